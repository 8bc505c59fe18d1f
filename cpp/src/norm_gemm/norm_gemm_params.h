// What the kernels of norm and GEMM in one launch are launched with, and the sizes that planner and kernel agree on.
#pragma once

#include <cstdint>

#include "common/activation.cuh"
#include "minfer/norm_gemm.h"

namespace minfer::norm_gemm {

constexpr int kTileColumns = 16;  // columns of B, which are the rows of an MMA's first operand
constexpr int kUnit = 32;         // k that a warp multiplies at a time: 8 of them in a lane

/// Elements from one row of normalised activations in shared memory to the next: whole units, and 64 bytes more than a multiple of 128, so
/// that the 16-byte loads of eight lanes, four in each of two rows, meet all banks once.
constexpr int64_t activation_pitch(int64_t k) { return (k + 63) / 64 * 64 + 32; }
inline int64_t activation_bytes(int64_t m, int64_t k) { return 2 * m * activation_pitch(k); }

struct NormGemmParams {
  void const *x, *norm_weight, *b, *bias;
  void *residual, *d;
  int64_t ldx, ld_residual, ldb, ldd;
  uint32_t m, n, k;
  uint32_t tiles;   // of columns
  uint32_t groups;  // rounds of the ring of weights in a tile
  uint32_t pitch;   // activation_pitch(k)
  float eps, weight_offset;
  ActivationParams activation;
  bool gated, bias_f32;
  uint64_t* read;  // with a residual: for each CTA, the nonce when it has read its rows
  uint64_t nonce;
};

struct NormGemmLaunchArguments {
  NormGemmParams params;
  int32_t ctas, smem_bytes;
  int32_t smem_limit;  // the device's, of a CTA
  bool programmatic;
  Stream stream;
};

}  // namespace minfer::norm_gemm
