// What a generated launch function of a grouped kernel receives. Private to the library.
#pragma once

#include "minfer/moe.h"

namespace minfer::moe {

struct GroupedLaunchArguments {
  GroupedProblem const* problem;
  GroupedOperands const* operands;
  DeviceProperties const* device;
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

/// out[r] = a[gather[r]], rows of k 16-bit elements, zeros where a [a_rows, k] has no such row; a's rows and out are 16-byte aligned.
Status gather_rows(void const* a, int64_t lda, int64_t a_rows, int32_t const* gather, int64_t rows, int64_t k, void* out, bool programmatic,
                   Stream stream);

using LaunchFunction = Status (*)(GroupedLaunchArguments const&);

}  // namespace minfer::moe
