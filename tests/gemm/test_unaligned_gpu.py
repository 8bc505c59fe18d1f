"""The kernels for operands at any address and with any stride, each forced: every depth at which their walk along k differs, every layout,
operands at odd places of NaN-filled memory, so that an element beside them would show in the sums, divided tiles, and the whole epilogue.
Those for a vector and a matrix are among them: they take any number of rows and columns.
"""

import itertools

import minfer
import pytest
import torch
from minfer.planning.plan import DTYPE_NAMES

from tests.gemm.cases import (
    gated_mismatch,
    gemm_mismatch,
    padded,
    placed,
    untouched_outside,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPE_OF = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ALL = [k for k in minfer.kernels() if k["family"] == "gemm" and k["alignment"] < 16]
KERNELS = {k["name"]: k for k in ALL if k["compiled"]} or {k["name"]: k for k in ALL}
# One MMA of k has a path of its own up to 16; a k tile is 64; a ring of 4 to 6 of them comes round after 256 to 384. Of vectors it is 1024.
DEPTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 18, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 384, 385, 703, 1023, 1024, 1031, 2049, 4100)
SIZES = ((1, 1), (2, 3), (15, 17), (16, 33), (31, 64), (65, 63), (129, 131), (7, 301), (257, 5))
DECOMPOSITIONS = ("persistent", "split_k,splits=2", "split_k,splits=3", "stream_k")
PLACES = [(offset, gap) for offset in (0, 1, 2, 3, 5, 7) for gap in (0, 1, 2, 3, 6)]


def operands_of(kernel, m, n, k, at_a, at_b, batch=()):
    """A and B in the kernel's layout, ``at``: elements in front of the first one, and between the lines."""
    dtype = DTYPE_OF[kernel["ab_type"]]
    a = placed(m, k, kernel["a_major"] == "k", dtype, offset=at_a[0], gap=at_a[1], batch=batch)
    return a, placed(k, n, kernel["b_major"] == "mn", dtype, offset=at_b[0], gap=at_b[1], batch=batch)


def epilogues(m, n, dtype):
    """Endless (options of the call, dtype of D)."""
    randn = lambda *shape: torch.randn(shape, device=DEVICE)  # noqa: E731
    options = (
        lambda: {},
        lambda: {"c": randn(m, n).to(dtype), "beta": 0.5},
        lambda: {"bias": randn(n).to(dtype), "activation": "silu"},
        lambda: {"c": randn(n, m).t(), "beta": -1.0, "alpha": 2.0},
        lambda: {"bias": randn(n), "activation": "silu", "c": randn(n).to(dtype), "beta": 1.0},
    )
    for make, out_dtype in zip(itertools.cycle(options), itertools.cycle((dtype, dtype, torch.float32)), strict=False):
        yield make(), out_dtype


@pytest.mark.parametrize("name", KERNELS)
def test_depths(name):
    kernel = KERNELS[name]
    dtype = DTYPE_OF[kernel["ab_type"]]
    sizes, places, decompositions = itertools.cycle(SIZES), itertools.cycle(PLACES), itertools.cycle(DECOMPOSITIONS)
    failures = []
    for k, _ in itertools.product(DEPTHS, range(7)):  # 7 has no factor in common with any of the cycles
        (m, n), at_a, decomposition = next(sizes), next(places), next(decompositions)
        at_b = PLACES[(7 * PLACES.index(at_a) + k) % len(PLACES)]
        a, b = operands_of(kernel, m, n, k, at_a, at_b)
        for epilogue, out_dtype in itertools.islice(epilogues(m, n, dtype), k % 5, k % 5 + 2):
            out, whole = padded((m, n), out_dtype, DEVICE, left=1 + k % 3, right=2)
            override = f"{name}@decomposition={decomposition}"
            try:
                minfer.gemm(a, b, **epilogue, out=out, kernel=override)
            except RuntimeError as error:  # gaps between a single row's or a single k's elements say another layout than was meant
                assert "it reads other operand layouts" in str(error) and 1 in (m, n, k)
                continue
            problem = gemm_mismatch(out, a, b, **epilogue)
            if problem is None and not untouched_outside(out, whole):
                problem = "wrote outside of D"
            if problem is not None:
                failures.append(f"{override} on {m} x {n} x {k}, A at {at_a}, B at {at_b}, {list(epilogue)}: {problem}")
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


@pytest.mark.parametrize("name", KERNELS)
def test_a_single_k_has_every_layout(name):
    kernel = KERNELS[name]
    for m, n in SIZES:
        a, b = operands_of(kernel, m, n, 1, (0, 0), (0, 0))
        out, whole = padded((m, n), a.dtype, DEVICE, left=1, right=2)
        minfer.gemm(a, b, out=out, kernel=name)
        assert gemm_mismatch(out, a, b) is None
        assert untouched_outside(out, whole)


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel["a_major"] == "mn" and kernel["tile_m"] > 1])
def test_single_rows_of_planes_keep_their_layout(name):
    kernel = KERNELS[name]
    _, b = operands_of(kernel, 1, 40, 64, (0, 0), (0, 0))
    a = torch.randn(5, 1, 64, device=DEVICE, dtype=b.dtype)  # folds into five rows, K-major ones
    with pytest.raises(RuntimeError, match="it reads other operand layouts"):
        minfer.gemm(a, b, kernel=name)


@pytest.mark.parametrize("name", KERNELS)
def test_batches_and_gates(name):
    kernel = KERNELS[name]
    for (m, n, k), decomposition in itertools.product(((33, 48, 37), (5, 112, 130)), DECOMPOSITIONS[:2]):
        override = f"{name}@decomposition={decomposition}"
        a, b = operands_of(kernel, m, n, k, (3, 1), (1, 5), batch=(3,))
        assert gemm_mismatch(minfer.gemm(a, b, kernel=override), a, b) is None
        if kernel["tile_n"] == 1:  # a column has no pairs of gate and up
            continue
        a, b = operands_of(kernel, m, n, k, (1, 0), (5, 3))
        a = a.mul_(k**-0.5)
        assert gated_mismatch(minfer.gemm_gated(a, b, kernel=override), a, b) is None
