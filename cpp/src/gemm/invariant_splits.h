// The ranges that products are summed in, in the batch-invariant mode.
#pragma once

#include <cstdint>

#include "minfer/gemm.h"

namespace minfer::gemm {

constexpr int64_t kInvariantTile = 64;  // rows of a weight: the tile of few tokens

/// Into how many ranges of k of equal length batch-invariant plans cut a tile. It follows from n, k and the types alone.
int32_t invariant_splits(GemmProblem const& problem);

}  // namespace minfer::gemm
