// A number of ranges has to do for all m: a few rows of a weight with few rows of its own want many, so that all SMs read it, many rows
// want one. The rules are those of the least geometric mean, over 1 to 4096 rows, of the model's times on the H200 relative to those of the
// best plans:
//   16 and 8 bits   ranges are worth their sums while there are SMs for them and k is long enough, the longer the more tiles there are:
//                   4096 x 4096 (bf16) takes 1 % longer in one range, 10 % in two, 1024 x 8192 takes 28, 8 and 6 % in 1, 2 and 4. A few
//                   tiles more than SMs, whose second wave is nearly empty, are no reason: 10240 x 8192 would take 7 % longer with few
//                   rows, but in four ranges an H100 took 38 to 64 % longer with 256 to 4096 rows
//   quantised       there is less to read for a tile and more to do, one MMA behind the other: beside activations of 16 bits 6144 x 4096
//                   takes 27 % longer in one range, 9 in two and in four, 8192 x 8192 31, 7 and 11 %. Four are taken where three CTAs an
//                   SM hold them, which few rows like, or k is long. Of 8 bits, whose tiles are larger, 20 and 15, and 2 in two
#include "gemm/invariant_splits.h"

#include "gemm/schedule.h"

namespace minfer::gemm {

int32_t invariant_splits(GemmProblem const& problem) {
  constexpr int64_t kRange = 128;  // k tiles of all kernels divide it
  if (problem.d_int32) return 1;
  int64_t const tiles = ceil_div(problem.n, kInvariantTile), k = problem.k;
  bool const quantised = problem.b_format != WeightFormat::kDense, narrow = has_8_bits(problem);
  auto const worth = [&](int64_t splits) {
    if (k % (splits * kRange) != 0 || k < 3072) return false;
    if (quantised && narrow) return splits * tiles <= (splits == 8 ? 128 : 256) && k >= splits * 2048;
    if (quantised) return splits * tiles <= (splits == 8 ? 128 : splits == 4 && k < 4 * 7168 ? 396 : 512) && k >= splits * 1024;
    double const per_tile = problem.ab_type == DataType::kE4M3 ? 0.15 : problem.ab_type == DataType::kS8 ? 0.5 : 1.2;
    return splits * tiles <= 128 && double(k) >= double(splits * splits) * (250.0 + per_tile * double(tiles) * double(tiles));
  };
  int32_t splits = 1;
  while (splits < 8 && worth(2 * splits)) splits *= 2;
  return splits;
}

}  // namespace minfer::gemm
