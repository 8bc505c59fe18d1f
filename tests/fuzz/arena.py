"""Where operands live: views into larger storages that are filled with NaN, or with integers that nobody may use, on all sides.

A view's gaps (padded rows, steps, other orders of its modes) and the bands before and behind it hold the filling, whose bits are compared
afterwards. Bytes of 0xff are NaN in every floating-point type here and -1 in every integer; integers are also surrounded by others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .draw import Draw

BAND = 256  # elements before and behind a view, at least
FILLINGS = (0xFF, 0xFF, 0x00, 0x7F, 0x80)  # of integers: -1, 0, large, and as negative as that


class Rule(NamedTuple):
    """Which views of a tensor an operator takes, by its documentation.

    ``unit``: bytes that base and strides are multiples of (0: of the element); ``last``: the last mode is contiguous; ``order``: modes may
    lie in any order; ``expand``: strides of 0 are legal; ``dense``: contiguous and nothing else, at any base; ``run``: all modes but the
    last are one run of rows; ``usual``: an order of modes in memory that comes often.
    """

    unit: int = 0
    last: bool = False
    order: bool = True
    expand: bool = True
    dense: bool = False
    run: bool = False
    usual: tuple[int, ...] = ()


ANY = Rule()
VIEW = Rule(expand=False)  # any view that does not overlap itself
ROWS = Rule(last=True, order=False, expand=False)  # rows contiguous, any leading dimension
TMA = Rule(unit=16, last=True, expand=False)
DENSE = Rule(dense=True)
RUN = Rule(last=True, order=False, expand=False, run=True)


class Layout(NamedTuple):
    """Strides and the place of a view in its storage, in elements."""

    strides: tuple[int, ...]
    offset: int
    size: int  # of the storage
    filling: int

    def text(self, shape: Sequence[int], bytes_each: int) -> str:
        base = self.offset * bytes_each
        odd = "" if base % 16 == 0 else f"+{base % 16}B"
        return "x".join(map(str, self.strides)) + odd


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))


def _draw_strides(draw: Draw, rule: Rule, shape: Sequence[int], unit: int) -> list[int]:
    """``unit``: elements that strides are multiples of, but for that of a contiguous last mode."""
    modes = len(shape)
    strides, order = list(contiguous_strides(shape)), list(range(modes))  # order: from the outermost mode to the innermost
    if rule.dense or modes == 0:
        return strides
    style = draw.weighted({"plain": 4, "padded": 3, "order": 2, "step": 1, "expand": 0.5})
    legal = {"order": rule.order, "step": not rule.last, "expand": rule.expand}.get(style, True)
    style = style if legal else "padded"
    usual = bool(rule.usual) and draw.chance(0.5)
    if usual:
        order, style = list(rule.usual), "plain" if draw.chance(0.7) else "padded"
    elif style == "order":
        movable = order[:-1] if rule.last else order
        draw.shuffle(movable)
        order = movable + order[len(movable) :]
    step = draw.pick(2, 3, 8) if style == "step" else 1
    for mode in reversed(order):
        strides[mode] = step
        step *= max(shape[mode], 1)
        if style != "plain" and draw.chance(0.6) and not (rule.run and mode < modes - 1):
            step += draw.pick(1, 2, 3, 8, 16, 64) if unit == 1 else unit * draw.pick(1, 2, 3, 8)
        step = -(-step // unit) * unit
    if style == "expand":
        strides[draw.randrange(modes)] = 0
    for mode, size in enumerate(shape):  # what a mode of one element has for a stride says nothing
        if size == 1 and draw.chance(0.2) and not (rule.run or (rule.last and mode == modes - 1)):
            strides[mode] = unit * draw.pick(1, 5, 1000)
    return strides


def far_modes(rule: Rule, shape: Sequence[int]) -> list[int]:
    """Modes whose few elements may lie gigabytes apart."""
    last = len(shape) - (1 if rule.last else 0)
    return [] if rule.dense or rule.run or 0 in shape else [mode for mode in range(last) if shape[mode] in (2, 3)]


def draw_layout(
    draw: Draw, rule: Rule, shape: Sequence[int], dtype: torch.dtype, *, limit: int = 1 << 26, far: int | None = None
) -> Layout:
    """A view that the rule allows; plain ones come often, for they are what is used most and have kernels of their own. ``far``: a mode
    whose elements lie so far apart that the last one's offset does not fit in 32 bits."""
    each = dtype.itemsize
    unit = max(1, rule.unit // each)
    strides = _draw_strides(draw, rule, shape, unit)
    while _extent(shape, strides) > limit:
        strides = _draw_strides(draw, rule, shape, unit)
    if far is not None:
        strides[far] = 2**31 // (shape[far] - 1) + 64
    extent = _extent(shape, strides)
    lane = max(1, 64 // each)
    band = -(-max(BAND, min(extent, 4096)) // lane) * lane
    offset = band  # a multiple of 64 bytes, plus ..
    if rule.unit:
        offset += unit * draw.pick(0, 0, 1, 2)
    elif draw.chance(0.4):
        offset += draw.pick(1, 2, 4, 8)
    filling = 0xFF if dtype.is_floating_point else draw.choice(FILLINGS)
    return Layout(tuple(strides), offset, offset + extent + band, filling)


class Storage:
    """One operand: its bytes, and the view that operators are given."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, layout: Layout, device: torch.device, content: Tensor | None = None):
        self.shape, self.dtype, self.layout = tuple(shape), dtype, layout
        each = dtype.itemsize
        self.bytes = torch.full((layout.size * each + (-layout.size * each) % 8,), layout.filling, dtype=torch.uint8, device=device)
        self.view = self.typed(self.bytes)
        if content is not None:
            self.fill(content)

    def typed(self, whole: Tensor) -> Tensor:
        """The view's place in a storage's bytes."""
        used = whole[: self.layout.size * self.dtype.itemsize].view(self.dtype)
        return used.as_strided(self.shape, self.layout.strides, self.layout.offset)

    def fill(self, content: Tensor) -> None:
        """Where the view repeats elements, the first of them counts."""
        view, content = _raw(self.view), _raw(content)
        for mode, stride in enumerate(self.layout.strides):
            if stride == 0:
                view, content = view.narrow(mode, 0, min(1, view.shape[mode])), content.narrow(mode, 0, min(1, content.shape[mode]))
        view.copy_(content)

    def content(self) -> Tensor:
        return _raw(self.view).clone(memory_format=torch.contiguous_format).view(self.dtype)

    def clone(self) -> Storage:
        other = object.__new__(Storage)
        other.shape, other.dtype, other.layout = self.shape, self.dtype, self.layout
        other.bytes = self.bytes.clone()
        other.view = other.typed(other.bytes)
        return other


def _raw(x: Tensor) -> Tensor:
    """Few operations know the 8-bit floating-point types: their bytes."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


class Arena:
    """The operands of a call by name."""

    def __init__(self, device: torch.device):
        self.device = device
        self.storages: dict[str, Storage] = {}
        self._before: dict[str, Tensor] = {}

    def put(self, name: str, content: Tensor, layout: Layout) -> None:
        self.storages[name] = Storage(content.shape, content.dtype, layout, self.device, content)

    def put_empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, layout: Layout) -> None:
        """An output: its view holds the filling, too."""
        self.storages[name] = Storage(shape, dtype, layout._replace(filling=0xFF), self.device)

    def views(self) -> dict[str, Tensor]:
        return {name: storage.view for name, storage in self.storages.items()}

    def contents(self) -> dict[str, Tensor]:
        return {name: storage.content() for name, storage in self.storages.items()}

    def refill(self, contents: dict[str, Tensor]) -> None:
        for name, content in contents.items():
            if content is not None:
                self.storages[name].fill(content)

    def remember(self) -> None:
        """The bits that :meth:`restore` brings back and :meth:`changed` compares with."""
        self._before = {name: storage.bytes.clone() for name, storage in self.storages.items()}

    def restore(self, names: Sequence[str]) -> None:
        for name in names:
            self.storages[name].bytes.copy_(self._before[name])

    def before(self, name: str) -> Tensor:
        """The view's contents as remembered."""
        return self.storages[name].typed(self._before[name])

    def changed(self, written: Sequence[str]) -> list[str]:
        """What has other bits than remembered: inputs anywhere, those of ``written`` outside of their view."""
        found = []
        for name, storage in self.storages.items():
            now, before = storage.bytes, self._before[name]
            if name in written:
                now = now.clone()
                _raw(storage.typed(now)).copy_(_raw(storage.typed(before)))
            if not torch.equal(now, before):
                first, count = _differences(now, before)
                where = first // storage.dtype.itemsize
                place = "guard band" if name in written else "input"
                begin, end = storage.layout.offset, storage.layout.size
                found.append(f"{place} of {name}: {count} bytes changed, first element {where} of a view from {begin} in {end}")
        return found

    def clone(self, names: Sequence[str]) -> Arena:
        """The same operands, with storages of their own for ``names``."""
        other = Arena(self.device)
        other.storages = {name: storage.clone() if name in names else storage for name, storage in self.storages.items()}
        other._before = self._before
        return other


def _differences(a: Tensor, b: Tensor) -> tuple[int, int]:
    """The first byte that differs, and how many do; in pieces, for some storages have more bytes than an int32 counts."""
    first, count, step = -1, 0, 1 << 28
    for begin in range(0, a.numel(), step):
        different = (a[begin : begin + step] != b[begin : begin + step]).nonzero()
        if first < 0 and len(different):
            first = begin + int(different[0])
        count += len(different)
    return first, count


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b))


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor's elements in order; of a contiguous one the memory itself."""
    x = _raw(x.detach()).contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
