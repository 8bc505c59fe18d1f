// What a generated launch function of a grouped kernel receives. Private to the library.
#pragma once

#include "minfer/moe.h"

namespace minfer::moe {

struct GroupedLaunchArguments {
  GroupedProblem const* problem;
  GroupedOperands const* operands;
  DeviceProperties const* device;
  // The rows that scales of a belong to, also where a's own have been gathered: the row of a that a row of d is of, or null; how many.
  int32_t const* scale_gather;
  int64_t scale_rows;
  bool programmatic_launch;  // launch with programmatic stream serialization (sm_90 kernels)
  Stream stream;
};

/// out[r] = a[gather[r]], rows of row_bytes, zeros where a has no such row of its a_rows, a_stride bytes apart. All are multiples of 16
/// bytes.
Status gather_rows(void const* a, int64_t a_stride, int64_t a_rows, int32_t const* gather, int64_t rows, int64_t row_bytes, void* out,
                   bool programmatic, Stream stream);

using LaunchFunction = Status (*)(GroupedLaunchArguments const&);

}  // namespace minfer::moe
