// Mainloop of few tokens and groups of 32: WGMMA, scales on the accumulators of 32 of k.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Scales on the accumulators of every step of 32 of k: while the two WGMMAs of a step run, the codes of the next step are dequantised into
/// the other set of registers.
/// kZeroPoints: whether zero points are read. The loop exists in both forms, since reading them costs as much as reading the scales.
template <class S, bool kZeroPoints, class Storage, class Accumulator>
CUTLASS_DEVICE void mainloop_fine_accumulators(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count,
                                               int group_shift, int consumer, int thread) {
  using Element = typename S::Element;
  using TiledMma = typename S::TiledMma;
  using SmemLayoutB = typename S::SmemLayoutB;
  using Codes = typename S::Codes;
  using Scale = typename S::Scale;
  using namespace cute;
  TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
  auto thread_mma = mma.get_slice(thread);
  Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));                     // (MMA,MMA_N,MMA_K,PIPE), descriptors
  Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<S::kGroup / 16>, _2>{});  // (MMA,MMA_K of a step,SET)
  auto registers = recast<uint32_t>(tCrA);
  Tensor partial = make_fragment_like(accumulator);  // (MMA,MMA_M,MMA_N), of a step
  int const row = consumer % S::kRowGroups * 64 + thread / 32 * 16 + thread % 32 / 4, slice = consumer / S::kRowGroups;
  constexpr int kStep = S::kGroup, kKBlocks = kStep / 16, kSteps = S::kSliceK / kStep;
  uint32_t symmetric[2];
  S::symmetric_zeros(symmetric);
  w4a16::Book const book = S::book_of(storage, thread);

  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < S::kValues; ++v) accumulator(v) = partial(v) = 0.0f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < k_count; ++i) {
    int const stage = ring.index;
    S::wait(storage, ring);
    uint4 codes[S::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < S::kChunks; ++c) codes[c] = S::load_codes(storage, stage, 0, c, consumer, thread);
    auto const group_of = [&](int step) { return (slice * S::kSliceK + step * kStep) >> group_shift; };
    auto const dequantize = [&](int step) {
      uint32_t zero[2];
      if constexpr (kZeroPoints) {
        S::load_zeros(storage, stage, group_of(step), row, zero);
      } else {
        zero[0] = symmetric[0];
        zero[1] = symmetric[1];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int k_block = 0; k_block < kKBlocks; ++k_block) {
        uint32_t words[Codes::kWords], a[4];
        S::words_of(codes, step * kKBlocks + k_block, words);
        Codes::fragment(words, zero, book, a);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 4; ++r) {
          registers(r + 4 * k_block + 4 * kKBlocks * (step % 2)) = a[r];
          warpgroup_fence_operand(registers(r + 4 * k_block + 4 * kKBlocks * (step % 2)));
        }
      }
    };
    dequantize(0);
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int k_block = 0; k_block < kKBlocks; ++k_block) {
        mma.accumulate_ = k_block == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        cute::gemm(mma, tCrA(_, k_block, step % 2), tCrB(_, _0{}, (slice * kSteps + step) * kKBlocks + k_block, stage),
                   partial(_, _0{}, _0{}));
      }
      warpgroup_commit_batch();
      if (step + 1 < kSteps) dequantize(step + 1);
      int const group = group_of(step);
      float const scale[2] = {Scale::to_float(storage.scales[stage][group][row]), Scale::to_float(storage.scales[stage][group][row + 8])};
      warpgroup_wait<0>();
      warpgroup_fence_operand(partial);
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < S::kValues; ++v) accumulator(v) = fmaf(scale[v / 2 % 2], partial(v), accumulator(v));
    }
    S::release(storage, stage, thread);
    ring.advance();
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < S::kValues; ++v) accumulator(v) *= Codes::inverse_float(v / 2 % 2);
}

}  // namespace minfer::w4a16
