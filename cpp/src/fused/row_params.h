// What the kernels on rows are launched with.
#pragma once

#include <cstdint>

#include "common/activation.cuh"
#include "minfer/fused.h"

namespace minfer::fused {

constexpr int kVectorElements = 8;
// Of rows in rings (row_ring.cuh).
constexpr int kRingWarps = 16;        // most of a CTA
constexpr int kRingBytes = 14 << 10;  // of a warp
constexpr int kTileVectors = 4;       // vectors of a thread in a warp tile, which is copied as a whole
constexpr int kRingVectors = 16;      // most of a thread that a row has, of 16-bit numbers without a residual

/// In the order of use: each line of parameters is fetched where a kernel first reads of it, and what an operator does not use comes last.
struct RowParams {
  RowTensor x, y;
  uint32_t rows, inner, width;
  // RowLaunch. threads: of a row, or of a CTA where there are parts. vectors: that a thread has of a row, the last ones may be outside
  uint32_t threads, rows_per_cta, parts, cluster, vectors;
  RowQuant quant;
  GateLayout gate_layout;
  bool logarithm;
  bool clamps;  // gate_max, up_max or up_shift do something
  bool fast;    // a vector of any tensor is one access, or two; row_whole.cuh: and a row fits where its kernel holds it
  ActivationParams activation;
  void const *weight, *bias;
  RowTensor residual;
  float eps, weight_offset;
  void* q;
  float const* scale;
  float* scales;
  int64_t scales_stride;
  float gate_max, up_max, up_shift;
  uint32_t groups;  // row_ring.cuh: of a CTA or a cluster, that share the rows out
};

struct RowLaunchArguments {
  RowParams params;
  bool programmatic;
  Stream stream;
};

}  // namespace minfer::fused
