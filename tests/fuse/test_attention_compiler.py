"""Kernels of attention with functions: that they are compiled as they should be, and exported. No GPU is needed, the CuTe DSL is."""

import glob
import re
import shutil
import subprocess
import sys

import pytest
import torch
from minfer import fuse
from minfer.fuse import attention_function, compiler
from minfer.fuse.attention_config import AttentionConfig

from tests.fuse.attention_cases import BF16, F16, Functions, drawn

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


def test_other_architectures_are_refused():
    function = fuse.AttentionFunction(None, FUNCTIONS.masks["causal"])
    for arch in ("sm_80", "sm_100a", "sm_120a"):
        with pytest.raises(fuse.FuseError, match=f"made for sm_90a .*, not for {arch}"):
            function.precompile(like(4, 4, 8, 64), arch=arch)


def test_export(tmp_path, monkeypatch):
    """Another process, without the DSL and without the functions."""
    function = fuse.AttentionFunction(FUNCTIONS.scores["relative"], FUNCTIONS.masks["causal"])
    one = function.configurations([like(4, 4, 300, 64, F16)])[:1]
    monkeypatch.setattr(fuse.AttentionFunction, "configurations", lambda self, examples: one)
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
