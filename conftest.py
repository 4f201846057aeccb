"""What tests of several rooms share."""

import pytest


def pytest_terminal_summary(terminalreporter):
    """Says loudly that tests were left out for want of a browser."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if any("chromium" in reason for reason in skipped):
        text = "LEFT OUT: the page in a browser. There is no chromium here: apt-get install chromium"
        terminalreporter.write_sep("!", text, red=True, bold=True)


@pytest.fixture
def one_thread():
    """PyTorch on one thread: the tests' networks are too small for more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
