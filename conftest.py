"""What tests of several rooms share."""

import pytest


@pytest.fixture
def one_thread():
    """PyTorch on one thread: the tests' networks are too small for more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
