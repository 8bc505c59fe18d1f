"""Kernels of attention with functions: that they are compiled as they should be, and exported. No GPU is needed, the CuTe DSL is."""

import glob
import itertools
import math
import operator
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch
from minfer import fuse
from minfer.fuse import attention_config, attention_function, compiler, launch
from minfer.fuse.attention_config import AttentionConfig

from tests.fuse.attention_cases import BF16, F16, Functions, drawn, paged, template_with_python_numbers

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")
FUNCTIONS = Functions(2, 4, 300, "cpu")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_known", {})


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def like(heads, heads_kv, length, dim, dtype=BF16):
    return (
        meta(1, heads, length, dim, dtype=dtype),
        meta(1, heads_kv, length, dim, dtype=dtype),
        meta(1, heads_kv, length, dim, dtype=dtype),
    )


def tool(name):
    found = shutil.which(name) or next(iter(sorted(glob.glob(f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/bin/{name}"))), None)
    if found is None:
        pytest.skip(f"no {name}")
    return found


def test_configurations():
    """Which kernels serve all lengths."""
    function = fuse.AttentionFunction(FUNCTIONS.scores["alibi"], FUNCTIONS.masks["causal"])
    found = function.configurations([like(8, 2, 100, 128)])
    assert {(c.consumers, c.keys) for c in found} == {(1, 128), (2, 128), (3, 80)} and any(c.packed for c in found)
    assert all(c.shared_bytes <= 227 * 1024 - 2048 and c.stages >= 2 for c in found) and len(found) <= 10
    causal = fuse.create_block_mask(FUNCTIONS.masks["causal"], None, None, 300, 300, "cpu", (256, 384))
    listed = function.configurations([{**dict(zip("qkv", like(8, 2, 300, 64), strict=True)), "block_mask": causal}])
    assert {(c.consumers, c.listed_q, c.listed_k, c.split, c.packed) for c in listed} == {(2, 2, 3, False, False)}
    table = {"block_table": torch.empty(1, 20, dtype=torch.int32), "seq_lens": torch.empty(1, dtype=torch.int32)}
    pages = meta(20, 24, 2, 64)
    paged = function.configurations([{"q": like(8, 2, 1, 64)[0], "k": pages, "v": pages, **table}])
    assert all(c.paged and c.box == 8 for c in paged) and any(c.split for c in paged)


def loops(code):
    """The instructions of a kernel's loops."""
    found = [(int(x, 16), y) for x, y in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", code)]
    at = {address: i for i, (address, _) in enumerate(found)}
    result = []
    for i, (_, text) in enumerate(found):
        branch = re.match(r"(?:@!?U?P\d+ )?BRA (0x[0-9a-f]+)", text)
        if branch and at.get(int(branch[1], 16), i + 1) <= i:
            result.append([text for _, text in found[at[int(branch[1], 16)] : i + 1]])
    return result


def count(instructions, pattern):
    return sum(bool(re.match(r"(@!?U?P\d+ )?" + pattern, text)) for text in instructions)


# Of the loop over full tiles, with head dimensions 64 and 128: instructions at most, and MUFU besides two of the rows.
LOOPS = {"plain": (None, None, (460, 395), 1), "causal": (None, "causal", (460, 395), 1), "alibi": ("alibi", None, (540, 450), 1),
         "soft_cap": ("soft_cap", None, (1140, 840), 3)}  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", LOOPS)
def test_loop_over_full_tiles(tmp_path, name, dim):
    """What each number costs there: one exponential, one rounding for two, and what its function needs; no conversion, no load, no address
    that is computed anew."""
    score, mask, most, exponentials = LOOPS[name]
    known = attention_function.traced(FUNCTIONS.scores.get(score), FUNCTIONS.masks.get(mask)).traced
    sizes = attention_function._Sizes(1, 16, 16, 16384, 16384, dim, dim, False)
    config, _ = attention_function.configure(known, sizes, "bf16", 0, (), 132)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiler.build(attention_function.kernel_of(known, config, "sm_90a")).cubin)
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage
    code = subprocess.run([tool("cuobjdump"), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    products = config.head_dim // 16 + config.keys // 16
    inner = sorted((x for x in loops(code) if count(x, "HGMMA") == products), key=len)
    # By tanh.approx there are fewer instructions than with the polynomial, which full tiles have beside it.
    loop = inner[-1] if name == "soft_cap" else inner[0]
    assert len(loop) <= most[dim == 128], len(loop)
    elements = config.keys // 2
    assert count(loop, "MUFU") <= exponentials * elements + 6 and count(loop, r"MUFU\.EX2") >= elements
    assert count(loop, "I2F|I2FP") <= 2 and count(loop, "LDG|LDL|STL|S2UR") == 0 and count(loop, "LDS") == 1
    assert count(loop, "F2FP") == elements // 2 * (2 if name == "soft_cap" else 1)
    assert count(loop, "FMNMX") <= elements * (2 if name == "soft_cap" else 1) + 8
    first = [i for i, text in enumerate(loop) if "HGMMA" in text][-1]
    waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
    roundings = [i for i, text in enumerate(loop) if "F2FP" in text]
    assert len(waits) == 2 and first < waits[0] < waits[1] < roundings[0]  # probabilities are not written while they are multiplied


DOCUMENT, LONG = torch.zeros(16384, dtype=torch.int32), torch.zeros(2, 16384, dtype=torch.int64)
PADDING, BIAS = torch.zeros(2, 16384, dtype=torch.bool), torch.zeros(8, 16384)


def documents(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def causal_documents(b, h, q_idx, kv_idx):
    return (LONG[b, q_idx] == LONG[b, kv_idx]) & (q_idx >= kv_idx)


def padded(b, h, q_idx, kv_idx):
    return PADDING[b, kv_idx]


def biased(score, b, h, q_idx, kv_idx):
    return score + BIAS[h, kv_idx]


@pytest.mark.parametrize("dim", [64, 128])
def test_loop_over_partial_tiles(tmp_path, dim):
    """Documents by a block mask: what is looked up for keys is in shared memory, two numbers a load; a score costs a comparison and a
    choice more than in a full tile. Nothing else is loaded in any loop over tiles."""
    known = attention_function.traced(None, documents).traced
    sizes = attention_function._Sizes(1, 16, 16, 16384, 16384, dim, dim, False)
    config, _ = attention_function.configure(known, sizes, "bf16", 0, (128, 128), 132)
    assert config.key_words == 1
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiler.build(attention_function.kernel_of(known, config, "sm_90a")).cubin)
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage
    code = subprocess.run([tool("cuobjdump"), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    products, elements = config.head_dim // 16 + config.keys // 16, config.keys // 2
    partial, full = sorted((x for x in loops(code) if count(x, "HGMMA") == products), key=len, reverse=True)
    assert len(re.findall(r"ATOMG\.E\.INC", code)) == 1 and "ATOMG.E.ADD" not in code  # additions would be waited for
    assert count(partial, "LDG|LDL|STL") == count(full, "LDG|LDL|STL") == 0
    assert count(partial, r"LDS\.64") == elements // 4 and count(partial, "LDS") == elements // 4 + 1 and count(full, "LDS") == 1
    assert count(partial, "ISETP") <= elements + elements // 2 + 8  # half as many are of the last tile's end, which has a branch
    assert len(partial) <= len(full) + 4 * elements and len(partial) <= (810 if dim == 128 else 690), (len(partial), len(full))


def test_what_is_looked_up_by_key():
    def found(score_mod, mask_mod, packed=False):
        graph = attention_function.traced(score_mod, mask_mod).traced.graph
        return [(graph.nodes[i].op, graph.nodes[i].dtype, words) for i, words in attention_config.looked_up_by_key(graph, packed).items()]

    assert found(None, documents) == [("gather", "i32", 1)] and found(None, causal_documents) == [("gather", "i64", 2)]
    assert found(None, padded) == [("gather", "bool", 1)] and found(biased, None) == [("gather", "f32", 1)]
    assert found(biased, None, True) == [] and found(None, documents, True) == [("gather", "i32", 1)]  # rows are heads
    assert found(FUNCTIONS.scores["relative"], FUNCTIONS.masks["causal"]) == found(FUNCTIONS.scores["alibi"], None) == []
    assert [x[0] for x in found(lambda s, b, h, q, kv: s * (2 * BIAS[h, kv] + 1), None)] == ["add"]  # all that needs no row
    assert [x[1:] for x in found(biased, causal_documents)] == [("f32", 1)]  # the other has no room


@pytest.mark.parametrize("functions", [(biased, documents), (biased, causal_documents), (None, padded), (biased, None)])
@pytest.mark.parametrize("consumers,keys,dim,others", [
    (3, 80, 128, {}), (2, 128, 64, {"listed": True}), (1, 128, 64, {"packed": True, "paged": True, "split": True}),
])  # fmt: skip
def test_numbers_by_key_compile(functions, consumers, keys, dim, others):
    known = attention_function.traced(*functions).traced
    words = sum(attention_config.looked_up_by_key(known.graph, "packed" in others).values())
    config = AttentionConfig("bf16", dim, consumers, keys, 2, 16 if "paged" in others else keys, scores=known.scores, masks=known.masks,
                             key_words=words, **others)  # fmt: skip
    assert config.shared_bytes == AttentionConfig(**{**config.__dict__, "key_words": 0}).shared_bytes + 4 * words * keys * 2 * 2
    assert compiler.build(attention_function.kernel_of(known, config, "sm_90a")).shared_bytes == config.shared_bytes


CONFIGS = {
    "128": AttentionConfig("bf16", 128, 3, 80, 2, 80, scores=True, masks=True),
    "128 block mask": AttentionConfig("bf16", 128, 2, 128, 2, 128, listed=True, scores=True, masks=True),
    "64": AttentionConfig("f16", 64, 3, 128, 4, 128, scores=True, masks=True),
    "64 paged": AttentionConfig("bf16", 64, 1, 128, 4, 16, packed=True, paged=True, split=True, scores=True, masks=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_instructions(tmp_path, name):
    """Products are WGMMA in unbroken batches, operands come by TMA, and no register is spilled."""
    config = CONFIGS[name]
    known = attention_function.traced(FUNCTIONS.scores["alibi"], FUNCTIONS.masks["causal"]).traced
    artifact = compiler.build(attention_function.kernel_of(known, config, "sm_90a"))
    assert (artifact.threads, artifact.shared_bytes) == (config.block, config.shared_bytes)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(artifact.cubin)
    usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"STACK:(\d+)", usage) == ["0"] and re.findall(r"LOCAL:(\d+)", usage) == ["0"], usage
    code = subprocess.run([tool("cuobjdump"), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
    products = config.head_dim // 16, config.keys // 16
    assert len(re.findall(r"HGMMA", code)) == 3 * sum(products)  # a first tile, two kinds of steps, and the last output
    assert len(re.findall(r"WARPGROUP.ARRIVE", code)) == 4 and len(re.findall(r"WARPGROUP.DEPBAR", code)) == 6
    assert len(re.findall(r"UTMALDG", code)) >= 4


@pytest.mark.parametrize("pair", range(9))
def test_functions_compile(pair):
    score_mod, mask_mod = FUNCTIONS.pairs()[pair]
    known = attention_function.traced(score_mod, mask_mod).traced
    config = AttentionConfig("bf16", 64, 2, 128, 2, 128, scores=score_mod is not None, masks=mask_mod is not None)
    assert compiler.build(attention_function.kernel_of(known, config, "sm_90a")).cubin


@pytest.mark.parametrize("seed", range(6))
def test_drawn_functions_compile(seed):
    score_mod, mask_mod = drawn(seed, 4, 300, "cpu")
    known = attention_function.traced(score_mod, mask_mod).traced
    config = AttentionConfig("f16", 64, 1, 128, 2, 128, packed=True, scores=True, masks=mask_mod is not None)
    assert compiler.build(attention_function.kernel_of(known, config, "sm_90a")).cubin


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_other_architectures(tmp_path, arch):
    """They have the portable kernel, with mma.sync and without TMA."""
    function = fuse.AttentionFunction(FUNCTIONS.scores["alibi"], FUNCTIONS.masks["causal"])
    found = function.configurations([like(8, 2, 300, 128)], arch)
    assert all(c.portable and c.consumers <= 2 and c.shared_bytes <= 99 * 1024 for c in found)
    table = {"block_table": torch.empty(1, 20, dtype=torch.int32), "seq_lens": torch.empty(1, dtype=torch.int32)}
    pages = meta(20, 24, 2, 64)
    found = found[-1:] + function.configurations([{"q": like(8, 2, 1, 64)[0], "k": pages, "v": pages, **table}], arch)[:1]
    for config in found:
        artifact = compiler.build(attention_function.kernel_of(function.traced(), config, arch))
        assert artifact.threads == config.block == 128 * config.consumers
        if arch == "sm_80":
            path = tmp_path / "kernel.cubin"
            path.write_bytes(artifact.cubin)
            usage = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
            assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage
            code = subprocess.run([tool("cuobjdump"), "-sass", str(path)], capture_output=True, text=True, check=True).stdout
            assert "HMMA.16816.F32" in code and "LDGSTS" in code and "HGMMA" not in code
    with pytest.raises(fuse.FuseError, match="made for sm_80 and later, not for sm_75"):
        function.precompile(like(4, 4, 8, 64), arch="sm_75")


def test_export(tmp_path, monkeypatch):
    """Another process, without the DSL and without the functions."""
    function = fuse.AttentionFunction(FUNCTIONS.scores["relative"], FUNCTIONS.masks["causal"])
    one = function.configurations([like(4, 4, 300, 64, F16)])[:1]
    monkeypatch.setattr(fuse.AttentionFunction, "configurations", lambda self, examples, arch: one)
    out = fuse.export(function, tmp_path / "out", [like(4, 4, 300, 64, F16)], archs=["sm_90a"])
    assert len(list(out.glob("*.kernel"))) == 1
    script = f"""
import sys
sys.modules["cutlass"] = None
import torch, minfer
f = minfer.fuse.load({str(out)!r})
q, k, v = (torch.randn(1, 4, 300, 64).half() for _ in range(3))
table = torch.zeros(4, 601)
out = f(q, k, v, table=table)
want = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=2e-3)
out = torch.compile(f, fullgraph=True, backend="aot_eager")(q, k, v, table=table)
torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=2e-3)
for wrong in ({{}}, {{"bias": table}}):
    try:
        f(q, k, v, **wrong)
    except RuntimeError as error:
        assert "look up in ['table']" in str(error), error
    else:
        raise SystemExit("a call without the table went through")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# The template's own arithmetic, with Python's numbers in the place of a kernel's.


@pytest.fixture
def template(monkeypatch):
    return template_with_python_numbers(monkeypatch)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("heads,batch,tiles,section", [(16, 1, 86, 4), (5, 3, 7, 4), (8, 2, 1, 3), (3, 1, 40, 100)])
def test_every_tile_is_visited_once(template, heads, batch, tiles, section, parts):
    """Sections of heads after each other, in each the last queries first."""
    config = AttentionConfig("bf16", 128, 3, 80, 2, 80, split=parts > 1)
    numbers = {"walk_heads": heads, "batch": batch, "tiles": tiles, "parts": parts, "group": 1, "sq": tiles * 192, "sk": 1000}
    numbers["section"] = min(section, heads * batch * parts)
    scheduler = template.tiles.TileScheduler(config, {(name, 0, 0): value for name, value in numbers.items()})
    places = [scheduler.locate(tile) for tile in range(heads * batch * tiles * parts)]
    seen = [(where.head, where.batch, where.block, where.part) for where in places]
    assert sorted(seen) == sorted(itertools.product(range(heads), range(batch), range(tiles), range(parts)))
    first = [where for where in places[: numbers["section"] * tiles]]
    assert len({(where.head, where.batch, where.part) for where in first}) == numbers["section"]
    assert [where.block for where in first] == sorted((where.block for where in first), reverse=True)


def test_walks():
    sizes = attention_function._Sizes(1, 16, 16, 16384, 16384, 128, 128, False)
    plain, masked = (AttentionConfig("bf16", 128, 3, 80, 2, 80, masks=masks) for masks in (False, True))
    assert attention_function.walk(plain, sizes, 86, 16, 1, 132) == ([132, 1, 1], 2)
    assert attention_function.walk(masked, sizes, 86, 16, 1, 132) == ([132, 1, 1], 4)
    short = attention_function._Sizes(16, 16, 4, 1024, 1024, 128, 128, False)
    grid, section = attention_function.walk(masked, short, 6, 16, 1, 132)
    assert grid == [132, 1, 1] and section * 1024 * 512 // 4 >= 16 << 20 and section % 4 == 0
    few = attention_function._Sizes(1, 32, 8, 1, 8192, 128, 128, True)
    assert attention_function.walk(AttentionConfig("bf16", 128, 1, 128, 3, 16, packed=True, paged=True), few, 1, 8, 16, 132)[0] == [
        128,
        1,
        1,
    ]


def stepped(score, b, h, q_idx, kv_idx):
    return score + (kv_idx * 0.3).to(torch.int32) * 0.125


@pytest.mark.parametrize("seed", [*range(24), "alibi", "relative", "checkered", "stepped"])
def test_elements_of_scores(template, monkeypatch, seed):
    """Of a thread's two rows and two columns, as the kernel's code is written, against the graph by torch."""
    score_mod = {**FUNCTIONS.scores, "stepped": stepped}[seed] if isinstance(seed, str) else drawn(seed, 4, 300, "cpu")[0]
    call = attention_function.traced(score_mod, None)
    functions = template.functions.AttentionFunctions(call.traced.graph, AttentionConfig("bf16", 64, 2, 128, 2, 128, scores=True), {})
    binary = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "floor_div": operator.floordiv,
        "mod": operator.mod, "maximum": max, "minimum": min, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
        "eq": operator.eq, "ne": operator.ne,
    }  # fmt: skip
    unary = {"neg": operator.neg, "abs": abs, "exp": math.exp, "tanh": math.tanh}
    lines = []

    class Numbers(template.grid.GridEvaluator):
        def _number(self, node, types, x):
            if node.op == "where":
                return x[1] if x[0] else x[2]
            if node.op == "cast":
                return template.grid.cast(x[0], types[0], node.dtype)
            return unary[node.op](x[0]) if node.op in unary else binary[node.op](*x)

        def line(self, number):
            found = super().line(number)
            lines.append(found[1] is not None)
            return found

    template.set("GridEvaluator", Numbers)
    functions.gather = lambda node, indices: float(call.captured[node.attrs[0]][tuple(indices)])
    where, first, rows = types.SimpleNamespace(batch=1, head=3), 130, (17, 25)
    scores = [0.3, -1.2, 2.5, 0.01]
    evaluator = functions.evaluator(where, [(row, 3) for row in rows], template.grid.Columns(first, [40, 41]), scores)
    grid = evaluator.value(functions.score)
    have = torch.tensor([[grid.at(row, column) for column in range(2)] for row in range(2)], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.int32)
    values = {
        "score": torch.tensor(scores, dtype=torch.float64).view(2, 2).T, "b": one, "h": one * 3, "q": torch.tensor(rows).view(2, 1),
        "kv": torch.tensor([[first + 40, first + 41]]),
    }  # fmt: skip
    want = attention_function._modified(call.traced, call.captured, values, 2, torch.float64)[0].expand(2, 2)
    torch.testing.assert_close(have, want.double(), rtol=1e-6, atol=1e-6)
    if seed == "alibi":
        assert any(lines)


@pytest.mark.parametrize("seed", ["alibi", "shifted", "per_row"])
def test_lines_are_added_before(template, monkeypatch, seed):
    """A product with what its column adds before, and the row's base after, is the function's score."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.7])

    def shifted(score, b, h, q_idx, kv_idx):
        return (score - (2 - kv_idx) * slopes[h]) * 1.5

    def per_row(score, b, h, q_idx, kv_idx):
        return 0.25 * kv_idx * slopes[q_idx % 4] + 3.0 * slopes[h] + score

    score_mod = {"alibi": FUNCTIONS.scores["alibi"], "shifted": shifted, "per_row": per_row}.get(seed)
    call = attention_function.traced(score_mod, None)
    config = AttentionConfig("bf16", 64, 2, 128, 2, 128, scores=True)
    functions = template.functions.AttentionFunctions(call.traced.graph, config, {("scale", 0, 0): 0.125})
    assert functions.line >= 0 and functions.scores_are_products()
    binary = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "mod": operator.mod}

    class Numbers(template.grid.GridEvaluator):
        def _number(self, node, types, x):
            if node.op == "cast":
                return template.grid.cast(x[0], types[0], node.dtype)
            return -x[0] if node.op == "neg" else binary[node.op](*x)

    template.set("GridEvaluator", Numbers)
    template.set("multiply_add_here", lambda x, number, y: x * number + y)
    template.set("cute", types.SimpleNamespace(math=types.SimpleNamespace(rcp=lambda x, approx: 1 / x)))
    functions.gather = lambda node, indices: float(call.captured[node.attrs[0]][tuple(indices)])
    where, tile, queries = types.SimpleNamespace(batch=1, head=3), 5, [(700, 3), (708, 3)]
    scores = template.scores.Scores(functions, [0.0] * 64, 2)
    scores.prepare(scores.steps_of(where, queries, {}))
    bases = scores.bases_of(where, queries, {}, tile)
    products = torch.randn(64, dtype=torch.float64) * 20
    have = torch.tensor([(scores.products[i] + float(products[i])) * functions.factor() + bases[i // 2 % 2] for i in range(64)]) * math.log(
        2.0
    )
    keys = torch.tensor([tile * 128 + 8 * (i // 4) + 4 + i % 2 for i in range(64)]).view(1, -1)
    one = torch.ones(1, 1, dtype=torch.int32)
    for row, (query, _) in enumerate(queries):
        values = {"score": products.view(1, -1) * 0.125, "b": one, "h": one * 3, "q": one * query, "kv": keys}
        want = attention_function._modified(call.traced, call.captured, values, 64, torch.float64)[0].double().flatten()
        of_row = [i for i in range(64) if i // 2 % 2 == row]
        torch.testing.assert_close(have.double()[of_row], want[of_row], rtol=1e-5, atol=2e-4)


def test_soft_caps_are_known():
    def graph(function):
        return attention_function.traced(function, None).traced.graph

    config = AttentionConfig("bf16", 64, 3, 128, 4, 128, scores=True)
    for function in (lambda s, b, h, q, kv: 20.0 * torch.tanh(s / 20.0), lambda s, b, h, q, kv: (s * 0.05).tanh() * 40 / 2):
        outer, inner = attention_config.soft_cap(graph(function), config)
        assert outer == pytest.approx(20) and inner == pytest.approx(0.05)
    for function in (lambda s, b, h, q, kv: torch.tanh(s + 1), lambda s, b, h, q, kv: s * 2, lambda s, b, h, q, kv: -torch.tanh(s)):
        assert attention_config.soft_cap(graph(function), config) is None
    assert attention_config.outer_factor(graph(lambda s, b, h, q, kv: s * 2.0 / 8.0), 0) == (1.0, 0)
    portable = AttentionConfig("bf16", 64, 2, 64, 1, 64, scores=True, portable=True)
    assert attention_config.soft_cap(graph(lambda s, b, h, q, kv: torch.tanh(s)), portable) is None


@pytest.mark.parametrize("cap,scale", [(20.0, 0.125), (50.0, 0.0884), (1.0, 1.0), (300.0, 0.01)])
def test_polynomial_of_soft_caps(cap, scale):
    """Up to the limit within 2^-12 of tanh, beyond it below its value at the limit; both as cpp/src/attention has them."""
    inner, limit, root, middle, rest, negligible = attention_config.cap_numbers((cap, 1 / cap), scale)
    x = torch.linspace(-limit, limit, 4001, dtype=torch.float64)
    have = x * (((x * root).square() + middle).square() + rest) * math.log(2.0)
    want = cap * torch.tanh(x * scale / cap)
    assert ((have - want).abs() <= 2.0**-12 * want.abs() + 1e-12).all() and inner == pytest.approx(scale / cap)
    far = torch.linspace(-50 * limit, -limit, 4001, dtype=torch.float64)
    below = far * (((far * root).square() + middle).square() + rest)
    assert (below.diff() > 0).all() and below.max() <= negligible - 24 + 1e-3 * cap


@pytest.mark.parametrize("name", ["none", "causal", "window", "prefix_lm", "sliding_tiles", "odd_heads"])
@pytest.mark.parametrize("consumers,keys", [(3, 80), (2, 128), (1, 128)])
def test_kinds_of_tiles(template, monkeypatch, name, consumers, keys):
    """What each warpgroup's rows see of a tile of keys, against the mask itself."""
    from minfer.fuse.intervals import Arithmetic

    whole = Arithmetic(min, max, lambda c, x, y: x if c else y, int, bool, lambda x, y: x and y, lambda x, y: x or y, operator.not_)
    template.set("_BOUNDS", whole)
    call = attention_function.traced(None, FUNCTIONS.masks.get(name))
    config = AttentionConfig("bf16", 128, consumers, keys, 2, keys, masks=name != "none")
    sq, sk = 300, 411
    values = {(x, 0, 0): y for x, y in {"sq": sq, "sk": sk, "group": 1}.items()}
    functions, scheduler = (
        template.functions.AttentionFunctions(call.traced.graph, config, values),
        template.tiles.TileScheduler(config, values),
    )
    key_tiles = template.key_tiles.KeyTiles(functions, scheduler)
    scalars = {"floor_div": operator.floordiv, "mod": operator.mod, "eq": operator.eq, "add": operator.add, "lt": operator.lt}
    monkeypatch.setattr(template.grid.GridEvaluator, "_number", lambda self, node, types, x: scalars[node.op](*x))
    functions.gather = lambda node, indices: int(call.captured[node.attrs[0]][tuple(indices)])
    visited = 0
    for head, block, tile in itertools.product((0, 1), range(-(-sq // config.rows)), range(-(-sk // keys) + 1)):
        where = scheduler.place_of(head, 1, block, 0, sk)
        kinds, together = key_tiles.kinds_of(where, tile, -(-sk // keys))
        columns = torch.arange(min(tile * keys, sk), min(tile * keys + keys, sk))
        alone = []
        for group in range(consumers):
            first = min(block * config.rows + 64 * group, sq)
            rows = torch.arange(first, min(first + 64, sq))
            kind = kinds >> (2 * group) & 3
            alone.append((kind, len(rows)))
            if len(rows) == 0 or len(columns) == 0:
                assert kind == template.key_tiles.EMPTY
                continue
            seen = torch.ones(len(rows), len(columns), dtype=torch.bool)
            if config.masks:
                seen = attention_function.evaluate_mask(call, 1, head, rows, columns)
            assert kind != template.key_tiles.EMPTY or not seen.any()
            assert kind != template.key_tiles.FULL or (seen.all() and len(columns) == keys)
            visited += kind != template.key_tiles.EMPTY
        if all(kind == template.key_tiles.EMPTY for kind, _ in alone):
            assert together == template.key_tiles.EMPTY
        else:
            full = all(kind == template.key_tiles.FULL for kind, rows in alone if rows)
            assert together == (template.key_tiles.FULL if full else template.key_tiles.PARTIAL)
    assert visited


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("case", ["plain", "block mask", "paged", "few"])
def test_parameters_are_what_kernels_take(monkeypatch, case, arch):
    """A launch's words, read as the library reads them, have the kinds that the kernel was compiled for, and name tensors."""
    from minfer.fuse.kernels.attention_kernel import attention_parameter_types

    batch, sq, sk = 2, 300, 500
    functions = Functions(batch, 4, 600, "cpu")
    q, k, v = (torch.randn(batch, h, n, 64).to(BF16) for h, n in ((4, sq), (2, sk), (2, sk)))
    arguments = {}
    if case == "block mask":
        arguments["block_mask"] = fuse.create_block_mask(functions.masks["causal"], None, None, sq, sk, "cpu")
    if case == "paged":
        arguments = paged(k, v, [sk, 77], 16)
        k, v = arguments.pop("k"), arguments.pop("v")
    if case == "few":
        q = q[:, :, :3]
    launched = []

    class Recorder:
        def launch(self, tensors, words, grid):
            launched.append((tensors, words, grid))

    configs = []

    def load(known, config, arch):
        configs.append(config)
        return Recorder()

    call = attention_function.traced(functions.scores["relative"], functions.masks["documents"])
    monkeypatch.setattr(attention_function, "loaders", {call.key: load})
    monkeypatch.setattr(attention_function, "_plans", {})
    monkeypatch.setattr(attention_function, "architecture", lambda index: arch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(multi_processor_count=132))
    merged = types.SimpleNamespace(merge_attention_states=lambda outs, lses: (outs[0], lses[0]))
    monkeypatch.setattr(attention_function, "ops", merged)
    mask = arguments.get("block_mask")
    blocks = [] if mask is None else attention_function.lists_of(mask)
    table, lengths = arguments.get("block_table"), arguments.get("seq_lens")
    size = [128, 128] if blocks else []
    out, lse = attention_function._cuda(q, k, v, call.captured, blocks, size, table, lengths, call.key, 0.125)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    ((tensors, words, grid),) = launched
    (config,) = configs
    assert config.portable == (arch != "sm_90a")
    assert (config.listed, config.paged, config.packed) == (case == "block mask", case == "paged", case == "few")
    left = list(words)
    kinds = attention_parameter_types(call.traced.graph, config)
    names = attention_config.parameters(call.traced.graph, config)
    values = {}
    for name, (kind, dtype) in zip(names, kinds, strict=True):
        word = left.pop(0)
        number = left.pop(0)
        if kind == "tensor_map":
            modes = left.pop(0)
            extents, strides = [left.pop(0) for _ in range(modes)], [left.pop(0) for _ in range(modes - 1)]
            box, swizzle = [left.pop(0) for _ in range(modes)], left.pop(0)
            assert word == launch.TENSOR_MAP and swizzle == 128 and all(stride % 8 == 0 for stride in strides)
            rows = config.rows if name[0] == "q_map" else config.box
            assert box == [64, rows, 1, 1] and sorted(extents) == sorted(tensors[number].shape)
        elif kind == "pointer":
            width = {"BFloat16": 2, "Float32": 4, "Int32": 4, "Int64": 8}[dtype.__name__]
            assert word == launch.ADDRESS and tensors[number].element_size() == width, name
        else:
            assert word == (launch.INT64 if dtype.__name__ == "Int64" else launch.INT32), name
            values[name[0]] = number
    assert not left and len(names) <= 64
    rows = 3 * 2 if config.packed else q.shape[2]
    assert values["tiles"] == -(-rows // config.rows) and values["section"] >= 1 and grid[1:] == [1, 1]
