"""What cannot be done for lack of memory, and outputs that cannot be written: the operator, what was asked for, how much of it and why."""

import inspect
import os
import re
import subprocess
import sys

import minfer
import pytest
import torch
from minfer._core.operator import OPERATORS

from tests.contracts import operator_cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALLOCATE_NOTHING = ("kv_cache_append", "rope")
PLACES = re.compile(r"API call|torch_call_dispatcher|site-packages|/[\w.+-]+/[\w./+-]*\.(cpp|h|cu|py)\b")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("elements", "bytes"), [((1 << 60,), "4.0 EiB"), ((1 << 30, 1 << 25), "128.0 PiB"), ((3, 1 << 48), "3.0 PiB")], ids=str
)
def test_no_memory(elements, bytes, device):
    like = torch.zeros(2, 3, dtype=torch.float32, device=device)
    with pytest.raises(RuntimeError) as raised:
        torch.ops.minfer._allocate(like, elements, "the workspace of num_splits = 256")
    message = str(raised.value)
    head = f"minfer::_allocate: could not allocate {bytes} for the workspace of num_splits = 256 beside [2, 3]: "
    assert message.startswith(head) and len(message) > len(head) + 10, "torch's reason, or where it is"
    assert "\n" not in message.strip() and not PLACES.search(message.replace("alloc_cpu.cpp", ""))


@pytest.mark.parametrize("device", DEVICES)
def test_memory(device):
    like = torch.zeros(2, dtype=torch.bfloat16, device=device)
    for shape in ((), (0,), (5,), (2, 0, 3), (1,) * 12, (2, 3, 4, 5, 6, 1, 2, 1, 2)):
        x = torch.ops.minfer._allocate(like, shape, "x")
        assert x.shape == shape and x.is_contiguous() and (x.dtype, x.device) == (like.dtype, like.device)
        assert x.stride() == torch.empty(shape).stride()


def test_texts_are_not_lost():
    """A text that the dispatcher hands over is given back: 100 MB of them do not stay."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    text = "x" * (1 << 20)
    torch.ops.minfer._kernels(text)
    before = resident()
    for _ in range(100):
        torch.ops.minfer._kernels(text)
    assert resident() - before < 30 << 20


@pytest.mark.gpu
def test_every_operator_out_of_memory():
    """With all memory of the device taken, an operator says so in its own name, and works again afterwards."""
    calls = operator_cases.calls("cuda")
    torch.cuda.synchronize()
    for name, own in calls.items():
        takes_residual = "residual" in inspect.signature(OPERATORS[name].wrapper).parameters  # its call makes one first
        if name in ALLOCATE_NOTHING or takes_residual:
            continue
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        allowed = torch.cuda.memory_reserved() / total
        torch.cuda.set_per_process_memory_fraction(allowed)
        held = []
        try:
            for size in (1 << 21, 1 << 18, 1 << 14, 1 << 10, 512):  # what is left of torch's own blocks
                try:
                    while True:
                        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    pass
            with torch.inference_mode(), pytest.raises(RuntimeError) as raised:
                own[0]()
            message = str(raised.value)
            assert re.match(rf"minfer::{name}: could not allocate [\d.]+ (bytes|[KMG]iB) for .*: \S+", message), message
            assert "are free" in message and not PLACES.search(message)
        finally:
            held.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
        with torch.inference_mode():
            own[0]()
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_splits_that_take_too_much_memory():
    cache = minfer.allocate_kv_cache(64, 64, 8, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.zeros(64, 2048, 32, 128, dtype=torch.bfloat16, device="cuda")
    lengths = torch.full((64,), 64, dtype=torch.int32, device="cuda")
    message = r"minfer::attention_paged: num_splits = 256 would take a workspace of [\d.]+ GiB .*; with these it can be at most \d+"
    with pytest.raises(RuntimeError, match=message):
        minfer.attention_paged(q, cache.k, cache.v, lengths, num_splits=256)


@pytest.mark.parametrize(
    ("variable", "legal"), [("MINFER_TUNED=false", "0 or 1"), ("MINFER_PDL=off", "0 or 1"), ("MINFER_FORCE_ARCH=banana", "80 or 90")]
)
def test_environment_variables_that_mean_nothing(variable, legal):
    name, _, value = variable.partition("=")
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
    command = [sys.executable, "-c", "import minfer"]
    done = subprocess.run(command, env=os.environ | {name: value, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=120)
    assert f"ImportError: minfer: the environment variable {name} must be {legal}, got '{value}'" in done.stderr
