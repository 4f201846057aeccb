"""What was written by earlier versions is still read, and still true."""

from pathlib import Path

import pytest

from matrixdp import Certificate
from matrixdp.accounting.composition import Composition
from matrixdp.accounting.ledger.exports import verify_export

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("certificate-schema-*.json")), ids=lambda path: path.name)
def test_certificates_of_every_schema_verify(path):
    certificate = Certificate.load(path)
    found = certificate.verify()
    assert found, str(found)
    assert 0.49 <= certificate.epsilon(1e-7) <= 0.5


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("composition-schema-*.json")), ids=lambda path: path.name)
def test_compositions_of_every_schema_verify(path):
    composition = Composition.from_json(path.read_text())
    found = composition.verify()
    assert found, str(found)
    assert [part.count for part in composition.parts] == [3, 10]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("export-schema-*.jsonl")), ids=lambda path: path.name)
def test_exported_ledgers_of_every_schema_verify(path):
    found = verify_export(path.read_text().splitlines())
    assert found, str(found)


def test_there_is_one_of_each():
    for kind in ("certificate", "composition", "export"):
        assert list(GOLDEN.glob(f"{kind}-schema-1.json*"))
