"""The proof that no kernel which still runs writes a module's weights, as ``constant_weights`` of its operator promises.

With programmatic dependent launch, a kernel may begin while its predecessor, the preceding kernel of the stream, still runs, if the
predecessor allows it, as minfer's kernels do; with ``constant_weights`` the kernel reads weights before its predecessor has finished. The
proof: torch has counted no write to the tensors (``_version``) since an earlier forward of the module, and

* in an eager call, all work that was launched before that forward has finished, as an event on the forward's stream has shown. That covers
  writers on other streams: the stream must have waited for them, or the forward itself would have read weights that were still being
  written. A forward without a row, or one that raised, has read nothing, and does not count.
* while a CUDA graph is captured, that forward was outside of captures: so no kernel of the graph, up to this one, writes the weights.
  Work that precedes a replay, such as another graph or the writer of new weights, has finished when the graph begins: launches overlap
  within a graph or outside of graphs, but not across the beginning of a graph.

Torch does not count writes through ``.data``, or by a kernel that was given an address. Those of torch's kernels do no harm, since torch's
kernels do not allow the overlap; after others, ``torch.autograd.graph.increment_version`` counts a write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.namespace import ops
from .._core.torch_private import dispatch_modes_are_active, version_of

_DEVICE = "cuda"
_PLAIN = (Tensor, torch.nn.Parameter)  # others may be made up by a tracer


def _is_done(event: torch.cuda.Event) -> bool:
    # Not event.query(): that breaks a capture of another thread, unless the capture's error mode is thread_local.
    return ops._is_done(event.cuda_event)


def is_tracing(x: Tensor) -> bool:
    """Whether this call becomes part of a graph: of torch.compile, torch.fx, make_fx, torch.jit.trace, or on tensors without contents."""
    return type(x) not in _PLAIN or torch.compiler.is_compiling() or torch.jit.is_tracing() or dispatch_modes_are_active()


def _nothing() -> None:
    """In place of a reference where there is no tensor."""


class _Seen(NamedTuple):
    """The tensors at a forward, by references that keep no memory. Their addresses change where ``.data`` is assigned to."""

    qweight: Callable[[], Tensor | None]
    scales: Callable[[], Tensor | None]
    zeros: Callable[[], Tensor | None]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    event: torch.cuda.Event | None  # recorded behind the work that precedes the forward; None: the work has finished


class ConstantWeights:
    """The state of the proof for one module; in copies of the module, and in pickled ones, it starts anew.

    Several threads may use it: the state is replaced as a whole.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: _Seen | None = None

    def __reduce__(self):
        return ConstantWeights, ()

    def reset(self) -> None:
        """Starts anew, after a forward that has not read the weights."""
        self._seen = None

    def promised(self, word: bool | None, x: Tensor, qweight: Tensor, scales: Tensor, zeros: Tensor | None = None) -> bool:
        """``constant_weights`` of a call on x, where the module's user says ``word``, or None: what is proven. A graph that is traced
        outlives the call, and gets no more than the user's word."""
        if word is not None:
            return word
        # Without a row the operator reads no weights: such a call says nothing of what was written in front of it.
        return not is_tracing(x) and x.numel() > 0 and self.proven(qweight, scales, zeros)

    def proven(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """Whether a call with these tensors, on the current stream, may pass ``constant_weights``. It never waits."""
        seen = self._seen
        if seen is None:
            return self._update(None, qweight, scales, zeros)
        q, s, z, versions, addresses, event = seen
        if (
            q() is not qweight
            or s() is not scales
            or z() is not zeros
            or versions != (version_of(qweight), version_of(scales), 0 if zeros is None else version_of(zeros))
            or addresses != (qweight.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr())
        ):
            seen = None
        elif event is None:
            return True
        return self._update(seen, qweight, scales, zeros)

    def _update(self, seen: _Seen | None, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """``seen``: the state, or None where it is of other tensors or these have changed since."""
        tensors = (qweight, scales) if zeros is None else (qweight, scales, zeros)
        # Tensors that were made under inference_mode have no version.
        if seen is None and any(type(x) not in _PLAIN or x.device.type != _DEVICE or x.is_inference() for x in tensors):
            return False
        with torch.cuda.device(qweight.device):
            if torch.cuda.is_current_stream_capturing():
                return seen is not None
            if seen is not None:
                if not _is_done(seen.event):
                    return False
                self._seen = seen._replace(event=None)
                return True
            # Versions are read before the event is recorded: after a write in between, the next forward finds another version.
            references = tuple(map(weakref.ref, tensors))
            versions, addresses = tuple(map(version_of, tensors)), tuple(x.data_ptr() for x in tensors)
            if zeros is None:
                references, versions, addresses = (*references, _nothing), (*versions, 0), (*addresses, 0)
            event = torch.cuda.Event()
            event.record()
            self._seen = _Seen(*references, versions, addresses, event)
            return False
