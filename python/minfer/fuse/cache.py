"""Compiled kernels on disk, for all processes of a user.

A file holds one kernel: a magic number, the SHA-256 of the rest, a header in JSON, the cubin. It is written under another name and renamed,
so that a reader sees all of it or nothing, whoever else writes. What is damaged is compiled anew; what belongs to somebody else, or may be
written by somebody else, is not read, because its code would run as this user's.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import tempfile
import warnings
from pathlib import Path

from .artifact import Artifact

_MAGIC = b"MINFERK1"
_HEAD = struct.Struct("<8s32sI")


def folder() -> Path:
    """``fuse`` in ``MINFER_CACHE_DIR``, else in ``~/.cache/minfer``."""
    return Path(os.environ.get("MINFER_CACHE_DIR") or Path.home() / ".cache" / "minfer") / "fuse"


def pack(key: str, artifact: Artifact) -> bytes:
    header = json.dumps(
        {
            "key": key,
            "entry": artifact.entry,
            "shared_bytes": artifact.shared_bytes,
            "threads": artifact.threads,
            "cluster": artifact.cluster,
        }
    ).encode()
    rest = header + artifact.cubin
    return _HEAD.pack(_MAGIC, hashlib.sha256(rest).digest(), len(header)) + rest


def unpack(key: str, data: bytes) -> Artifact:
    """@raise ValueError for what is not a whole file of this kernel."""
    if len(data) < _HEAD.size:
        raise ValueError("it is cut off")
    magic, digest, length = _HEAD.unpack_from(data)
    rest = data[_HEAD.size :]
    if magic != _MAGIC:
        raise ValueError("it is not a kernel of minfer.fuse")
    if hashlib.sha256(rest).digest() != digest:
        raise ValueError("its checksum is wrong")
    header = json.loads(rest[:length])
    if header["key"] != key:
        raise ValueError("it is another kernel")
    return Artifact(rest[length:], header["entry"], header["shared_bytes"], header["threads"], header["cluster"])


def _mistrusted(path: Path) -> str | None:
    """Why a file or folder must not be read."""
    if not hasattr(os, "geteuid"):
        return None
    status = path.stat()
    if status.st_uid != os.geteuid():
        return f"it belongs to the user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return f"others may write it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def load(key: str) -> Artifact | None:
    path = folder() / f"{key}.kernel"
    try:
        for place in (path.parent, path):
            reason = _mistrusted(place)
            if reason is not None:
                warnings.warn(f"minfer.fuse: {place} is not used as a cache: {reason}", RuntimeWarning, stacklevel=2)
                return None
        return unpack(key, path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"minfer.fuse: {path} cannot be read: {error}", RuntimeWarning, stacklevel=2)
    except (ValueError, KeyError) as error:
        warnings.warn(f"minfer.fuse: {path} is compiled anew: {error}", RuntimeWarning, stacklevel=2)
    return None


def store(key: str, artifact: Artifact) -> None:
    """A folder that cannot be written is no error: kernels are then compiled in each process."""
    path = folder() / f"{key}.kernel"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _mistrusted(path.parent) is not None:
            return
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{key[:16]}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(pack(key, artifact))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(f"minfer.fuse: {path.parent} cannot be written: {error}", RuntimeWarning, stacklevel=2)
