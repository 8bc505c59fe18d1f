// Mainloop of the fewest tokens: mma.sync.
#pragma once

#include "common/mma_sm80.cuh"
#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

/// Few tokens, by mma.sync: fewer instructions than the WGMMA loop and no waiting for its batches (8192 x 8192 at m = 1: 11.8 us, by WGMMA
/// 12.6). The accumulators are laid out as WGMMA's. With kInOrder there is one sum, which has WGMMA's bits.
template <class S, bool kZeroPoints, class Storage, class Accumulator>
CUTLASS_DEVICE void mainloop_sync(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count, int group_shift,
                                  int consumer, int thread) {
  using Codes = typename S::Codes;
  using Scale = typename S::Scale;
  constexpr bool kOnFragments = S::kScaling == Scaling::kFragments || S::kScaling == Scaling::kFine;
  constexpr int kKBlocks = S::kSliceK / 16, kEights = S::kTileN / 8;                        // of k and of tokens
  constexpr int kScaled = kOnFragments ? kKBlocks : cute::min(S::kGroup, S::kSliceK) / 16;  // k blocks between scalings of the accumulators
  constexpr int kChains = kScaled > 2 && !S::kInOrder ? 2 : 1;                              // sums to which k blocks are added alternately
  int const slice = consumer / S::kRowGroups, first_group = slice * S::kSliceK >> group_shift;
  int const lane = thread % 32, row = consumer % S::kRowGroups * 64 + thread / 32 * 16 + lane / 4;
  // ldmatrix: lane l gives the address of vector l / 8 (8 of k) of token l % 8; vector v lies at v ^ token % 8 of the token's 128 bytes.
  uint32_t const tokens =
      cute::cast_smem_ptr_to_uint(&storage.activations[0][slice * S::kSliceK * S::kTileN]) + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
  w4a16::Book const book = S::book_of(storage, thread);
  uint32_t zero[2], scale[2];
  S::symmetric_zeros(zero);
  float sum[kChains][kEights][4];
  auto const clear = [&] {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChains * S::kValues; ++i) sum[i / S::kValues][i % S::kValues / 4][i % 4] = 0.0f;
  };
  auto const total = [&](int v) { return kChains == 2 ? sum[0][v / 4][v % 4] + sum[kChains - 1][v / 4][v % 4] : sum[0][v / 4][v % 4]; };

  clear();
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < S::kValues; ++v) accumulator(v) = 0.0f;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int i = 0; i < k_count; ++i) {
    int const stage = ring.index;
    S::wait(storage, ring);
    uint4 codes[S::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < S::kChunks; ++c) codes[c] = S::load_codes(storage, stage, 0, c, consumer, thread);
    uint32_t b[kKBlocks / 2][kEights][4];
    CUTLASS_PRAGMA_UNROLL
    for (int u = 0; u < kKBlocks / 2 * kEights; ++u) {
      int const pair = u / kEights, eight = u % kEights;  // [32 of k][eight tokens][vector]
      uint32_t const at = tokens + stage * (S::kTileN * S::kTileK * 2) + pair / 2 * (S::kTileN * 128) + eight * 1024;
      load_matrices(at ^ pair % 2 * 64, b[pair][eight]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int k_block = 0; k_block < kKBlocks; ++k_block) {
      int const group = first_group + (S::kFine ? k_block * 16 >> group_shift : 0);
      typename Scale::Stored const* scales = &storage.scales[stage][group][row];
      if (k_block % (S::kGroup / 16) == 0) {
        if constexpr (kOnFragments) {
          S::template load_scales<kZeroPoints>(storage, stage, group, row, scale, zero);
        } else if constexpr (kZeroPoints) {
          S::load_zeros(storage, stage, group, row, zero);
        }
      }
      if (!kOnFragments && k_block % kScaled == 0) clear();
      uint32_t words[Codes::kWords], a[4];
      S::words_of(codes, k_block, words);
      if constexpr (kOnFragments) {
        S::template scaled_fragment<kZeroPoints>(words, scale, zero, book, a);
      } else {
        Codes::fragment(words, zero, book, a);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kEights; ++e) {
        multiply_16x8x16<S::kType>(sum[k_block % kChains][e], a, b[k_block / 2][e][k_block % 2 * 2],
                                   b[k_block / 2][e][k_block % 2 * 2 + 1]);
      }
      if (!kOnFragments && k_block % kScaled == kScaled - 1) {
        float const factor[2] = {Scale::to_float(scales[0]), Scale::to_float(scales[8])};
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < S::kValues; ++v) accumulator(v) = fmaf(factor[v / 2 % 2], total(v), accumulator(v));
      }
    }
    // The stage is released only when the sums are complete, and with them all reads of the stage. When it was released as soon as the last
    // ldmatrix was issued, stages were overwritten under it: 2 of 24 test cases with tails in m, n and k were wrong, and none since. No sum
    // has these bits: the NaNs of arithmetic have others.
    constexpr uint32_t kNever = 0x7fedcba9u;
    float const low = kOnFragments ? total(0) : accumulator(0), high = kOnFragments ? total(S::kValues - 1) : accumulator(S::kValues - 1);
    S::release(storage, stage, thread, __float_as_uint(low) != kNever && __float_as_uint(high) != kNever);
    ring.advance();
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < S::kValues; ++v) {
    if constexpr (kOnFragments) {
      accumulator(v) = total(v) * S::template rest<kZeroPoints>();
    } else {
      accumulator(v) *= Codes::inverse_float(v / 2 % 2);
    }
  }
}

}  // namespace minfer::w4a16
