"""gemm_fp8, gemm_int8 and their gated forms on a CPU: values against float64, every kind of scale, types of D, what is refused."""

import itertools

import minfer
import pytest
import torch

from tests.scaled_gemm import cases
from tests.scaled_gemm.cases import DTYPES, FP8, KINDS, blocks_of


def kinds_of(dtype):
    return KINDS if dtype == FP8 else KINDS[:3]


@pytest.mark.parametrize("shape", cases.SHAPES[:8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_values(dtype, shape):
    torch.manual_seed(sum(shape))
    m, n, k = shape
    a, w = cases.operands(*shape, dtype)
    for a_kind, b_kind in itertools.product(kinds_of(dtype), kinds_of(dtype)):
        a_scale, b_scale = cases.scale_of(a_kind, m, k, weight=False), cases.scale_of(b_kind, n, k, weight=True)
        want, magnitude = cases.truth(a, w, a_scale, b_scale)
        have = cases.call(dtype)(a, w.t(), a_scale, b_scale, out_dtype=torch.float32)
        assert ((have.double() - want).abs() <= (k * 2.0**-24 + 2.0**-22) * magnitude).all(), (a_kind, b_kind)
        half = cases.call(dtype)(a, w.t(), a_scale, b_scale)
        assert half.dtype == torch.bfloat16 and torch.equal(half, have.bfloat16())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_epilogue(dtype):
    """c, bias, activation, gates and codes follow the scaled product in float32."""
    torch.manual_seed(1)
    a, w = cases.operands(20, 96, 256, dtype)
    a_scale, b_scale = cases.scale_of("lines", 20, 256, weight=False, size=0.01), cases.scale_of("lines", 96, 256, weight=True, size=0.01)
    product = cases.call(dtype)(a, w.t(), a_scale, b_scale, out_dtype=torch.float32)
    c, bias = torch.randn(96).half(), torch.randn(96)
    want = torch.nn.functional.silu(product - 0.5 * c.float() + bias)
    have = cases.call(dtype)(a, w.t(), a_scale, b_scale, c=c, beta=-0.5, bias=bias, activation="silu", out_dtype=torch.float16)
    torch.testing.assert_close(have, want.half(), rtol=2e-3, atol=1e-4)
    blocks = (product + bias).unflatten(1, (-1, 2, 8))
    gated = torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]
    torch.testing.assert_close(
        cases.call(dtype, gated=True)(a, w.t(), a_scale, b_scale, bias=bias, out_dtype=torch.float32),
        gated.flatten(1),
        rtol=1e-5,
        atol=1e-5,
    )
    if dtype == FP8:
        scale = torch.full((1,), 0.02)
        q = minfer.gemm_fp8(a, w.t(), a_scale, b_scale, out_scale=scale)
        assert q.dtype == FP8 and torch.equal(q.float(), (product / scale).clamp(-448, 448).to(FP8).float())


def test_sums_of_int32():
    torch.manual_seed(2)
    a, w = cases.operands(5, 24, 1000, torch.int8)
    have = minfer.gemm_int8(a, w.t(), torch.ones(1), torch.ones(24), out_dtype=torch.int32)
    assert torch.equal(have.long(), a.long() @ w.long().t())
    assert not minfer.gemm_int8(a[:, :0], w[:, :0].t(), torch.ones(1), torch.ones(24), out_dtype=torch.int32).any()


def test_what_the_operators_on_rows_write_is_what_is_read():
    """Norm, codes by blocks, product: the scales go from one to the other as they are."""
    torch.manual_seed(3)
    x, w = torch.randn(33, 512).bfloat16(), torch.randn(64, 512)
    q, scales = minfer.rms_norm(x, quant="fp8_block128")
    weight, b_scale = (w * 100).to(FP8), torch.full((1, 4), 0.01)
    have = minfer.gemm_fp8(q, weight.t(), scales, b_scale, out_dtype=torch.float32)
    exact = torch.nn.functional.rms_norm(x.float(), (512,), eps=1e-6) @ (weight.float() * 0.01).t()
    assert (have - exact).norm() <= 0.03 * exact.norm()
    for quant in ("fp8_token", "int8_token"):
        q, scales = minfer.rms_norm(x, quant=quant)
        weight = torch.randint(-100, 100, (64, 512)).to(q.dtype)
        have = cases.call(q.dtype)(q, weight.t(), scales, torch.full((1,), 0.01), out_dtype=torch.float32)
        exact = torch.nn.functional.rms_norm(x.float(), (512,), eps=1e-6) @ (weight.float() * 0.01).t()
        assert (have - exact).norm() <= 0.03 * exact.norm()


def gated_blocks(m, half, k, device="cpu"):
    """Gate and up as checkpoints have them, each with its own blocks of scales, packed: what two products and the gate give."""
    a, gate = cases.operands(m, half, k, FP8, device)
    up = cases.operands(1, half, k, FP8, device)[1]
    for exponents in (False, True):
        kind = "exponents" if exponents and blocks_of(half) * blocks_of(k) > 1 and blocks_of(k) > 1 else "blocks"
        scales = torch.stack([cases.scale_of(kind, half, k, weight=True, device=device, size=0.004) for _ in range(2)])
        for a_kind in ("blocks", "lines", "one"):
            a_scale = cases.scale_of(a_kind, m, k, weight=False, device=device)
            packed = minfer.pack_gate_up(gate, up)
            have = minfer.gemm_fp8_gated(a, packed.t(), a_scale, scales, out_dtype=torch.float32)
            (x, of_x), (y, of_y) = (cases.truth(a, w, a_scale, s) for w, s in ((gate, scales[0]), (up, scales[1])))
            want = torch.nn.functional.silu(x) * y
            error = cases.relative_bound(FP8, k) * (of_x * y.abs() * 1.1 + of_y * torch.nn.functional.silu(x).abs()) + 2.0**-20 * want.abs()
            off = (have.double() - want).abs() - error - 1e-6
            assert (off <= 0).all(), (kind, a_kind, float(off.max()))


@pytest.mark.parametrize("shape", [(5, 64, 256), (20, 200, 400), (3, 520, 1040)], ids=str)
def test_gated_blocks(shape):
    torch.manual_seed(7)
    gated_blocks(*shape)


def test_gated_blocks_of_one_block_each():
    """Exponents of two are numbers there, too."""
    torch.manual_seed(9)
    a, w = cases.operands(5, 64, 96, FP8)
    exponents = torch.tensor([120, 123], dtype=torch.uint8).view(2, 1, 1)
    numbers = torch.exp2(exponents.float() - 127)
    one = torch.full((1,), 0.05)
    assert torch.equal(minfer.gemm_fp8_gated(a, w.t(), one, exponents), minfer.gemm_fp8_gated(a, w.t(), one, numbers))


def zero_points(m, n, k, device="cpu"):
    """Asymmetric activations: a zero point for each token, or one."""
    a, w = cases.operands(m, n, k, torch.int8, device)
    a_scale, b_scale = (cases.scale_of("lines", x, k, weight=False, device=device, size=0.01) for x in (m, n))
    sums = w.sum(1, dtype=torch.int32)
    bias, c = torch.randn(n, device=device).bfloat16(), torch.randn(m, n, device=device).bfloat16()
    for shape in ((m,), (m, 1), (1,), ()):
        zero = torch.randint(-128, 128, shape, device=device).int()
        x = (a.double() - zero.double().reshape(-1, 1)) * a_scale.double()[:, None]
        y = w.double() * b_scale.double()[:, None]
        want, magnitude = x @ y.t(), (a.double().abs() + 128) * a_scale.double()[:, None] @ y.abs().t()
        have = minfer.gemm_int8(a, w.t(), a_scale, b_scale, a_zero=zero, b_sums=sums, out_dtype=torch.float32)
        assert ((have.double() - want).abs() <= 2.0**-22 * magnitude + 1e-6).all()
        options = dict(a_zero=zero, b_sums=sums, bias=bias, c=c, beta=0.5, activation="relu")
        want = (want + bias.double() + 0.5 * c.double()).relu()
        assert (
            (minfer.gemm_int8(a, w.t(), a_scale, b_scale, **options).double() - want).abs() <= 2.0**-8 * (want.abs() + 1e-2 * magnitude)
        ).all()
    gated = minfer.gemm_int8_gated(a, w.t(), a_scale, b_scale, a_zero=zero, b_sums=sums, out_dtype=torch.float32)
    blocks = (x @ y.t()).unflatten(1, (-1, 2, 8))
    want = (torch.nn.functional.silu(blocks[:, :, 0]) * blocks[:, :, 1]).flatten(1)
    assert (gated.double() - want).norm() <= 1e-5 * want.norm()
    lead = minfer.gemm_int8(
        a.view(1, m, k), w.t(), a_scale, b_scale, a_zero=zero.expand(m).reshape(1, m), b_sums=sums, out_dtype=torch.float32
    )
    want = minfer.gemm_int8(a, w.t(), a_scale, b_scale, a_zero=zero, b_sums=sums, out_dtype=torch.float32)
    assert torch.equal(lead[0], want)


@pytest.mark.parametrize("shape", [(1, 64, 128), (20, 208, 400), (70, 96, 1040)], ids=str)
def test_zero_points(shape):
    torch.manual_seed(8)
    zero_points(*shape)


def leading_modes(dtype, device="cpu"):
    """That of a of more modes each form of scales, of c and of out gives what the matrix of all rows gives."""
    torch.manual_seed(4)
    lead, n, k = (2, 3, 5), 48, 384
    m = 30
    flat, w = cases.operands(m, n, k, dtype, device)
    b_scale = cases.scale_of("lines", n, k, weight=True, device=device)
    spaced = torch.zeros(2, 3, 7, 400, dtype=dtype, device=device)
    spaced[:, :, :5, :k] = flat.view(*lead, k)
    for kind, a in itertools.product(kinds_of(dtype), (flat.view(*lead, k), spaced[:, :, :5, :k])):
        scale = cases.scale_of(kind, m, k, weight=False, device=device)
        forms = [scale] if kind == "one" else [scale, scale.view(*lead, *scale.shape[1:]), scale.view(*lead, -1)]
        for of_a, c in itertools.product(forms, (None, (), (n,), (5, n), (3, 1, n), (1, 1, 1, n), (*lead, n), (*lead, 1))):
            options = dict(out_dtype=torch.float32)
            whole = dict(options)
            if c is not None:
                options |= dict(beta=2.0, c=torch.randn(c, device=device))
                whole |= dict(beta=2.0, c=options["c"].expand(*lead, n).reshape(m, n))
            want = cases.call(dtype)(flat, w.t(), scale, b_scale, **whole)
            have = cases.call(dtype)(a, w.t(), of_a, b_scale, **options)
            assert have.is_contiguous() and torch.equal(have, want.view(*lead, n)), (kind, of_a.shape, c)
            for out in (torch.empty(*lead, n, device=device), torch.empty(3, 2, 5, n + 3, device=device).transpose(0, 1)[..., :n]):
                given = cases.call(dtype)(a, w.t(), of_a, b_scale, out=out, **options)
                assert given is out and torch.equal(out, have), (kind, of_a.shape, c, out.stride())
    gated = cases.call(dtype, gated=True)(flat.view(*lead, k), w.t(), scale, b_scale)
    assert torch.equal(gated, cases.call(dtype, gated=True)(flat, w.t(), scale, b_scale).view(*lead, n // 2))
    none = cases.call(dtype)(flat.view(*lead, k)[:, :0], w.t(), torch.ones(1, device=device), b_scale)
    assert none.shape == (2, 0, 5, n)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_leading_modes(dtype):
    leading_modes(dtype)


def test_ends():
    """No rows, no columns, no k."""
    one = torch.ones(1)
    for dtype, (m, n, k) in itertools.product(DTYPES.values(), ((0, 16, 32), (4, 0, 32), (4, 16, 0))):
        a, w = cases.operands(m, n, k, dtype)
        have = cases.call(dtype)(a, w.t(), one, one, bias=torch.ones(n))
        assert have.shape == (m, n) and (have == 1).all()


def bad_calls(device="cpu"):
    """(operator, arguments, options, message)"""
    a, w = cases.operands(6, 256, 300, FP8, device)
    ai, wi = cases.operands(6, 256, 300, torch.int8, device)
    one, rows, columns = (torch.ones(shape, device=device) for shape in (1, 6, 256))
    blocks = "or, of blocks, "
    yield "gemm_fp8", (a.half(), w.t(), one, one), {}, "a must be float8_e4m3fn, got float16"
    yield "gemm_fp8", (a, w.half().t(), one, one), {}, "b must have a's dtype float8_e4m3fn, got float16"
    yield "gemm_fp8", (a[0], w.t(), one, one), {}, "a must be [.., m, k], got [300]"
    yield "gemm_fp8", (a.view(2, 3, 300), w.t(), rows.view(3, 2), one), {}, "a_scale must be one number, [6] or [6, 1]"
    yield "gemm_fp8", (a.view(2, 3, 300), w.t(), one, one), dict(beta=1.0, c=torch.ones(6, 256, device=device)), "c must broadcast to"
    yield "gemm_fp8", (a, w, one, one), {}, "b must have k = 300 rows to match a [6, 300], got b [256, 300]"
    yield "gemm_fp8", (a, w.t(), columns, one), {}, f"a_scale must be one number, [6] or [6, 1], {blocks}[6, 3], got [256]"
    yield "gemm_fp8", (a, w.t(), one, rows), {}, f"b_scale must be one number, [256] or [256, 1], {blocks}[2, 3], got [6]"
    yield "gemm_fp8", (a, w.t(), one, columns.view(1, 256)), {}, "b_scale must be one number"
    yield "gemm_fp8", (a, w.t(), one, columns.half()), {}, "b_scale must be float32 (of blocks also uint8, exponents of two), got float16"
    yield "gemm_fp8", (a, w.t(), rows.to(torch.uint8), one), {}, "a_scale must be float32"
    yield "gemm_fp8", (a, w.t(), one, one), dict(out_dtype=torch.int32), "out_dtype must be float16, bfloat16, float32 or float8_e4m3fn"
    yield "gemm_fp8", (a, w.t(), one, one), dict(out_dtype=FP8), "out_scale must be given for a D of float8_e4m3fn"
    yield "gemm_fp8", (a, w.t(), one, one), dict(out_scale=one, out_dtype=torch.float32), "out_scale must be given for a D of float8_e4m3fn"
    yield "gemm_fp8", (a, w.t(), one, one), dict(bias=columns.half()), "bias must be bfloat16 or float32, got float16"
    yield "gemm_fp8", (a, w.t(), one, one), dict(beta=1.0), "c must be given when beta is not 0"
    yield "gemm_fp8", (a, w.t(), one, one), dict(kernel="gemm"), "kernel 'gemm' is not in the registry"
    yield "gemm_fp8_gated", (a, w[:24].t(), one, one), {}, "b must have a multiple of 16 columns"
    yield "gemm_int8", (ai, wi.t(), torch.ones(6, 3, device=device), one), {}, "a_scale must be one number, [6] or [6, 1], got [6, 3]"
    sums = torch.ones(256, dtype=torch.int32, device=device)
    yield (
        "gemm_fp8_gated",
        (a, w.t(), one, torch.ones(2, 3, device=device)),
        {},
        "b_scale must be one number, [256] or [256, 1], or, of blocks, [2, 1, 3]",
    )
    yield "gemm_int8", (ai, wi.t(), one, one), dict(a_zero=sums[:1]), "a_zero and b_sums must be given together"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(b_sums=sums), "a_zero and b_sums must be given together"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(a_zero=sums[:5], b_sums=sums), "a_zero must be one number, [6] or [6, 1], got [5]"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(a_zero=ai[:1, 0], b_sums=sums), "a_zero must be int32"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(a_zero=sums[:6], b_sums=sums[:6]), "b_sums must be [256], got [6]"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(a_zero=sums[:6], b_sums=sums, out_dtype=torch.int32), "a_zero is not for a D of int32"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(out_dtype=FP8), "out_dtype must be float16, bfloat16, float32 or int32"
    yield "gemm_int8", (ai, wi.t(), one, one), dict(out_dtype=torch.int32, bias=columns), "c, bias and activation are not for a D of int32"


@pytest.mark.parametrize("case", list(bad_calls()), ids=lambda case: case[3][:40])
def test_calls_that_cannot_be_right(case):
    operator, arguments, options, message = case
    with pytest.raises(RuntimeError) as raised:
        getattr(minfer, operator)(*arguments, **options)
    assert str(raised.value).startswith(f"minfer::{operator}: ") and message in str(raised.value)
