"""Calls that cannot be right: a legal one, changed in one place. Each must raise a RuntimeError that begins with the operator's name and
names the argument, on every device, with the same words for tensors with and without contents. None may return a number."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .draw import Draw
from .family import Argument, Family, Parameters

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


@dataclass
class Wrong:
    """what: the change. names: arguments of which the message must name one."""

    what: str
    tensors: dict[str, Tensor | None]
    parameters: Parameters
    names: tuple[str, ...]


def draw_wrong(family: Family, p: Parameters, tensors: dict[str, Tensor | None], draw: Draw) -> Wrong | None:
    """A wrong call of what the family says about its arguments, made of a legal one's; None where it says nothing."""
    arguments = {name: a for name, a in family.arguments(p).items() if tensors.get(name) is not None}
    options = family.wrong_options(p)
    kinds = {"dtype": 3, "rank": 2, "size": 4} if arguments else {}
    if len(arguments) > 1:
        kinds["device"] = 2
    if options:
        kinds["option"] = 4
    if not kinds:
        return None
    for _ in range(8):  # not every kind fits to every argument
        kind = draw.weighted(kinds)
        if kind == "option":
            name, value, named = draw.choice(options)
            return Wrong(f"{name} = {value!r}", tensors, p | {"extra": {name: value}}, (named,))
        name = draw.choice(list(arguments))
        changed = _changed(kind, name, tensors, arguments, draw)
        if changed is not None:
            what, x = changed
            return Wrong(f"{name} {what}", tensors | {name: x}, p, (name, *arguments[name].beside))
    return None


def _changed(
    kind: str, name: str, tensors: dict[str, Tensor | None], arguments: dict[str, Argument], draw: Draw
) -> tuple[str, Tensor] | None:
    x, argument = tensors[name], arguments[name]
    if kind == "dtype":
        dtype = draw.choice([dtype for dtype in DTYPES if dtype not in argument.dtypes])
        return f"is {dtype}", torch.zeros(x.shape, dtype=dtype, device=x.device)
    if kind == "rank":
        ranks = argument.ranks or ((len(argument.shape),) if argument.shape else ())
        for y in draw.sample([x.unsqueeze(0), x.new_zeros(()), x.unsqueeze(-1), x.flatten()], 4):
            if ranks and y.dim() not in ranks:
                return f"is {list(y.shape)}", y
        return None
    if kind == "device":
        return "is on another device", x.to("meta") if x.device.type == "cpu" else x.cpu()
    shared = [
        mode
        for mode, symbol in enumerate(argument.shape)
        if symbol and any(symbol in other.shape for other_name, other in arguments.items() if other_name != name)
    ]
    if not shared:
        return None
    mode = draw.choice(shared)
    shape = list(x.shape)
    shape[mode] += draw.pick(1, 1, 7, -1) if shape[mode] > 2 else draw.pick(1, 8)
    y = torch.zeros(shape, dtype=torch.uint8, device=x.device)
    return f"is {shape} instead of {list(x.shape)}", y.to(x.dtype)


def refusal(call: Callable[[], Any], names: tuple[str, ...], arguments: tuple[str, ...], *, anywhere: bool = False) -> str | None:
    """Why a call was not refused as it should be, or None."""
    try:
        call()
    except RuntimeError as error:
        text = str(error)
    except Exception as error:  # noqa: BLE001  the wrong kind of error is what is looked for
        return f"raised {type(error).__name__} instead of RuntimeError: {str(error).splitlines()[0][:300] if str(error) else ''}"
    else:
        return "was accepted"
    begins = any(name in text for name in names) if anywhere else text.startswith(names)
    if not begins:
        return f"raised a text that does not begin with {names[0]} {text.splitlines()[0][:300]!r}"
    message = text[text.index("minfer::") :]
    if arguments and not any(re.search(rf"\b{re.escape(name)}", message) for name in arguments):
        return f"raised a text that names none of {', '.join(arguments)}: {message.splitlines()[0][:300]!r}"
    return None


def judge(family: Family, p: Parameters, wrong: Wrong, device: torch.device) -> list[str]:
    def call(tensors: dict[str, Tensor | None]) -> None:
        family.call(wrong.parameters, tensors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    names = family.operator_names()
    problem = refusal(lambda: call(wrong.tensors), names, wrong.names, anywhere=device.type == "cuda")
    if problem:
        return [f"a call where {wrong.what} {problem}"]
    if device.type != "cpu" or any(x is not None and x.device.type == "meta" for x in wrong.tensors.values()):
        return []
    empty = {name: None if x is None else _without_contents(x) for name, x in wrong.tensors.items()}
    texts = [_text(lambda: call(wrong.tensors)), _text(lambda: call(empty))]
    if texts[0] != texts[1]:
        return [f"a call where {wrong.what} raises {texts[0]!r}, without contents {texts[1]!r}"]
    return []


def _without_contents(x: Tensor) -> Tensor:
    """On the meta device, strides and offset as they are."""
    reach = x.storage_offset() + (0 if x.numel() == 0 else 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))
    return torch.empty(reach, dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), x.storage_offset())


def _text(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return "nothing"
