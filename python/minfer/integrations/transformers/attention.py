"""minfer's attention behind transformers' interfaces: ``attn_implementation="minfer"``.

The mask interface hands on what the attention function needs: None where queries see all keys up to their own (within a window that the
function gets by itself), bool [batch, keys] where some are padding, and transformers' 4-dimensional mask for any other pattern.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ...ops.attention import attention, attention_varlen

NAME = "minfer"


def register() -> None:
    """Makes "minfer" an ``attn_implementation``; again does nothing more."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def _cells(function: Callable) -> dict[str, Any]:
    closure = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in closure), strict=True))


def _is_causal(function: Callable) -> bool:
    """Whether a mask function is causal, with a window or without: the functions that transformers makes for these two, and no others. A
    compiler does not look into closures, and windows are masks there."""
    if function is causal_mask_function:
        return True
    if torch.compiler.is_compiling() or not function.__qualname__.startswith("and_masks."):
        return False
    parts = _cells(function).get("mask_functions", ())
    windows = [part for part in parts if part.__qualname__.startswith("sliding_window_overlay.")]
    return len(parts) == 2 and len(windows) == 1 and causal_mask_function in parts


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface; arguments as of its ``sdpa_mask``."""
    grows = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length  # keys end where the queries do
    if not grows or use_vmap or not _is_causal(mask_function):
        options = {**kwargs, "allow_is_causal_skip": False, "mask_function": mask_function, "attention_mask": attention_mask}
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, use_vmap=use_vmap, **options)
    if attention_mask is None:
        return None
    attention_mask = _padded_to(attention_mask, kv_offset + kv_length)
    return attention_mask if torch.compiler.is_compiling() or not attention_mask.all() else None


def _padded_to(attention_mask: Tensor, length: int) -> Tensor:
    """Tokens that a mask does not reach are hidden, as transformers has it."""
    missing = length - attention_mask.shape[1]
    return torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask[:, :length]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
      query, key, value: [batch, heads, tokens, head_dim], float16 or bfloat16, heads of keys and values unrepeated.
      attention_mask: what :func:`mask` returns; or bool or additive, broadcastable to [batch, heads, queries, keys].
      scaling, sliding_window, softcap, s_aux: as models pass them; s_aux are the sinks.
      is_causal: default: the module's.

    Returns:
      [batch, tokens, heads, head_dim], and no weights.
    """
    if dropout:
        raise RuntimeError(f"minfer attention: dropout must be 0, got {dropout}; call model.eval()")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None and attention_mask.dim() == 4:
        return _by_mask(query, key, value, attention_mask, scaling, softcap, s_aux), None
    scores = {
        "causal": bool(causal),
        "scale": scaling,
        "window_left": -1 if sliding_window is None else sliding_window - 1,
        "softcap": softcap or 0.0,
        "sinks": None if s_aux is None else s_aux.to(query.dtype),
    }
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attention_mask is None:
        return attention(q, k, v, **scores)[0], None
    return _padded(q, k, v, attention_mask[:, -k.shape[1] :], scores), None


def padded_rows(shown: Tensor) -> tuple[Tensor, Tensor]:
    """bool [batch, tokens] -> int64 [batch * tokens], rows with padding last, and int32 [batch + 1], those of each sequence."""
    order = torch.argsort(shown.reshape(-1).logical_not(), stable=True)
    return order, torch.nn.functional.pad(shown.sum(1).cumsum(0), (1, 0)).to(torch.int32)


def _padded(q: Tensor, k: Tensor, v: Tensor, shown: Tensor, scores: dict[str, Any]) -> Tensor:
    """q, k, v: [batch, tokens, heads, head_dim]. What a padding query gets are zeros."""
    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    k_order, k_rows = padded_rows(shown)
    q_order, q_rows = (k_order, k_rows) if queries == keys else padded_rows(shown[:, keys - queries :])
    q, k, v = q.flatten(0, 1)[q_order], k.flatten(0, 1)[k_order], v.flatten(0, 1)[k_order]
    y, _ = attention_varlen(q, k, v, q_rows, k_rows, queries, keys, **scores)
    return torch.empty_like(y).index_copy_(0, q_order, y).view(batch, queries, *y.shape[1:])


def _by_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Attention by any mask, which no kernel of minfer takes: torch's, or, of softcaps and sinks, one product after another."""
    mask = mask[..., : k.shape[2]]
    if not softcap and sinks is None:
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return y.transpose(1, 2)
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.matmul(q, k.mT).float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        extra = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.matmul(weights.to(v.dtype), v).transpose(1, 2)
