// The producers of few_rows_warps_sm90.cuh.
#pragma once

#include "attention/prefill/few_rows_warps_facts.cuh"

namespace minfer::attention {

/// A producer: its streams take turns, a stage each.
template <class Facts>
struct FewRowsWarpsLoads : Facts {
  using Facts::address_of_storage, Facts::empty_at, Facts::full_at, Facts::kBlockStages, Facts::kBoxBytes, Facts::kColumns, Facts::kHeadDim,
      Facts::kInt4, Facts::kLocations, Facts::kProducers, Facts::kScaleBytes, Facts::kSplitStages, Facts::kStageBytes, Facts::kStageKeys,
      Facts::kStreams, Facts::kTokenScales, Facts::kWarps, Facts::range_of, Facts::scales_at, Facts::stage_at;
  using typename Facts::Int4, typename Facts::Params, typename Facts::Producer, typename Facts::Range, typename Facts::Ring,
      typename Facts::SharedStorage, typename Facts::Tile, typename Facts::TileScheduler, typename Facts::Traits;

  /// Which stage of an item comes next: from the last block to the first, a block's keys and then its values. In one register, since a
  /// producer has several: [kv_head][values][end of the block][its first stage][stage], counted from the item's first stage.
  struct Place {
    static constexpr int kBits = 6, kMaxHeads = 1 << (31 - 3 * kBits);
    static_assert(kSplitStages < 1 << kBits);
    uint32_t word;

    static CUTLASS_DEVICE Place of(Range const& range, int kv_head) {
      int const first = range.first_of((range.end - 1) / kBlockStages) - range.begin;
      return {uint32_t(first) * ((1u << kBits) + 1) | uint32_t(range.end - range.begin) << 2 * kBits |
              uint32_t(kv_head) << (3 * kBits + 1)};
    }
    CUTLASS_DEVICE int field(int number) const { return int(word >> number * kBits & ((1u << kBits) - 1)); }
    CUTLASS_DEVICE int stage() const { return field(0); }
    CUTLASS_DEVICE bool values() const { return (word >> 3 * kBits & 1) != 0; }
    CUTLASS_DEVICE int kv_head() const { return int(word >> (3 * kBits + 1)); }
    /// False behind the last one.
    CUTLASS_DEVICE bool advance() {
      if (stage() + 1 < field(2)) {
        ++word;
        return true;
      }
      int first = field(1), end = field(2);
      bool const had_values = values();
      if (had_values) end = first, first = max(first - kBlockStages, 0);
      word = (word >> 3 * kBits ^ 1) << 3 * kBits | uint32_t(end) << 2 * kBits | uint32_t(first) * ((1u << kBits) + 1);
      return end > 0;
    }
  };

  /// The loads of one consumer: the stages of its item that are left, and which item is next. Lane i holds where boxes i, i + 32 of the
  /// item lie, and where their scales do.
  struct Stream {
    int next;
    Place at{0};
    PageTable::Location of_lane[kLocations] = {};
    uint32_t scales[2] = {kNotThere, kNotThere};  // of keys, of values: 16 bytes each
    Ring ring = Ring::of_producer();
  };
  static constexpr uint32_t kNotThere = 0xffffffffu;

  Params const& params;
  SharedStorage& storage;
  int const producer, lane;
  uint32_t const base;
  int const box_shift = 31 - __clz(params.box_rows), boxes = kStageKeys >> box_shift;  // tokens of a box; boxes of a stage
  // The lane's 16 bytes of a stage's scales.
  int of_box = 0;                            // in which box of the stage
  char const* from[2] = {nullptr, nullptr};  // of keys, of values: of the box whose number is zero
  uint32_t bytes[2] = {0, 0};

  CUTLASS_DEVICE FewRowsWarpsLoads(Params const& params, SharedStorage& storage, int producer, int lane)
      : params(params), storage(storage), producer(producer), lane(lane), base(address_of_storage(storage)) {
    if constexpr (kTokenScales > 0) {
      static_assert(kLocations == 1);
      int offsets[2];
      if constexpr (kInt4) {  // a unit: of keys [scale, minimum][channel], of values [plane][token]
        offsets[0] = lane / 16 * params.keys.head_dim + lane % 16 * 8;
        offsets[1] = lane / 4 * params.page_size + lane % 4 * 8;
        bytes[0] = lane % 16 * 8 < params.keys.head_dim ? 16 : 0;
        bytes[1] = lane / 4 < 2 * params.groups_v ? 16 : 0;
      } else {
        int const token = lane * 4 % kStageKeys;
        of_box = token >> box_shift;
        offsets[0] = offsets[1] = token - (of_box << box_shift);
        bytes[0] = bytes[1] = 16;
      }
      constexpr int kBytes = sizeof(typename Traits::Scale);
      from[0] = static_cast<char const*>(params.keys.scale) + offsets[0] * kBytes;
      from[1] = static_cast<char const*>(params.values.scale) + offsets[1] * kBytes;
    }
  }

  CUTLASS_DEVICE void run(int count) const {
    Stream streams[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) streams[i].next = (producer + i * kProducers) * int(gridDim.x) + int(blockIdx.x);
    constexpr uint32_t kAll = (1u << kStreams) - 1;
    uint32_t lacking = kAll, over = 0;  // streams whose item has been loaded, and those that have no more
    while (true) {
      if (lacking != 0) {
        over |= find_items(streams, lacking, count);
        lacking = 0;
        if (over == kAll) return;
      }
      bool loaded = false;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        int const consumer = producer + i * kProducers;
        Stream& s = streams[i];
        // Those with room first: a consumer between two items must not keep the others waiting.
        if ((over >> i & 1) != 0 || !is_complete(empty_at(base, consumer, s.ring.index), s.ring.phase)) continue;
        load_stage(s, consumer);
        if (!s.at.advance()) lacking |= 1u << i;
        loaded = true;
      }
      if (loaded) continue;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {  // none has room: waits for the first that has something left
        if (loaded || (over >> i & 1) != 0) continue;
        wait_for_phase(empty_at(base, producer + i * kProducers, streams[i].ring.index), streams[i].ring.phase);
        loaded = true;
      }
    }
  }

  /// Gives the lacking streams their next items that have stages; returns those for which there is none. A lane finds the item of a
  /// stream, for all of them at once: their consumers often end together.
  CUTLASS_DEVICE uint32_t find_items(Stream (&streams)[kStreams], uint32_t lacking, int count) const {
    int next = streams[0].next;
#pragma unroll
    for (int i = 1; i < kStreams; ++i) next = i == lane ? streams[i].next : next;
    bool const searches = lane < kStreams && (lacking >> lane & 1) != 0;
    Tile tile{};
    Range range{0, 0};
    bool sees_last = false;
    while (searches && next < count && range.end <= range.begin) {
      tile = TileScheduler::at(storage.tiles, params, next);
      next += int(gridDim.x) * kWarps;
      range = range_of(params, tile);
      if constexpr (kInt4) {  // the residual's stages are not loaded here
        int const in_codes = Int4::in_codes(params, tile.seqlen_k) / kStageKeys;
        sees_last = range.end > in_codes;
        range.end = min(range.end, in_codes);
      }
    }
    bool const found = range.end > range.begin;
    int const kv_head = Traits::kv_head_of(params, tile);
    uint32_t const place = found ? Place::of(range, kv_head).word : 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      if ((lacking >> i & 1) == 0) continue;
      auto const of_lane = [i](auto x) { return __shfl_sync(0xffffffffu, x, i); };
      Stream& s = streams[i];
      s.next = of_lane(next);
      s.at = Place{of_lane(place)};
      Tile own{};  // what find_box() asks for
      own.batch = of_lane(tile.batch), own.row_k = of_lane(tile.row_k), own.seqlen_k = of_lane(tile.seqlen_k);
      own.first_key = of_lane(tile.first_key);
      int const first = of_lane(range.begin) * boxes, last = of_lane(range.end) * boxes - 1;
      if (last < first) continue;
#pragma unroll
      for (int j = 0; j < kLocations; ++j) {
        s.of_lane[j] = Producer::find_box(params, own, min(first + lane + 32 * j, last) << box_shift);
      }
      if constexpr (kTokenScales > 0) describe_scales(s, s.at.kv_head());
      if constexpr (kInt4) {
        if (of_lane(int(sees_last))) Int4::prefetch_residual(params, own.batch, s.at.kv_head(), own.seqlen_k, lane);
      }
    }
    return lacking & ~__ballot_sync(0xffffffffu, found);
  }
  /// Where the scales of the lane's box are.
  CUTLASS_DEVICE void describe_scales(Stream& s, int kv_head) const {
    auto const [page, row] = s.of_lane[0];
    s.scales[0] = s.scales[1] = kNotThere;
    if (!params.has(page) || row >= params.page_size) return;
    constexpr int kPerVector = 16 / int(sizeof(typename Traits::Scale));
    int of_key, of_value;
    if constexpr (kInt4) {
      int const shift = params.group_tokens == 64 ? 6 : 5, group = kv_head * (params.page_size >> shift) + (row >> shift);
      of_key = 2 * group * params.keys.head_dim;
      of_value = kv_head * 2 * params.groups_v * params.page_size + row;
    } else {
      of_key = of_value = kv_head * params.page_size + row;
    }
    s.scales[0] = uint32_t((page * params.keys.scale_page + of_key) / kPerVector);
    s.scales[1] = uint32_t((page * params.values.scale_page + of_value) / kPerVector);
  }

  /// Where box `box` of the item is.
  static CUTLASS_DEVICE PageTable::Location location_of(Stream const& s, int box) {
    PageTable::Location found{__shfl_sync(0xffffffffu, s.of_lane[0].page, box), __shfl_sync(0xffffffffu, s.of_lane[0].row, box)};
#pragma unroll
    for (int i = 1; i < kLocations; ++i) {
      PageTable::Location const other{__shfl_sync(0xffffffffu, s.of_lane[i].page, box), __shfl_sync(0xffffffffu, s.of_lane[i].row, box)};
      if (box >= 32 * i) found = other;
    }
    return found;
  }

  /// Loads the stream's next stage, for which there is room.
  CUTLASS_DEVICE void load_stage(Stream& s, int consumer) const {
    int const stage = s.ring.index, box = s.at.stage() * boxes;
    bool const values = s.at.values();
    uint32_t const full = full_at(base, consumer, stage), to = stage_at(base, consumer, stage);
    PageTable::Location location = location_of(s, box);
    if constexpr (kTokenScales > 0) {  // pages that are not in the cache have zeros
      uint32_t const at = __shfl_sync(0xffffffffu, values ? s.scales[1] : s.scales[0], box + of_box);
      if (lane * 16 < kStageKeys * kScaleBytes) {
        copy_async_16(scales_at(base, consumer, stage) + lane * 16, (values ? from[1] : from[0]) + uint64_t(at) * 16,
                      at == kNotThere ? 0
                      : values        ? bytes[1]
                                      : bytes[0]);
      }
      arrive_behind_copies(full);
    }
    auto const load = [&](int i) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        load_box(to + (column * kStageKeys + (i << box_shift)) * kBoxBytes, values ? &params.v : &params.k, full,
                 uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), column * (kHeadDim / kColumns), s.at.kv_head(), location.row,
                 location.page);
      }
    };
    if (cute::elect_one_sync()) {
      arrive_and_expect(full, kStageBytes);
      load(0);
    }
#pragma unroll 1
    for (int i = 1; i < boxes; ++i) {
      location = location_of(s, box + i);
      if (cute::elect_one_sync()) load(i);
    }
    s.ring.advance();
  }
};

}  // namespace minfer::attention
