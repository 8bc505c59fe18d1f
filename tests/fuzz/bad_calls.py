"""Calls that cannot be right: a legal one, changed in one place. Each must raise a RuntimeError that begins with the operator's name and
names the argument, on every device, with the same words for tensors with and without contents. None may return a number."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compare import mismatch
from .draw import Draw
from .family import Argument, Contents, Family, Parameters, WrongTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)


@dataclass
class Wrong:
    """what: the change. names: arguments of which the message must name one. or_right: it may be accepted where the result is right."""

    what: str
    tensors: dict[str, Tensor | None]
    parameters: Parameters
    names: tuple[str, ...]
    or_right: bool = False


def draw_wrong(family: Family, p: Parameters, tensors: dict[str, Tensor | None], draw: Draw) -> Wrong | None:
    """A wrong call of what the family says about its arguments, made of a legal one's; None where it says nothing."""
    arguments = {name: a for name, a in family.arguments(p).items() if tensors.get(name) is not None}
    options, others = family.wrong_options(p), [*family.wrong_tensors(p, tensors), *_wrong_outs(family, p, tensors)]
    kinds = {"dtype": 3, "rank": 2, "size": 4} if arguments else {}
    if len(arguments) > 1:
        kinds["device"] = 2
    if options:
        kinds["option"] = 4
    if others:
        kinds["other"] = 3
    overlapping = _overlap(family, p, tensors)
    if overlapping is not None:
        kinds["overlap"] = 1
    if not kinds:
        return None
    for _ in range(8):  # not every kind fits to every argument
        kind = draw.weighted(kinds)
        if kind == "option":
            name, value, named = draw.choice(options)
            return Wrong(f"{name} = {value!r}", tensors, p | {"extra": {name: value}}, (named,))
        if kind == "other":
            what, instead, names = draw.choice(others)
            return Wrong(what, tensors | instead, p, names)
        if kind == "overlap":
            return Wrong("out overlaps an input", tensors | {"out": overlapping}, p, ("out",), or_right=True)
        name = draw.choice(list(arguments))
        changed = _changed(kind, name, tensors, arguments, draw)
        if changed is not None:
            what, x = changed
            return Wrong(f"{name} {what}", tensors | {name: x}, p, (name, *arguments[name].beside))
    return None


def _wrong_outs(family: Family, p: Parameters, tensors: dict[str, Tensor | None]) -> list[WrongTensors]:
    """out= whose elements share memory: no order of writing them would be right."""
    if family.out(p) is None or "out_is" in p:
        return []
    out = tensors["out"]
    found: list[WrongTensors] = []
    for mode, size in enumerate(out.shape):
        if size > 1 and out.numel():
            found.append((f"out repeats itself along mode {mode}", {"out": out.narrow(mode, 0, 1).expand(out.shape)}, ("out",)))
    if out.dim() == 2 and min(out.shape) > 1:
        windows = out.new_zeros(sum(out.shape)).as_strided(out.shape, (1, 1))
        found.append(("out's rows overlap", {"out": windows}, ("out",)))
    return found


def _overlap(family: Family, p: Parameters, tensors: dict[str, Tensor | None]) -> Tensor | None:
    """An out= in the memory of an operand that is read."""
    out = None if family.out(p) is None or "out_is" in p else tensors["out"]
    if out is None or out.numel() == 0:
        return None
    for name in ("a", "b"):
        x = tensors.get(name)
        if x is not None and x.dtype == out.dtype and x.is_contiguous() and x.numel() >= out.numel():
            return x.flatten()[x.numel() - out.numel() :].view(out.shape)
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


def refusal(
    call: Callable[[], Any],
    names: tuple[str, ...],
    arguments: tuple[str, ...],
    *,
    error: type[Exception] = RuntimeError,
    anywhere: bool = False,
) -> str | None:
    """Why a call was not refused as it should be, or None. ``anywhere``: the operator's name need not be the text's beginning."""
    try:
        call()
    except error as raised:
        text = str(raised)
    except Exception as raised:  # noqa: BLE001  the wrong kind of error is what is looked for
        return f"raised {type(raised).__name__} instead of {error.__name__}: {str(raised).splitlines()[0][:300] if str(raised) else ''}"
    else:
        return "was accepted"
    places = [text.find(name) for name in names]
    if not any(place == 0 or (anywhere and place > 0) for place in places):
        return f"raised a text that does not begin with {names[0]} {text.splitlines()[0][:300]!r}"
    message = text[max(places) :]
    if arguments and not any(re.search(rf"\b{re.escape(name)}", message) for name in arguments):
        return f"raised a text that names none of {', '.join(arguments)}: {message.splitlines()[0][:300]!r}"
    return None


def judge(family: Family, p: Parameters, contents: Contents, wrong: Wrong, device: torch.device) -> list[str]:
    """What was wrong about how a wrong call was taken."""

    def call(tensors: dict[str, Tensor | None]) -> None:
        family.call(wrong.parameters, tensors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    names = family.operator_names()
    if wrong.or_right:
        return _right_or_refused(family, p, contents, wrong, device)
    problem = refusal(lambda: call(wrong.tensors), names, wrong.names, error=family.error, anywhere=device.type == "cuda")
    if problem:
        return [f"a call where {wrong.what} {problem}"]
    if device.type != "cpu" or not family.traced or any(x is not None and x.device.type == "meta" for x in wrong.tensors.values()):
        return []
    empty = {name: None if x is None else _without_contents(x) for name, x in wrong.tensors.items()}
    texts = [_text(lambda: call(wrong.tensors)), _text(lambda: call(empty))]
    if texts[0] != texts[1]:
        return [f"a call where {wrong.what} raises {texts[0]!r}, without contents {texts[1]!r}"]
    return []


def _right_or_refused(family: Family, p: Parameters, contents: Contents, wrong: Wrong, device: torch.device) -> list[str]:
    wants = family.expect(p, contents, {"out": wrong.tensors["out"].clone()}, {})
    try:
        results = family.call(wrong.parameters, wrong.tensors)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        text = str(error)
        good = any(name in text for name in family.operator_names()) and any(name in text for name in wrong.names)
        return [] if good else [f"a call where {wrong.what} raised {text.splitlines()[0][:300]!r}"]
    problems = [mismatch(results[want.name], want, strided=True) for want in wants]
    return [f"a call where {wrong.what} was accepted, and {problem}" for problem in problems if problem]


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
