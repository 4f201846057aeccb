"""Writes a released matrix together with its certificate, or neither."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from matrixdp import _extras
from matrixdp._check import Array
from matrixdp.errors import InvalidInput, MatrixDPError

FORMATS = (".csv", ".npy", ".parquet")


def certificate_path(output: Path) -> Path:
    """Where the certificate of a released matrix lies: next to it."""
    return output.with_suffix(".certificate.json")


def check_free(output: Path) -> None:
    """Raises InvalidInput unless the matrix and its certificate can be written without replacing a file."""
    if output.suffix not in FORMATS:
        raise InvalidInput(f"output must end in {', '.join(FORMATS)}, got {str(output)!r}")
    if not output.parent.is_dir():
        raise InvalidInput(f"output must lie in a folder that exists, got {str(output)!r}; create the folder first")
    for path in (output, certificate_path(output)):
        if path.exists() or path.is_symlink():
            raise InvalidInput(f"output {str(path)!r} exists already and is not replaced; choose another name")


def write(output: Path, value: Array, certificate: dict[str, Any]) -> dict[str, Any]:
    """Writes the matrix and its certificate, to which it adds the matrix's file name and checksum, after `check_free`.

    Both are drafted in a folder next to them and then linked to their names, which fails if a name is taken. The
    certificate goes first: of two writers only one gets its name, and no matrix ever stands without its certificate.

    Returns:
        The certificate as written.
    """
    beside = certificate_path(output)
    try:
        with TemporaryDirectory(dir=output.parent, prefix=".matrixdp-") as folder:
            drafts = Path(folder, output.name), Path(folder, beside.name)
            _write_matrix(drafts[0], value)
            checksum = hashlib.sha256(drafts[0].read_bytes()).hexdigest()
            complete = {"file": output.name, "sha256": checksum, **certificate}
            _write_certificate(drafts[1], complete)
            os.link(drafts[1], beside)
            try:
                os.link(drafts[0], output)
            except BaseException:
                beside.unlink()
                raise
    except OSError as reason:
        raise MatrixDPError(
            f"output {str(output)!r} could not be written ({reason}); nothing was left behind"
        ) from None
    return complete


def _write_matrix(path: Path, value: Array) -> None:
    """Every digit is kept; a vector becomes one column."""
    if path.suffix == ".npy":
        np.save(path, value)
    elif path.suffix == ".csv":
        np.savetxt(path, value, delimiter=",", fmt="%.17g")
    else:
        _extras.require("tables", "pyarrow")
        import pyarrow
        import pyarrow.parquet

        columns = value.reshape(len(value), -1).T
        table = pyarrow.table({str(index): column for index, column in enumerate(columns)})
        pyarrow.parquet.write_table(table, path)


def _write_certificate(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
