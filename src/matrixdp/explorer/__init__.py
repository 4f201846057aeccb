"""`matrixdp explore`: a page for data stewards and analysts, on this machine alone.

    serve(Given(records="patients.csv", domain="domain.toml", ledger="budget.db"))

Four views: mechanisms side by side, a plan with its error bars, a release, and the ledger. What a view computes is a
plain function here (`comparing`, `planning`, `releasing`, `ledgers`); the page is a thin layer over them (`views`), and
`access` controls who can reach it.
"""

from matrixdp import _extras

_extras.require("explorer", "shiny", "matplotlib")

from matrixdp.explorer.app import Given
from matrixdp.explorer.server import serve

__all__ = ["Given", "serve"]
