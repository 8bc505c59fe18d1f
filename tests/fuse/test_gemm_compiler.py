"""Kernels of fused GEMMs: that they are compiled, for what, and exported. No GPU is needed, the CuTe DSL is."""

import dataclasses
import glob
import re
import shutil
import struct
import subprocess
import sys

import pytest
import torch
from minfer import fuse
from minfer.fuse import compiler
from minfer.fuse.gemm_config import SHARED_BYTES, GemmConfig, Tile, legal, parameters, stages_of
from minfer.fuse.gemm_interface import GemmSpace
from minfer.fuse.gemm_kernels import kernel_of

from tests.fuse import gemm_cases as cases
from tests.fuse.gemm_cases import BF16, E4M3, F16, KINDS

pytest.importorskip("cutlass.cute", reason="the CuTe DSL is not installed")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Every test begins without kernels."""
    monkeypatch.setenv("MINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_known", {})


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def problem(kind, m, n, k, b_major="k", dtype=BF16):
    """A function and a call of it, on the meta device."""
    function, operands = cases.operands_of(kind, m, n, "cpu")
    b = meta(n, k, dtype=dtype).t() if b_major == "k" else meta(k, n, dtype=dtype)
    return function, (meta(m, k, dtype=dtype), b, *(x if x.ndim == 0 else x.to("meta") for x in operands))


def built(function, args, tile=None, m=None, arch="sm_90a", **kwargs):
    """The configuration and the compiled kernel of a call."""
    arguments, space, specialisation, traced = function._called(args, kwargs)
    config = function.config(traced, specialisation, dataclasses.replace(space, m=m or space.m), arguments, 132, arch)
    if tile is not None:
        config = dataclasses.replace(
            config, tile_m=tile.m, tile_n=tile.n, pingpong=tile.pingpong, cluster=tile.cluster, stages=stages_of(tile)
        )
    return config, compiler.build(kernel_of(function.name, traced, config, arch))


def tool(name):
    path = shutil.which(name) or next(iter(sorted(glob.glob(f"{sys.prefix}/lib/python3*/site-packages/nvidia/*/bin/{name}"))), None)
    if path is None:
        pytest.skip(f"no {name}")
    return path


def usage(artifact, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(artifact.cubin)
    text = subprocess.run([tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def code(artifact, tmp_path):
    path = tmp_path / "kernel.cubin"
    path.write_bytes(artifact.cubin)
    return subprocess.run([tool("cuobjdump"), "-sass", str(path)], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("kind", KINDS)
def test_no_registers_are_spilled(kind, tmp_path):
    """Of the tiles with most accumulators. Registers move between warpgroups: the kernel begins with 168 for each of 384 threads."""
    tile = (Tile(128, 256, False, 2), Tile(128, 128, True))[KINDS.index(kind) % 2]
    function, args = problem(kind, 512, 1024, 256)
    config, artifact = built(function, args, tile)
    assert usage(artifact, tmp_path) == {"REG": 168, "STACK": 0, "LOCAL": 0}, config
    assert artifact.threads == 384 and artifact.cluster == tile.cluster and artifact.shared_bytes <= SHARED_BYTES


TILES = [
    (Tile(256, 128, False), "k"), (Tile(64, 256, True), "k"), (Tile(64, 128, True), "n"), (Tile(64, 64, True), "n"),
    (Tile(64, 32, True), "k"), (Tile(128, 256, False, 2), "n"), (Tile(128, 128, True), "n"),
]  # fmt: skip


@pytest.mark.parametrize("tile,b_major", TILES, ids=str)
def test_tiles(tile, b_major, tmp_path):
    """Tensor cores are used, one instruction after another without waiting: as many as a stage has, and those of the first stage."""
    for kind in ("residual", "swiglu"):
        function, args = problem(kind, 512, 1024, 256, b_major)
        if not legal(tile, b_major, function.gate, False, False):
            continue
        config, artifact = built(function, args, tile)
        assert config.b_major == b_major
        text = code(artifact, tmp_path)
        shape = f"HGMMA.64x{tile.n}x16.F32.BF16"
        assert text.count(shape) == 8 * (tile.m // 128 if not tile.pingpong else tile.m // 64) and "UTMALDG" in text
        assert text.count("HGMMA") == text.count(shape)
        assert text.count("WARPGROUP.DEPBAR") == 2
        assert ("MULTICAST" in text) == (tile.cluster > 1)
        assert usage(artifact, tmp_path)["LOCAL"] == 0


@pytest.mark.parametrize("dtype,name", [(F16, "F32"), (E4M3, "E4M3")])
def test_dtypes(dtype, name, tmp_path):
    function, args = problem("plain", 512, 1024, 256, dtype=dtype)
    _, artifact = built(function, args)
    assert re.search(rf"[HQ]GMMA\S*{name}", code(artifact, tmp_path))


@pytest.mark.parametrize("n", [1, 7, 12, 100, 1000])
def test_odd_widths(n, tmp_path):
    """Numbers are stored in vectors of as many as divide n."""
    for kind in ("biases", "norms") if n > 1 else ("biases",):
        function, args = problem(kind, 100, n, 64)
        config, artifact = built(function, args)
        assert config.vector == max(x for x in (1, 2, 4, 8) if n % x == 0) and usage(artifact, tmp_path)["LOCAL"] == 0


def test_experts(tmp_path):
    for m in (64, 4096):
        for function, operands in (
            (cases.expert_bias, (meta(8, 1, 512), meta(8, 1, 1, dtype=torch.float32))),
            (cases.expert_statistics, (meta(8, 1, 512),)),
        ):
            args = (meta(m, 256), meta(8, 512, 256).mT, *operands)
            config, artifact = built(function, args, offsets=meta(8, dtype=torch.int32))
            assert config.grouped and usage(artifact, tmp_path)["LOCAL"] == 0
            assert "UTMALDG.3D" in code(artifact, tmp_path)


@pytest.mark.parametrize("seed", range(0, 24, 4))
def test_drawn(seed):
    function, operands = cases.drawn(seed)
    made = [x if x.ndim == 0 else x.to("meta") for x in operands(128, 256, "cpu")]
    built(function, (meta(128, 128), meta(256, 128).t(), *made))


@pytest.mark.parametrize("stored", [BF16, F16, E4M3, torch.int8], ids=str)
def test_prologues(stored, tmp_path):
    """A comes from registers, and nothing waits for one instruction after another: five groups of a stage's four."""
    m, k, n = 64 if stored in (BF16, E4M3) else 4096, 256, 4096
    a, b = meta(m, k, dtype=stored), meta(n, k).t()
    for function, operands, named in (
        (cases.normalised, [meta(n)], {"factor": meta(m, 1), "weight": meta(k)}),
        (cases.dequantised, [], {"scale": meta(m, dtype=torch.float32)}),
        (cases.mixed, [], {"other": meta(m, k)}),
    ):
        config, artifact = built(function, (a, b, *operands), **named)
        assert config.prologue and usage(artifact, tmp_path)["LOCAL"] == 0
        text = code(artifact, tmp_path)
        assert text.count("HGMMA") == 8 and text.count("WARPGROUP.DEPBAR") == 2, (text.count("HGMMA"), text.count("WARPGROUP.DEPBAR"))


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100a", "sm_120a"])
def test_other_architectures(arch, tmp_path):
    """They have mma.sync: an instruction for every 16 numbers of k and 8 columns, in a stage of 64."""
    for kind, m, b_major in (("residual", 64, "k"), ("norms", 4096, "n"), ("swiglu", 1024, "n"), ("geglu", 8192, "k")):
        function, args = problem(kind, 512, 1024, 256, b_major)
        config, artifact = built(function, args, m=m, arch=arch)
        text = code(artifact, tmp_path)
        assert config.portable and usage(artifact, tmp_path)["LOCAL"] == 0 and artifact.shared_bytes <= 99 * 1024
        assert text.count("HMMA.16816.F32") == 4 * config.tile_n // 8 and "LDGSTS" in text and "LDSM" in text
        traced = function._called(args, {})[-1]
        if traced.last is not None:
            assert compiler.build(function.rows_kernel(traced, m, 8, arch)[0]).cubin
    experts = meta(4096, 256), meta(8, 512, 256).mT, meta(8, 1, 512), meta(8, 1, 1, dtype=torch.float32)
    assert built(cases.expert_bias, experts, arch=arch, offsets=meta(8, dtype=torch.int32))[0].portable
    a = meta(64, 256, dtype=torch.int8)
    assert built(cases.dequantised, (a, meta(512, 256).t()), arch=arch, scale=meta(64, dtype=torch.float32))[0].prologue


def test_parameters():
    """The kernel's parameters are where a launch puts them: two descriptors of 128 bytes, aligned to 64, then addresses and numbers."""
    function, args = problem("norms", 512, 1024, 256)
    _, _, _, traced = function._called(args, {})
    config, artifact = built(function, args)
    kinds = [kind for kind, _ in parameters(traced.first, config)]
    assert kinds[:2] == ["map", "map"]
    sizes = [128 if kind == "map" else 4 if kind in ("m", "n", "k_tiles", "m_tiles", "n_tiles", "band") else 8 for kind in kinds]
    base = 0x210  # of parameters in the constant bank of sm_90, from which offsets count
    offsets, at = [], base
    for size in sizes:
        align = 64 if size == 128 else size
        at = -(-at // align) * align
        offsets.append(at - base)
        at += size
    found = sorted(_parameters_of(artifact.cubin))
    assert [offset for offset, _ in found] == offsets and [size for _, size in found] == sizes


def _parameters_of(cubin):
    """(offset, bytes) of each, from the EIATTR_KPARAM_INFO entries of a cubin: 12 bytes with the ordinal, the offset and the size."""
    found, at = [], 0
    while (at := cubin.find(b"\x04\x17\x0c\x00", at)) >= 0:
        _, _, offset, packed = struct.unpack_from("<IHHI", cubin, at + 4)
        found.append((offset, packed >> 18))
        at += 16
    return found


def test_precompiled(monkeypatch):
    """Calls with any number of rows find their kernels."""
    function, args = problem("norms", 512, 1024, 256)
    function.precompile(args, arch="sm_90a")
    monkeypatch.setattr(compiler, "build", lambda kernel: pytest.fail("compiled again"))
    arguments, space, specialisation, traced = function._called(args, {})
    for m in (1, 16, 64, 100, 700, 3000, 5000, 20000, 100000):
        config = function.config(traced, specialisation, dataclasses.replace(space, m=m), arguments, 132)
        compiler.compile_all([kernel_of(function.name, traced, config, "sm_90a")])
        compiler.compile_all([function.rows_kernel(traced, m, -(-1024 // config.columns), "sm_90a")[0]])


def test_configurations_are_data():
    assert GemmConfig(**dataclasses.asdict(GemmConfig(128, 256, False, 4, 1, "bf16", "k", "", 8, False))).block == 384
    assert GemmSpace(1, 2, 3, 2).experts == 0


def test_export(tmp_path):
    out = tmp_path / "exported"
    function, args = problem("norms", 64, 256, 128)
    fuse.export(function, out, [args], archs=["sm_90a"])
    # Another process, without the DSL and without the function.
    script = f"""
import sys
sys.modules["cutlass"] = None
import torch, minfer
f = minfer.fuse.load({str(out)!r})
a, b = torch.ones(3, 128).bfloat16(), torch.ones(128, 256).bfloat16()
y, norm, most = f(a, b, torch.ones(3), torch.ones(256).bfloat16())
assert torch.equal(y.float(), torch.full((3, 256), 129.0)) and norm.shape == (3, 1) and torch.equal(most, torch.full((3,), 129.0))
torch.compile(f, fullgraph=True, backend="aot_eager")(a, b, torch.ones(3), torch.ones(256).bfloat16())
try:
    f(a.half(), b.half(), torch.ones(3), torch.ones(256).bfloat16())
except RuntimeError as error:
    assert "was not exported; exported were a bf16, b bf16, scale f32 vector" in str(error), error
else:
    raise SystemExit("a call that was not exported went through")
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    loaded = fuse.load(out)
    for m in (1, 100, 5000):
        arguments, space, specialisation, traced = loaded._called(
            (meta(m, 128), meta(256, 128).t(), meta(m, dtype=torch.float32), meta(256)), {}
        )
        config = loaded.config(traced, specialisation, space, arguments, 132)
        assert loaded.choose_config(traced, config, space, "sm_90a") == config
        assert loaded.artifact_of(kernel_of(loaded.name, traced, config, "sm_90a"))[1].cubin
        assert loaded.artifact_of(loaded.rows_kernel(traced, m, -(-256 // config.columns), "sm_90a")[0])[1].cubin
    with pytest.raises(fuse.FuseError, match="no exported kernel serves"):
        loaded.choose_config(traced, dataclasses.replace(config, vector=1), space, "sm_90a")
    plain, args = problem("plain", 64, 256, 128)
    exported = fuse.load(fuse.export(plain, tmp_path / "plain", [args], archs=["sm_90a"]))
    assert exported(torch.ones(3, 40).bfloat16(), torch.ones(40, 64).bfloat16()).shape == (3, 64)  # any n and k


class _Pointer:
    """Of a matrix whose numbers have 2 bytes."""

    def toint(self):
        return 0


PORTABLE = [(m, n, major, gate) for m in (64, 128) for n in (64, 128) for major in ("k", "n") for gate in ("", "halves")]


@pytest.mark.parametrize("tile_m,tile_n,b_major,gate", PORTABLE)
def test_addresses_of_the_portable_kernel(tile_m, tile_n, b_major, gate, monkeypatch):
    """Its copies and matrix loads, thread by thread: every product gets the numbers that mma.sync takes from each lane."""
    from minfer.fuse.kernels import gemm_portable

    monkeypatch.setattr(gemm_portable.cutlass, "min", min)
    monkeypatch.setattr(gemm_portable.cutlass, "max", max)
    monkeypatch.setattr(gemm_portable.cutlass, "select_", lambda chosen, x, y: x if chosen else y)
    monkeypatch.setattr(gemm_portable, "Int32", int)
    monkeypatch.setattr(gemm_portable, "Int64", int)
    config = GemmConfig(tile_m, tile_n, False, 3, 1, "bf16", b_major, gate, 8, False, portable=True)
    columns = 104 if gate else 208  # of the output
    n, m, k, row, n_tile, k_tile = 208, 5000, 72, 4992 - 64, 1, 1
    lda, ldb = 80, 88 if b_major == "k" else 216
    shared = {}

    def thread_of(number):
        gemm = object.__new__(gemm_portable._PortableGemm)
        gemm.config, gemm.prologue, gemm.thread, gemm.base = config, None, number, 0
        gemm.lane, gemm.warp, gemm.group = number % 32, number // 32 % 4, number // 128
        gemm.m, gemm.n = m, columns
        gemm.values = {("a", 0): _Pointer(), ("b", 0): _Pointer(), ("lda", 0): lda, ("ldb", 0): ldb, ("k", 0): k}
        return gemm

    for number in range(config.block):
        gemm = thread_of(number)

        def copied(target, source, size):
            assert target % 16 == 0 and source % 16 == 0 and 0 <= size <= 16 and target not in shared
            shared[target] = (source, size)

        gemm.copy_piece = copied
        gemm.request(1, k_tile, row, n_tile, 0)
    assert len(shared) * 16 == config.stage_bytes  # all of the stage, once
    assert min(shared) == config.stage_bytes and max(shared) == 2 * config.stage_bytes - 16

    def element(address):
        """What a number in shared memory is: 0, or its place in the matrix of A or B."""
        source, size = shared[address - address % 16]
        inside = address % 16
        return None if inside >= size else (source + inside) // 2

    addresses = {number: [] for number in range(config.block)}
    for number in range(config.block):
        gemm = thread_of(number)
        monkeypatch.setattr(
            gemm_portable, "load_matrices", lambda address, turned, to=addresses[number]: to.append((address, turned)) or [0] * 4
        )
        gemm.product = lambda *_: None
        gemm.multiply_tile(1)

    def in_a(i, j):
        return i * lda + j if i < m and j < k else None

    def in_b(j, i):
        """Of k, and of the tile's columns."""
        column = n_tile * config.tile_n + i
        if gate:
            column = n_tile * config.columns + (i if i < config.columns else i - config.columns + columns)
        inside = j < k and column < n
        return None if not inside else column * ldb + j if b_major == "k" else j * ldb + column

    for number in range(config.block):
        lane, warp, group_of = number % 32, number // 32 % 4, number // 128
        calls = iter(range(len(addresses[number])))

        def registers(lane=lane, warp_first=number - number % 32, calls=calls):
            """What ldmatrix.x4 gives a lane: two numbers of each matrix."""
            call = next(calls)
            result = []
            for matrix in range(4):
                if addresses[warp_first][call][1]:
                    rows = [addresses[warp_first + matrix * 8 + lane % 4 * 2 + e][call][0] for e in range(2)]
                    result.append([element(address + 2 * (lane // 4)) for address in rows])
                else:
                    address = addresses[warp_first + matrix * 8 + lane // 4][call][0]
                    result.append([element(address + 2 * (lane % 4 * 2 + e)) for e in range(2)])
            return result

        gemm = thread_of(number)
        monkeypatch.setattr(gemm_portable, "load_matrices", lambda address, turned: registers())
        seen = []

        def product(a, b, group, lane=lane, warp=warp, group_of=group_of, seen=seen):
            step = len(seen) // (config.tile_n // 8)  # of 16 numbers of k
            first = k_tile * 64 + step * 16 + lane % 4 * 2
            i = row + group_of * 64 + warp * 16 + lane // 4
            assert a == [[in_a(i + 8 * (x % 2), first + 8 * (x // 2) + e) for e in range(2)] for x in range(4)]
            column = group * 8 + lane // 4
            assert b == [[in_b(first + 8 * x + e, column) for e in range(2)] for x in range(2)]
            seen.append(group)

        gemm.product = product
        gemm.multiply_tile(1)
        assert seen == list(range(config.tile_n // 8)) * 4
