// How an operator call finds its GEMM plan: the kernel that it requests by name, else plan_gemm with the process's switches and the user's
// tuned rows, behind a cache for each thread.
#pragma once

#include <optional>
#include <string>

#include "core/device.h"
#include "core/parse.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// "NAME" or "NAME@decomposition=stream_k,splits=2,swizzle=4,raster=along_n,columns=64,realign_a=1,realign_b=1".
struct KernelOverride {
  std::string name;
  std::optional<GemmLaunch> launch;
};
KernelOverride parse_override(char const* op, std::string const& text);

/// Whether MINFER_TUNED allows tuned tables (default: it does). The environment is read once.
bool tuned_enabled();
/// MINFER_FORCE_ARCH: 80 for portable kernels alone; 0 where it is not set. The environment is read once.
int32_t forced_arch();

/// The plan for the kernel, and the launch configuration, that the call requests; returns *plan.
GemmPlan const& plan_as_requested(char const* op, GemmProblem const& problem, KernelOverride const& requested, OnDevice const& on,
                                  GemmPlan* plan);

/// What plan_gemm chooses. Each thread remembers its plans; the reference is good until the next call on the thread.
GemmPlan const& cached_plan(char const* op, GemmProblem const& problem, OnDevice const& on);

/// Whether a kernel of this build computes the problem on the device, remembered likewise.
bool cached_has_kernel(char const* op, GemmProblem const& problem, OnDevice const& on);

/// What dequantize_first chooses, remembered likewise.
bool cached_dequantize_first(char const* op, GemmProblem const& problem, OnDevice const& on);

/// The `kernel=` of quantised GEMMs that writes the weight in 16 bits and runs the dense plan.
constexpr char const* kDequantizeFirst = "dequantize";

}  // namespace minfer::torch_binding
