// What producers and consumers of few_rows_warps_sm90.cuh share.
#pragma once

#include <algorithm>

#include "attention/prefill/few_rows_consumer.cuh"
#include "attention/prefill/few_rows_producer.cuh"
#include "common/shared_barrier.cuh"

namespace minfer::attention {

/// What this kernel needs of the queries beside their tensor map, whose boxes are tiles: strides in elements.
template <class Base>
struct FewRowsWarpsParams : Base {
  void const* queries;
  int64_t q_batch, q_row, q_head;
  int32_t head_dim;
};

/// Sizes, shared memory and addresses. A stage has tiles of 16 keys: two, whose MMAs are independent of each other, where blocks have pairs
/// of them.
template <class Config>
struct FewRowsWarpsFacts : FewRowsConsumer<FewRowsTraits<Config>> {
  using Traits = FewRowsTraits<Config>;
  using Consumer = FewRowsConsumer<Traits>;
  using Producer = FewRowsProducer<Traits>;
  using Int4 = FewRowsInt4<Traits::kType>;
  using Traits::kBoxBytes, Traits::kCodes, Traits::kColumns, Traits::kHeadDim, Traits::kInt4, Traits::kInt8, Traits::kMmaType;
  using Traits::kRowBytes, Traits::kScaleBytes, Traits::kScalesQueries, Traits::kSigns, Traits::kTileN, Traits::kTokenScales,
      Traits::kTokenTiles;
  using Traits::kType;
  using typename Consumer::Codes, typename Consumer::Items, typename Consumer::TokenScale;
  using typename Traits::EmptyBarrier, typename Traits::FullBarrier, typename Traits::Tile, typename Traits::TileScheduler;
  using BaseParams = typename Traits::Params;
  using Params = FewRowsWarpsParams<BaseParams>;
  static constexpr int kWarps = kInt4 ? 12 : 8, kProducers = 4, kStreams = kWarps / kProducers, kThreads = 32 * (kWarps + kProducers);
  static constexpr int kSteps = kHeadDim / 16;
  static constexpr int kConsumerRegisters = kWarps > 8 ? 152 : 208, kProducerRegisters = kWarps > 8 ? 56 : 88;
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;  // of a thread before that
  static_assert(kWarps * kConsumerRegisters + kProducers * kProducerRegisters <= (kWarps + kProducers) * kLaunchRegisters,
                "a warpgroup would wait forever for registers");
  static constexpr int kStageTiles = kTokenTiles % 2 == 0 ? 2 : 1, kStageKeys = 16 * kStageTiles, kBlockStages = kTokenTiles / kStageTiles;
  static constexpr int kStageBytes = kStageKeys * kRowBytes, kFixedBytes = 4096;
  static constexpr int kStages = std::min((227 * 1024 - kFixedBytes) / (kWarps * (kStageBytes + kStageKeys * kScaleBytes + 16)), 16);
  static constexpr int kSplitStages = Traits::kSplitBlocks * kBlockStages;
  static constexpr int kLocations = (kSplitStages + 31) / 32;  // that a lane holds, of a split's boxes

  using Ring = minfer::Ring<kStages>;

  struct SharedStorage {
    alignas(1024) uint8_t ring[kWarps][kStages][kStageBytes];  // [column][key][kBoxBytes], as TMA swizzles them
    alignas(16) typename Traits::Scale
        scales[kTokenScales > 0 ? kWarps : 1][kTokenScales > 0 ? kStages : 1][kTokenScales > 0 ? kStageKeys* kTokenScales : 8];
    alignas(16) uint64_t barriers[kWarps][kStages][2];  // of a stage: that it is full, and that it is empty
    typename TileScheduler::Storage tiles;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024);

  /// Addresses in shared memory. base: address_of_storage(), which the compiler keeps, since it does not know it.
  static CUTLASS_DEVICE uint32_t address_of_storage(SharedStorage const& storage) {
    uint32_t base = shared_address(&storage);
    make_opaque(base);
    return base;
  }
  static CUTLASS_DEVICE uint32_t stage_at(uint32_t base, int warp, int stage) { return base + (warp * kStages + stage) * kStageBytes; }
  static CUTLASS_DEVICE uint32_t scales_at(uint32_t base, int warp, int stage) {
    return base + uint32_t(offsetof(SharedStorage, scales)) + (warp * kStages + stage) * (kStageKeys * kScaleBytes);
  }
  static CUTLASS_DEVICE uint32_t full_at(uint32_t base, int warp, int stage) {
    return base + uint32_t(offsetof(SharedStorage, barriers)) + (warp * kStages + stage) * 16;
  }
  static CUTLASS_DEVICE uint32_t empty_at(uint32_t base, int warp, int stage) { return full_at(base, warp, stage) + 8; }

  /// The stages' keys of an item of which one of its queries sees some; none where end <= begin.
  struct Range {
    int begin, end;

    CUTLASS_DEVICE int first_of(int block) const { return max(begin, block * kBlockStages); }
    CUTLASS_DEVICE int end_of(int block) const { return min(end, (block + 1) * kBlockStages); }
  };
  static CUTLASS_DEVICE Range range_of(Params const& params, Tile const& tile) {
    auto const queries = Traits::queries_of(params, tile);
    Mask const mask = Traits::mask_of(params, tile);
    int begin = mask.begin(queries.first), end = mask.end(queries.last);
    if (tile.split >= 0) {
      begin = max(begin, tile.split * Items::kSplitKeys);
      end = min(end, (tile.split + 1) * Items::kSplitKeys);
    }
    return {begin / kStageKeys, begin < end ? (end + kStageKeys - 1) / kStageKeys : 0};
  }
};

}  // namespace minfer::attention
