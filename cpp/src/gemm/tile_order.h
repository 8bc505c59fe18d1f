// In which order the tiles of a GEMM are computed.
#pragma once

#include "gemm/schedule.h"

namespace minfer::gemm {

/// Tiles that are walked side by side, in the orders that plans choose from.
constexpr int kSwizzles[] = {1, 2, 3, 4, 5, 6, 8, 12, 16};

/// The order of tiles in which the fewest operand bytes leave L2 for the GPCs, and memory for L2: groups of neighbours work on as square a
/// set of tiles as there is, in bands that are wide enough for few of them to read the other operand again, and narrow enough for L2. Over
/// 254 random products of 16 and 8 bits with many tokens (seed 2805, an H100) it is 1.4 to 2.0 % slower than the best of 16 orders, at
/// worst 12 %; by the lines that leave L2 alone it was 1.4 to 2.2 %, at worst 37 %. `launch` has the columns of a tile.
void choose_order(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device, GemmLaunch* launch);

}  // namespace minfer::gemm
