"""Kernels -> registry.cpp (minfer::registry and what the build says of itself) and kernels.json."""

from __future__ import annotations

import json

from codegen.families import FAMILIES
from codegen.formats import project_formats
from codegen.kernel import MAJORS, SCHEDULES, Kernel, cpp_bool, cpp_string
from codegen.shards import BANNER


def registry_text(kernels: list[Kernel], compiled: set[str], archs: list[str], cutlass_version: str) -> str:
    """Lists every kernel, in table order; `launch` is null for those this build leaves out."""
    families = sorted({kernel.FAMILY for kernel in kernels if kernel.name in compiled})
    parts = [BANNER, '#include "minfer/registry.h"\n\n']
    parts += [f'#include "{header}"\n' for header in sorted({FAMILIES[family].LAUNCH_HEADER for family in families})]
    for family in families:
        parts.append(f"\nnamespace minfer::{family} {{\n")
        for kernel in kernels:
            if kernel.FAMILY == family and kernel.name in compiled:
                parts.append(f"Status launch_{kernel.name}({FAMILIES[family].ARGUMENTS} const&);\n")
        parts.append(f"}}  // namespace minfer::{family}\n")
    parts.append("\nnamespace minfer {\nnamespace {\n\nKernelInfo const kKernels[] = {\n")
    parts += [_row(kernel, kernel.name in compiled) for kernel in kernels]
    parts.append("};\n\n}  // namespace\n\n")
    parts.append("KernelInfo const* registry(int64_t* count) {\n  *count = static_cast<int64_t>(sizeof(kKernels) / sizeof(kKernels[0]));\n")
    parts.append("  return kKernels;\n}\n\n")
    parts.append(f"char const* build_archs() {{ return {cpp_string(';'.join(archs))}; }}\n\n")
    parts.append(f"char const* build_cutlass_version() {{ return {cpp_string(cutlass_version)}; }}\n\n")
    parts.append("}  // namespace minfer\n")
    return "".join(parts)


def _row(kernel: Kernel, compiled: bool) -> str:
    launch = f"reinterpret_cast<void const*>(&{kernel.FAMILY}::launch_{kernel.name})" if compiled else "nullptr"
    fields, formats = [], project_formats()
    for field, value in kernel.info().items():
        if field == "ab_type":
            value = formats.elements[value].cpp
        elif field in ("a_major", "b_major"):
            value = MAJORS[value]
        elif field == "b_format":
            value = formats.formats[value].cpp
        elif field == "schedule":
            value = SCHEDULES[value]
        elif isinstance(value, bool):
            value = cpp_bool(value)
        elif isinstance(value, str):
            value = cpp_string(value)
        fields.append(f".{field} = {value}")
    return "    {" + ",\n     ".join([*fields, f".launch = {launch}"]) + "},\n"


def kernels_json(kernels: list[Kernel], compiled: set[str]) -> str:
    """The same rows for readers without the library: KernelInfo's fields, where a kernel is compiled (kernel.TARGETS), and "compiled"."""
    rows = [json.dumps({**kernel.info(), "targets": kernel.targets, "compiled": kernel.name in compiled}) for kernel in kernels]
    return "[\n" + ",\n".join(rows) + "\n]\n"
