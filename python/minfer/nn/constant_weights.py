"""The proof that nothing which still runs writes a module's weights, as ``constant_weights`` of its operator promises.

A kernel may begin while the kernel in front of it on its stream still runs, if that one asks for it, as the operators' own do
(programmatic dependent launch); with ``constant_weights`` it reads weights before the other has finished. The proof: no write that
torch counts (``_version``) has come to the tensors since an earlier forward of the module, and

* in an eager call, all work in front of that forward has finished. An event on the forward's stream has said so. That covers writers on
  other streams: the stream must have waited for them, or the forward itself would have read what was still being written. A forward
  without a row, or one that raised, has read nothing, and does not count.
* while a CUDA graph is captured, that forward was outside of captures: so no kernel of the graph, up to this one, writes the weights.
  What stands in front of a replay, another graph or the writer of new weights, has finished when the graph begins: launches overlap
  within a graph or outside of graphs, but not across.

Writes that torch does not count are not seen: through ``.data``, or by a kernel that was given an address. Those of torch's own kernels do
no harm, which do not ask for the overlap; after others, ``torch.autograd.graph.increment_version`` counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._core.torch_private import dispatch_modes_are_active, version_of

_DEVICE = "cuda"
_PLAIN = (Tensor, torch.nn.Parameter)  # others may be made up by a tracer


def _is_done(event: torch.cuda.Event) -> bool:
    # Not event.query(): that breaks a capture of another thread, unless the capture's error mode is thread_local.
    return torch.ops.minfer._is_done(event.cuda_event)


def is_tracing(x: Tensor) -> bool:
    """Whether this call becomes part of a graph: of torch.compile, torch.fx, make_fx, torch.jit.trace, or on tensors without contents."""
    return type(x) not in _PLAIN or torch.compiler.is_compiling() or torch.jit.is_tracing() or dispatch_modes_are_active()


def _nothing() -> None:
    """In place of a reference to a tensor that is not there."""


class _Seen(NamedTuple):
    """The tensors at a forward, by references that keep no memory. Their addresses change where ``.data`` is assigned to."""

    qweight: Callable[[], Tensor | None]
    scales: Callable[[], Tensor | None]
    zeros: Callable[[], Tensor | None]
    versions: tuple[int, ...]
    addresses: tuple[int, ...]
    event: torch.cuda.Event | None  # behind the work in front of the forward; None: it has happened


class ConstantWeights:
    """What a module knows of its weights; copies of the module, and pickled ones, begin with nothing.

    Threads may share it: what it knows is replaced as a whole.
    """

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: _Seen | None = None

    def __reduce__(self):
        return ConstantWeights, ()

    def forget(self) -> None:
        """After a forward that did not come to read the weights."""
        self._seen = None

    def proven(self, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """Whether a call with these tensors, on the current stream, may say ``constant_weights``. It never waits."""
        seen = self._seen
        if seen is None:
            return self._look(None, qweight, scales, zeros)
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
        return self._look(seen, qweight, scales, zeros)

    def _look(self, seen: _Seen | None, qweight: Tensor, scales: Tensor, zeros: Tensor | None) -> bool:
        """``seen``: of these tensors, if they have not changed since."""
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
            # Versions before the event: a write in between is of another version at the next forward.
            references = tuple(map(weakref.ref, tensors))
            versions, addresses = tuple(map(version_of, tensors)), tuple(x.data_ptr() for x in tensors)
            if zeros is None:
                references, versions, addresses = (*references, _nothing), (*versions, 0), (*addresses, 0)
            event = torch.cuda.Event()
            event.record()
            self._seen = _Seen(*references, versions, addresses, event)
            return False
