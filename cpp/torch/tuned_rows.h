// The user's tuned rows and cost models, which _load_tuned and _load_model load for one device of this machine or for all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gemm/cost_model.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// All devices. Also the index of a device that this machine need not have, such as the H200 whose plans can be read without a GPU.
constexpr int32_t kAnyDevice = -1;

/// A cost model that was read, with its factors in the registry's order.
struct UserModel {
  GemmModel model{};
  std::vector<GemmKernelFactors> factors;
};

/// A table of lines "rate,<name>,<value>" and "kernel,<name>,<compute>,<tile>,<start>,<epilogue>,<latency>,<bytes>": every rate once,
/// kernels as far as it has them. Kernels that this build does not know are skipped: tables outlive them. Raises with `op` and the line.
std::shared_ptr<UserModel const> read_model(char const* op, std::string const& csv);

/// Points the options at the rows for `device`, followed by the rows for all devices, and at its cost model, if one was loaded. They stay
/// valid until the thread calls this again.
void use_user_rows(GemmPlanOptions* options, int32_t device);

/// A number that changes with every load of rows or models, so that plans made before it are not used again.
uint64_t user_rows_generation();

}  // namespace minfer::torch_binding
