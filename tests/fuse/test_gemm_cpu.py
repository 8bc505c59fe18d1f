"""Fused GEMMs without a GPU: what is traced and refused, the operators, and what torch computes."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from minfer import fuse
from minfer.fuse import gemm_config, gemm_function, gemm_reference
from minfer.fuse.evaluate import evaluate, node_values
from minfer.fuse.graph import COLUMN, FULL, REDUCTIONS, Graph

from tests.fuse import gemm_cases as cases
from tests.fuse.gemm_cases import BF16, E4M3, F16, F32, KINDS, bias_gelu, check, expert_bias, expert_statistics, judged, norms


def matrices(m, n, k, dtype=BF16):
    return torch.randn(m, k).to(dtype), (torch.randn(n, k) / k**0.5).to(dtype).t()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 48, 16), (33, 96, 40), (1, 16, 7)], ids=str)
def test_results(kind, shape):
    m, n, k = shape
    judged_function, operands = cases.operands_of(kind, m, n, "cpu")
    judged(judged_function, *matrices(m, n, k), operands)


@pytest.mark.parametrize("dtype", [BF16, F16, E4M3])
def test_dtypes(dtype):
    judged(cases.plain, *matrices(9, 32, 64, dtype), [])


def test_functions_are_torchs():
    """Against the Python function itself."""
    a, b = matrices(9, 64, 32)
    acc = a.double() @ b.double()
    bias, rows = torch.randn(64).to(BF16), torch.rand(9)
    row, col = torch.arange(9).view(-1, 1), torch.arange(64)
    close = dict(rtol=2.0**-7, atol=1e-3)
    torch.testing.assert_close(bias_gelu(a, b, bias, alpha=0.5), bias_gelu.function(acc, row, col, bias, alpha=0.5), **close)
    for have, want in zip(norms(a, b, rows, bias), norms.function(acc, row, col, rows.double(), bias.double()), strict=True):
        torch.testing.assert_close(have.double(), want.double(), **close)
    halves = acc.chunk(2, 1)
    torch.testing.assert_close(cases.swiglu(a, b), cases.swiglu.function(halves, row, col[:32]), **close)
    alternating = acc[:, 0::2], acc[:, 1::2]
    want = cases.clamped_swiglu.function(alternating, row, col[:32], bias[:32].double())
    torch.testing.assert_close(cases.clamped_swiglu(a, b, bias[:32]), want, **close)
    blocks = acc.view(9, 4, 2, 8)
    want = cases.geglu.function((blocks[:, :, 0].reshape(9, 32), blocks[:, :, 1].reshape(9, 32)), row, col[:32])
    torch.testing.assert_close(cases.geglu(a, b), want, **close)
    torch.testing.assert_close(cases.rotated(a, b)[0], torch.where((row + col) % 2 == 0, acc, -acc).to(BF16), **close)


@pytest.mark.parametrize("seed", range(40))
def test_drawn(seed):
    function, operands = cases.drawn(seed)
    judged(function, *matrices(6, 32, 24), operands(6, 32, "cpu"))


def test_scatter_keeps_what_is_not_written():
    a, b = matrices(4, 8, 16)
    out, index = torch.full((6, 8), 7.0).to(BF16), torch.tensor([5, -1, 0, 6], dtype=torch.int64)
    weight = torch.ones(4)
    assert cases.scattered(a, b, index, out, weight) is None
    acc = a.float() @ b.float()
    assert torch.equal(out[5], acc[0].to(BF16)) and torch.equal(out[0], acc[2].to(BF16)) and (out[1:5] == 7).all()


def test_stochastic_rounding_is_unbiased():
    x = torch.full((400, 256), 1.0 + 2.0**-9)
    row, col = torch.arange(400).view(-1, 1), torch.arange(256)
    for dtype, step in ((BF16, 2.0**-7), (F16, 2.0**-10), (E4M3, 2.0**-3)):
        y = fuse.stochastic_round(x + 0.3 * step, dtype, 7, row, col).float()
        assert set(((y - 1) / step).unique().tolist()) <= {0.0, 1.0, 2.0, 3.0}
        assert abs(y.mean() - x.mean() - 0.3 * step) < 4 * step / (400 * 256) ** 0.5
    one, other = (fuse.random_bits(seed, row, col) for seed in (1, 2))
    assert not torch.equal(one, other) and torch.equal(one, fuse.random_bits(torch.tensor(1), row, col))
    bits = torch.stack([(one >> i) & 1 for i in range(32)]).float().mean((1, 2))
    assert ((bits - 0.5).abs() < 0.01).all()
    special = torch.tensor([[float("inf"), -float("inf"), float("nan")]])
    assert torch.equal(fuse.stochastic_round(special, BF16, 1, row[:1], col[:3])[0, :2], special[0, :2].to(BF16))


@pytest.mark.parametrize("ends", [[3, 3, 9], [0, 0, 0], [4, 2, 50], [12, 12, 12]], ids=str)
def test_experts(ends):
    """Rows behind the last one's are zero; offsets that no rows have are as if they ended there."""
    a, b = torch.randn(12, 16).to(BF16), torch.randn(3, 16, 32).to(BF16)
    offsets = torch.tensor(ends, dtype=torch.int32)
    bias, scale = torch.randn(3, 1, 32).to(BF16), torch.rand(3, 1, 1)
    judged(expert_bias, a, b, [bias, scale], offsets=offsets)
    judged(expert_statistics, a, b, [bias], offsets=offsets)
    have, first = expert_bias(a, b, bias, scale, offsets=offsets), 0
    for e, end in enumerate(min(end, 12) for end in ends):
        end = max(end, first)
        want = ((a[first:end].double() @ b[e].double() + bias[e].double()) * scale[e].double()).to(BF16)
        torch.testing.assert_close(have[first:end], want)
        first = end
    assert (have[first:] == 0).all()


def test_prologues():
    a, b = matrices(9, 32, 16)
    factor, weight, bias = torch.rand(9, 1), torch.rand(16), torch.randn(32).to(BF16)
    judged(cases.normalised, a.to(E4M3), b, [bias], factor=factor, weight=weight)
    want = ((a.float() * factor * weight).to(BF16).double() @ b.double() + bias.double()).to(BF16)
    torch.testing.assert_close(cases.normalised(a, b, bias, factor=factor, weight=weight), want)
    codes = torch.randint(-128, 127, (9, 16), dtype=torch.int8)
    made = fuse.gemm(codes, b, cases.plain.function, prologue=lambda a, row, col, scale: a.float() * scale[row], scale=factor[:, 0])
    torch.testing.assert_close(made, ((codes.float() * factor).to(BF16).double() @ b.double()).to(BF16))


def test_operators():
    a, b = matrices(4, 32, 16)
    for kind in ("bias_gelu", "biases", "norms", "swiglu", "accumulated", "scattered"):
        function, operands = cases.operands_of(kind, 4, 32, "cpu")
        torch.library.opcheck(function.op, (a, b, *operands))
    torch.library.opcheck(cases.normalised.op, (a, b, torch.randn(32)), {"factor": torch.rand(4, 1), "weight": torch.rand(16)})
    experts = torch.randn(2, 16, 32).to(BF16)
    offsets = torch.tensor([1, 3], dtype=torch.int32)
    torch.library.opcheck(expert_bias.op, (a, experts, torch.randn(2, 1, 32), torch.rand(2, 1, 1)), {"offsets": offsets})


def test_compiled_graphs():
    calls = torch.compile(lambda a, b, bias: bias_gelu(a, b, bias) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    through = torch.compile(lambda a, b, bias: fuse.gemm(a, b, bias_gelu, bias=bias), fullgraph=True, dynamic=True, backend="aot_eager")
    _, b = matrices(1, 32, 16)
    bias = torch.randn(32)
    for m in (4, 7, 1):
        a = torch.randn(m, 16).to(BF16)
        assert torch.equal(calls(a, b, bias), bias_gelu(a, b, bias) * 2)
        assert torch.equal(through(a, b, bias), bias_gelu(a, b, bias))
    with pytest.raises(RuntimeError, match="functions that gemm_epilogue has made"):
        torch.compile(lambda a, b: fuse.gemm(a, b, lambda acc, row, col: acc), fullgraph=True, backend="eager")(a, b)


def test_traced_once():
    """Whatever the number of rows."""
    counted = []

    def epilogue(acc, row, col, stream):
        counted.append(1)
        return (acc + stream).to(BF16)

    for m in (4, 7, 4):
        a, b = matrices(m, 32, 16)
        fuse.gemm(a, b, epilogue, stream=torch.randn(m, 32))
    assert len(counted) == 1


def test_functions_by_their_code():
    """A lambda in a loop is one function, as long as what it has from outside is the same."""
    a, b = matrices(4, 32, 16)
    before, results = len(gemm_function._functions), []
    for factor in (1.0, 2.0, 1.0, 1):
        results.append(fuse.gemm(a, b, lambda acc, row, col, factor=factor: acc * factor))
        results.append(fuse.gemm(a, b, lambda acc, row, col: acc * factor))  # noqa: B023
    assert len(gemm_function._functions) - before == 6
    for i, factor in enumerate((1.0, 2.0, 1.0, 1)):
        assert torch.equal(results[2 * i], results[2 * i + 1]) and torch.equal(results[2 * i], results[0] * factor)


def test_gradients_are_refused():
    a, b = matrices(4, 32, 16)
    with pytest.raises(RuntimeError, match="has no backward"):
        cases.plain(a.requires_grad_(), b).sum().backward()


def test_no_rows():
    _, b = matrices(1, 32, 16)
    assert bias_gelu(torch.zeros(0, 16).to(BF16), b, torch.zeros(32)).shape == (0, 32)


REFUSED = {
    "softmax": (lambda acc, row, col: torch.softmax(acc, -1), "needs a reduction over a whole row"),
    "two reductions": (lambda acc, row, col: (acc - acc.amax(-1, keepdim=True)).exp().sum(-1), "whole row"),
    "cumsum": (lambda acc, row, col: acc.cumsum(-1), r"test_gemm_cpu.py:\d+: torch.cumsum is not among"),
    "branch": (lambda acc, row, col: acc if acc > 0 else -acc, "cannot branch on"),
    "rows": (lambda acc, row, col: acc / acc.shape[0], "number of rows is not known"),
    "indices alone": (lambda acc, row, col: col, "the same in all rows"),
    "outside": (lambda acc, row, col: acc + torch.ones(32), "tensors cannot be made|is not an argument"),
    "matmul": (lambda acc, row, col: acc @ acc, "unsupported operand|is not among|__matmul__"),
    "nothing": (lambda acc, row, col: None, "returns nothing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fused_names_the_line(case):
    function, message = REFUSED[case]
    with pytest.raises((RuntimeError, TypeError), match=message):
        fuse.gemm(*matrices(4, 32, 16), function)


def test_wrong_calls():
    a, b = matrices(4, 32, 16)

    def refused(message, call):
        with pytest.raises(RuntimeError, match=message):
            call()

    refused(r"bias must be \[n\], here \[32\], got \[31\]", lambda: bias_gelu(a, b, torch.zeros(31)))
    refused(r"scale must be \[m, 1\], or \[m\] that is looked up", lambda: norms(a, b, torch.zeros(5), torch.zeros(32)))
    refused(r"stream must be \[m, n\], here \[4, 32\]", lambda: cases.residual(a, b, torch.zeros(3, 32)))
    refused(r"b must be \[16, n\], got \[15, 32\]", lambda: cases.plain(a, b[:15]))
    refused(r"a must be \[m, k\]", lambda: cases.plain(a[None], b))
    refused("a must be torch.bfloat16, as b is", lambda: cases.plain(a.half(), b))
    refused("b must be bfloat16, float16 or float8_e4m3fn", lambda: cases.plain(a.float(), b.float()))
    refused("n must be a multiple of 16 with the gate 'blocks'", lambda: cases.geglu(a, b[:, :24]))
    refused(r"offsets must be int32 \[2\]", lambda: cases.plain(a, torch.zeros(2, 16, 32).to(BF16), offsets=torch.zeros(2)))
    refused("gate must be one of", lambda: fuse.gemm_epilogue(cases.plain.function, gate="thirds"))
    refused("cannot be called 'b'", lambda: fuse.gemm_epilogue(lambda acc, row, col, b: acc))
    refused(r"is a function of \(acc, row, col", lambda: fuse.gemm_epilogue(lambda acc: acc))
    refused(
        "returns=2",
        lambda: fuse.gemm_epilogue(lambda acc, row, col, x: (x.copy_(acc), acc, acc)[1:], mutates=("x",))(a, b, b.new_zeros(4, 32)),
    )
    refused("looked up by the row", lambda: fuse.gemm(a, b, lambda acc, row, col, x: acc + x[row + 1], x=torch.zeros(4)))
    refused("for sm_80 and later", lambda: cases.plain.precompile((a.to("meta"), b.to("meta")), arch="sm_75"))
    refused("9.0 as sm_90a", lambda: cases.plain.precompile((a.to("meta"), b.to("meta")), arch="sm_90"))
    refused("FP8 needs sm_89", lambda: cases.codes.precompile((a.to("meta"), b.to("meta"), torch.zeros(4, 1)), arch="sm_80"))
    fp8 = a.to(E4M3).to("meta"), b.to(E4M3).to("meta")
    refused("for sm_100a b must be bfloat16 or float16", lambda: cases.plain.precompile(fp8, arch="sm_100a"))


@pytest.mark.parametrize("kind", ["norms", "ranges"])
def test_reductions_of_tiles(kind):
    """Partial reductions of two tiles, put together by the second graph, as kernels do it."""
    m, n, k = 6, 48, 16
    a, b = matrices(m, n, k)
    function, operands = cases.operands_of(kind, m, n, "cpu")
    arguments, space, _, traced = function._called((a, b, *operands), {})
    row, col = torch.arange(m).view(m, 1), torch.arange(n).view(1, n)
    inputs = [gemm_reference.part(arguments[x.name], x.extent, slice(0, m), m, n, 0) for x in traced.first.inputs]
    values = {"acc": a.float() @ b.float(), "row": row, "col": col}
    known = node_values(traced.first, inputs, columns=n, values=values)
    partials = []
    for x, number in zip(traced.last.inputs, gemm_config.partials_of(traced.last), strict=True):
        if number is None:
            partials.append(arguments[x.name].reshape(m, 1))
            continue
        node = traced.first.nodes[number]
        whole = known[node.inputs[0]]
        reduce = {"reduce_sum": torch.sum, "reduce_max": torch.amax, "reduce_min": torch.amin}[node.op]
        partials.append(torch.stack([reduce(part, -1) for part in whole.split(32, -1)], -1).to(whole.dtype))
    results = function(a, b, *operands)
    outputs = evaluate(traced.last, partials, rows=m, columns=2)
    for i, have in zip(traced.late, outputs, strict=True):
        torch.testing.assert_close(have.reshape(results[i].shape), results[i])


def test_reductions_split():
    """A graph's parts compute what it does."""
    function, operands = cases.operands_of("norms", 6, 48, "cpu")
    _, _, _, traced = function._called((*matrices(6, 48, 16), *operands), {})
    assert [y.extent for y in traced.first.outputs] == [FULL] and [y.extent for y in traced.last.outputs] == [COLUMN, COLUMN]
    assert [x.name for x in traced.last.inputs] and sum(node.op in REDUCTIONS for node in traced.last.nodes) == 2
    assert Graph.from_plain(traced.last.plain()) == traced.last


@pytest.mark.parametrize("gate", gemm_config.GATES)
@pytest.mark.parametrize("b_major", ["k", "n"])
def test_tiles(gate, b_major):
    """There is a legal tile for everything, and it fits."""
    for m in (1, 64, 65, 200, 1000, 8192, 100000):
        for n in (16, 512, 4096, 28672):
            for experts in (0, 8):
                for prologue in (False, True):
                    tile = gemm_config.choose(m, n, 64, b_major, gate, experts, prologue, 132)
                    assert gemm_config.legal(tile, b_major, gate, experts > 0, prologue)
                    config = gemm_config.GemmConfig(
                        tile.m, tile.n, tile.pingpong, gemm_config.stages_of(tile), tile.cluster, "bf16", b_major, gate, 8, experts > 0
                    )
                    assert config.shared_bytes <= gemm_config.SHARED_BYTES and config.stages >= 3
                    assert config.tile_n // config.boxes <= 256 and config.boxes * (config.tile_n // config.boxes) == config.tile_n
    assert dataclasses.asdict(config)


def test_check_refuses():
    """The judge of these tests can fail."""
    x = torch.randn(8, 8)
    with pytest.raises(AssertionError):
        check(x + 1e-3, x, x, "one")
    check(x, x, x, "none")
    assert F32 in cases.SPACING
    assert F.relu(x).shape == x.shape
