"""Memory between tests: what a large GPU test freed goes back to the device, so that the next one finds all of it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def free_memory():
    yield
    torch.cuda.empty_cache()
