"""``constant_weights`` of products whose weight is read before the kernel in front of them has finished: no bit changes, whatever that
kernel writes of the other operands, and however late."""

import functools

import minfer
import pytest
import torch

pytestmark = pytest.mark.gpu
FP8 = torch.float8_e4m3fn
SIZES = ((1, 4096, 4096), (3, 1000, 1032), (16, 6144, 4096), (16, 4096, 14336), (40, 2048, 512), (64, 4096, 7168), (300, 4096, 4096))


def dense(m, n, k, gated, dtype):
    w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
    call = minfer.gemm_gated if gated else minfer.gemm
    return lambda x, **more: call(x, w.t(), **more)


def scaled(m, n, k, gated, mode):
    int8 = mode == "int8"
    w = torch.randn(n, k, device="cuda") * (40 if int8 else 16)
    w = w.round().clamp(-127, 127).to(torch.int8) if int8 else w.to(FP8)
    if mode == "block":
        halves = 2 if gated else 1
        scale = torch.rand(halves, -(-n // halves // 128), -(-k // 128), device="cuda") / k**0.5
        scale = scale if gated else scale[0]
    else:
        scale = torch.rand(n, device="cuda") / k**0.5
    call = getattr(minfer, f"gemm_{'int8' if int8 else 'fp8'}{'_gated' if gated else ''}")

    def run(x, **more):
        q, s = minfer.quantize_int8(x) if int8 else minfer.quantize_fp8(x, "block128" if mode == "block" else "token")
        return call(q, w.t(), s, scale, out_dtype=x.dtype, **more)

    return run


MAKERS = {
    "bf16": functools.partial(dense, dtype=torch.bfloat16),
    "f16": functools.partial(dense, dtype=torch.float16),
    "fp8 rows": functools.partial(scaled, mode="row"),
    "fp8 blocks": functools.partial(scaled, mode="block"),
    "int8": functools.partial(scaled, mode="int8"),
}


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", MAKERS)
def test_activations_that_are_written_late(name, gated):
    """Each product's activations come from a norm of what a slow product has just written; eagerly, and from a graph."""
    dtype = torch.float16 if name == "f16" else torch.bfloat16
    for m, n, k in SIZES:
        n = n // 16 * 16
        call = MAKERS[name](m, n, k, gated)
        source = torch.randn(m, k, device="cuda", dtype=dtype)
        slow = torch.eye(k, device="cuda", dtype=dtype)
        weight = torch.ones(k, device="cuda", dtype=dtype)

        def chain(x, constant, call=call, slow=slow, weight=weight):
            for _ in range(3):
                x = minfer.rms_norm(minfer.gemm(x, slow), weight)
                y = call(x, constant_weights=constant)
            return x, y

        want = chain(source, False)
        torch.cuda.synchronize()
        have = chain(source, True)
        for a, b in zip(want, have, strict=True):
            assert torch.equal(a, b), (name, m, n, k)
        graph, x = torch.cuda.CUDAGraph(), torch.zeros_like(source)
        chain(x, True)
        with torch.cuda.graph(graph):
            have = chain(x, True)
        for _ in range(3):
            x.copy_(source)
            graph.replay()
            for a, b in zip(want, have, strict=True):
                assert torch.equal(a, b), (name, m, n, k, "graph")
            x.zero_()
            graph.replay()


def test_copies_of_the_weight_are_exempt():
    """A weight without a contiguous mode is copied, just in front of the kernel."""
    w = torch.randn(4096, 2, 2048, 2, device="cuda", dtype=torch.bfloat16)[:, 0, :, 0].t()
    assert 1 not in w.stride()
    x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    want = minfer.gemm(x, w)
    for _ in range(5):
        assert torch.equal(minfer.gemm(x, w, constant_weights=True), want)


def test_kernels():
    """Each swapped kernel, whole tiles or split."""
    x = torch.randn(24, 2048, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) / 45
    for kernel in minfer.kernels("gemm"):
        if not kernel["compiled"] or not kernel["name"].startswith("gemm_sm90_bf16_tn") or not kernel["swap"]:
            continue
        for launch in ("decomposition=persistent", "decomposition=split_k,splits=3", "decomposition=stream_k"):
            if kernel["invariant_only"] and "split_k" in launch:
                continue  # it continues sums
            how = f"{kernel['name']}@{launch}"
            want = minfer.gemm(x, w.t(), kernel=how)
            assert torch.equal(minfer.gemm(x, w.t(), kernel=how, constant_weights=True), want), how
