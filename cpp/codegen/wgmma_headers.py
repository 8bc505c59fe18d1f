"""CUTLASS's headers of WGMMA, without the instructions that no kernel uses: copies in the build folder, found before the originals.

Eight headers hold a struct, its traits and a second name for every shape, pair of types and sparsity, 8 of the 14 MB that the compilers'
front ends read for a kernel. Here the structs of other types than ours have no members, and neither have those of sparse operands; their
names and templates stay, because CUTLASS's selectors name them all. Traits and second names of them are left out: thousands of partial
specialisations of one template, which a front end is slow at. The machine code is the same. A kernel that needs another type gets an
error that its struct has no member, or that it has no traits: add the type to KEPT.
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
# An instruction's struct: MMA_64x8x16_F32F16F16_SS, of sparse operands GMMA_64x8x32_F32F16F16_SS.
_STRUCT = re.compile(r"^(struct G?MMA_\d[^\n;{]*)\n\{\n.*?^\};\n", re.MULTILINE | re.DOTALL)
# What is there for an instruction in addition: the specialisation of MMA_Traits, and a second name.
_TRAITS = re.compile(r"^template <[^;{}]*>\n(struct [^\n;{]*MMA_Traits<SM90[^\n;{]*)\n\{\n.*?^\};\n", re.MULTILINE | re.DOTALL)
_ALIAS = re.compile(r"^(?:template <[^;{}]*>\n)?(using SM90_\d[^\n;]*);[^\n]*\n", re.MULTILINE)
_KEPT = re.compile(rf"_(?:{'|'.join(KEPT)})_[SR]S(?:_TN)?\b")
_REMARKS = re.compile(r"^(?:/{20,}|// GMMA .*)\n\n?", re.MULTILINE)


def _replace_unused(pattern: re.Pattern, by: str, text: str, *, sparse: bool) -> str:
    """The text with what matches replaced, where it belongs to an instruction that no kernel uses."""
    return pattern.sub(lambda found: found[0] if not sparse and _KEPT.search(found[1]) else found.expand(by), text)


def trim(text: str, *, sparse: bool) -> str:
    """The header's text without the members of unused structs, their traits and second names.

    Raises:
      ConfigError: there are no such structs or traits, so it is not the header that this was written for.
    """
    shorter = _replace_unused(_STRUCT, r"\1 {};\n", text, sparse=sparse)
    shorter = _replace_unused(_TRAITS, "", shorter, sparse=sparse)
    if shorter == text:
        raise ConfigError("this CUTLASS states its WGMMA instructions in another form than cpp/codegen/wgmma_headers.py knows")
    return _REMARKS.sub("", _replace_unused(_ALIAS, "", shorter, sparse=sparse))


def texts(include: Path) -> dict[str, str]:
    """Path below an include folder -> text, of CUTLASS's folder `include`."""
    return {name: trim((include / name).read_text(), sparse="sparse" in name) for name in HEADERS}
