"""The routing operators of mixture-of-experts layers.

    weights, ids = minfer.moe_router_gemm(x, w_gate, top_k)
    token_index, offsets, inverse, _ = minfer.moe_sort(ids, num_experts)
    y = ...                                     # each expert's rows: x[token_index[offsets[e - 1] : offsets[e]]]
    out = minfer.moe_combine(y, inverse, weights)

Every operator is one launch (:func:`moe_router_gemm`: up to 64 tokens), can be captured in a CUDA graph, and gives the same bits in every
run.
"""

from __future__ import annotations

from torch import Tensor

from .._core.operator import operator
from ..checks import moe_routing as checks
from ..reference import moe_routing as reference

__all__ = [
    "moe_router",
    "moe_router_gemm",
    "moe_sort",
    "moe_combine",
]


@operator(check=checks.check_moe_router, reference=reference.moe_router)
def moe_router(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, of its logits.

    Args:
      logits: [tokens, experts], float16, bfloat16 or float32; 1 to 1024 experts. Rows may be strided.
      top_k: experts of a token, 1 to min(experts, 32), and not more than the groups that stay have.
      scoring: "softmax", over all experts, or "sigmoid".
      renormalize: divide a token's weights by their sum. Where that is 0 they stay 0.
      correction_bias: float32 [experts], added to the scores for the choice; the weights are without it (DeepSeek-V3).
      n_group: groups of consecutive experts, of equal size, of which the best ``topk_group`` stay. A group is as good as its best choice,
        with ``correction_bias`` as the sum of its two best (DeepSeek-V2 and V3).
      topk_group: 1 to n_group.
      scale: of the weights, at the end; finite in float32.

    Returns:
      weights float32 and ids int32, [tokens, top_k], by descending choice. Among equals the lower index comes first.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: scores are float32. Without ``correction_bias`` the choice is made by the logits, whose order is the scores' without their
    rounding. A NaN among a token's logits makes its weights NaN; in the choice it counts as -inf, so that ids are always valid and
    distinct. In a softmax, logits of +inf, and logits that are all -inf, share the weight equally. There is no backward.
    """


@operator(check=checks.check_moe_router_gemm, reference=reference.moe_router_gemm)
def moe_router_gemm(
    x: Tensor,
    w_gate: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    correction_bias: Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """:func:`moe_router` of the logits x.w_gate^T, which stay in float32.

    Up to 64 tokens it is one launch, all SMs reading the weights and the last step choosing; for more the dense GEMM writes float32 logits
    and a second launch chooses.

    Args:
      x: [tokens, hidden], float16 or bfloat16. Rows may be strided; aligned to 16 bytes they are faster.
      w_gate: [experts, hidden], x's dtype (a float32 matrix is refused: round it, or multiply and call :func:`moe_router`).
      top_k, scoring, renormalize, correction_bias, n_group, topk_group, scale: as in :func:`moe_router`.

    Returns:
      weights float32 and ids int32, [tokens, top_k], as :func:`moe_router`.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`moe_router`).

    Numerics: products are accumulated in float32 in a fixed order and never rounded to 16 bits; the order depends on the number of tokens.
    Then as :func:`moe_router`. There is no backward.
    """


@operator(check=checks.check_moe_sort, reference=reference.moe_sort)
def moe_sort(ids: Tensor, num_experts: int, *, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The (token, expert) pairs in the order of the experts: what a grouped GEMM reads and :func:`moe_combine` undoes.

    Args:
      ids: int32 [tokens, top_k], a router's. Pairs whose id is outside 0 to num_experts - 1, such as -1, are left out: expert parallelism
        drops other ranks' pairs this way.
      num_experts: 1 to 1024.
      weights: float32 [tokens, top_k], to be put in the same order.

    Returns:
      token_index: int32 [tokens * top_k], the token of each sorted row. The sort is stable: an expert's tokens ascend. Where pairs were
        left out, as many rows at the end are unused, and hold 0.
      offsets: int32 [num_experts], the row behind each expert's last, as ``torch._grouped_mm`` takes them.
      inverse: int32 [tokens, top_k], the sorted row of each pair, or -1.
      sorted_weights: float32 [tokens * top_k], 0 in unused rows; [0] without ``weights``.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.
    """


@operator(check=checks.check_moe_combine, reference=reference.moe_combine)
def moe_combine(y: Tensor, inverse: Tensor, weights: Tensor | None = None) -> Tensor:
    """out[t] = sum over j of weights[t, j] * y[inverse[t, j]]: the experts' rows of each token, added up.

    Args:
      y: [rows, n], float16, bfloat16 or float32, placed by :func:`moe_sort`. Rows may be strided; aligned to 16 bytes they are faster.
      inverse: int32 [tokens, top_k]. What is outside 0 to rows - 1, -1 for instance, adds nothing.
      weights: float32 [tokens, top_k]; None is ones.

    Returns:
      [tokens, n] of y's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: added in float32 in the order of j, rounded once. There is no backward.
    """
