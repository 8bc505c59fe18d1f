"""What a fused function raises, with the place in the user's code."""

from __future__ import annotations

import inspect
import linecache
import os
import sys

import torch

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCHS = os.path.dirname(os.path.abspath(inspect.getfile(torch))) + os.sep


class FuseError(RuntimeError):
    """A function cannot be fused: an operation, a shape or a dtype that the kernels do not have. It begins with the user's line."""


def user_line() -> tuple[str, int] | None:
    """The innermost line that is neither ours nor torch's."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not os.path.abspath(file).startswith((_OURS, _TORCHS)):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def at_user_line(message: str) -> FuseError:
    """The error with its place: ``file:line: message``, and the text of the line where it can be read."""
    place = user_line()
    if place is None:
        return FuseError(message)
    file, line = place
    text = linecache.getline(file, line).strip()
    return FuseError(f"{file}:{line}: {message}" + (f"\n    {text}" if text else ""))
