"""What the page shows of an address."""

import pytest

from matrixdp.explorer.snippets import without_password


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://ada:SECRET@host/db", "postgresql://ada@host/db"),
        ("postgresql://ada@host/db?password=SECRET", "postgresql://ada@host/db"),
        ("postgresql://host/db?sslpassword=SECRET&sslmode=require", "postgresql://host/db"),
        ("postgresql://ada:SEC/RET@host/db", "postgresql://ada@host/db"),
        ("postgresql://ada:p@SECRET@host/db", "postgresql://ada@host/db"),
        ("budget.db", "budget.db"),
    ],
)
def test_no_password_is_shown(address, shown):
    assert without_password(address) == shown
