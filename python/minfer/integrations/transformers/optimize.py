"""One call on a Hugging Face model: its layers run by minfer, until they are given back.

    handle = minfer.integrations.transformers.optimize(model)        # or with optimize(model) as handle: ...
    model.generate(**inputs)
    print(handle)                                                    # what was replaced, what was not, and why
    handle.restore()                                                 # the original modules, forwards and bits

What is replaced are forwards of instances; classes, and other models, stay as they are. Modules keep their names and parameters. Where a
kernel wants weights in another order, there is one copy in that order and none in the old one: fused projections of q, k and v are what
the three parameters are views of, gate and up rows are interleaved, and the two parameters are empty until they are restored
(``state_dict`` has them, in their own order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...checks.common import DTYPES
from ...distributed.tensor_parallel import TensorParallel
from ...formats.kv_cache import KV_FORMATS
from ...ops.gemm import gemm
from ..decoder import DecoderLayer, Norm
from ..decoder.projection import Projection, projection_of
from ..decoder.scheme import WeightScheme
from ..decoder.weights import Dense
from . import attention
from .architectures import DECODER_LAYERS, Architecture, Facts
from .layers import decoder_forward, gpt2_forward
from .modules import Unsupported
from .parts import replace_parts
from .replace import Replacements, gone
from .rotary import rotary_forward
from .share import attach, share

KV_CACHES = {None: "16bit", "fp8": "fp8_e4m3", **{name: name for name in KV_FORMATS}}


class OptimizedModel:
    """What :func:`optimize` did to a model, and the way back. As a context manager it restores the model at the end, if it can be.

    Attributes:
      model: the model.
      layers: its decoder layers as :class:`minfer.integrations.decoder.DecoderLayer`, in order; None where one was not taken over.
      norm: that behind them, or None; base: the module that has them, or None where no layer was found.
      head: from hidden states to the vocabulary where it was quantised, or None.
      kv_format: of the caches that it makes.
      parallel: the ranks that the layers are divided among, or None.
    """

    def __init__(self, model: PreTrainedModel, scheme: WeightScheme | None, kv_format: str, parallel: TensorParallel | None = None):
        self.model, self.scheme, self.kv_format, self.parallel = model, scheme, kv_format, parallel
        self.layers: list[DecoderLayer | None] = []
        self.norm: Norm | None = None
        self.head: Projection | None = None
        self.base: torch.nn.Module | None = None
        self.replacements = Replacements()
        self.done: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self._active = True

    def restore(self) -> None:
        """Gives the model back as it was, bit by bit; a second call does nothing.

        Raises:
          RuntimeError: weights were quantised with ``restorable=False``; nothing changes then.
        """
        if self._active:
            if not self.replacements.restorable:
                gone()
            self._active = False
            self.replacements.undo()
            self.layers, self.head = [], None

    def __enter__(self) -> OptimizedModel:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.replacements.restorable:
            self.restore()

    def __str__(self) -> str:
        def lines(title: str, facts: Counter[str]) -> list[str]:
            return [title, *(f"  {count:4d} x {text}" for text, count in facts.items())] if facts else []

        head = f"{type(self.model).__name__}: " + ("optimised by minfer" if self._active else "restored")
        return "\n".join([head, *lines("replaced", self.done), *lines("left as they were", self.left)])

    __repr__ = __str__


def optimize(
    model: PreTrainedModel,
    *,
    weights: str | WeightScheme | None = None,
    head: str | WeightScheme | None = None,
    kv_cache: str | None = None,
    fuse: bool = True,
    restorable: bool = True,
    parallel: TensorParallel | None = None,
) -> OptimizedModel:
    """Makes minfer's operators run a Hugging Face model.

    Llama 3, Mistral, Qwen2.5, Qwen3, Qwen3-MoE, Mixtral, gpt-oss, Gemma 2 and 3, Phi-3 and 4 and GPT-2 have their decoder layers taken over
    as wholes. Of any other architecture what applies is replaced: attention, if the model asks transformers' interface for it; experts, if
    they do; RMS norms and gated MLPs whose forwards were seen to compute the same; and with ``weights`` linear layers.

    Args:
      model: in eval mode, its weights float16 or bfloat16, or quantised modules of :mod:`minfer.nn`; on any device.
      weights: None, or how linear layers and experts of decoder layers are quantised: "w4a16", "nf4", "mxfp4", "w8a16", "fp8", "int8", or a
        :class:`minfer.integrations.decoder.scheme.WeightScheme` with a group size. Embeddings and routers keep their 16 bits.
      head: None: the head keeps its 16 bits; or how it is quantised, as ``weights``. Logits stay float32 in ``generate`` and are of the
        model's type in its forward. A head whose weight is the embedding's, too, gets one of its own. Not with ``parallel``.
      kv_cache: None: 16 bits; or "fp8", "int8", "int4": of the caches that the model makes for itself. "fp8" has a scale of 1.
      fuse: False: weights are not fused: q, k and v, and gate and up, stay products of their own, no parameter is moved, and layers are
        replaced part by part, as those of an unknown architecture are.
      restorable: whether quantised weights' originals are kept, in the CPU's memory. False: they are gone, and ``restore`` raises; also
        after an error in here.
      parallel: the ranks among which layers are divided, each of which calls this with the same model: heads of attention, columns of MLPs
        and experts. The model may be on the CPU: parts go to ``parallel.device`` layer by layer, the rest at the end. Every later call,
        forwards and ``generate``, is one of all ranks with the same arguments. Needs ``fuse``.

    Returns:
      A handle, which is a context manager, too.

    Raises:
      ValueError: an argument cannot be right, or the model is in training mode, of another type than 16 bits, or optimised already. The
        model is as it was then, as it is after any other error in here.

    Numerics: norms, rotations, activations and softmax are float32 inside their kernels and rounded once; transformers rounds them step by
    step to 16 bits. So results differ by roundings, with smaller errors against float64. Routers choose experts by float32 logits.
    """
    scheme = WeightScheme(weights) if isinstance(weights, str) else weights
    of_head = WeightScheme(head) if isinstance(head, str) else head
    if kv_cache not in KV_CACHES:
        raise ValueError(f"optimize: kv_cache must be None, fp8, int8 or int4, got {kv_cache!r}")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"optimize: model must be a transformers model, got {type(model).__name__}")
    if model.training:
        raise ValueError("optimize: model must be in eval mode: call model.eval() first")
    if model.dtype not in DTYPES:
        raise ValueError(f"optimize: model must be float16 or bfloat16, got {model.dtype}: call model.to(torch.bfloat16) first")
    if getattr(model, "_minfer", None) is not None:
        raise ValueError("optimize: model is optimised already: restore it first")
    if parallel is not None and not fuse:
        raise ValueError("optimize: parallel needs fuse: parts of layers are those of whole layers")
    if parallel is not None and of_head is not None:
        raise ValueError("optimize: head must be None with parallel: a rank's part of the head keeps its 16 bits")
    if of_head is not None and of_head.parts != "all":
        raise ValueError(f"optimize: head must be a scheme of all parts, got parts {of_head.parts!r}: a head has no experts")
    handle = OptimizedModel(model, scheme, KV_CACHES[kv_cache], parallel)
    handle.replacements.restorable = restorable or (scheme is None and of_head is None)
    try:
        with torch.no_grad():
            _optimize(handle, of_head, fuse)
    except BaseException:
        handle._active = False
        handle.replacements.undo(as_far_as_possible=True)
        raise
    handle.replacements.set_attribute(model, "_minfer", handle)
    return handle


def _optimize(handle: OptimizedModel, of_head: WeightScheme | None, fuse: bool) -> None:
    model, replacements = handle.model, handle.replacements
    attention.register()
    taken: set[torch.nn.Module] = set()
    for base in [module for module in model.modules() if _layers_of(module)]:
        layers, handle.base = _layers_of(base), base
        for index, layer in enumerate(layers):
            decoder = _take_over(handle, layer, index, base.config) if fuse else None
            handle.layers.append(decoder)
            if decoder is not None:
                taken.add(layer)
        if layers and all(layer in taken for layer in layers):
            _around_layers(handle, base, DECODER_LAYERS[type(layers[0]).__name__])
    _head(handle, of_head, taken)
    replace_parts(model, handle.scheme, replacements, taken, handle.done, handle.left)
    if handle.parallel is not None:
        model.to(handle.parallel.device)
    before = model.config._attn_implementation
    if before != attention.NAME:
        try:
            model.set_attn_implementation(attention.NAME)
        except ValueError as error:
            handle.left[f"attention: the model takes no other ({error})"] += 1
        else:
            replacements.on_undo(lambda: model.set_attn_implementation(before))


def _layers_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The decoder layers of a base model, by either name."""
    for name in ("layers", "h"):
        layers = getattr(module, name, None)
        if isinstance(layers, torch.nn.ModuleList) and len(layers) and hasattr(module, "config"):
            return list(layers)
    return []


def _take_over(handle: OptimizedModel, layer: torch.nn.Module, index: int, config: Any) -> DecoderLayer | None:
    name = type(layer).__name__
    architecture = DECODER_LAYERS.get(name)
    if architecture is None or not type(layer).__module__.startswith("transformers.models."):
        handle.left[f"{name} as a whole: none of the layers that minfer reads"] += 1
        return None
    module = getattr(layer, architecture.attention)
    if getattr(module, "is_causal", True) is False:
        handle.left[f"{name} as a whole: it attends to later tokens, too"] += 1
        return None
    config = getattr(module, "config", config)
    try:
        decoder = architecture.read(layer, Facts(config, handle.model.dtype, handle.scheme, handle.parallel))
    except Unsupported as error:
        handle.left[f"{name} as a whole: {error}"] += 1
        return None
    if handle.parallel is None:
        share(handle.replacements, layer, decoder, architecture)
    else:
        attach(handle.replacements, layer, decoder)
    make = gpt2_forward if name == "GPT2Block" else decoder_forward
    layer_idx = getattr(module, "layer_idx", index)
    handle.replacements.set_forward(layer, make(decoder, module, index if layer_idx is None else layer_idx, handle.kv_format))
    formats = {decoder.attention.qkv.weight_format, decoder.attention.output.weight_format, *_formats(decoder)}
    part = "" if handle.parallel is None else f"; part {handle.parallel.rank + 1} of {handle.parallel.ranks}"
    handle.done[f"{name}: {', '.join(sorted(formats))}; cache {handle.kv_format}{part}"] += 1
    return decoder


def _formats(decoder: DecoderLayer) -> list[str]:
    mlp = decoder.mlp
    return [f"experts {mlp.weight_format}"] if hasattr(mlp, "router") else [mlp.first.weight_format, mlp.down.weight_format]


def _around_layers(handle: OptimizedModel, base: torch.nn.Module, architecture: Architecture) -> None:
    """What stands beside a base model's layers where all of these were taken over."""
    rotary = getattr(base, "rotary_emb", None)
    if rotary is not None and hasattr(rotary, "rope_type"):
        handle.replacements.set_forward(rotary, rotary_forward(rotary, rotary.forward))
        handle.done[f"{type(rotary).__name__}: float32"] += 1
    norm = getattr(base, "norm", None) or getattr(base, "ln_f", None)
    if norm is not None:
        try:
            own = architecture.norm(norm, handle.model.dtype)
        except Unsupported as error:
            handle.left[f"{type(norm).__name__}: {error}"] += 1
        else:
            handle.norm = own
            handle.replacements.set_forward(norm, own.forward)
            attach(handle.replacements, norm, own)
            handle.done[f"{type(norm).__name__}: one launch"] += 1


def _head(handle: OptimizedModel, scheme: WeightScheme | None, taken: set[torch.nn.Module]) -> None:
    head = handle.model.get_output_embeddings()
    if head is None or (not taken and scheme is None):
        return
    if type(head) is not torch.nn.Linear or head.weight.dtype not in DTYPES:
        handle.left[f"the head: {type(head).__name__} of {head.weight.dtype}"] += 1
        return
    refused = None if scheme is None else scheme.refuses(*head.weight.shape)
    if refused is not None:
        handle.left[f"the head in {scheme.kind}: {refused}"] += 1
    if scheme is None or refused is not None:
        handle.replacements.set_forward(head, _head_forward(head))
        handle.done["the head: minfer.gemm"] += 1
        return
    handle.head = projection_of(scheme.quantize(Dense(head.weight.detach(), None if head.bias is None else head.bias.detach())))
    handle.replacements.set_forward(head, _rows_through(handle.head))
    if head.weight is handle.model.get_input_embeddings().weight:
        handle.replacements.add_child(head, handle.head)
    else:
        attach(handle.replacements, head, handle.head)
    handle.done[f"the head: {handle.head.weight_format}"] += 1


def _rows_through(projection: Projection) -> Callable[[Tensor], Tensor]:
    return lambda x: projection(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def _head_forward(head: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return gemm(x.flatten(0, -2), head.weight.t(), bias=head.bias).unflatten(0, x.shape[:-1])

    return forward
