// Partial sums of a tile on their way to its owner: between the CTAs of a cluster, and between the slices of a CTA.
#pragma once

#include "quantized_gemm/stage_sm90.cuh"

namespace minfer::w4a16 {

// Straight into the owner's shared memory, whose barrier counts the bytes: 0.2 us, where the way through L2 takes 1 to 2.
template <class S, class Accumulator>
CUTLASS_DEVICE void send_piece(typename S::SharedStorage& storage, Accumulator const& accumulator, int piece, int owner, int consumer,
                               int thread) {
  uint32_t const barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage.pieces.full[consumer]), owner);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < S::kValues / 4; ++i) {
    uint32_t const at = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage.pieces.of[piece][consumer][i][thread]), owner);
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                 "f"(accumulator(4 * i)), "f"(accumulator(4 * i + 1)), "f"(accumulator(4 * i + 2)), "f"(accumulator(4 * i + 3)),
                 "r"(barrier)
                 : "memory");
  }
}
template <class S, class Accumulator>
CUTLASS_DEVICE void add_pieces(typename S::SharedStorage& storage, Accumulator& accumulator, int pieces, int consumer, int thread) {
  S::FullBarrier::wait(&storage.pieces.full[consumer], 0);
  CUTLASS_PRAGMA_NO_UNROLL
  for (int piece = 0; piece < pieces; ++piece) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < S::kValues / 4; ++i) {
      float4 const part = storage.pieces.of[piece][consumer][i][thread];
      accumulator(4 * i) += part.x;
      accumulator(4 * i + 1) += part.y;
      accumulator(4 * i + 2) += part.z;
      accumulator(4 * i + 3) += part.w;
    }
  }
}

/// The other slices' sums are added to the first one's, in their order. Returns whether this warpgroup has them now.
template <class S, class Accumulator>
CUTLASS_DEVICE bool add_slices(typename S::SharedStorage& storage, Accumulator& accumulator, int consumer, int thread) {
  if constexpr (S::kSlices > 1) {
    int const slice = consumer / S::kRowGroups, rows = consumer % S::kRowGroups;
    int const written = S::kRowGroups + 1 + rows, read = 2 * S::kRowGroups + 1 + rows;  // barriers; the epilogues have 1 to S::kRowGroups
    static_assert(3 * S::kRowGroups < S::kBookBarrier);
    if (slice > 0) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < S::kValues / 4; ++i) {
        storage.slices.of[slice - 1][rows][i][thread] =
            make_float4(accumulator(4 * i), accumulator(4 * i + 1), accumulator(4 * i + 2), accumulator(4 * i + 3));
      }
      asm volatile("bar.arrive %0, %1;" ::"r"(written), "n"(S::kSlices * 128) : "memory");
      asm volatile("bar.sync %0, %1;" ::"r"(read), "n"(S::kSlices * 128) : "memory");
      return false;
    }
    asm volatile("bar.sync %0, %1;" ::"r"(written), "n"(S::kSlices * 128) : "memory");
    CUTLASS_PRAGMA_UNROLL
    for (int other = 0; other < S::kSlices - 1; ++other) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < S::kValues / 4; ++i) {
        float4 const part = storage.slices.of[other][rows][i][thread];
        accumulator(4 * i) += part.x;
        accumulator(4 * i + 1) += part.y;
        accumulator(4 * i + 2) += part.z;
        accumulator(4 * i + 3) += part.w;
      }
    }
    asm volatile("bar.arrive %0, %1;" ::"r"(read), "n"(S::kSlices * 128) : "memory");
  }
  return true;
}

}  // namespace minfer::w4a16
