"""How the operators are known to torch: schemas, opcheck, fakes, torch.compile, torch.export, import."""

import functools
import subprocess
import sys
from pathlib import Path

import minfer
import pytest
import torch
from torch.library import opcheck

from tests.gemm.cases import (
    DTYPES,
    LAYOUTS,
    name_of,
    operands,
    padded,
)

# One for float16 "tn" operands, in this build where there is one.
KERNEL = max((k for k in minfer.kernels() if (k["ab_type"], k["a_major"], k["b_major"]) == ("f16", "k", "k")), key=lambda k: k["compiled"])[
    "name"
]


@functools.cache
def inductor_works() -> bool:
    """Whether Inductor finds the compiler and headers that its CPU kernels need."""
    try:
        torch.compile(lambda x: x * 2 + 1, fullgraph=True)(torch.ones(4))
    except Exception:
        return False
    return True


def need(backend):
    torch._dynamo.reset()
    if backend == "inductor" and not inductor_works():
        pytest.skip("Inductor does not work here: no compiler or no Python headers")


def test_schemas():
    epilogue = (
        "*, Tensor? c=None, Tensor? bias=None, float alpha=1., float beta=0., "
        'str activation="none", ScalarType? out_dtype=None, str? quant=None, Tensor? scale=None, '
        "bool constant_weights=False, str? kernel=None"
    )
    assert str(torch.ops.minfer.gemm.default._schema) == f"minfer::gemm(Tensor a, Tensor b, {epilogue}) -> Tensor"
    assert str(torch.ops.minfer.gemm.out._schema) == f"minfer::gemm.out(Tensor a, Tensor b, {epilogue}, Tensor(a!) out) -> Tensor(a!)"
    assert str(torch.ops.minfer.gemm_gated.default._schema) == (
        'minfer::gemm_gated(Tensor a, Tensor b, *, Tensor? bias=None, str activation="silu", str? quant=None, Tensor? scale=None, '
        "bool constant_weights=False, str? kernel=None) -> Tensor"
    )


GEMM_SAMPLES = {
    "plain": {},
    "c": {"c": (5, 24), "beta": 2.0, "alpha": 0.5},
    "c row": {"c": (24,), "beta": 1.0},
    "epilogue": {"c": (5, 1), "beta": 1.0, "bias": (24,), "activation": "gelu"},
    "float32": {"out_dtype": torch.float32, "activation": "silu"},
    "kernel": {"kernel": KERNEL},
}


def sample(arguments, device, dtype=torch.float16):
    return {k: torch.randn(v, device=device).to(dtype) if isinstance(v, tuple) else v for k, v in arguments.items()}


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_op(op, args, kwargs):
    result = opcheck(op, args, kwargs)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", GEMM_SAMPLES)
def test_opcheck_gemm(case, device):
    kwargs = sample(GEMM_SAMPLES[case], device)
    check_op(torch.ops.minfer.gemm.default, operands(5, 24, 16, torch.float16, "tn", device), kwargs)
    out = torch.empty(5, 24, device=device, dtype=kwargs.get("out_dtype", torch.float16))
    check_op(torch.ops.minfer.gemm.out, operands(5, 24, 16, torch.float16, "tn", device), kwargs | {"out": out})


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_batches(device):
    a, b = operands(5, 24, 16, torch.bfloat16, "nn", device, batch=(3,))
    for x, y in ((a, b), (a[0], b), (a, b[0])):
        check_op(torch.ops.minfer.gemm.default, (x, y), {})


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_gemm_gated(device):
    a, b = operands(5, 32, 16, torch.float16, "tn", device)
    check_op(torch.ops.minfer.gemm_gated.default, (a, b), {})
    check_op(torch.ops.minfer.gemm_gated.default, (a, b), {"bias": torch.randn(32, device=device), "activation": "gelu"})


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_tensors_that_require_grad(device):
    """Registration and fakes; the traced backward is refused, as it is in eager mode."""
    a, b = operands(5, 24, 16, torch.float16, "tn", device)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    result = opcheck(torch.ops.minfer.gemm.default, (a.requires_grad_(), b), {}, test_utils=tests)
    assert set(result.values()) == {"SUCCESS"}, result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_meta_is_like_cpu(dtype, layout):
    for batches in (((), ()), ((3,), ()), ((), (3,)), ((3,), (3,))):
        a, _ = operands(5, 24, 16, dtype, layout, batch=batches[0])
        _, b = operands(5, 24, 16, dtype, layout, batch=batches[1])
        for kwargs in ({}, {"out_dtype": torch.float32}):
            real = minfer.gemm(a, b, **kwargs)
            fake = minfer.gemm(a.to("meta"), b.to("meta"), **kwargs)
            assert (fake.shape, fake.dtype, fake.stride(), fake.device.type) == (real.shape, real.dtype, real.stride(), "meta")
    for m, n, k in ((0, 8, 4), (4, 0, 8), (4, 8, 0)):
        assert minfer.gemm(torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")).shape == (m, n)


def layer(x, weight, residual, packed, bias):
    y = minfer.gemm(x, weight.t(), bias=bias, activation="silu")
    z = minfer.gemm(torch.relu(y), weight.t(), c=residual, beta=1.0)
    return minfer.gemm_gated(z * 2, packed.t())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(backend, dynamic):
    need(backend)
    weight, packed, bias = torch.randn(32, 32).half() / 6, torch.randn(64, 32).half() / 6, torch.randn(32)
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for m in (3, 7, 1):
        x, residual = torch.randn(m, 32).half(), torch.randn(m, 32).half()
        with torch.no_grad():
            expected, out = layer(x, weight, residual, packed, bias), compiled(x, weight, residual, packed, bias)
        torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_with_kernel_and_out(backend):
    """Inductor keeps the keyword ``kernel`` for itself, and functionalisation refuses outputs that alias: both are worked around."""
    need(backend)
    a, b = operands(5, 32, 16, torch.float16, "tn")
    launch = f"{KERNEL}@decomposition=split_k,splits=2"

    def with_kernel(a, b):
        return minfer.gemm(a, b, activation="relu", kernel=launch) + 1, minfer.gemm_gated(a, b, kernel=launch)

    def with_out(a, b):
        out = torch.empty(5, 32)
        minfer.gemm(a, b, out=out)
        return out + 1

    def into_argument(a, b, out):
        minfer.gemm(a, b, kernel=launch, out=out)

    for function in (with_kernel, with_out):
        out = torch.compile(function, fullgraph=True, backend=backend)(a, b)
        for have, want in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(function(a, b)), strict=True):
            torch.testing.assert_close(have, want)
    out = torch.full((5, 32), torch.nan)
    torch.compile(into_argument, fullgraph=True, backend=backend)(a, b, out)
    assert torch.equal(out, minfer.gemm(a, b, out_dtype=torch.float32))


def test_compile_traces_the_backward():
    """Documented: where gradients are enabled and an argument requires them, the compiled forward raises; under no_grad it works."""
    torch._dynamo.reset()
    a, b = operands(5, 24, 16, torch.float16, "tn")
    b.requires_grad_()
    compiled = torch.compile(lambda a, b: minfer.gemm(a, b), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="minfer::gemm: has no backward"):
        compiled(a, b)
    with torch.no_grad():
        assert torch.equal(compiled(a, b), minfer.gemm(a, b))


def test_compile_makes_constants_of_integers():
    """Documented: every new value of an integer argument compiles anew, with dynamic=True as well; new sizes do not."""
    q, lengths = torch.randn(1, 40, 4, 64).bfloat16(), torch.tensor([0, 16, 32], dtype=torch.int32)
    ids, logits = torch.randint(0, 4, (6, 2), dtype=torch.int32), torch.randn(6, 8)
    cache = minfer.allocate_kv_cache(2, 32, 2, 64, dtype=torch.bfloat16, device="cpu")
    cache.k.zero_(), cache.v.zero_()
    used = torch.tensor([16, 16], dtype=torch.int32)
    functions = {
        "max_seqlen_q": lambda n: minfer.attention_varlen(q[0], q[0], q[0], lengths, lengths, n, 32),
        "max_seqlen_k": lambda n: minfer.attention_varlen(q[0], q[0], q[0], lengths, lengths, 32, n),
        "num_experts": lambda n: minfer.moe_sort(ids, n),
        "top_k": lambda n: minfer.moe_router(logits, n - 15),
        "window_left": lambda n: minfer.attention(q, q, q, window_left=n),
        "window_right": lambda n: minfer.attention(q, q, q, window_right=n),
        "num_splits": lambda n: minfer.attention_paged(q[:, :1].expand(2, -1, -1, -1), cache.k, cache.v, used, num_splits=n),
    }
    for name, function in functions.items():
        torch._dynamo.reset()
        graphs = []

        def count(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(function, fullgraph=True, backend=count, dynamic=True)
        for n in (16, 17, 19, 17):
            compiled(n)
        assert len(graphs) == 3, name


def test_compile_keeps_operand_strides():
    """The graph must call the operator with the strides of eager mode: the layout chooses the kernel."""
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    nodes = []

    def record(graph, inputs):
        nodes.extend(n for n in graph.graph.nodes if n.op == "call_function")
        return graph

    a, b = operands(5, 24, 16, torch.float16, "nn")
    torch.compile(lambda a, b: minfer.gemm(a, b), fullgraph=True, backend=aot_autograd(fw_compiler=record))(a, b)
    (node,) = nodes
    assert node.target is torch.ops.minfer.gemm.default
    assert [x.meta["val"].stride() for x in node.args] == [a.stride(), b.stride()]
    assert torch.Tag.needs_fixed_stride_order in node.target.tags


def test_compile_bad_input():
    torch._dynamo.reset()
    a, b = operands(5, 24, 16, torch.float16, "tn")
    with pytest.raises(Exception, match="minfer::gemm: b must have k = 16 rows"):
        torch.compile(lambda a, b: minfer.gemm(a, b), fullgraph=True, backend="aot_eager")(a, b.t())


def test_compile_noncontiguous_out_is_refused_by_dynamo():
    """Documented: Dynamo takes only contiguous out= in a full graph; in eager mode any view works."""
    torch._dynamo.reset()
    a, b = operands(5, 24, 16, torch.float16, "tn")
    out, _ = padded((5, 24), torch.float16, "cpu")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="out="):
        torch.compile(lambda a, b, out: minfer.gemm(a, b, out=out), fullgraph=True, backend="eager")(a, b, out)


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, a, b):
            return minfer.gemm(a, b, activation="relu")

    a, b = operands(5, 24, 16, torch.float16, "tn")
    program = torch.export.export(Layer(), (a, b))
    targets = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert targets == [torch.ops.minfer.gemm.default]
    assert torch.equal(program.module()(a, b), minfer.gemm(a, b, activation="relu"))


IMPORT = """
import sys, time
import torch
before = set(sys.modules)
begin = time.perf_counter()
import minfer
seconds = time.perf_counter() - begin
print(seconds, *sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def test_import_is_cheap():
    """Less than 0.3 s beyond torch, and no module that only the tools need."""
    runs = [subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True).stdout.split() for _ in range(3)]
    assert min(float(seconds) for seconds, *_ in runs) < 0.3
    assert not {"numpy", "rich", "typer", "matplotlib", "triton"} & set(runs[0][1:]), runs[0][1:]


MISSING = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.__version__ = sys.argv[2]
try:
    import minfer
except ImportError as error:
    print(error)
"""


def test_import_errors(tmp_path):
    """A package that was not built, and a torch that is too old, each say so in one sentence."""
    package = tmp_path / "minfer"
    source = next(path for path in map(Path, minfer.__path__) if (path / "__init__.py").exists())
    for file in ("__init__.py", "_core/__init__.py", "_core/library.py"):
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        (package / file).write_text((source / file).read_text())

    def message(version):
        command = [sys.executable, "-c", MISSING, str(tmp_path), version]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "_C.so is not in" in message("2.13.0") and "pip install ." in message("2.13.0")
    assert "needs torch >= 2.10" in message("2.9.1+cpu") and "2.9.1+cpu" in message("2.9.1+cpu")
