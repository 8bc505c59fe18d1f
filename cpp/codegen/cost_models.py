"""cpp/configs/models/<device>.csv -> gemm_models.cpp: the cost models that ship, their kernels' factors in the registry's order."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from codegen.kernel import Kernel, cpp_string
from codegen.shards import BANNER
from codegen.toml import ConfigError

RATES = (  # the fields of minfer::GemmRates, in order
    "start",
    "overlap_two",
    "overlap_three",
    "overlap_four",
    "cluster",
    "sm_rate",
    "gpu_rate",
    "columns",
    "latency",
    "tile",
    "tile_pingpong",
    "epilogue",
    "c_epilogue",
    "c_start",
    "fixup",
    "partial",
    "fixup_bytes",
    "fixup_pingpong",
    "fixup_cluster",
    "cluster_partial",
    "bandwidth",
    "c_bytes",
    "idle",
    "idle_tiles",
    "stream",
    "narrow_split",
    "narrow_rounds",
    "narrow_l2",
    "exposed",
    "uneven",
    "general",
    "general_c",
    "block_scales",
    "block_scales_swap",
    "copy",
    "copy_bandwidth",
    "copy_transposed",
    "quantized_start",
    "quantized_overlap_two",
    "quantized_overlap_three",
    "quantized_bandwidth",
    "quantized_sm_bandwidth",
    "quantized_ahead",
    "quantized_cycles",
    "quantized_latency",
    "quantized_tile",
    "quantized_epilogue",
    "quantized_stream",
    "quantized_tagged",
    "quantized_flagged",
    "quantized_partial",
    "quantized_partial_bytes",
    "quantized_cluster",
)
FACTORS = ("compute", "tile", "start", "epilogue", "latency", "bytes")


@dataclass(frozen=True)
class CostModel:
    rates: dict[str, float]
    kernels: dict[str, tuple[float, ...]]  # by model_name: its FACTORS


def model_name(kernel: Kernel) -> str:
    """A kernel's name in model tables: without the family and the element type (minfer::model_name_of)."""
    return kernel.name.split("_", 1)[1].replace(f"{kernel.element}_", "", 1)


def read_csv(path: Path) -> CostModel:
    """A device's model. ConfigError for a malformed line, a name that comes twice, and rates that are not RATES in their order."""
    rates: dict[str, float] = {}
    kernels: dict[str, tuple[float, ...]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        where = f"models/{path.name}: line {number}"
        kind, name, *cells = line.split(",")
        table, size = {"rate": (rates, 1), "kernel": (kernels, len(FACTORS))}.get(kind, (None, 0))
        try:
            values = tuple(map(float, cells))
        except ValueError:
            values = ()
        if table is None or len(values) != size or not all(value > 0 and math.isfinite(value) for value in values):
            raise ConfigError(f"{where}: expected rate,name,value or kernel,name,{','.join(FACTORS)} with positive numbers, got {line!r}")
        if name in table:
            raise ConfigError(f"{where}: repeats {name}")
        table[name] = values[0] if kind == "rate" else values
    if tuple(rates) != RATES:
        raise ConfigError(f"models/{path.name}: the rates must be {', '.join(RATES)}, got {', '.join(rates)}")
    return CostModel(rates, kernels)


def read_folder(folder: Path) -> dict[str, CostModel]:
    """A device's file name -> model, for every csv of the folder."""
    return {path.stem: read_csv(path) for path in sorted(folder.glob("*.csv"))}


_LOOKUP = """\
struct Table {
  char const* device;  // file name of the table
  GemmModel model;
};

%TABLES%
}  // namespace

GemmModel const* shipped_gemm_model(char const* device_name) {
  if (device_name == nullptr) return nullptr;
  DeviceFileName const file = device_file_name(device_name);
  for (Table const& table : kTables) {
    if (std::strcmp(file.text, table.device) == 0) return &table.model;
  }
  return nullptr;
}

}  // namespace minfer
"""


def models_text(models: dict[str, CostModel], kernels: list[Kernel]) -> str:
    """gemm_models.cpp: minfer::shipped_gemm_model over the models."""
    if not models:
        raise ConfigError("models: there must be a model of at least one device")
    parts = [BANNER, '#include <cstring>\n\n#include "gemm/cost_model.h"\n\nnamespace minfer {\nnamespace {\n\n']
    entries = []
    for index, (device, model) in enumerate(models.items()):
        parts.append(f"// {device}\nGemmKernelFactors const kFactors{index}[] = {{\n")
        for kernel in kernels:
            values = model.kernels.get(model_name(kernel), ())
            parts.append("    {" + ", ".join(f"{value!r}f" for value in values) + "},\n")
        parts.append("};\n\n")
        rates = ", ".join(f".{name} = {value!r}" for name, value in model.rates.items())
        entries.append(f"    {{{cpp_string(device)}, {{{{{rates}}}, kFactors{index}}}}},\n")
    return "".join(parts) + _LOOKUP.replace("%TABLES%", "Table const kTables[] = {\n" + "".join(entries) + "};\n")
