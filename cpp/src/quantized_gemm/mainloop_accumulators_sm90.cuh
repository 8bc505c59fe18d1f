// Mainloop of few tokens: WGMMA, scales on the accumulators of 128 of k.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Scales on the accumulators of each stage.
template <class S, class Storage, class Accumulator>
CUTLASS_DEVICE void mainloop_accumulators(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count,
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
  Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));        // (MMA,MMA_N,MMA_K,PIPE), descriptors
  Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _1, _4, _2>{});  // (MMA,MMA_M,MMA_K of a block,SET)
  auto registers = recast<uint32_t>(tCrA);
  Tensor even = make_fragment_like(accumulator), odd = make_fragment_like(accumulator);  // (MMA,MMA_M,MMA_N), of a stage
  int const row = consumer % S::kRowGroups * 64 + thread / 32 * 16 + thread % 32 / 4;
  int const slice = consumer / S::kRowGroups, group = slice * S::kSliceK >> group_shift;

  w4a16::Book const book = S::book_of(storage, thread);

  auto const dequantize = [&](uint4 const* codes, uint32_t const(&zero)[2], int block) {
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < 4; ++slab) {
      uint32_t words[Codes::kWords], a[4];
      S::words_of(codes, block * 4 + slab, words);
      Codes::fragment(words, zero, book, a);
      S::set(registers, block, slab, a);
    }
  };
  auto const multiply = [&](int block, int stage, auto& partial) {
    S::pin(registers, block);
    warpgroup_fence_operand(partial);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int slab = 0; slab < 4; ++slab) {
      mma.accumulate_ = block == 0 && slab == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      cute::gemm(mma, tCrA(_, _0{}, slab, block), tCrB(_, _0{}, slice * S::kBlocks * 4 + block * 4 + slab, stage), partial(_, _0{}, _0{}));
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(partial);
  };

  float scale[2] = {0.0f, 0.0f};
  int previous = -1;
  auto const scale_and_add = [&](auto& partial) {
    warpgroup_fence_operand(partial);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < S::kValues; ++v) accumulator(v) = fmaf(scale[v / 2 % 2], partial(v), accumulator(v));
  };
  // One stage. At most two batches of WGMMAs are in flight, and each has the time of a dequantisation.
  auto const step = [&](auto& partial, auto& previous_partial) {
    int const stage = ring.index;
    S::wait(storage, ring);
    uint4 codes[S::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < S::kChunks; ++i) codes[i] = S::load_codes(storage, stage, 0, i, consumer, thread);
    uint32_t zero[2];
    S::load_zeros(storage, stage, group, row, zero);
    warpgroup_wait<1>();
    dequantize(codes, zero, 0);
    multiply(0, stage, partial);
    warpgroup_wait<1>();  // the previous stage has retired
    S::release(storage, previous, thread, previous >= 0);
    scale_and_add(previous_partial);
    dequantize(codes, zero, 1);
    multiply(1, stage, partial);
    scale[0] = Scale::to_float(storage.scales[stage][group][row]);
    scale[1] = Scale::to_float(storage.scales[stage][group][row + 8]);
    previous = stage;
    ring.advance();
  };
  auto const finish = [&](auto& partial) {
    warpgroup_wait<0>();
    S::release(storage, previous, thread);
    scale_and_add(partial);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < S::kValues; ++v) accumulator(v) *= Codes::inverse_float(v / 2 % 2);
  };

  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < S::kValues; ++v) accumulator(v) = even(v) = odd(v) = 0.0f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int left = k_count;;) {
    step(even, odd);
    if (--left == 0) {
      finish(even);
      break;
    }
    step(odd, even);
    if (--left == 0) {
      finish(odd);
      break;
    }
  }
}

}  // namespace minfer::w4a16
