"""The operators: typed wrapper, fake and autograd rule side by side. Schemas live in the compiled library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._core.signatures import signature_of, with_out
from ..checks import gemm as checks

_library = torch.library.Library("minfer", "IMPL")


@signature_of(with_out(torch.ops.minfer.gemm))
def gemm(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """D = activation(alpha * A.B + beta * C + bias) in one kernel.

    Args:
      a: [m, k] or [batch, m, k], float16 or bfloat16.
      b: [k, n] or [batch, k, n], a's dtype and device. An ``nn.Linear`` weight [n, k] goes in as ``weight.t()``.
        Row- and column-major, strided and offset views of both are taken as they are; a view without a contiguous mode is
        copied first. A 2-D operand is used for every matrix of a 3-D other.
      c: broadcastable to D ([m, n], [n], [m, 1], a scalar, ...), a's dtype or float32. Not read when beta = 0, so a NaN in it
        does not reach D then; mind that beta = 0 is the default. Required when beta is not 0.
      bias: [n], a's dtype or float32.
      alpha, beta: finite in float32. With alpha = 0 or k = 0, A and B are not read.
      activation: "none", "relu", "gelu" (erf), "gelu_tanh" or "silu".
      out_dtype: a's dtype (default) or float32.
      kernel: for measurements: NAME[@decomposition=persistent|stream_k|split_k,splits=N,swizzle=N,raster=along_m|along_n], a name of
        :func:`minfer.kernels`. On CPU it is checked and otherwise ignored.
      out: D itself, a's dtype or float32. Written in place where its rows are contiguous (any leading dimension), otherwise through a
        copy. It may be ``c``, but must not overlap itself, a, b or bias, which is an error where it can be told from where they begin and
        end. Not under ``torch.compile(fullgraph=True)`` unless contiguous. A tensor made under ``torch.inference_mode()`` only there.

    Returns:
      D, [m, n] or [batch, m, n], contiguous (or ``out``). Any m, n, k >= 0.

    Raises:
      RuntimeError: an argument cannot be right; the message names it, what it must be and what it is, and nothing was launched.

    Numerics: products are accumulated in float32, the epilogue is float32, D is rounded once. Reductions across thread blocks are
    ordered: the same inputs, shapes and kernel give the same bits in every run. For inference: there is no backward, and calling
    it raises; forward-mode differentiation and ``torch.func.grad`` raise in the forward pass.
    """


@torch.library.register_fake("minfer::gemm", lib=_library)
def _gemm_fake(a, b, *, c=None, bias=None, alpha=1.0, beta=0.0, activation="none", out_dtype=None, kernel=None):
    shape = checks.check_gemm(a, b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation, out_dtype=out_dtype, kernel=kernel)
    return a.new_empty(shape.out, dtype=shape.out_dtype)


@torch.library.register_fake("minfer::gemm.out", lib=_library)
def _gemm_out_fake(a, b, *, c=None, bias=None, alpha=1.0, beta=0.0, activation="none", out_dtype=None, kernel=None, out):
    checks.check_gemm(a, b, c=c, bias=bias, alpha=alpha, beta=beta, activation=activation, out_dtype=out_dtype, kernel=kernel, out=out)
    return out


@signature_of(torch.ops.minfer.gemm_gated.default)
def gemm_gated(a: Tensor, b: Tensor, *, bias: Tensor | None = None, activation: str = "silu", kernel: str | None = None) -> Tensor:
    """D = activation(A.B_gate + bias_gate) * (A.B_up + bias_up) in one kernel: the first half of a SwiGLU (GeGLU, ...) MLP.

    Args:
      a: [m, k] or [batch, m, k], float16 or bfloat16.
      b: [k, 2 * n_half] or [batch, k, 2 * n_half], a's dtype: ``minfer.pack_gate_up(gate.weight, up.weight).t()``, blocks of 8 gate
        columns and 8 up columns. Views and batches as in :func:`gemm`.
      bias: [2 * n_half], ``minfer.pack_gate_up(gate.bias, up.bias)``, a's dtype or float32.
      activation: of the gate; as in :func:`gemm`.
      kernel: as in :func:`gemm`.

    Returns:
      D, [m, n_half] or [batch, m, n_half], a's dtype, contiguous.

    Raises:
      RuntimeError: an argument cannot be right (see :func:`gemm`), or b's columns are not a multiple of 16.

    Numerics: as in :func:`gemm`; gate and up stay in float32 until D is rounded.
    """


@torch.library.register_fake("minfer::gemm_gated", lib=_library)
def _gemm_gated_fake(a, b, *, bias=None, activation="silu", kernel=None):
    shape = checks.check_gemm_gated(a, b, bias=bias, activation=activation, kernel=kernel)
    return a.new_empty(shape.out, dtype=shape.out_dtype)


# ---- autograd: forward works, backward raises, and so does forward-mode differentiation ---------------------------------------
#
# Without a rule the dispatcher lets gradients stop at a CUDA kernel with only a warning, and follows the ATen calls of a CPU kernel.
# These rules make every device say the same thing. They cost 2-3 us of host time per eager call under no_grad and nothing under
# inference_mode, in a compiled graph or in a CUDA graph.


def _no_backward(name: str) -> str:
    return f"{name}: has no backward, it is an inference operator; call it under torch.inference_mode() or no_grad()"


class _InferenceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, keyset, args, kwargs, *_tensors):
        ctx.name = op._schema.name
        return op.redispatch(keyset, *args, **kwargs)

    @staticmethod
    def backward(ctx, *_grads):
        raise RuntimeError(_no_backward(ctx.name))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def _differentiated(args, kwargs) -> list[Tensor]:
    """The arguments that autograd follows: those that require grad where it is enabled, and those with a tangent, which no_grad() keeps."""
    grad = torch.is_grad_enabled()
    if not grad and forward_ad._current_level < 0:
        return []
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list | tuple):  # a schema's Tensor[]
            tensors += [y for y in x if isinstance(y, Tensor)]
    return [x for x in tensors if (grad and x.requires_grad) or _has_tangent(x)]


def _refuse_tangents(op: torch._ops.OpOverload, tensors: list[Tensor]) -> None:
    """Without this rule a tangent is followed through the ATen calls of a CPU kernel, and is lost at a CUDA kernel."""
    torch._check(
        not any(map(_has_tangent, tensors)),
        lambda: (
            f"{op._schema.name}: has no derivative, it is an inference operator; its arguments must have no tangent of forward-mode "
            "differentiation, got one that has"
        ),
    )


def register_autograd(op: torch._ops.OpOverload) -> None:
    """Forward works, backward and forward mode raise, whatever the device; for an overload that returns tensors or writes ``out``."""
    below = torch._C._after_autograd_keyset

    def functional(keyset, *args, **kwargs):
        tensors = _differentiated(args, kwargs)
        if tensors:
            _refuse_tangents(op, tensors)
            # A transform of torch.func (grad, vjp, jacrev) takes no autograd.Function of this kind, and would call its backward at once.
            torch._check(not torch._C._are_functorch_transforms_active(), lambda: _no_backward(op._schema.name))
            return _InferenceOnly.apply(op, keyset & below, args, kwargs, *tensors)
        return op.redispatch(keyset & below, *args, **kwargs)

    def out_form(keyset, *args, **kwargs):
        tensors = _differentiated(args, kwargs)
        _refuse_tangents(op, tensors)
        torch._check(
            not tensors,
            lambda: f"{op._schema.name}: out= cannot be differentiated, but an argument requires grad; call it under torch.no_grad()",
        )
        return counted(keyset, *args, **kwargs)

    def counted(keyset, *args, **kwargs):
        """Under inference_mode, too, where a tensor that was not made there keeps its count of writes."""
        out = kwargs["out"]
        if out.is_inference() and not torch.is_inference_mode_enabled():  # torch would refuse to count the write when it is done
            raise RuntimeError(
                f"{op._schema.name}: out must not be an inference tensor outside of torch.inference_mode(), got one of {list(out.shape)}"
            )
        op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)
        torch.autograd.graph.increment_version(out)
        return out

    if op._overloadname != "out":
        _library.impl(op, functional, "Autograd", with_keyset=True)
        return
    _library.impl(op, out_form, "Autograd", with_keyset=True)
    _library.impl(op, counted, "ADInplaceOrView", with_keyset=True)


for _op in (torch.ops.minfer.gemm.default, torch.ops.minfer.gemm.out, torch.ops.minfer.gemm_gated.default):
    register_autograd(_op)
