"""What torch.compile needs of the operators beyond their fakes.

* Layout: an operand keeps the stride order it has in eager mode, so a compiled graph runs the kernel that eager mode would.
* ``minfer::gemm.out`` and its like return their output argument, which functionalisation refuses of operators outside ATen: they are
  traced as the functional form and a copy into ``out``; Inductor drops the copy unless ``out`` is an input of the graph.
* Inductor's code for calling an operator has a parameter named ``kernel`` of its own, so a node must not carry that keyword. A call
  with an override is traced as ``minfer::_gemm_override`` or its like, which call the operator; a call without one leaves it out.
"""

from __future__ import annotations

import torch

from ..checks import (
    gemm as checks_gemm,
    grouped_gemm as checks_moe,
    grouped_quantized_gemm as checks_moe_w4a16,
    quantized_gemm as checks_w4a16,
)

_ops = torch.ops.minfer
_library = torch.library.Library("minfer", "FRAGMENT")

_ATTENTION_OPTIONS = "bool causal, float? scale, int window_left, int window_right, float softcap, Tensor? sinks"
# Arguments of the operators that take ``kernel``, and what they return if it is not one tensor; in their overrides ``str override`` follows
# the positional ones. A keyword that an operator gets later has a default here: graphs in torch.compile's cache on disk do not have it.
_OVERRIDES = (
    {
        "gemm": (
            "Tensor a, Tensor b",
            "Tensor? c, Tensor? bias, float alpha, float beta, str activation, ScalarType? out_dtype",
        ),
        "gemm_gated": ("Tensor a, Tensor b", "Tensor? bias, str activation"),
    }
    | {
        f"w{bits}a16_{name}": (
            "Tensor a, Tensor qweight, Tensor scales, Tensor? zeros",
            f"int group_size, float alpha, Tensor? perm, {c}Tensor? bias, str activation, str w{bits}_format, bool constant_weights=False",
        )
        for bits in (4, 8)
        for name, c in (("gemm", "Tensor? c, "), ("gemm_gated", ""))
    }
    | {
        "grouped_gemm": (
            "Tensor a, Tensor b, Tensor offsets",
            "Tensor? bias, Tensor? gather, Tensor? row_scale, str activation, bool gated, str gate_layout",
        ),
        "grouped_gemm_masked": (
            "Tensor a, Tensor b, Tensor counts",
            "Tensor? bias, Tensor? row_scale, str activation, bool gated, str gate_layout",
        ),
        "grouped_w4a16_gemm": (
            "Tensor a, Tensor qweight, Tensor scales, Tensor? zeros, Tensor offsets",
            "int group_size, str w4_format, Tensor? alpha, Tensor? bias, Tensor? gather, Tensor? row_scale, str activation, bool gated",
        ),
        "attention": ("Tensor q, Tensor k, Tensor v", _ATTENTION_OPTIONS, "(Tensor, Tensor)"),
        "attention_varlen": (
            "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k",
            _ATTENTION_OPTIONS,
            "(Tensor, Tensor)",
        ),
        "attention_paged": (
            "Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens",
            "Tensor? block_table, Tensor? cu_seqlens_q, int max_seqlen_q, Tensor? k_scale, Tensor? v_scale, Tensor? k_residual, "
            "Tensor? v_residual, str kv_format, bool causal, float? scale, int window_left, float softcap, Tensor? sinks, int? num_splits",
            "(Tensor, Tensor)",
        ),
    }
)


def _functional(context, operator, override_operator, args, kwargs):
    """Calls ``operator`` below functionalisation, without the keyword ``kernel``; arguments and result are plain tensors."""
    kernel = kwargs.pop("kernel", None)
    if kernel is not None:
        schema = operator._schema.arguments
        positional = [x for x in schema if not x.kwarg_only]
        args = (*args, *(kwargs.pop(x.name, x.default_value) for x in positional[len(args) :]), kernel)
        defaults = {x.name: x.default_value for x in schema if x.kwarg_only and x.name != "kernel"}
        operator, kwargs = override_operator, {**defaults, **kwargs}
    with context.redispatch_to_next():
        return operator(*args, **kwargs)


def _register(name: str, positional: str, keywords: str, returns: str = "Tensor") -> None:
    operator = getattr(_ops, name).default

    def call(*args, **kwargs):
        return operator(*args[:-1], kernel=args[-1], **kwargs)

    tags = (torch.Tag.needs_fixed_stride_order,)
    _library.define(f"_{name}_override({positional}, str override, *, {keywords}) -> {returns}", tags=tags)
    _library.impl(f"_{name}_override", call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minfer::_{name}_override", call, lib=_library)
    override_operator = getattr(_ops, f"_{name}_override").default

    @operator.py_functionalize_impl
    def functional(context, *args, **kwargs):
        args, kwargs = context.unwrap_tensors(args), context.unwrap_tensors(kwargs)
        return context.wrap_tensors(_functional(context, operator, override_operator, args, kwargs))

    operator.tags.append(torch.Tag.needs_fixed_stride_order)


def _register_out(name: str, check, keep_dtype: bool, merge=None) -> None:
    """The out form; ``keep_dtype``: the functional form has to be told the dtype of ``out``; ``merge(result, out, *args)``: what becomes of
    ``out`` where not all of it is written."""
    operator, override_operator = getattr(_ops, name).default, getattr(_ops, f"_{name}_override").default

    @getattr(_ops, name).out.py_functionalize_impl
    def functional_out(context, *args, out, **kwargs):
        args, kwargs, plain_out = context.unwrap_tensors(args), context.unwrap_tensors(kwargs), context.unwrap_tensors(out)
        check(*args, **kwargs, out=plain_out)  # the functional form does not see `out`
        if keep_dtype:
            kwargs["out_dtype"] = out.dtype
        result = _functional(context, operator, override_operator, args, kwargs)
        if merge is not None:
            with context.redispatch_to_next():
                result = merge(result, plain_out, *args)
        context.replace(out, result)
        context.commit_update(out)
        context.sync(out)
        return out


def _behind_counts(result: torch.Tensor, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """The masked form writes no row behind an expert's count."""
    inside = torch.arange(result.shape[1], device=result.device)[None, :, None] < counts[:, None, None]
    return torch.where(inside, result, out)


for _name, _arguments in _OVERRIDES.items():
    _register(_name, *_arguments)
_register_out("gemm", checks_gemm.check_gemm, keep_dtype=True)
_register_out("w4a16_gemm", checks_w4a16.check_w4a16_gemm, keep_dtype=False)
_register_out("w8a16_gemm", checks_w4a16.check_w8a16_gemm, keep_dtype=False)
_register_out("grouped_gemm", checks_moe.check_grouped_gemm, keep_dtype=False)
_register_out("grouped_w4a16_gemm", checks_moe_w4a16.check_grouped_w4a16_gemm, keep_dtype=False)
_register_out("grouped_gemm_masked", checks_moe.check_grouped_gemm_masked, keep_dtype=False, merge=_behind_counts)
for _op in (
    _ops.kv_cache_append.default,
    _ops.merge_attention_states.default,
    _ops.moe_ffn.default,
    _ops.moe_ffn_w4a16.default,
    _ops.w4a16_pack.default,
    _ops.w4a16_dequantize.default,
    _ops.w8a16_pack.default,
    _ops.w8a16_dequantize.default,
):
    _op.tags.append(torch.Tag.needs_fixed_stride_order)
