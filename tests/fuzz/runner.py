"""Runs one case: draws it, computes the truth, calls the operator in the modes that were drawn, and says what was wrong."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import bad_calls, late_writer, modes
from .arena import Arena, Storage, draw_layout, far_modes
from .compare import Expected, mismatch
from .draw import Data, Draw
from .families import FAMILIES
from .family import Contents, Family, Hostile, Parameters, limits_of

# What an operator says of a kernel that was asked for by name and is not of this build, this device or this problem.
REFUSED = re.compile(
    r"cannot compute this problem|is in the table but not in this build|needs more than 2\^31 work items|cannot be launched with"
    r"|does not compute"
)
LARGEST_COPIED = 1 << 26  # elements of a storage that each thread has a copy of


@dataclass
class Result:
    """Of a case. kind: "legal", "bad" or "hostile"; failures: one line each; fatal: the process cannot go on."""

    name: str
    kind: str = "legal"
    parameters: str = ""
    comparisons: int = 0
    failures: list[str] = field(default_factory=list)
    fatal: bool = False
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def case_of(seed: int, index: int, only: list[str] | None = None) -> str:
    """The name of a run's case ``index``; ``only``: the families that it is drawn from."""
    shares = {name: family.share for name, family in FAMILIES.items() if not only or name in only}
    return f"{Draw(f'{seed}/{index}').weighted(shares)}:{index}"


def run_case(name: str, seed: int, device: torch.device, announce: Callable[[str], None] = lambda parameters: None) -> Result:
    """``name``: FAMILY:INDEX. ``announce`` is told what was drawn before it is called."""
    family_name, _, _ = name.partition(":")
    result, begin = Result(name), time.monotonic()
    try:
        _Case(FAMILIES[family_name], name, seed, device, result).run(announce)
    except Exception as error:  # noqa: BLE001  an operator that raises is a failure like others
        result.failures.append(f"raised {type(error).__name__}: {_first_lines(error)} [{_place(error)}]")
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except Exception as error:  # noqa: BLE001  after this the context is lost
            result.failures.append(f"the CUDA context is lost: {_first_lines(error)}")
            result.fatal = True
    result.seconds = time.monotonic() - begin
    return result


def _first_lines(error: BaseException) -> str:
    return " / ".join(str(error).strip().splitlines()[:3])[:600]


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(frames[-4:]))


class _Case:
    def __init__(self, family: Family, name: str, seed: int, device: torch.device, result: Result):
        self.family, self.device, self.result = family, device, result
        self.draw = Draw(f"{seed}/{name}")
        self.data = Data(device, self.draw.getrandbits(62))
        self.p: Parameters = {}
        self.wants: list[Expected] = []

    def run(self, announce: Callable[[str], None]) -> None:
        family, draw = self.family, self.draw
        kind = draw.weighted({"legal": 80, "bad": 12, "hostile": 8})
        self.p = family.draw(draw, limits_of(self.device))
        self.result.parameters = describe(self.p)
        contents = family.fill(self.p, draw, self.data)
        hostile = family.hostile(self.p, contents, draw) if kind == "hostile" else None
        arena = self._arena(contents)
        announce(f"{kind}: {self.result.parameters}" + (f"; {hostile.what}" if hostile is not None else ""))
        if kind == "bad" and self._bad(arena, contents):
            return
        call = modes.Call(family, self.p, arena, list(contents.tensors))
        if hostile is not None:
            self.result.kind = "hostile"
            self.result.parameters += f"; {hostile.what}"
            self._hostile(call, hostile)
        else:
            self._legal(call, contents)

    # ---- operands ------------------------------------------------------------------------------------------------------------------

    def _arena(self, contents: Contents) -> Arena:
        """Places contents; where a view repeats elements, they become what it shows."""
        arena, layouts = Arena(self.device), []
        far = self._far_operand(contents)
        for name, x in contents.tensors.items():
            if x is not None:
                mode = far[1] if far is not None and far[0] == name else None
                layout = draw_layout(self.draw, self.family.rule(self.p, name), x.shape, x.dtype, far=mode)
                arena.put(name, x, layout)
                contents.tensors[name] = arena.storages[name].content()
                layouts.append(self._layout_text(name, arena.storages[name]))
        out = self.family.out(self.p)
        if out is not None and "out_is" not in self.p:
            layout = draw_layout(self.draw, self.family.rule(self.p, "out"), *out)
            arena.put_empty("out", *out, layout)
            layouts.append(self._layout_text("out", arena.storages["out"]))
        arena.remember()
        self.result.parameters += "; " + ", ".join(text for text in layouts if text)
        return arena

    def _far_operand(self, contents: Contents) -> tuple[str, int] | None:
        """Rarely, an operand of 16 bits or fewer of which a mode spans 2^31 elements."""
        if self.device.type != "cuda" or not self.draw.chance(0.005):
            return None
        found = []
        for name, x in contents.tensors.items():
            if x is not None and x.dtype.itemsize <= 2:
                found += [(name, mode) for mode in far_modes(self.family.rule(self.p, name), x.shape)]
        return self.draw.choice(found) if found else None

    @staticmethod
    def _layout_text(name: str, storage: Storage) -> str:
        text = storage.layout.text(storage.shape, storage.dtype.itemsize)
        return f"{name} {'x'.join(map(str, storage.shape))}:{text}"

    # ---- kinds of cases --------------------------------------------------------------------------------------------------------------

    def _legal(self, call: modes.Call, contents: Contents) -> None:
        family, p, draw, device = self.family, self.p, self.draw, self.device
        chosen = self._modes(call)
        other = None
        if "graph" in chosen or "late" in chosen:
            other = family.fill(p, draw, self.data)
        others = []
        if "threads" in chosen and all(storage.layout.size <= LARGEST_COPIED for storage in call.arena.storages.values()):
            others = [family.fill(p, draw, self.data) for _ in range(modes.OTHER_THREADS)]
        want = self._eager(call, contents)
        if want is None:
            return
        for mode in chosen:
            try:
                problem = modes.threads(call, want, others) if mode == "threads" else self._mode(mode, call, want, contents, other)
            except Exception as error:  # noqa: BLE001
                problem = f"raised {type(error).__name__}: {_first_lines(error)} [{_place(error)}]"
            self.result.comparisons += mode != "forced"  # which counts its own
            if problem:
                self.result.failures.append(f"{mode}: {problem}")
            modes.synchronize(device)
        self.result.failures += call.arena.changed(call.written)

    def _mode(self, mode: str, call: modes.Call, want: dict[str, Tensor], contents: Contents, other: Contents | None) -> str | None:
        if mode == "graph":
            return modes.graph(call, want, other)
        if mode == "forced":
            return self._forced(call)
        if mode == "late":
            return late_writer.late(call, contents, other, self.draw)
        return getattr(modes, mode)(call, want)

    def _forced(self, call: modes.Call) -> str | None:
        """By kernels that would not be chosen: each is right, or refuses and says why."""
        family, p, draw = self.family, self.p, self.draw
        form = p.get("format") or p.get("kv_format") or "dense"
        names = [name for name in modes.kernels_of(family.kernels, p["dtype"], "dense" if form == "16bit" else form) if family.fits(name)]
        if family.kernels == "w4a16":
            names = [*names, "dequantize"]
        for name in draw.sample(names, min(len(names), 4)):
            if family.kernels == "gemm" and draw.chance(0.4):
                name += draw.pick(
                    "@decomposition=split_k,splits=3",
                    "@decomposition=stream_k",
                    "@decomposition=persistent,swizzle=4",
                    "@realign_a=1,realign_b=1",
                    "@decomposition=split_k,splits=2,realign_b=1",
                )
            if modes.has_ranges(name) and draw.chance(0.4):
                name += draw.pick("@decomposition=ranges,splits=2", "@decomposition=ranges,splits=5")
            if family.launches(p) and draw.chance(0.5):
                name += draw.choice(family.launches(p))
            call.arena.restore(call.written)
            try:
                results = family.call(p | {"extra": {"kernel": name}}, call.tensors())
            except RuntimeError as error:
                if not REFUSED.search(str(error)):
                    raise
                continue
            modes.synchronize(self.device)
            for want in self.wants:
                problem = mismatch(results[want.name], want, strided=family.out(p) is not None)
                self.result.comparisons += 1
                if problem:
                    return f"by {name}: {problem}"
            changed = call.arena.changed(call.written)
            if changed:
                return f"by {name}: {changed[0]}"
        return None

    def _modes(self, call: modes.Call) -> list[str]:
        draw = self.draw
        if self.device.type != "cuda":
            chances = {"again": 0.3, "inference": 0.15, "threads": 0.1, "fake": 0.1, "compiled": 0.004}
            if not self.family.traced:
                del chances["fake"], chances["compiled"]
            elif self.family.out(self.p) is not None and not call.tensors()[self.p.get("out_is", "out")].is_contiguous():
                del chances["compiled"]  # Dynamo takes no other out=
            return [mode for mode, chance in chances.items() if draw.chance(chance)]
        # All are drawn, whatever this machine has: a case is the same elsewhere but for the modes that are not there.
        chances = {"busy": 0.6, "inference": 0.2, "threads": 0.25, "fresh_thread": 0.3, "other_device": 0.3, "fake": 0.02}
        chances |= {"forced": 0.25, "late": 0.08, "graph": 0.5}  # graph is the last one: it leaves other contents
        chosen = [mode for mode, chance in chances.items() if draw.chance(chance)]
        missing = set()
        if torch.cuda.device_count() < 2:
            missing.add("other_device")
        if not self.family.traced:
            missing |= {"fake", "graph", "late", "forced"}
        if not self.family.kernels:
            missing.add("forced")
        if torch.cuda.get_device_capability(self.device) < (9, 0):
            missing.add("late")
        return [mode for mode in chosen if mode not in missing]

    def _eager(self, call: modes.Call, contents: Contents) -> dict[str, Tensor] | None:
        """The run that is compared with the truth; copies of its results, None where it failed."""
        family, p, result = self.family, self.p, self.result
        before = {name: call.arena.before(name) for name in call.written}
        modes.poison_free_memory(self.device, [x for x in call.tensors().values() if x is not None][:2])
        results = call()
        modes.synchronize(self.device)
        result.failures += call.arena.changed(call.written)
        result.comparisons += 1
        form = family.out(p)
        if form is not None:
            target = call.tensors()[p.get("out_is", "out")]
            if results["out"].data_ptr() != target.data_ptr() or results["out"].stride() != target.stride():
                result.failures.append("what was returned is not out")
        self.wants = family.expect(p, contents, before, results)
        for want in self.wants:
            strided = form is not None and want.name == "out"
            problem = mismatch(results[want.name], want, strided=strided)
            result.comparisons += 1
            if problem:
                result.failures.append(problem)
        return modes.copies(results) if not result.failures else None

    def _hostile(self, call: modes.Call, hostile: Hostile) -> None:
        """On CUDA memory stays intact and, where they are defined, values are right; the CPU refuses."""
        family, p, result = self.family, self.p, self.result
        before = {name: call.arena.before(name) for name in call.written}
        if self.device.type != "cuda" and hostile.cpu_raises:
            problem = bad_calls.refusal(lambda: call(), family.operator_names(), ())
            result.comparisons += 1
            if problem:
                result.failures.append(f"a call that cannot be right {problem}")
            return
        try:
            results = call()
        except RuntimeError:
            if self.device.type == "cuda" or hostile.cpu_raises is not None:
                raise
            result.comparisons += 1
            return
        modes.synchronize(self.device)
        result.comparisons += 1
        result.failures += call.arena.changed(call.written)
        if hostile.expected is not None:
            for want in hostile.expected(before, results):
                problem = mismatch(results[want.name], want, strided=family.out(p) is not None)
                result.comparisons += 1
                if problem:
                    result.failures.append(problem)

    def _bad(self, arena: Arena, contents: Contents) -> bool:
        """Whether there was a call that cannot be right to be made of this one."""
        tensors = dict.fromkeys(contents.tensors) | arena.views()
        wrong = bad_calls.draw_wrong(self.family, self.p, tensors, self.draw)
        if wrong is None:
            return False
        self.result.kind = "bad"
        self.result.parameters += f"; {wrong.what}"
        self.result.comparisons += 1
        self.result.failures += bad_calls.judge(self.family, self.p, contents, wrong, self.device)
        return True


def describe(p: Parameters) -> str:
    """Parameters in one line."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:.6g}"
        if isinstance(value, tuple | list):
            return "(" + ",".join(map(text, value)) + ")"
        return str(value)

    return " ".join(f"{name}={text(value)}" for name, value in p.items())
