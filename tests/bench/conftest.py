import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """As the benchmark runs; small tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
