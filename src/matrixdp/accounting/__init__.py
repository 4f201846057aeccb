"""What many releases guarantee together: accountants, filters for adaptive choices, ledgers."""
