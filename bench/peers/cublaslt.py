"""ctypes side of bench/cpp/common/cublaslt_best.h: cuBLASLt with the best of its top heuristics, launched on torch's current stream.

The library is the one that CMake built (``MINFER_CUBLASLT_BEST`` or build/*/bench/libcublaslt_best.so), else it is compiled here with
the host compiler against the cuBLAS that torch brings.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
REQUESTED = 32  # heuristics
WORKSPACE_BYTES = 64 << 20
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
ACTIVATIONS = {"none": 0, "relu": 1, "gelu_tanh": 3}


class _Problem(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_int64) for name in ("m", "n", "k", "batch", "lda", "ldb", "ldc", "ldd")]
        + [(f"{operand}_batch_stride", ctypes.c_int64) for operand in "abcd"]
        + [(name, ctypes.c_int32) for name in ("ab_type", "d_type", "a_major", "b_major", "activation", "has_bias")]
        + [("alpha", ctypes.c_float), ("beta", ctypes.c_float)]
    )


class _Operands(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("a", "b", "c", "bias", "d")]


# ---- the library ---------------------------------------------------------------------------------------------------------------


def _roots() -> list[Path]:
    """Folders that may hold include/ and lib/ of the CUDA runtime and of cuBLAS: NVIDIA's wheels first, whose cuBLAS torch loads."""
    roots = []
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        roots += sorted(Path(folder).glob("cu1?"), reverse=True) + [Path(folder) / "cublas", Path(folder) / "cuda_runtime"]
    nvcc = shutil.which("nvcc")
    roots += [Path(p) for p in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if p]
    return roots + ([Path(nvcc).resolve().parent.parent] if nvcc else [])


def _first(patterns: Sequence[str]) -> Path:
    for root in _roots():
        for pattern in patterns:
            found = sorted(root.glob(pattern), key=lambda path: len(path.name))
            if found:
                return found[0]
    raise FileNotFoundError(f"{patterns[0]} is in none of {', '.join(map(str, _roots()))}")


def compile_library(folder: Path) -> Path:
    """Compiles libcublaslt_best.so into ``folder``.

    Raises:
      FileNotFoundError: no compiler, or no headers or library of cuBLASLt or of the CUDA runtime.
      RuntimeError: the compiler's message.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("a C++ compiler: set CXX")
    # NVIDIA's runtime wheel leaves crt/ to the compiler's: the headers may come from several folders.
    headers = ("cublasLt.h", "cuda_runtime.h", "crt/host_defines.h")
    includes = dict.fromkeys(str(_first([f"include/{header}"])).removesuffix(f"/{header}") for header in headers)
    libraries = [
        _first(["lib/libcublasLt.so*", "lib64/libcublasLt.so*", "targets/x86_64-linux/lib/libcublasLt.so*"]),
        _first(["lib/libcudart.so*", "lib64/libcudart.so*", "targets/x86_64-linux/lib/libcudart.so*"]),
    ]
    out = folder / "libcublaslt_best.so"
    command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", f"-I{ROOT / 'bench' / 'cpp'}", *(f"-I{i}" for i in includes)]
    command += [str(ROOT / "bench" / "cpp" / "common" / "cublaslt_best.cpp"), *map(str, libraries), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return out


def _built() -> Path | None:
    given = os.environ.get("MINFER_CUBLASLT_BEST")
    if given:
        return Path(given)
    found = glob.glob(str(ROOT / "build" / "**" / "libcublaslt_best.so"), recursive=True)
    return Path(max(found, key=os.path.getmtime)) if found else None


@functools.cache
def _library() -> ctypes.CDLL:
    torch.cuda.init()  # loads the cuBLASLt that this one resolves to
    path = _built() or compile_library(Path(tempfile.mkdtemp(prefix="minfer_bench_")))
    library = ctypes.CDLL(str(path))
    library.cublaslt_best_create.restype = ctypes.c_void_p
    library.cublaslt_best_create.argtypes = [
        ctypes.POINTER(_Problem), ctypes.POINTER(_Operands), ctypes.c_int32, ctypes.c_int32,
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    library.cublaslt_best_run.restype = ctypes.c_int32
    library.cublaslt_best_run.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(_Operands), ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t,
    ]  # fmt: skip
    library.cublaslt_best_info.restype = None
    library.cublaslt_best_info.argtypes = [ctypes.c_void_p] + [ctypes.POINTER(ctypes.c_int32)] * 3
    library.cublaslt_best_destroy.restype = None
    library.cublaslt_best_destroy.argtypes = [ctypes.c_void_p]
    return library


@functools.cache
def _workspace(device: int) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=f"cuda:{device}")


# ---- a problem -----------------------------------------------------------------------------------------------------------------


def _matrix(x: torch.Tensor, rows_first: bool) -> tuple[int, int]:
    """(leading dimension, major) of a 2-D operand whose k mode is the last (``rows_first``) or the first."""
    k_mode = 1 if rows_first else 0
    other = 1 - k_mode
    if x.stride(k_mode) == 1:
        return max(x.stride(other), x.shape[k_mode]), 0  # a mode of extent 1 may have any stride
    if x.stride(other) == 1:
        return max(x.stride(k_mode), x.shape[other]), 1
    raise ValueError(f"operand of strides {x.stride()} has no contiguous mode")


class CublasLtBest:
    """D = activation(alpha * A.B + beta * C + bias) on sets of 2-D operands; construction searches (and synchronises).

    Args:
      a: [m, k] for each set, float16 or bfloat16, row- or column-major. b: [k, n] likewise.
      d: [m, n] outputs, row-major. c: [m, n] like d, where beta is not 0. bias: [n] of a's dtype, or None.
      activation: "none", "relu" or "gelu_tanh"; cuBLASLt has no other.

    Raises:
      FileNotFoundError, RuntimeError: the library cannot be had, or cuBLASLt cannot compute this.
    """

    def __init__(self, a, b, d, *, c=None, bias=None, alpha: float = 1.0, beta: float = 0.0, activation: str = "none"):
        if activation not in ACTIVATIONS:
            raise RuntimeError(f"cuBLASLt has no epilogue for {activation}")
        self._handle = None
        self._library = _library()
        (m, k), n = a[0].shape, b[0].shape[1]
        lda, a_major = _matrix(a[0], rows_first=True)
        ldb, b_major = _matrix(b[0], rows_first=False)
        ldd = d[0].stride(0)
        problem = _Problem(
            m=m, n=n, k=k, batch=1, lda=lda, ldb=ldb, ldc=c[0].stride(0) if c else ldd, ldd=ldd,
            ab_type=TYPES[a[0].dtype], d_type=TYPES[d[0].dtype], a_major=a_major, b_major=b_major,
            activation=ACTIVATIONS[activation], has_bias=bias is not None, alpha=alpha, beta=beta,
        )  # fmt: skip
        self._keep = (a, b, c, bias, d)
        pointers = [[x[i].data_ptr() if x else None for x in (a, b, c, bias, d)] for i in range(len(a))]
        self._sets = (_Operands * len(a))(*(_Operands(*p) for p in pointers))
        self._message = ctypes.create_string_buffer(512)
        workspace = _workspace(torch.cuda.current_device())
        torch.cuda.synchronize()
        self._handle = self._library.cublaslt_best_create(
            ctypes.byref(problem), self._sets, len(a), REQUESTED, workspace.data_ptr(), workspace.numel(), self._message, len(self._message)
        )
        if not self._handle:
            raise RuntimeError(f"cublaslt_best: {self._message.value.decode()}")

    def __call__(self, i: int) -> None:
        """Launches on set ``i``, on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        if self._library.cublaslt_best_run(self._handle, ctypes.byref(self._sets[i]), stream, self._message, len(self._message)):
            raise RuntimeError(f"cublaslt_best: {self._message.value.decode()}")

    def info(self) -> dict[str, int]:
        """How many heuristics were offered and could run, and the winner's rank (0: cuBLASLt's own first choice)."""
        values = [ctypes.c_int32() for _ in range(3)]
        self._library.cublaslt_best_info(self._handle, *(ctypes.byref(v) for v in values))
        return dict(zip(("offered", "runnable", "winner"), (v.value for v in values), strict=True))

    def __del__(self):
        if getattr(self, "_handle", None):
            self._library.cublaslt_best_destroy(self._handle)
