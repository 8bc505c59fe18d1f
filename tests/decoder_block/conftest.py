"""What the tests of decoder blocks on a GPU share."""

import pytest
import torch


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("one launch requires compute capability 9.0")
