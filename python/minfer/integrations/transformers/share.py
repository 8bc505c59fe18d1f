"""One copy of each weight, between a model's modules and the decoder layer that reads them in its own order.

A parameter that the layer holds as it is, or as rows of a larger tensor, stays a view of that. One that the layer holds in another order,
or quantised, gives up its memory: it is empty until it is restored, and ``state_dict`` computes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...formats.gate_up import split_gate_up
from ..decoder import DecoderLayer, Experts
from .architectures import Architecture
from .replace import Replacements, gone


def share(replacements: Replacements, layer: torch.nn.Module, decoder: DecoderLayer, architecture: Architecture) -> None:
    """Lets a layer's own modules, and ``decoder``, which becomes their sibling, share memory."""
    if architecture.fused and all(_is_dense(layer, name) for name in architecture.fused):
        _rows(replacements, layer, decoder.attention.qkv, architecture.fused)
    if architecture.gated and hasattr(decoder.mlp, "first") and all(_is_dense(layer, name) for name in architecture.gated):
        _gate_and_up(replacements, layer, decoder.mlp.first, architecture.gated)
    if isinstance(decoder.mlp, Experts):
        _experts(replacements, layer.mlp.experts, decoder.mlp)
    attach(replacements, layer, decoder)


def attach(replacements: Replacements, module: torch.nn.Module, child: torch.nn.Module) -> None:
    """Makes a module, whose buffers may be the other's tensors, its child. Matrices that the child does not hold are emptied."""
    held, links = _storages(child), []
    for owner, name, x in _tensors(module):
        buffer = held.get(x.untyped_storage().data_ptr()) if x.numel() else None
        if buffer is not None:
            links.append((owner, name, *buffer, x.shape, x.stride(), x.storage_offset()))
        elif x.dim() >= 2 and x.numel():
            _keep(replacements, owner, name, x)
    replacements.add_child(module, child)
    _follow(child, links)


def _is_dense(layer: torch.nn.Module, name: str) -> bool:
    try:
        return type(layer.get_submodule(name)) is torch.nn.Linear
    except AttributeError:
        return False


def _tensors(layer: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Tensor]]:
    """Parameters and buffers of a layer: (module, name, tensor)."""
    found = []
    for module in layer.modules():
        for own in (module._parameters, module._buffers):
            found += [(module, name, x) for name, x in own.items() if x is not None]
    return found


def _storages(decoder: torch.nn.Module) -> dict[int, tuple[torch.nn.Module, str]]:
    """The buffer that has each storage: (module, name)."""
    return {x.untyped_storage().data_ptr(): (module, name) for module, name, x in _tensors(decoder) if x.numel()}


def _follow(child: torch.nn.Module, links: list[tuple[Any, ...]]) -> None:
    """When the model is moved, or becomes another type, each tensor is first copied by itself: then those of the modules are the child's
    again. It is the last child, so that it is moved last; a module moves its own parameters behind its children."""
    move = type(child)._apply

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        move(child, fn, recurse)
        for owner, name, holder, buffer, shape, stride, offset in links:
            source = getattr(holder, buffer)
            _set(owner, name, source.as_strided(shape, stride, offset) if source.untyped_storage().nbytes() else source)
        return child

    object.__setattr__(child, "_apply", apply)


def _set(owner: torch.nn.Module, name: str, x: Tensor) -> None:
    """Another tensor in the place of a parameter's data, or of a buffer."""
    if name in owner._parameters:
        owner._parameters[name].data = x
    else:
        owner._buffers[name] = x


def _rows(replacements: Replacements, layer: torch.nn.Module, projection: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Linear layers whose rows are those of one 16-bit weight become views of it."""
    weight = getattr(projection, "weight", None)
    linears = [layer.get_submodule(name) for name in names]
    if weight is None or weight.dtype != linears[0].weight.dtype:
        return
    begin = 0
    for linear in linears:
        own = linear.weight
        own.data = weight[begin : begin + own.shape[0]]
        begin += own.shape[0]
        replacements.on_undo(lambda own=own: setattr(own, "data", own.data.clone()))


def _gate_and_up(replacements: Replacements, layer: torch.nn.Module, projection: torch.nn.Module, names: tuple[str, ...]) -> None:
    """Gate and up, whose rows one 16-bit weight has in blocks."""
    linears = [layer.get_submodule(name) for name in names]
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dtype != linears[0].weight.dtype:
        return

    def halves() -> tuple[Tensor, ...]:
        return split_gate_up(projection.weight, "blocks", 0)

    if len(linears) == 1:
        _release(replacements, linears[0], "weight", lambda: torch.cat(halves()))
    else:
        for index, linear in enumerate(linears):
            _release(replacements, linear, "weight", lambda index=index: halves()[index].contiguous())


def _experts(replacements: Replacements, module: torch.nn.Module, experts: Experts) -> None:
    """16-bit experts that a model keeps as [in, out] (gpt-oss) get contiguous rows, which each product would copy else; the model's own
    tensors become views of them."""
    for name, own in (("gate_up_proj", "w13"), ("down_proj", "w2")):
        weight = experts._buffers.get(own)
        if weight is None or weight.stride(-1) == 1:
            continue
        parameter = getattr(module, name)
        experts._buffers[own] = weight = weight.contiguous()
        parameter.data = weight.mT
        replacements.on_undo(lambda parameter=parameter: setattr(parameter, "data", parameter.data.contiguous()))


def _keep(replacements: Replacements, owner: torch.nn.Module, name: str, x: Tensor) -> None:
    """A weight that was quantised: its numbers are kept in the CPU's memory, or not at all."""
    if not replacements.restorable:
        _release(replacements, owner, name, gone)
        return
    kept, device = x.detach().to("cpu", copy=True), x.device
    _release(replacements, owner, name, lambda: kept.to(device))


def _release(replacements: Replacements, owner: torch.nn.Module, name: str, compute: Callable[[], Tensor]) -> None:
    """Empties a tensor until ``compute`` gives it back."""

    def hook(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        if prefix + name in state:
            state[prefix + name] = compute()

    present = getattr(owner, name)
    _set(owner, name, present.new_empty(0))
    handle = owner.register_state_dict_post_hook(hook)

    def give_back() -> None:
        handle.remove()
        _set(owner, name, compute())

    replacements.on_undo(give_back)
