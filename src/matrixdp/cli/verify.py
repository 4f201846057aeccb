"""`matrixdp verify`: verifies a certificate without the data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from matrixdp.cli import arguments, show
from matrixdp.errors import InvalidInput, MatrixDPError

if TYPE_CHECKING:
    from matrixdp.privacy.verification import Verification


def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A certificate, a composition, or an exported ledger (.jsonl).")
    ],
    value: Annotated[
        Path | None,
        typer.Option(help="The released file; its SHA-256 must be the one in the certificate.", show_default="none"),
    ] = None,
    json: arguments.Json = False,
) -> None:
    """Verify a certificate: compute everything again from its law and its set, and compare. Exit code 0 means yes.

    It proves that the numbers are true for the noise that is described, not who wrote them: nothing is signed.

    Example: matrixdp verify moment.certificate.json --value moment.csv
    """
    if not file.is_file() or (value is not None and not value.is_file()):
        raise InvalidInput(f"there is no file {str(value if file.is_file() else file)!r}")
    try:
        with show.working("verifying"):
            found = _verification(file, value)
    except MatrixDPError as reason:
        verified, text, findings = False, f"NOT verified: {reason}", [str(reason)]
    else:
        verified, text, findings = bool(found), str(found), [str(finding) for finding in found.findings]
    if json:
        show.document({"file": file.name, "verified": verified, "findings": findings})
    else:
        show.text(text)
    if not verified:
        raise typer.Exit(1)


def _verification(file: Path, value: Path | None) -> Verification:
    """Certificates and compositions are one JSON object; an exported ledger has one in every line."""
    from matrixdp.accounting.composition import Composition
    from matrixdp.accounting.ledger.exports import verify_export
    from matrixdp.privacy.certificate import Certificate
    from matrixdp.privacy.verification import parsed, with_value

    text = file.read_bytes()
    if file.suffix == ".jsonl":
        return verify_export(text.decode("utf-8", errors="replace").splitlines())
    composed = parsed(text)["matrixdp"] == "composition"
    found = Composition.from_json(text) if composed else Certificate.load(file)
    verification = found.verify()
    if value is not None:
        return with_value(verification, found.released, value.read_bytes())
    note = ("The released file was not compared: --value FILE does so.",) if found.released else ()
    return replace(verification, remarks=(*verification.remarks, *note))
