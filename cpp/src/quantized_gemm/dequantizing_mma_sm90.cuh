// What the dequantising mainloops for sm_90 have in common: the consumers' part. Filling the stages differs: tokens of one matrix
// (mainloop_sm90.cuh) or of an expert, in order or gathered (moe/grouped/grouped_w4a16_sm90.cuh, which calls multiply alone).
#pragma once

#include "common/named_barrier.cuh"
#include "quantized_gemm/mainloop_accumulators_sm90.cuh"
#include "quantized_gemm/mainloop_fine_accumulators_sm90.cuh"
#include "quantized_gemm/mainloop_fragments_sm90.cuh"
#include "quantized_gemm/mainloop_sync_sm90.cuh"
#include "quantized_gemm/sliced_k_sm90.cuh"

namespace minfer::w4a16 {

/// accumulator = (a warpgroup's rows of the weights) x (the tile's tokens)^T over the next k_count stages, which it waits for and
/// releases: one of five loops. has_zeros: whether zero points are read; constants stand for them elsewhere.
template <class S, class Storage, class Accumulator>
CUTLASS_DEVICE void multiply(Storage& storage, typename S::PipelineState& ring, Accumulator& accumulator, int k_count, int group_shift,
                             bool has_zeros, int consumer, int thread) {
  auto const run = [&](auto zero_points) {
    [[maybe_unused]] constexpr bool kZeroPoints = zero_points;
    if constexpr (S::kSync) {
      mainloop_sync<S, kZeroPoints>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
    } else if constexpr (S::kScaling == Scaling::kFineAccumulators) {
      mainloop_fine_accumulators<S, kZeroPoints>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
    } else if constexpr (S::kScaling == Scaling::kAccumulators) {
      mainloop_accumulators<S>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
    } else if constexpr (S::kMmaM == 1 && S::kSlices == 1 && S::kTileN * S::kConsumers <= 32) {  // with registers for two sets
      mainloop_few_fragments<S, kZeroPoints>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
    } else {
      mainloop_fragments<S, kZeroPoints>(storage, ring, accumulator, k_count, group_shift, consumer, thread);
    }
  };
  if (S::kTwoLoops && has_zeros) {
    run(cute::bool_constant<S::kTwoLoops>{});
  } else {
    run(cute::false_type{});
  }
}

/// The consumers' part of a CollectiveMma. S: StageSm90. A warpgroup computes 64 rows of the tile (or 128), or, sliced-K, a slice of each
/// stage's k.
template <class S>
class DequantizingMmaSm90 {
 public:
  using Stage = S;
  using Element = typename S::Element;
  using TiledMma = typename S::TiledMma;
  using PipelineState = typename S::PipelineState;
  static constexpr int kThreads = S::kThreads, kValues = S::kValues, kRowGroups = S::kRowGroups;
  static constexpr int kProducerRegisters = S::kProducerRegisters, kConsumerRegisters = S::kConsumerRegisters;
  static constexpr bool kPingpong = false, kOrdered = false, kPipelineFences = false;

  template <class AnyParams>
  static CUTLASS_DEVICE PipelineState producer_start(AnyParams const&) {
    return PipelineState::of_producer();
  }
  template <class AnyParams>
  static CUTLASS_DEVICE PipelineState consumer_start(AnyParams const&) {
    return {};
  }

  static CUTLASS_DEVICE int output_group(int consumer) { return consumer % S::kRowGroups; }
  static CUTLASS_DEVICE bool stores(int consumer) { return consumer < S::kRowGroups; }

  static CUTLASS_DEVICE auto make_accumulator() {
    using namespace cute;
    auto accumulator = partition_fragment_C(TiledMma{}, Shape<Int<64 * S::kMmaM>, Int<S::kTileN>>{});  // (MMA,MMA_M,MMA_N)
    static_assert(decltype(size(accumulator))::value == S::kValues);
    return accumulator;
  }

 protected:
  template <class Storage, class Barrier>
  static CUTLASS_DEVICE void mma_init(Storage& storage, bool has_zeros, int consumer, int thread, Barrier const& barrier) {
    if constexpr (S::kHasZeros && !S::kTwoLoops) {
      if (!has_zeros) {
        S::fill_zeros(storage, consumer, thread);
        if constexpr (S::kSlices > 1) {  // each warpgroup has filled in a part of its rows'
          ConstantNamedBarrier<S::kBookBarrier, S::kConsumers * 128>::sync();
        } else {
          barrier();
        }
      }
    }
    if constexpr (S::kHasBook) {
      fill_book<S::kType, S::kFormat>(storage.book.bytes, consumer * 128 + thread, S::kConsumers * 128);
      ConstantNamedBarrier<S::kBookBarrier, S::kConsumers * 128>::sync();
    }
  }

 public:
  /// Adds the slices' sums. Returns whether this warpgroup has them now.
  template <class Storage, class Accumulator>
  static CUTLASS_DEVICE bool mma_tail(Storage& storage, PipelineState&, Accumulator& accumulator, int, int consumer, int thread) {
    return add_slices<S>(storage, accumulator, consumer, thread);
  }
};

}  // namespace minfer::w4a16
