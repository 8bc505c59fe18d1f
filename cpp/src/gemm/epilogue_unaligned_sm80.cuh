// Epilogue of the portable GEMMs of unaligned operands: fp32 accumulators through shared memory, then D in aligned words of two outputs at
// any address and with any stride. Only outputs that share a word with another tile or row are stored alone. Gated D, fp32 D and
// codes take the general loop (epilogue.cuh).
//
// Staging is [rows][columns + padding] fp32. The padding puts the values that a warp stores together in different banks: a lane has two
// neighbours of a row, or four where B is contiguous along n, and its rows are neighbours of those of the next lanes or, where A is
// contiguous along m, every second one.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "gemm/epilogue.cuh"
#include "gemm/tile_scheduler.h"

namespace minfer::gemm {

/// Writes a tile of outputs, as store_rectangle, whose accumulator it takes: words of two columns, and then the first and the last column
/// of a row where they are not a word's.
template <DataType kType, int kRows, int kColumns, int kThreads, class Accumulator>
__device__ __forceinline__ void store_words(EpilogueParams const& e, int m0, int n0, int l, int thread, Accumulator&& accumulator) {
  using Number = Float16<kType>;
  using Type = typename Number::Type;
  constexpr int kLanes = kColumns / 2, kStep = kThreads / kLanes, kTogether = kRows / kStep < 8 ? kRows / kStep : 8;  // rows in flight
  static_assert(kThreads % kLanes == 0 && kStep % 2 == 0 && kRows % (kStep * kTogether) == 0, "a thread's rows begin alike");
  int const rows = min(kRows, e.m - m0), columns = min(kColumns, e.n - n0);
  Type* const corner = static_cast<Type*>(e.d) + (l * e.d_batch_stride + m0 * e.ldd + n0);
  bool const plain = e.c == nullptr && e.activation.kind == ActivationParams::Kind::kNone;

  int const first = int(unsigned(thread) / kLanes);
  Type* d = corner + first * e.ldd;
  int const odd = int(reinterpret_cast<uintptr_t>(d) >> 1) & 1, c = 2 * int(unsigned(thread) % kLanes) + odd;
  int const end = c + 1 < columns ? rows : 0;
  int64_t const step = kStep * e.ldd;
  float bias[2] = {0.0f, 0.0f};
  if (e.bias != nullptr && end > 0) {
    bias[0] = load_bias(Float16<kType>{}, e, n0 + c);
    bias[1] = load_bias(Float16<kType>{}, e, n0 + c + 1);
  }
  d += c;
  if (plain) {
#pragma unroll 4
    for (int row = first; row < end; row += kStep) {
      float const v0 = fmaf(e.alpha, accumulator(row, c), bias[0]), v1 = fmaf(e.alpha, accumulator(row, c + 1), bias[1]);
      *reinterpret_cast<uint32_t*>(d) = Number::pack(v0, v1);
      d += step;
    }
  } else {
    Type const* from = nullptr;  // C, where it comes in aligned words as well
    if (e.c != nullptr && !e.c_f32 && e.c_stride_n == 1) {
      from = static_cast<Type const*>(e.c) + (l * e.c_batch_stride + (m0 + first) * e.c_stride_m + n0 + c);
      if ((reinterpret_cast<uintptr_t>(from) & 2) != 0) from = nullptr;
    }
    int64_t const c_step = kStep * e.c_stride_m;
#pragma unroll 1
    for (int row = first; row < end; row += kTogether * kStep) {
      uint32_t words[kTogether] = {};
      if (from != nullptr) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (row + i * kStep < rows) words[i] = *reinterpret_cast<uint32_t const*>(from);
          from += c_step;
        }
      }
      float v[2 * kTogether];
#pragma unroll
      for (int i = 0; i < 2 * kTogether; ++i) v[i] = fmaf(e.alpha, accumulator(row + i / 2 * kStep, c + i % 2), bias[i % 2]);
      if (from != nullptr) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          v[2 * i] = fmaf(e.beta, Number::to_float(Number::of_bits(uint16_t(words[i]))), v[2 * i]);
          v[2 * i + 1] = fmaf(e.beta, Number::to_float(Number::of_bits(uint16_t(words[i] >> 16))), v[2 * i + 1]);
        }
      } else if (e.c != nullptr) {
#pragma unroll
        for (int i = 0; i < 2 * kTogether; ++i) {
          int const r = row + i / 2 * kStep;
          if (r < rows) v[i] = fmaf(e.beta, load_c(Float16<kType>{}, e, m0 + r, n0 + c + i % 2, l), v[i]);
        }
      }
      activate_all<2 * kTogether>(e.activation, [&](int i) -> float& { return v[i]; });
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row + i * kStep < rows) *reinterpret_cast<uint32_t*>(d) = Number::pack(v[2 * i], v[2 * i + 1]);
        d += step;
      }
    }
  }

  bool const words_alone = ((reinterpret_cast<uintptr_t>(corner) >> 1 | uintptr_t(e.ldd) | uintptr_t(columns)) & 1) == 0;
  for (int i = thread; i < 2 * rows && !words_alone; i += kThreads) {
    int const row = i / 2;
    Type* const line = corner + row * e.ldd;
    bool const odd_line = (reinterpret_cast<uintptr_t>(line) & 2) != 0, at_end = i % 2 != 0;
    if (at_end ? ((columns & 1) != 0) == odd_line : !odd_line) continue;  // a word's
    int const column = at_end ? columns - 1 : 0;
    float v = fmaf(e.alpha, accumulator(row, column), e.bias != nullptr ? load_bias(Float16<kType>{}, e, n0 + column) : 0.0f);
    if (!plain) {
      if (e.c != nullptr) v = fmaf(e.beta, load_c(Float16<kType>{}, e, m0 + row, n0 + column, l), v);
      v = activate(e.activation, v);
    }
    line[column] = Number::from_float(v);
  }
}

template <class Config, class Mainloop>
class EpilogueUnalignedSm80 {
  static constexpr int kThreads = Config::kThreads, kRows = Config::kTileM, kColumns = Config::kTileN;
  static constexpr bool kRowsApart = Config::kMajorA == Major::kMN, kQuads = Config::kMajorB == Major::kMN;
  static constexpr int kStagedRow = kColumns + (kRowsApart ? (kQuads ? 8 : 4) : (kQuads ? 16 : 8));

 public:
  using Params = EpilogueParams;
  struct TensorStorage {
    alignas(16) float staged[kRows * kStagedRow];
  };
  struct PipelineStorage {};

  CUTLASS_DEVICE EpilogueUnalignedSm80(Params const& params, TensorStorage& storage, PipelineStorage&, int, int thread)
      : params_(params), staged_(storage.staged), thread_(thread) {}

  using Output = TileCoord;
  static CUTLASS_DEVICE Output locate(TileCoord const& tile, int) { return tile; }

  template <class SchedulerParams, class SchedulerStorage>
  static CUTLASS_DEVICE void begin(Params const&, SchedulerParams const&, SchedulerStorage const&, int, int) {}
  CUTLASS_DEVICE void prefetch(Output const&) {}

  CUTLASS_DEVICE void store(typename Mainloop::Accumulator const& accumulator, Output const& tile) const {
    unsigned const thread = unsigned(thread_);
    int const warp = int(thread / 32), g = int(thread / 4 % 8), q = int(thread % 4);
    int const row = warp / Config::kWarpsN * Mainloop::kWarpM, column = warp % Config::kWarpsN * Mainloop::kWarpN;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Mainloop::kBlocksM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        float* const to = staged_ + (row + 16 * i + Mainloop::OperandA::row_of(g, h)) * kStagedRow + column;
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < Mainloop::kBlocksN; ++j) {
          auto const& first = accumulator.d[i][2 * j];
          auto const& second = accumulator.d[i][2 * j + 1];
          if constexpr (kQuads) {
            *reinterpret_cast<float4*>(to + 16 * j + 4 * q) = make_float4(first[2 * h], second[2 * h], first[2 * h + 1], second[2 * h + 1]);
          } else {
            *reinterpret_cast<float2*>(to + 16 * j + 2 * q) = make_float2(first[2 * h], first[2 * h + 1]);
            *reinterpret_cast<float2*>(to + 16 * j + 8 + 2 * q) = make_float2(second[2 * h], second[2 * h + 1]);
          }
        }
      }
    }
    __syncthreads();
    int const m0 = tile.m * kRows, n0 = tile.n * kColumns;
    auto const staged = [&](int r, int c) { return staged_[r * kStagedRow + c]; };
    if (params_.gated || params_.d_f32 || params_.d_scale != nullptr) {
      store_rectangle(Float16<Config::kType>{}, params_, m0, n0, tile.l, kRows, kColumns, thread_, kThreads, staged);
    } else {
      store_words<Config::kType, kRows, kColumns, kThreads>(params_, m0, n0, tile.l, thread_, staged);
    }
  }

 private:
  Params const& params_;
  float* staged_;
  int thread_;
};

}  // namespace minfer::gemm
