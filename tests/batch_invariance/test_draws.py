"""Draws of a request beside others that want something else."""

import pytest

from . import cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocabulary", [1000, 32000, 128256])
def test_options_of_others_change_nothing(device, vocabulary):
    cases.check_options_of_others(device, vocabulary)
