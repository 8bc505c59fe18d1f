// Mainloops with scales on the weights: WGMMA. One of many tokens, and one of few that adds up k in the same order.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Waits for the last WGMMAs, releases their stage, and multiplies by what products of fragments and scales still lack.
template <class S, bool kZeroPoints, class Storage, class Accumulator>
CUTLASS_DEVICE void finish_fragments(Storage& storage, Accumulator& accumulator, int stage, int thread) {
  cute::warpgroup_wait<0>();
  cute::warpgroup_fence_operand(accumulator);
  S::release(storage, stage, thread);
  constexpr float kRest = S::template rest<kZeroPoints>();
  if constexpr (kRest != 1.0f) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < S::kValues; ++v) accumulator(v) *= kRest;
  }
}

/// Scales on the fragments, many tokens. A WGMMA holds its warps until it has read A's registers, so with many tokens a warp can do little
/// else while its WGMMAs run: each k block is a batch of its own, dequantised while the previous one runs, in a ring of four fragments.
/// kZeroPoints: whether zero points are read. The loop exists in both forms.
template <class S, bool kZeroPoints, class Storage, class Accumulator>
CUTLASS_DEVICE void mainloop_fragments(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count,
                                       int group_shift, int consumer, int thread) {
  using Element = typename S::Element;
  using TiledMma = typename S::TiledMma;
  using SmemLayoutB = typename S::SmemLayoutB;
  using Codes = typename S::Codes;
  using namespace cute;
  TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
  auto thread_mma = mma.get_slice(thread);
  Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));           // (MMA,MMA_N,MMA_K,PIPE), descriptors
  Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<S::kRing>>{});  // (MMA,RING)
  auto registers = recast<uint32_t>(tCrA);

  w4a16::Book const book = S::book_of(storage, thread);
  int previous = 0;
  warpgroup_fence_operand(accumulator);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < k_count; ++i) {
    int const stage = ring.index;
    S::wait(storage, ring);
    uint4 codes[S::kMmaM][S::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < S::kChunks * S::kMmaM; ++u)
      codes[u % S::kMmaM][u / S::kMmaM] = S::load_codes(storage, stage, u % S::kMmaM, u / S::kMmaM, consumer, thread);
    uint32_t scale[S::kMmaM][2], zero[S::kMmaM][2];  // [64 rows][row]
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < S::kTileK / 16 * S::kMmaM; ++step) {
      int const mi = step % S::kMmaM, k_block = step / S::kMmaM;
      if (k_block % (S::kGroup / 16) == 0) {
        int const row = (mi * S::kConsumers + consumer) * 64 + thread / 32 * 16 + thread % 32 / 4;
        int const group = S::kFine ? (k_block * 16) >> group_shift : 0;
        S::template load_scales<kZeroPoints>(storage, stage, group, row, scale[mi], zero[mi]);
      }
      uint32_t words[Codes::kWords];
      S::words_of(codes[mi], k_block, words);
      warpgroup_wait<S::kRing - 1>();                                          // this fragment's last reader
      if (step == S::kRing - 1) S::release(storage, previous, thread, i > 0);  // with it all of the previous stage has retired
      uint32_t a[4];
      S::template scaled_fragment<kZeroPoints>(words, scale[mi], zero[mi], book, a);
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < 4; ++r) {
        registers(r + 4 * (step % S::kRing)) = a[r];
        warpgroup_fence_operand(registers(r + 4 * (step % S::kRing)));
      }
      warpgroup_fence_operand(accumulator);
      warpgroup_arrive();
      mma.accumulate_ = k_block == 0 && i == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
      cute::gemm(mma, tCrA(_, step % S::kRing), tCrB(_, _0{}, k_block, stage), accumulator(_, mi, _0{}));
      warpgroup_commit_batch();
      warpgroup_fence_operand(accumulator);
    }
    previous = stage;
    ring.advance();
  }
  finish_fragments<S, kZeroPoints>(storage, accumulator, previous, thread);
}

/// The same sums for few tokens, as the batch-invariant mode wants them. WGMMAs are short, so that fences and waits count: the
/// four k blocks of a weight block are a batch, dequantised while the previous one runs, in two sets of four fragments.
template <class S, bool kZeroPoints, class Storage, class Accumulator>
CUTLASS_DEVICE void mainloop_few_fragments(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count,
                                           int group_shift, int consumer, int thread) {
  using Element = typename S::Element;
  using TiledMma = typename S::TiledMma;
  using SmemLayoutB = typename S::SmemLayoutB;
  using Codes = typename S::Codes;
  using namespace cute;
  static_assert(S::kMmaM == 1 && S::kSlices == 1);
  TiledMma mma;
  Tensor sB = make_tensor(make_smem_ptr(&storage.activations[0][0]), SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
  auto thread_mma = mma.get_slice(thread);
  Tensor tCrB = thread_mma.make_fragment_B(thread_mma.partition_B(sB));    // (MMA,MMA_N,MMA_K,PIPE), descriptors
  Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, _4, _2>{});  // (MMA,MMA_K of a weight block,SET)
  auto registers = recast<uint32_t>(tCrA);
  int const row = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;

  w4a16::Book const book = S::book_of(storage, thread);
  int previous = 0;
  warpgroup_fence_operand(accumulator);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < k_count; ++i) {
    int const stage = ring.index;
    S::wait(storage, ring);
    uint4 codes[S::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < S::kChunks; ++chunk) codes[chunk] = S::load_codes(storage, stage, 0, chunk, consumer, thread);
    uint32_t scale[2], zero[2];  // [row]
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < S::kBlocks; ++block) {
      int const set = block % 2;
      warpgroup_wait<1>();                                           // this set's last readers
      if (block == 1) S::release(storage, previous, thread, i > 0);  // with them all of the previous stage has retired
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < 4; ++b) {
        int const k_block = block * 4 + b;
        if (k_block % (S::kGroup / 16) == 0) {
          int const group = S::kFine ? (k_block * 16) >> group_shift : 0;
          S::template load_scales<kZeroPoints>(storage, stage, group, row, scale, zero);
        }
        uint32_t words[Codes::kWords], a[4];
        S::words_of(codes, k_block, words);
        S::template scaled_fragment<kZeroPoints>(words, scale, zero, book, a);
        S::set(registers, set, b, a);
      }
      S::pin(registers, set);
      warpgroup_fence_operand(accumulator);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int b = 0; b < 4; ++b) {
        mma.accumulate_ = block == 0 && b == 0 && i == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        cute::gemm(mma, tCrA(_, b, set), tCrB(_, _0{}, block * 4 + b, stage), accumulator(_, _0{}, _0{}));
      }
      warpgroup_commit_batch();
      warpgroup_fence_operand(accumulator);
    }
    previous = stage;
    ring.advance();
  }
  finish_fragments<S, kZeroPoints>(storage, accumulator, previous, thread);
}

}  // namespace minfer::w4a16
