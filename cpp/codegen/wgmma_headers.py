"""CUTLASS's headers of WGMMA, without the instructions that no kernel uses: copies in the build folder, found before the originals.

Eight headers hold a struct and its traits for every shape, pair of types and sparsity, 8 of the 14 MB that the compilers' front ends read
for a kernel. Here the structs of other types than ours have no members, and neither have those of sparse operands; names and templates
stay, because CUTLASS's selectors name them all. Half of the time that a translation unit pays for its headers goes with them, and the
machine code is the same. A kernel that needs another type gets an error that its struct has no member: add the type to KEPT.
"""

from __future__ import annotations

import re
from pathlib import Path

from codegen.toml import ConfigError

KEPT = ("F32F16F16", "F32BF16BF16", "F32E4M3E4M3", "S32S8S8")  # accumulator, A, B; dense
HEADERS = tuple(
    f"cute/{name}{part}.hpp"
    for name in ("arch/mma_sm90_gmma", "arch/mma_sm90_gmma_sparse", "atom/mma_traits_sm90_gmma", "atom/mma_traits_sm90_gmma_sparse")
    for part in ("", "_ext")
)
# An instruction's struct (MMA_64x8x16_F32F16F16_SS, of sparse operands GMMA_64x8x32_F32F16F16_SS), or its specialisation of MMA_Traits.
_STRUCT = re.compile(r"^(struct [^\n;{]*MMA_(?:\d|Traits<SM90)[^\n;{]*)\n\{\n.*?^\};\n", re.MULTILINE | re.DOTALL)
_KEPT = re.compile(rf"_(?:{'|'.join(KEPT)})_[SR]S(?:_TN)?\b")
_REMARKS = re.compile(r"^(?:/{20,}|// GMMA .*)\n\n?", re.MULTILINE)


def trim(text: str, *, sparse: bool) -> str:
    """The header's text with the members of unused structs taken out.

    Raises:
      ConfigError: there is none, so it is not the header that this was written for.
    """
    emptied = 0

    def shorten(found: re.Match) -> str:
        nonlocal emptied
        if not sparse and _KEPT.search(found[1]):
            return found[0]
        emptied += 1
        return f"{found[1]} {{}};\n"

    text = _STRUCT.sub(shorten, text)
    if emptied == 0:
        raise ConfigError("this CUTLASS states its WGMMA instructions in another form than cpp/codegen/wgmma_headers.py knows")
    return _REMARKS.sub("", text)


def texts(include: Path) -> dict[str, str]:
    """Path below an include folder -> text, of CUTLASS's folder `include`."""
    return {name: trim((include / name).read_text(), sparse="sparse" in name) for name in HEADERS}
