// Planning as the bindings do it: environment switches, users' tuned rows, and a per-thread cache in front of plan_gemm.
#pragma once

#include "common.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// "NAME" or "NAME@decomposition=stream_k,splits=2,swizzle=4,raster=along_n".
struct KernelOverride {
  std::string name;
  std::optional<GemmLaunch> launch;
};
KernelOverride parse_override(char const* op, std::string const& text);

WeightFormat parse_format(char const* op, std::string const& name);
Activation parse_activation(char const* op, std::string const& name);

/// MINFER_TUNED and MINFER_FORCE_ARCH, read once.
bool tuned_enabled();
int32_t forced_arch();

/// Rows loaded by load_tuned for `device`; options points into them, valid until the next load.
void use_user_rows(GemmPlanOptions* options);

/// plan_gemm with the process's options, remembered per thread.
GemmPlan const& cached_plan(char const* op, GemmProblem const& problem, int32_t device);

}  // namespace minfer::torch_binding
