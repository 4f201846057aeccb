"""A budget that outlives the process: every spend in a file, with its certificate."""

from matrixdp.accounting.ledger.entries import Entry
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger, Remaining

__all__ = ["Entry", "Ledger", "Remaining", "verify_export"]
