// The user's tuned rows: what _load_tuned was given, for one device of this machine or for all.
#pragma once

#include <cstdint>
#include <string>

#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// For a device that has no index, such as the H200 that plans are read for without a GPU, and as load_tuned's: all of them.
constexpr int32_t kAnyDevice = -1;

/// Points options at the rows for `device`, its own before those for all; they stay where they are until the thread asks again.
void use_user_rows(GemmPlanOptions* options, int32_t device);

/// Changes with every load: what was planned before one is forgotten.
uint64_t user_rows_generation();

}  // namespace minfer::torch_binding
