// Planning as the bindings do it: environment switches, users' tuned rows, and a per-thread cache in front of plan_gemm.
#pragma once

#include <optional>
#include <string>

#include "core/device.h"
#include "core/parse.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// "NAME" or "NAME@decomposition=stream_k,splits=2,swizzle=4,raster=along_n".
struct KernelOverride {
  std::string name;
  std::optional<GemmLaunch> launch;
};
KernelOverride parse_override(char const* op, std::string const& text);

/// Whether a copy of misaligned operands pays: TMA's kernels are several times faster than the element-wise ones, so it does as soon as the
/// product is more than a launch or two of work.
inline bool worth_realigning(int64_t m, int64_t n, int64_t k, int64_t batch) {
  return double(m) * double(n) * double(k) * double(batch) > 4e6;
}

/// MINFER_TUNED and MINFER_FORCE_ARCH, read once.
bool tuned_enabled();
int32_t forced_arch();

/// plan_gemm with the process's options, remembered per thread.
GemmPlan const& cached_plan(char const* op, GemmProblem const& problem, OnDevice const& on);

/// dequantize_first likewise.
bool cached_dequantize_first(char const* op, GemmProblem const& problem, OnDevice const& on);

/// The `kernel=` of quantised GEMMs that writes the weight out in 16 bits and runs the dense plan.
constexpr char const* kDequantizeFirst = "dequantize";

}  // namespace minfer::torch_binding
