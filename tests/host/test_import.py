"""What importing minfer imports: the operators and what is built of them, but neither the engine nor fused functions."""

from __future__ import annotations

import subprocess
import sys

import minfer
import pytest


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_the_engine_is_imported_at_its_first_use():
    program = """
import sys, minfer
lazy = ("minfer.generation", "minfer.fuse", "minfer.integrations", "transformers")
print([name for name in lazy if name in sys.modules], minfer.SamplingParams.__module__, "minfer.generation" in sys.modules)
"""
    assert run(program) == "[] minfer.generation.params True"


def test_every_public_name_is_there():
    program = "from minfer import *; import minfer; print([name for name in minfer.__all__ if name not in globals()])"
    assert run(program) == "[]"
    assert {*minfer.__all__, "fuse", "generation"} <= set(dir(minfer))


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'minfer' has no attribute 'generator'"):
        _ = minfer.generator


@pytest.mark.parametrize("collects", (True, False))
def test_the_collector_is_as_it_was(collects):
    program = f"import gc; gc.{'enable' if collects else 'disable'}(); import torch, minfer; print(gc.isenabled())"
    assert run(program) == str(collects)
