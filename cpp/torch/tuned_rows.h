// The user's tuned rows and cost models, which _load_tuned and _load_model load for one device of this machine or for all.
#pragma once

#include <cstdint>
#include <string>

#include "minfer/gemm.h"

namespace minfer::torch_binding {

/// All devices. Also the index of a device that this machine need not have, such as the H200 whose plans can be read without a GPU.
constexpr int32_t kAnyDevice = -1;

/// Points the options at the rows for `device`, followed by the rows for all devices, and at its cost model, if one was loaded. They stay
/// valid until the thread calls this again.
void use_user_rows(GemmPlanOptions* options, int32_t device);

/// A number that changes with every load of rows or models, so that plans made before it are not used again.
uint64_t user_rows_generation();

}  // namespace minfer::torch_binding
