// Mainloop of the grouped 16-bit GEMM for sm_80 onward: an expert's weights and its tokens, in order or gathered, by cp.async, ldmatrix of
// both, mma.sync m16n8k16.
//
// Four warps have 16 of every 64 rows of the weight each, and all tokens of the tile: the accumulators are those of the sm_90 kernels, and
// so the epilogue is theirs. A stage is filled 16 bytes a copy, or element by element where operands are not aligned; vectors of 16 bytes
// lie at u ^ row % 8.
#pragma once

#include "common/mma_sm80.cuh"
#include "cute/tensor.hpp"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "minfer/types.h"
#include "moe/grouped/grouped_epilogue.cuh"

namespace minfer::moe {

/// Dispatch policy: both operands by cp.async, tokens in expert order or gathered.
template <class Config_>
struct MainloopSm80CpAsyncExperts {
  using Config = Config_;
  static constexpr int Stages = Config::kStages;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ArchTag = cutlass::arch::Sm80;
  using Schedule = cutlass::gemm::KernelMultistage;
};

}  // namespace minfer::moe

namespace cutlass::gemm::collective {

template <class Config, class TileShape_, class Element_, class StrideA, class ElementB, class StrideB, class TiledMma_, class GmemCopyA,
          class SmemLayoutA, class SmemCopyA, class TransformA, class GmemCopyB, class SmemLayoutB, class SmemCopyB, class TransformB>
struct CollectiveMma<minfer::moe::MainloopSm80CpAsyncExperts<Config>, TileShape_, Element_, StrideA, ElementB, StrideB, TiledMma_,
                     GmemCopyA, SmemLayoutA, SmemCopyA, TransformA, GmemCopyB, SmemLayoutB, SmemCopyB, TransformB> {
  using DispatchPolicy = minfer::moe::MainloopSm80CpAsyncExperts<Config>;
  using TileShape = TileShape_;
  using Element = Element_;
  using ExpertTile = minfer::moe::ExpertTile;
  static constexpr int kTileM = Config::kTileM, kTileN = Config::kTileN, kTileK = Config::kTileK, kStages = Config::kStages;
  static constexpr int kThreads = Config::kThreads, kMmaM = kTileM / 64, kMmaN = kTileN / 8;
  static constexpr int kStep = 8;                    // tokens of a tile are rounded up to these
  static constexpr int kValues = kMmaM * kMmaN * 4;  // accumulators of a thread
  static constexpr bool kCopiesAhead = false;
  static_assert(kThreads == 128 && kTileM % 64 == 0 && kTileN % 16 == 0 && kTileK == 64);

  struct Params {
    Element const* a;
    Element const* b;
    int32_t const* gather;  // rows of a, or null: in order
    int64_t lda, ldb, b_expert_stride;
    int32_t a_rows, k;
    bool vectors;  // a and b are read 16 bytes at a time
    // Rows of an expert's weight and their order where they are gated: weight_row.
    bool gated, gate_blocks;
    int32_t n, gate_row_stride, up_row_offset;
  };
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(128) Element weights[kStages][kTileM * kTileK];
    alignas(128) Element tokens[kStages][kTileN * kTileK];
    typename Epilogue::TensorStorage staging;
    typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE cute::tuple<> load_init(Params const&, Storage&, WorkItems const&, int) {
    return {};
  }

  static CUTLASS_DEVICE auto make_accumulator() {
    auto accumulator = cute::make_tensor<float>(cute::Int<kValues>{});  // d[4] of instruction j of the 64 rows mi, with j the inner index
    cute::clear(accumulator);
    return accumulator;
  }

  template <class Storage, class Inputs, class Accumulator, class Output>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const&, Accumulator& accumulator, int, int k_tiles,
                                 Output const& output, int thread) {
    __syncthreads();  // all have read the previous tile's stages
#pragma unroll 1
    for (int k = 0; k < kStages - 1; ++k) {
      if (k < k_tiles) load_stage(params, storage, k, output.tile, k, thread);
      minfer::commit_copies();
    }
    int stage = 0;
#pragma unroll 1
    for (int k = 0; k < k_tiles; ++k) {
      minfer::wait_for_copies<kStages - 2>();
      __syncthreads();
      int const next = k + kStages - 1;
      if (next < k_tiles) load_stage(params, storage, next % kStages, output.tile, next, thread);
      minfer::commit_copies();
      multiply(storage, stage, accumulator, thread);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    minfer::wait_for_copies<0>();
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }

 private:
  /// Copies 8 of k of one row; zeros outside.
  static CUTLASS_DEVICE void copy_vector(Params const& params, Element* to, Element const* row, bool inside, int column) {
    if (params.vectors) {
      bool const reads = inside && column < params.k;
      minfer::copy_async_16(to, reads ? row + column : row, reads);
    } else {
      alignas(16) Element elements[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) elements[i] = inside && column + i < params.k ? row[column + i] : Element(0.0f);
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(elements);
    }
  }

  template <class Storage>
  static CUTLASS_DEVICE void load_stage(Params const& params, Storage& storage, int stage, ExpertTile const& tile, int k, int thread) {
    int const vector = thread % 8, column = k * kTileK + vector * 8;
    Element const* const weight = params.b + tile.expert * params.b_expert_stride;
#pragma unroll
    for (int row = thread / 8; row < kTileM; row += kThreads / 8) {
      int const source = minfer::moe::weight_row(params, tile.weight_tile * kTileM + row);
      copy_vector(params, &storage.weights[stage][row * kTileK + (vector ^ row % 8) * 8], weight + (source < 0 ? 0 : source) * params.ldb,
                  source >= 0, column);
    }
#pragma unroll
    for (int row = thread / 8; row < kTileN; row += kThreads / 8) {
      uint32_t source = uint32_t(tile.row + row);
      if (params.gather != nullptr && row < tile.tokens) source = uint32_t(params.gather[source]);
      bool const inside = row < tile.tokens && source < uint32_t(params.a_rows);  // a row that a does not have is zeros
      copy_vector(params, &storage.tokens[stage][row * kTileK + (vector ^ row % 8) * 8], params.a + (inside ? source : 0) * params.lda,
                  inside, column);
    }
  }

  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE void multiply(Storage const& storage, int stage, Accumulator& accumulator, int thread) {
    int const lane = thread % 32, warp = thread / 32, matrix = lane / 8;
    uint32_t const weights = minfer::shared_address(&storage.weights[stage][0]), tokens = minfer::shared_address(&storage.tokens[stage][0]);
    auto const sums = [&](int mi, int j) -> auto& { return reinterpret_cast<float(&)[4]>(accumulator((mi * kMmaN + j) * 4)); };
#pragma unroll
    for (int k_block = 0; k_block < kTileK / 16; ++k_block) {
      uint32_t a[kMmaM][4];
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) {
        int const row = 64 * mi + 16 * warp + 8 * (matrix % 2) + lane % 8, vector = 2 * k_block + matrix / 2;
        minfer::load_matrices(weights + row * (kTileK * 2) + (vector ^ row % 8) * 16, a[mi]);
      }
#pragma unroll
      for (int j = 0; j < kMmaN; j += 2) {
        int const row = 8 * (j + matrix / 2) + lane % 8, vector = 2 * k_block + matrix % 2;
        uint32_t b[4];
        minfer::load_matrices(tokens + row * (kTileK * 2) + (vector ^ row % 8) * 16, b);
#pragma unroll
        for (int mi = 0; mi < kMmaM; ++mi) {
          minfer::multiply_16x8x16<Config::kType>(sums(mi, j), a[mi], b[0], b[1]);
          minfer::multiply_16x8x16<Config::kType>(sums(mi, j + 1), a[mi], b[2], b[3]);
        }
      }
    }
  }
};

}  // namespace cutlass::gemm::collective
