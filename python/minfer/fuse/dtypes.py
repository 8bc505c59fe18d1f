"""The types of tensors that fused kernels read and write, and what their numbers are in registers."""

from __future__ import annotations

import torch

from .graph import BOOL, F32, I32, I64

# torch's dtype: its name here, what a value of it is in registers, its bytes.
_TYPES = {
    torch.float32: ("f32", F32, 4),
    torch.bfloat16: ("bf16", F32, 2),
    torch.float16: ("f16", F32, 2),
    torch.float8_e4m3fn: ("e4m3", F32, 1),
    torch.float8_e5m2: ("e5m2", F32, 1),
    torch.int64: ("i64", I64, 8),
    torch.int32: ("i32", I32, 4),
    torch.int16: ("i16", I32, 2),
    torch.int8: ("i8", I32, 1),
    torch.uint8: ("u8", I32, 1),
    torch.bool: ("bool", BOOL, 1),
}
_BY_NAME = {name: dtype for dtype, (name, _, _) in _TYPES.items()}
# Beyond these a cast to the storage saturates, NaN stays NaN.
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
INTEGERS = {
    "i8": (-128, 127),
    "u8": (0, 255),
    "i16": (-32768, 32767),
    "i32": (-(1 << 31), (1 << 31) - 1),
    "i64": (-(1 << 63), (1 << 63) - 1),
}


def is_supported(dtype: torch.dtype) -> bool:
    return dtype in _TYPES


def storage_of(dtype: torch.dtype) -> str:
    return _TYPES[dtype][0]


def register_of(dtype: torch.dtype) -> str:
    return _TYPES[dtype][1]


def register_of_storage(storage: str) -> str:
    return register_of(dtype_of(storage))


def dtype_of(storage: str) -> torch.dtype:
    return _BY_NAME[storage]


def bytes_of(storage: str) -> int:
    return _TYPES[_BY_NAME[storage]][2]


def rounded(x: torch.Tensor, storage: str) -> torch.Tensor:
    """x as a tensor of ``storage``, by the rule of casts: round to nearest even, FP8 saturates; integers truncate and saturate."""
    dtype = dtype_of(storage)
    if storage in LARGEST:
        return x.clamp(-LARGEST[storage], LARGEST[storage]).to(torch.float32).to(dtype)
    if storage in INTEGERS and x.is_floating_point():
        low, high = INTEGERS[storage]
        return torch.nan_to_num(x, nan=0.0).double().trunc().clamp(float(low), float(high)).to(dtype) if storage != "i64" else x.to(dtype)
    if storage in ("bf16", "f16") and x.dtype == torch.float64:
        return x.to(torch.float32).to(dtype)
    return x.to(dtype)
