"""The decoder layers of transformers' models, read into :class:`minfer.integrations.decoder.DecoderLayer`.

A layer class that is not in :data:`DECODER_LAYERS` is not guessed at: whoever names its parts like Llama may mean something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...distributed.tensor_parallel import TensorParallel
from ..decoder import Attention, DecoderLayer, Experts, Mlp, Norm, Projection, concatenate, projection_of
from ..decoder.mlp import DenseExperts, Router
from ..decoder.scheme import WeightScheme
from ..decoder.shard import Heads, Range, ReducedProjection, SharedExperts, experts_of, heads_of, owned, part_of_columns, part_of_rows
from ..decoder.weights import Dense, Weight, split_rows
from .modules import Unsupported, activation_of, layer_norm_of, rms_norm_of, weight_of
from .quantized_experts import QuantizedExperts


@dataclass(frozen=True)
class Facts:
    """What a layer is read with.

    Attributes:
      config: of the model.
      dtype: of activations.
      scheme: what 16-bit weights become, or None.
      parallel: the ranks that have a part of each layer, or None. Parts are taken before they are fused and quantised.
    """

    config: Any
    dtype: torch.dtype
    scheme: WeightScheme | None
    parallel: TensorParallel | None = None

    def heads(self, qkv: list[Weight] | Weight, output: Weight, heads: int, heads_kv: int, head_dim: int) -> _Part:
        """What this rank has of attention. qkv: three weights, or one with the rows of q, k and v."""
        if self.parallel is None:
            return _Part(qkv, output, Heads((0, heads), (0, heads_kv)))
        own = heads_of(self.parallel, heads, heads_kv)
        if own is None:
            raise Unsupported(f"its {heads} heads and {heads_kv} of keys cannot be divided among {self.parallel.ranks} ranks")
        wholes = qkv if isinstance(qkv, list) else [qkv] * 3
        begins = [0, 0, 0] if isinstance(qkv, list) else [0, heads, heads + heads_kv]
        ranges = [_scaled(part, head_dim, begin) for part, begin in zip((own.q, own.kv, own.kv), begins, strict=True)]
        parts = [self._rows(whole, part) for whole, part in zip(wholes, ranges, strict=True)]
        return _Part(parts, self._columns(output, _scaled(own.q, head_dim)), own)

    def inner(self, first: list[Weight], down: Weight) -> tuple[list[Weight], Weight]:
        """What this rank has of an MLP: rows of the first weights, which are the columns of ``down``."""
        if self.parallel is None:
            return first, down
        units = [unit for unit in _UNITS if down.k % unit == 0 and down.k // unit >= self.parallel.ranks]
        if not units:
            raise Unsupported(f"its MLP of {down.k} columns cannot be divided among {self.parallel.ranks} ranks")
        part = self.parallel.part(down.k, units[0])
        return [self._rows(whole, part) for whole in first], self._columns(down, part)

    def _rows(self, weight: Weight, part: Range) -> Weight:
        return owned(part_of_rows(weight, part, self.dtype), self.parallel.device)

    def _columns(self, weight: Weight, part: Range) -> Weight:
        return owned(part_of_columns(weight, part, self.dtype, with_bias=self.parallel.rank == 0), self.parallel.device)

    def output(self, weight: Weight) -> Projection:
        """The projection behind a block, whose sum is that of all ranks."""
        own = self.projection(weight)
        return own if self.parallel is None else ReducedProjection(own, self.parallel)

    def projection(self, weights: Weight | list[Weight], *, gated: bool = False, activation: str = "none") -> Projection:
        """:func:`minfer.integrations.decoder.projection_of`, of weights that become what the scheme says."""
        if self.scheme is not None and self.scheme.parts == "all":
            if isinstance(weights, list) and not gated and all(isinstance(x, Dense) for x in weights):
                weights = concatenate(weights) or weights  # before they are quantised, so that blocks of scales may cross
            weights = [self._quantized(x) for x in weights] if isinstance(weights, list) else self._quantized(weights)
        return projection_of(weights, gated=gated, activation=activation)

    def _quantized(self, weight: Weight) -> Weight:
        if not isinstance(weight, Dense):
            return weight
        refused = self.scheme.refuses(weight.n, weight.k)
        if refused is not None:
            raise Unsupported(f"{self.scheme.kind} does not take it: {refused}")
        return self.scheme.quantize(weight)

    def experts(self, router: Router, experts: DenseExperts | tuple[Any, Any], activation: str) -> Experts:
        """A mixture of experts, quantised where the scheme can be."""
        first = 0
        if self.parallel is not None:
            count = router.weight.shape[0]
            if count < self.parallel.ranks:
                raise Unsupported(f"its {count} experts cannot be divided among {self.parallel.ranks} ranks")
            part = self.parallel.part(count)
            experts, first = experts_of(experts, part, self.parallel.device), part[0]
        if self.scheme is not None and isinstance(experts, DenseExperts):
            refused = self.scheme.refuses_experts(experts.w13.device)
            if refused is not None:
                raise Unsupported(f"{self.scheme.kind} does not take its experts: {refused}")
            experts = self.scheme.quantize_experts(experts)
        if self.parallel is None:
            return Experts(router, experts, activation)
        return SharedExperts(router, experts, activation, first, self.parallel)


class _Part(NamedTuple):
    qkv: list[Weight] | Weight
    output: Weight
    heads: Heads


_UNITS = (128, 64, 8, 1)  # columns of an MLP that stay together: scales of groups and blocks begin with a part where they can


def _scaled(part: Range, width: int, begin: int = 0) -> Range:
    """Columns of heads, the first of which is ``begin``."""
    return (begin + part[0]) * width, (begin + part[1]) * width


Reader = Callable[[torch.nn.Module, Facts], DecoderLayer]


@dataclass(frozen=True)
class Architecture:
    """How a class of decoder layers is read.

    Attributes:
      attention: the name of its attention module.
      read: (layer, facts) -> the layer's parts.
      norm: (module, dtype) -> the norm behind the last layer.
      fused: names of linear layers whose rows become one weight in this order, as attributes of the layer.
      gated: the linear layers of gate and up: two, or one whose rows are gate and then up.
    """

    attention: str
    read: Reader
    norm: Callable[[torch.nn.Module, torch.dtype], Norm]
    fused: tuple[str, ...] = ()
    gated: tuple[str, ...] = ()


def _plain_window(attention: torch.nn.Module, config: Any) -> int | None:
    """Llama's attention has no window; models whose attention hands one on call it ``sliding_window``, their own or the config's."""
    return getattr(attention, "sliding_window", None)


def _config_window(attention: torch.nn.Module, config: Any) -> int | None:
    return getattr(config, "sliding_window", None)


def _no_window(attention: torch.nn.Module, config: Any) -> int | None:
    return None


def _attention(
    module: torch.nn.Module,
    facts: Facts,
    window: Callable[[torch.nn.Module, Any], int | None],
    weight_offset: float,
    softcap: bool = False,
) -> Attention:
    config, dtype = facts.config, facts.dtype
    head_dim, heads, heads_kv = module.head_dim, config.num_attention_heads, config.num_key_value_heads
    if hasattr(module, "qkv_proj"):
        qkv: Weight | list[Weight] = weight_of(module.qkv_proj)
    else:
        qkv = [weight_of(linear) for linear in (module.q_proj, module.k_proj, module.v_proj)]
    norms = {}
    if hasattr(module, "q_norm"):
        norms = {name: rms_norm_of(getattr(module, name), dtype, weight_offset) for name in ("q_norm", "k_norm")}
    part = facts.heads(qkv, weight_of(module.o_proj), heads, heads_kv, head_dim)
    seen, sinks = window(module, config), getattr(module, "sinks", None)
    cap = getattr(module, "attn_logit_softcapping", None) if softcap else None
    rotated = int(head_dim * _partial_rotary_factor(config, getattr(module, "layer_type", None)))
    return Attention(
        facts.projection(part.qkv),
        facts.output(part.output),
        heads=part.heads.q[1] - part.heads.q[0],
        heads_kv=part.heads.kv[1] - part.heads.kv[0],
        head_dim=head_dim,
        scale=float(module.scaling),
        window=-1 if seen is None else int(seen) - 1,
        softcap=0.0 if cap is None else float(cap),
        sinks=None if sinks is None else sinks.detach().to(dtype)[slice(*part.heads.q)],
        rotary_dim=None if rotated == head_dim else rotated,
        rotary=getattr(module, "layer_type", None) or "full_attention",
        causal=bool(module.is_causal),
        **norms,
    )


def _partial_rotary_factor(config: Any, layer_type: str | None) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    if layer_type in parameters:
        parameters = parameters[layer_type] or {}
    return float(parameters.get("partial_rotary_factor", 1.0))


def _mlp(module: torch.nn.Module, facts: Facts, activation: str) -> Mlp:
    if hasattr(module, "gate_up_proj"):  # Phi-3: gate rows, then up rows
        parts = split_rows(weight_of(module.gate_up_proj), 2)
        if parts is None:
            raise Unsupported("its gate_up_proj has blocks of scales that have gate and up rows in them")
    else:
        parts = [weight_of(module.gate_proj), weight_of(module.up_proj)]
    parts, down = facts.inner(parts, weight_of(module.down_proj))
    return Mlp(facts.projection(parts, gated=True, activation=activation), facts.output(down))


def _experts_of(module: torch.nn.Module) -> DenseExperts | tuple[Any, Any]:
    """Experts in transformers' two tensors, whatever their order of modes and rows is, or quantised ones; no copies."""
    if isinstance(module, QuantizedExperts):
        return module.parts()
    w13, w2 = module.gate_up_proj.detach(), module.down_proj.detach()
    b13, b2 = (module.gate_up_proj_bias.detach(), module.down_proj_bias.detach()) if module.has_bias else (None, None)
    if module.is_transposed:
        w13, w2 = w13.mT, w2.mT
    return DenseExperts(w13, w2, b13, b2, "halves" if module.is_concatenated else "alternating")


def _softmax_moe(module: torch.nn.Module, facts: Facts) -> Experts:
    """Qwen3-MoE and Mixtral."""
    gate = module.gate
    router = Router(gate.weight.detach(), gate.top_k, renormalize=bool(getattr(gate, "norm_topk_prob", True)))
    return facts.experts(router, _experts_of(module.experts), activation_of(facts.config.hidden_act))


def _gpt_oss_moe(module: torch.nn.Module, facts: Facts) -> Experts:
    router, experts = module.router, module.experts
    if not isinstance(experts, QuantizedExperts) and (experts.alpha, experts.limit) != (1.702, 7.0):
        raise Unsupported(f"its experts' swiglu has alpha {experts.alpha} and limit {experts.limit}, where minfer's has 1.702 and 7")
    # The softmax over the chosen logits is that over all, renormalised.
    return facts.experts(Router(router.weight.detach(), router.top_k, bias=router.bias.detach()), _experts_of(experts), "swigluoai")


def _reader(
    *,
    window: Callable[[torch.nn.Module, Any], int | None] = _plain_window,
    moe: Callable[[torch.nn.Module, Facts], Experts] | None = None,
    weight_offset: float = 0.0,
    softcap: bool = False,
    output_norms: bool = False,
    activation: str = "hidden_act",
) -> Reader:
    """A reader of layers whose parts are named as Llama's.

    Args:
      window: (attention module, config) -> its ``sliding_window``.
      moe: reads a ``layer.mlp`` that is a mixture of experts.
      weight_offset: of the norms.
      softcap: whether attention has one.
      output_norms: whether blocks have norms of their outputs, named as Gemma's.
      activation: the config's name for the MLP's.
    """

    def read(layer: torch.nn.Module, facts: Facts) -> DecoderLayer:
        def norm(name: str) -> Norm:
            return rms_norm_of(getattr(layer, name), facts.dtype, weight_offset)

        attention = _attention(layer.self_attn, facts, window, weight_offset, softcap)
        if moe is not None and not hasattr(layer.mlp, "down_proj"):
            behind = moe(layer.mlp, facts)
        else:
            behind = _mlp(layer.mlp, facts, activation_of(getattr(facts.config, activation)))
        if not output_norms:
            return DecoderLayer(attention, behind, norm("input_layernorm"), norm("post_attention_layernorm"))
        return DecoderLayer(
            attention,
            behind,
            norm("input_layernorm"),
            norm("pre_feedforward_layernorm"),
            norm("post_attention_layernorm"),
            norm("post_feedforward_layernorm"),
        )

    return read


def _gpt2(layer: torch.nn.Module, facts: Facts) -> DecoderLayer:
    module = layer.attn
    if hasattr(layer, "crossattention"):
        raise Unsupported("it attends to an encoder")
    part = facts.heads(weight_of(module.c_attn), weight_of(module.c_proj), module.num_heads, module.num_heads, module.head_dim)
    heads = part.heads.q[1] - part.heads.q[0]
    attention = Attention(
        facts.projection(part.qkv),
        facts.output(part.output),
        heads=heads,
        heads_kv=heads,
        head_dim=module.head_dim,
        scale=float(module.scaling),
        rotary=None,
    )
    (first,), down = facts.inner([weight_of(layer.mlp.c_fc)], weight_of(layer.mlp.c_proj))
    mlp = Mlp(facts.projection(first, activation=activation_of(facts.config.activation_function)), facts.output(down))
    return DecoderLayer(attention, mlp, layer_norm_of(layer.ln_1, facts.dtype), layer_norm_of(layer.ln_2, facts.dtype))


def _llama_like(**options: Any) -> Architecture:
    offset = options.get("weight_offset", 0.0)
    return Architecture(
        "self_attn",
        _reader(**options),
        lambda module, dtype: rms_norm_of(module, dtype, offset),
        fused=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        gated=("mlp.gate_proj", "mlp.up_proj"),
    )


_GEMMA: dict[str, Any] = {"weight_offset": 1.0, "output_norms": True, "activation": "hidden_activation"}

DECODER_LAYERS: dict[str, Architecture] = {
    "LlamaDecoderLayer": _llama_like(window=_no_window),
    "MistralDecoderLayer": _llama_like(window=_config_window),
    "Qwen2DecoderLayer": _llama_like(),
    "Qwen3DecoderLayer": _llama_like(),
    "Qwen3MoeDecoderLayer": _llama_like(moe=_softmax_moe),
    "MixtralDecoderLayer": _llama_like(window=_config_window, moe=_softmax_moe),
    "GptOssDecoderLayer": _llama_like(moe=_gpt_oss_moe),
    "Gemma2DecoderLayer": _llama_like(softcap=True, **_GEMMA),
    "Gemma3DecoderLayer": _llama_like(**_GEMMA),
    "Phi3DecoderLayer": Architecture(
        "self_attn",
        _reader(window=_config_window),
        lambda module, dtype: rms_norm_of(module, dtype, 0.0),
        gated=("mlp.gate_up_proj",),
    ),
    "GPT2Block": Architecture("attn", _gpt2, layer_norm_of),
}
