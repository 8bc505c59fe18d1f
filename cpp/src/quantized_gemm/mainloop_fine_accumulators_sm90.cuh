// Mainloop of few tokens and groups of 32: WGMMA, scales on the accumulators of 32 of k.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Scales on the accumulators of every 32 of k: while a piece's two WGMMAs run the next one's codes are dequantised into the other set.
/// kZeroPoints: whether they are read; in two forms, as there are as many of them as scales.
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
  Tensor tCrA = make_tensor<Element>(Shape<Shape<_2, _2, _2>, Int<S::kGroup / 16>, _2>{});  // (MMA,MMA_K of a piece,SET)
  auto registers = recast<uint32_t>(tCrA);
  Tensor partial = make_fragment_like(accumulator);  // (MMA,MMA_M,MMA_N), of a piece
  int const row = consumer % S::kRowGroups * 64 + thread / 32 * 16 + thread % 32 / 4, slice = consumer / S::kRowGroups;
  constexpr int kPiece = S::kGroup, kSlabs = kPiece / 16, kPieces = S::kSliceK / kPiece;
  uint32_t symmetric[2] = {0, 0};
  if constexpr (S::kHasZeros && !kZeroPoints) {
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < 2; ++r) {
      symmetric[r] = Half2<S::kType>::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
    }
  }
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
    auto const group_of = [&](int piece) { return (slice * S::kSliceK + piece * kPiece) >> group_shift; };
    auto const dequantize = [&](int piece) {
      uint32_t zero[2];
      if constexpr (kZeroPoints) {
        S::load_zeros(storage, stage, group_of(piece), row, zero);
      } else {
        zero[0] = symmetric[0];
        zero[1] = symmetric[1];
      }
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        uint32_t words[Codes::kWords], a[4];
        S::words_of(codes, piece * kSlabs + slab, words);
        Codes::fragment(words, zero, book, a);
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < 4; ++r) {
          registers(r + 4 * slab + 4 * kSlabs * (piece % 2)) = a[r];
          warpgroup_fence_operand(registers(r + 4 * slab + 4 * kSlabs * (piece % 2)));
        }
      }
    };
    dequantize(0);
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < kPieces; ++piece) {
      warpgroup_fence_operand(partial);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        mma.accumulate_ = slab == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One;
        cute::gemm(mma, tCrA(_, slab, piece % 2), tCrB(_, _0{}, (slice * kPieces + piece) * kSlabs + slab, stage), partial(_, _0{}, _0{}));
      }
      warpgroup_commit_batch();
      if (piece + 1 < kPieces) dequantize(piece + 1);
      int const group = group_of(piece);
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
