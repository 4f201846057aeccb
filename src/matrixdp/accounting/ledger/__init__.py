"""A budget that outlives the process: every spend in a file or a database, with its certificate."""

from matrixdp.accounting.ledger.entries import Change, Entry
from matrixdp.accounting.ledger.exports import verify_export
from matrixdp.accounting.ledger.ledger import Ledger
from matrixdp.accounting.ledger.left import Left, Remaining
from matrixdp.accounting.ledger.rules import Quota, Reservation

__all__ = ["Change", "Entry", "Ledger", "Left", "Quota", "Remaining", "Reservation", "verify_export"]
