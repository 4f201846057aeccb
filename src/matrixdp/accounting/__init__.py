"""What many releases guarantee together: accountant, filter for adaptive use, ledger."""
