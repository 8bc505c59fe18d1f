"""Kernels of fused functions: that they are compiled, kept, refused and exported. No GPU is needed, the CuTe DSL is."""

import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from minfer import fuse
from minfer.fuse import cache, compiler
from minfer.fuse.artifact import Artifact

from tests.fuse.cases import (
    BF16,
    F32,
    activations,
    add_rms_norm,
    drawn,
    four_passes,
    gated,
    integers,
    quantized,
    rational,
    rms_norm,
    saturated,
    scaled,
    softmax,
    statistics,
)

ARCHS = ("sm_90a", "sm_100a", "sm_120a")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test begins without kernels."""
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_known", {})
    return tmp_path / "cache" / "fuse"


@pytest.fixture
def dsl():
    pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def kernels_of(function, *args):
    return [function._kernel(graph, config, "sm_90a") for _, graph, config in function.specialisations([args], "sm_90a")]


def soft_cap(x):
    return 30.0 * torch.tanh(x.float() / -30.0)


def tanhs(x, y):
    return (
        soft_cap(x).to(BF16),
        torch.where((torch.tanh(x.float() * 7)).to(BF16) > y, x, y),  # what it is compared with may be as near as that
        (torch.tanh(y.float()) * x).to(BF16),
        (torch.tanh(x.float()) + 1).to(BF16),  # near -1 nothing of it would be left
        (torch.tanh(x.float() * 2) * torch.tanh(x.float() * 3)).to(BF16),
        torch.tanh(x.float() * 5),
    )


def test_tanh_of_the_hardware_where_rounding_is_coarser():
    _, graph, _ = fuse.pointwise(tanhs).specialisations([(meta(4, 64), meta(4, 64))], "sm_90a")[0]
    assert sum(node.op == "tanh" for node in graph.nodes) == 7
    coarse = sorted(graph.coarse_tanhs())
    users = [next(node for node in graph.nodes if i in node.inputs) for i in coarse]
    assert [node.op for node in users] == ["mul", "mul"], graph.nodes


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(dsl, arch):
    x, w = meta(8, 4096), meta(4096)
    gated.precompile((x, x), (meta(8, 4097, dtype=F32), meta(8, 4097, dtype=F32)), arch=arch)
    rms_norm.precompile((x, w), (meta(8, 131072), meta(131072)), (meta(8, 24), meta(24)), arch=arch)
    add_rms_norm.precompile((x, x, w), arch=arch)
    softmax.precompile((meta(8, 1000, dtype=F32), torch.tensor(1.0)), arch=arch)
    for function in (quantized, statistics, four_passes, activations, saturated):
        function.precompile((x, torch.tensor(1.0)) if function is saturated else (x,), arch=arch)
    integers.precompile((meta(4, 33, dtype=torch.int32), meta(4, 33, dtype=torch.int32)), arch=arch)


@pytest.mark.parametrize("columns", [1, 3, 4, 8, 16])
def test_narrow_rows_compile(dsl, columns):
    """A thread has the whole row: nothing is exchanged, and reductions of integers and booleans are what it computes."""
    statistics.precompile((meta(8, columns),), arch="sm_90a")


def test_rows_below_each_other():
    """Many rows, where tensors of one row are as many bytes as those of rows."""
    row = meta(4096, dtype=F32)

    def chosen(function, *args):
        return function.specialisations([args], "sm_90a")[-1][2]  # for the most rows

    config = chosen(rational, meta(4096, 4096), meta(4096, 4096), row, row, row)
    assert (config.down, config.vectors, config.block) == (True, 4, 128)
    assert not chosen(gated, meta(4096, 4096), meta(4096, 4096)).down
    assert not chosen(scaled, meta(4096, 4096), row, meta(4096, 1), torch.tensor(1.0)).down


@pytest.mark.parametrize("columns", [40000, 65536, 131072])
def test_rings_compile(dsl, columns):
    """Wide rows go through shared memory, where there are enough of them and nothing lies beside them."""
    x, w = meta(8, columns), meta(columns)
    for function, args in ((rms_norm, (x, w)), (softmax, (x, torch.tensor(1.0))), (statistics, (x,))):
        kernels = kernels_of(function, *args)
        assert (kernels[0].template, kernels[-1].template) == ("rows", "ring")
        assert compiler.build(kernels[-1]).shared_bytes > 100_000
    assert {kernel.template for kernel in kernels_of(add_rms_norm, x, x, w)} == {"rows"}


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_drawn_functions_compile(dsl, seed):
    function, reduces = drawn(seed)
    fused = (fuse.rowwise if reduces else fuse.pointwise)(function)
    fused.precompile((meta(8, 1024), meta(8, 1024), meta(1024, dtype=F32), meta(8, 1)), arch="sm_90a")


def test_no_registers_are_spilled(dsl, tmp_path):
    tool = shutil.which("cuobjdump") or next(
        iter(sorted(__import__("glob").glob(f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/bin/cuobjdump"))), None
    )
    if tool is None:
        pytest.skip("no cuobjdump")
    for function, args in (
        (rms_norm, (meta(8, 8192), meta(8192))),
        (four_passes, (meta(8, 16384),)),
        (add_rms_norm, (meta(8, 4096), meta(8, 4096))),
    ):
        for kernel in kernels_of(function, *args):
            path = tmp_path / "kernel.cubin"
            path.write_bytes(compiler.build(kernel).cubin)
            usage = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
            assert re.findall(r"STACK:(\d+)", usage) == ["0"] and re.findall(r"LOCAL:(\d+)", usage) == ["0"], (kernel.config, usage)


def test_once(dsl, folder, monkeypatch):
    """The second time kernels come from the disk, and in one process from memory."""
    kernel = kernels_of(gated, meta(8, 512), meta(8, 512))[0]
    artifact = compiler.compiled(kernel)
    assert len(list(folder.glob("*.kernel"))) == 1
    monkeypatch.setattr(compiler, "build", lambda kernel: pytest.fail("compiled again"))
    assert compiler.compiled(kernel) is artifact
    monkeypatch.setattr(compiler, "_known", {})
    assert compiler.compiled(kernel) == artifact


def test_keys(dsl, monkeypatch):
    """Everything that the code depends on is in the key."""
    a, b = kernels_of(rms_norm, meta(8, 512), meta(512))[0], kernels_of(rms_norm, meta(8, 1024), meta(1024))[0]
    other = compiler.Kernel(a.template, a.graph, a.config, "sm_100a", a.name)
    keys = {a.key(), b.key(), other.key()}
    monkeypatch.setattr(compiler, "dsl_version", lambda: "4.9.0")
    keys.add(a.key())
    monkeypatch.setattr(compiler, "_templates", lambda: "others")
    keys.add(a.key())
    assert len(keys) == 5


def damage(path, how):
    data = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut off": data[: len(data) // 2],
        "a bit": data[:-9] + bytes([data[-9] ^ 4]) + data[-8:],
        "foreign": b"something else entirely" * 40,
        "another kernel": cache.pack("0" * 64, Artifact(b"cubin", "kernel", 0, 32, 1)),
    }[how]
    path.write_bytes(damaged)


@pytest.mark.parametrize("how", ["empty", "cut off", "a bit", "foreign", "another kernel"])
def test_damaged_files_are_compiled_anew(dsl, folder, monkeypatch, how):
    kernel = kernels_of(gated, meta(8, 512), meta(8, 512))[0]
    artifact = compiler.compiled(kernel)
    (path,) = folder.glob("*.kernel")
    damage(path, how)
    monkeypatch.setattr(compiler, "_known", {})
    with pytest.warns(RuntimeWarning, match="compiled anew"):
        assert compiler.compiled(kernel).entry == artifact.entry
    assert cache.load(kernel.key()) is not None


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_write_is_not_read(dsl, folder, monkeypatch, what):
    kernel = kernels_of(gated, meta(8, 512), meta(8, 512))[0]
    compiler.compiled(kernel)
    (path,) = folder.glob("*.kernel")
    (folder if what == "folder" else path).chmod(0o777)
    with pytest.warns(RuntimeWarning, match="is not used as a cache: others may write it"):
        assert cache.load(kernel.key()) is None


def test_files_of_others_are_not_read(dsl, folder, monkeypatch):
    kernel = kernels_of(gated, meta(8, 512), meta(8, 512))[0]
    compiler.compiled(kernel)
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    with pytest.warns(RuntimeWarning, match="belongs to the user"):
        assert cache.load(kernel.key()) is None


def test_a_folder_that_cannot_be_written(dsl, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MINFER_CACHE_DIR", str(blocked / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be"):
        assert compiler.compiled(kernels_of(gated, meta(8, 512), meta(8, 512))[0]).cubin


def _compile_in_a_process(folder, widths):
    os.environ["MINFER_CACHE_DIR"] = folder
    from tests.fuse.cases import rms_norm

    for width in widths:
        rms_norm.precompile((meta(8, width), meta(width)), arch="sm_90a")
    return len(compiler._known)


def test_eight_processes(dsl, folder):
    """All compile the same kernels into one folder at once."""
    widths = (256, 512, 768)
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        counts = pool.starmap(_compile_in_a_process, [(str(folder.parent), widths)] * 8)
    assert len(set(counts)) == 1
    files = list(folder.iterdir())
    assert len(files) == counts[0] and all(path.suffix == ".kernel" for path in files)
    for path in files:
        assert cache.unpack(path.stem, path.read_bytes()).cubin


def test_parallel(dsl, monkeypatch):
    kernels = [kernel for width in (264, 520, 776, 1032) for kernel in kernels_of(rms_norm, meta(8, width), meta(width))]
    artifacts = compiler.compile_all(kernels, processes=2)
    assert all(artifact.cubin for artifact in artifacts) and len(artifacts) == len(kernels)


def test_without_the_dsl(monkeypatch):
    def missing(name):
        raise compiler.importlib.metadata.PackageNotFoundError(name)

    compiler.dsl_version.cache_clear()
    monkeypatch.setattr(compiler.importlib.metadata, "version", missing)
    try:
        with pytest.raises(ImportError, match=r"pip install minfer\[dsl\]"):
            rms_norm.precompile((meta(8, 64), meta(64)), arch="sm_90a")
        assert gated(torch.ones(2, 8), torch.ones(2, 8)).shape == (2, 8)
    finally:
        compiler.dsl_version.cache_clear()


@pytest.mark.parametrize("version,taken", [("4.7.0", False), ("4.8.1", True), ("4.11.2", True), ("5.0.0", False), ("4.9.0.dev1", True)])
def test_versions_of_the_dsl(monkeypatch, version, taken):
    compiler.dsl_version.cache_clear()
    monkeypatch.setattr(compiler.importlib.metadata, "version", lambda name: version)
    try:
        if taken:
            assert compiler.dsl_version() == version
        else:
            with pytest.raises(ImportError, match=f"got {version}"):
                compiler.dsl_version()
    finally:
        compiler.dsl_version.cache_clear()


def test_export(dsl, tmp_path):
    out = tmp_path / "exported"
    fuse.export(add_rms_norm, out, [(meta(8, 64), meta(8, 64), meta(64))], archs=["sm_90a"])
    manifest = json.loads((out / "manifest.json").read_text())
    assert {path.stem for path in out.glob("*.kernel")} == set(manifest["kernels"])
    # Another process, without the DSL and without the function.
    script = f"""
import sys
sys.modules["cutlass"] = None
import torch, minfer
f = minfer.fuse.load({str(out)!r})
x, r, w = torch.ones(3, 64).bfloat16(), torch.ones(3, 64).bfloat16(), torch.ones(64).bfloat16()
f._space(dict(x=x, residual=r, weight=w))
assert "sympy" not in sys.modules  # its import would take longer than the first call on a GPU
y = f(x, r, w)
assert torch.allclose(y.float(), torch.ones(3, 64)) and torch.equal(r.float(), torch.full((3, 64), 2.0))
y = torch.compile(f, fullgraph=True, backend="aot_eager")(x, r, w)
try:
    f(x.half(), r, w)
except RuntimeError as error:
    assert "was not exported; exported were x bf16 full" in str(error), error
else:
    raise SystemExit("a call that was not exported went through")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    again = fuse.export(add_rms_norm, out, [(meta(8, 128), meta(8, 128), meta(128))], archs=["sm_90a"])
    assert fuse.load(again)(torch.ones(2, 128).bfloat16(), torch.ones(2, 128).bfloat16(), torch.ones(128).bfloat16()).shape == (2, 128)


def test_exports_that_cannot_be(dsl, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    with pytest.raises(fuse.FuseError, match="it has other files"):
        fuse.export(gated, tmp_path / "other", [(meta(8, 64), meta(8, 64))], archs=["sm_90a"])
    with pytest.raises(fuse.FuseError, match="needs an example"):
        fuse.export(gated, tmp_path / "none", [], archs=["sm_90a"])
    with pytest.raises(fuse.FuseError, match="holds no export"):
        fuse.load(tmp_path / "other")


def test_exported_elementwise_functions_take_any_width(dsl, tmp_path):
    exported = fuse.load(fuse.export(gated, tmp_path / "gated", [(meta(8, 512), meta(8, 512))], archs=["sm_90a"]))
    x = torch.randn(3, 48).bfloat16()
    assert torch.equal(exported(x, x), gated(x, x))
