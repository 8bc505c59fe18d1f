// Batch-invariant attention of few rows for sm_90a, for launches of many items: each warp computes items of its own, from the loads to the
// store, with the arithmetic of few_rows_sm90.cuh and therefore the same bits. Such launches are bound by the bytes of the cache, and what
// counts is that as many loads are under way as shared memory holds, over blocks and items.
//
// Warp roles. Eight warps, of int4 twelve, are consumers. Each has a ring of its own, whose stages are 16 or 32 keys or their values: a
// block's keys, then its values, from the last block of a split to the first. Scores, probabilities and output are in the consumer's
// registers, as are the queries. Four more warps, one to a scheduler, are producers, which fill the rings of two or three consumers each: a
// stage of one, then a stage of another, where there is room. What can be issued is the limit of consumers that convert codes, so that a
// producer's instructions count: a lane holds where a box of the item lies, and brings 16 bytes of a stage's scales.
// Limits: an item is one split (split_scheduler.cuh), or a tile whose keys are one split; fits() has others.
#pragma once

#include <algorithm>
#include <numeric>

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

template <class Config>
struct FewRowsWarpsSm90 : FewRowsConsumer<FewRowsTraits<Config>> {
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
  // A stage has tiles of 16 keys: two, whose MMAs are independent of each other, where blocks have pairs of them.
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

  /// Whether lanes can hold where all boxes of a split lie, and a Place has room for the KV head.
  static bool fits(AttentionProblem const& problem, AttentionPlan const& plan) {
    int64_t const box_rows = std::gcd(plan.box_rows, int64_t(kStageKeys));
    return kSplitStages * kStageKeys <= 32 * kLocations * box_rows && problem.heads_kv <= Place::kMaxHeads;
  }

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (shared_address(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread < kWarps) {
      for (int s = 0; s < kStages; ++s) {
        FullBarrier::init(&storage.barriers[thread][s][0], kTokenScales > 0 ? 33 : 1);  // each lane brings scales
        EmptyBarrier::init(&storage.barriers[thread][s][1], 1);
      }
      cutlass::arch::fence_barrier_init();
    }
    wait_for_predecessor();
    TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();
    int const step = int(gridDim.x) * kWarps;
    int const count = TileScheduler::count(storage.tiles, params);
    if (warp >= kWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      Loads(params, storage, warp - kWarps, thread % 32).run(count);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      clear_rows_outside_sequences(params, thread, 32 * kWarps);
      Warp of{params, storage, warp, thread % 32, address_of_storage(storage)};
      for (int item = warp * int(gridDim.x) + int(blockIdx.x); item < count; item += step) {  // few items are on all SMs
        of.compute(TileScheduler::at(storage.tiles, params, item));
      }
    }
  }

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

  // ---- producers ------------------------------------------------------------------------------------------------------------------

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

  /// A producer's streams take turns, a stage each.
  struct Loads {
    Params const& params;
    SharedStorage& storage;
    int const producer, lane;
    uint32_t const base;
    int const box_shift = 31 - __clz(params.box_rows), boxes = kStageKeys >> box_shift;  // tokens of a box; boxes of a stage
    // The lane's 16 bytes of a stage's scales.
    int of_box = 0;                            // in which box of the stage
    char const* from[2] = {nullptr, nullptr};  // of keys, of values: of the box whose number is zero
    uint32_t bytes[2] = {0, 0};

    CUTLASS_DEVICE Loads(Params const& params, SharedStorage& storage, int producer, int lane)
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

  // ---- a consumer -----------------------------------------------------------------------------------------------------------------

  struct Warp {
    Params const& params;
    SharedStorage& storage;
    int const warp, lane;
    uint32_t const base;
    Ring ring{};

    /// Waits for the next stage and returns its number.
    CUTLASS_DEVICE int wait() const {
      wait_for_phase(full_at(base, warp, ring.index), ring.phase);
      return ring.index;
    }
    CUTLASS_DEVICE void release() {
      __syncwarp();
      if (lane == 0) arrive_at(empty_at(base, warp, ring.index));
      ring.advance();
    }

    /// The queries as B operands; codes have another order (KvCodes::operand_of). Returns what their scores are multiplied by. Lanes
    /// 4 g + c have row g.
    CUTLASS_DEVICE float load_queries(Tile const& tile, uint32_t (&b)[kSteps][2]) const {
      int const row = lane / 4, query = tile.first + Traits::over_packed_heads(params, row);
      int const head = tile.head_tile * params.packed_heads + (row & (params.packed_heads - 1));
      bool const is_query = query < tile.seqlen_q;
      int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
      auto const* const from = static_cast<uint16_t const*>(params.queries) + batch * params.q_batch +
                               (int64_t(tile.row_q) + (is_query ? query : tile.first)) * params.q_row + head * params.q_head;
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int const column = kCodes ? 16 * s + 4 * (lane % 4) + 2 * half : 16 * s + 8 * half + 2 * (lane % 4);
          b[s][half] = 0;
          if (is_query && column < params.head_dim) b[s][half] = load_operand(reinterpret_cast<uint32_t const*>(from + column));
        }
      }
      if constexpr (!kSigns && !kScalesQueries) {
        return 1.0f;
      } else if constexpr (kSigns) {
        float const sign = sign_of_keys(params, Traits::kv_head_of(params, tile));
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) b[i / 2][i % 2] = Consumer::with_sign(b[i / 2][i % 2], sign);
        return 1.0f;
      } else {  // as scale_query()
        using From = Float16<kType>;
        float max = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
          float2 const pair = From::unpack(b[i / 2][i % 2]);
          max = fmaxf(max, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
#pragma unroll
        for (int x = 1; x < 4; x *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, x));
        float const factor = query_factor(max), signed_factor = factor * sign_of_keys(params, Traits::kv_head_of(params, tile));
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
          float2 const pair = From::unpack(b[i / 2][i % 2]);
          b[i / 2][i % 2] = Float16<DataType::kF16>::pack(pair.x * signed_factor, pair.y * signed_factor);
        }
        return inverse_of_power(factor);
      }
    }

    /// int4: S^T of a stage's keys.
    CUTLASS_DEVICE void multiply_int4_keys(int stage, int kv_head, uint32_t const (&b)[kSteps][2], float (&scores)[kStageTiles][4]) const {
      uint32_t const keys = stage_at(base, warp, stage), unit = scales_at(base, warp, stage);
      typename Int4::Constants const constants(kv_head, lane);
      Consumer::clear(scores);
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        typename Int4::KeyScales const first(unit, s, lane), second(unit, s + 1, lane);
        uint32_t const of_lane = Int4::address_of_keys(keys, 0, s / 2, lane);
#pragma unroll
        for (int t = 0; t < kStageTiles; ++t) {
          uint32_t a[2][4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint4 const x = Int4::load_keys(of_lane + (16 * t + 8 * i) * Int4::kRowBytes);
            Int4::convert_keys(x.x, x.y, first, constants, a[0][i], a[0][2 + i]);
            Int4::convert_keys(x.z, x.w, second, constants, a[1][i], a[1][2 + i]);
          }
          multiply_16x8x16<kMmaType>(scores[t], a[0], b[s][0], b[s][1]);
          multiply_16x8x16<kMmaType>(scores[t], a[1], b[s + 1][0], b[s + 1][1]);
        }
      }
    }
    /// Of keys from `key` on, which are in the residual. b is as before behind it: it turns, so that the loop is not unrolled; the loads of
    /// all steps at once would take registers that the loops over codes then lack.
    CUTLASS_DEVICE void multiply_residual_keys(typename Int4::Residual const& from, int key, uint32_t (&b)[kSteps][2],
                                               float (&scores)[kStageTiles][4]) const {
      constexpr int kAtOnce = 4;
      Consumer::clear(scores);
#pragma unroll 1
      for (int s = 0; s < kSteps; s += kAtOnce) {
        uint32_t a[kAtOnce][kStageTiles][4];
#pragma unroll
        for (int i = 0; i < kAtOnce * kStageTiles; ++i) {
          from.load_keys(key + 16 * (i % kStageTiles), s + i / kStageTiles, lane, a[i / kStageTiles][i % kStageTiles]);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce * kStageTiles; ++i) {
          int const step = i / kStageTiles;
          multiply_16x8x16<kMmaType>(scores[i % kStageTiles], a[step][i % kStageTiles], b[step][0], b[step][1]);
        }
        uint32_t first[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if (i < kAtOnce) first[i][j] = b[i][j];
            b[i][j] = i + kAtOnce < kSteps ? b[(i + kAtOnce) % kSteps][j] : first[i + kAtOnce - kSteps][j];
          }
        }
      }
    }
    /// S^T of a stage's keys.
    CUTLASS_DEVICE void multiply_keys(int stage, uint32_t kept, uint32_t const (&b)[kSteps][2], float (&scores)[kStageTiles][4]) const {
      uint32_t const keys = stage_at(base, warp, stage);
      TokenScale scales[kStageTiles][2];
      Consumer::clear(scores);
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
        if constexpr (kInt8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) scales[t][i] = TokenScale(storage.scales[warp][stage][16 * t + 8 * i + lane / 4]);
        }
      }
      constexpr int kStepsOfVectors = kCodes ? 2 : 1;  // MMAs of two vectors of 16 bytes
#pragma unroll
      for (int s = 0; s < kSteps; s += kStepsOfVectors) {
#pragma unroll
        for (int t = 0; t < kStageTiles; ++t) {
          uint32_t x[4], a[4];
          load_matrices(Consumer::address_of(keys, kStageKeys, 16 * t + lane % 16, 2 * s / kStepsOfVectors + lane / 16), x);
          if constexpr (kCodes) {
            if constexpr (kSigns) {
#pragma unroll
              for (int i = 0; i < 4; ++i) x[i] &= kept;
            }
            Consumer::template convert_keys<0>(x, scales[t], a);
            multiply_16x8x16<kMmaType>(scores[t], a, b[s][0], b[s][1]);
            Consumer::template convert_keys<1>(x, scales[t], a);
            multiply_16x8x16<kMmaType>(scores[t], a, b[s + 1][0], b[s + 1][1]);
          } else {
            multiply_16x8x16<kMmaType>(scores[t], x, b[s][0], b[s][1]);
          }
        }
      }
    }
    /// int4: O^T += V^T.P^T of a stage's keys.
    CUTLASS_DEVICE void multiply_int4_values(int stage, int kv_head, uint2 const* p, float (&output)[kSteps][4]) const {
      uint32_t const values = stage_at(base, warp, stage), unit = scales_at(base, warp, stage);
      typename Int4::Constants const constants(kv_head, lane);
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
        typename Int4::ValueScales scales;
#pragma unroll
        for (int v = 0; v < kSteps / 2; v += 2) {  // vectors of 32 channels
          uint32_t x[4];                           // {tokens 0-7 of the first vector, of the second, tokens 8-15 likewise}
          load_matrices_transposed(Int4::address_of(values, 16 * t + lane / 16 * 8 + lane % 8, v + lane / 8 % 2), x);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            if ((v + j) % params.vectors_of_group == 0) {
              scales = typename Int4::ValueScales(unit, t, (v + j) / params.vectors_of_group, params.groups_v, lane);
            }
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              uint32_t a[4];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                Int4::convert_values(x[2 * i + j] >> 8 * tile, scales.scale[i], scales.minimum[i], constants, a[2 * i], a[2 * i + 1]);
              }
              multiply_16x8x16<kMmaType>(output[2 * (v + j) + tile], a, p[t].x, p[t].y);
            }
          }
        }
      }
    }
    /// Of values from `key` on, which are in the residual.
    CUTLASS_DEVICE void multiply_residual_values(typename Int4::Residual const& from, int key, uint2 const* p,
                                                 float (&output)[kSteps][4]) const {
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
#pragma unroll
        for (int v = 0; v < kSteps / 2; ++v) {
          uint32_t a[2][4];
          from.load_values(key + 16 * t, v, lane, a);
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) multiply_16x8x16<kMmaType>(output[2 * v + tile], a[tile], p[t].x, p[t].y);
        }
      }
    }

    /// O^T += V^T.P^T of a stage's keys.
    CUTLASS_DEVICE void multiply_values(int stage, uint2 const* p, float (&output)[kSteps][4]) const {
      uint32_t const values = stage_at(base, warp, stage);
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
        int const key = 16 * t + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
        if constexpr (kCodes) {
          TokenScale scales[4];
          if constexpr (kInt8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              scales[i] = TokenScale(storage.scales[warp][stage][16 * t + i / 2 * 8 + 2 * (lane % 4) + i % 2]);
            }
          }
#pragma unroll
          for (int i = 0; i < kSteps; i += 2) {
            uint32_t x[4], a[4];
            load_matrices_transposed(Consumer::address_of(values, kStageKeys, key, i + half), x);
            Consumer::template convert_values<0>(x, scales, a);
            multiply_16x8x16<kMmaType>(output[i], a, p[t].x, p[t].y);
            Consumer::template convert_values<1>(x, scales, a);
            multiply_16x8x16<kMmaType>(output[i + 1], a, p[t].x, p[t].y);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
            uint32_t a[4];
            load_matrices_transposed(Consumer::address_of(values, kStageKeys, key, 2 * i + half), a);
            multiply_16x8x16<kMmaType>(output[i], a, p[t].x, p[t].y);
          }
        }
      }
    }
    /// Values of keys outside of [begin, end) become zeros: their probabilities are zero, but 0 * NaN is NaN. Codes with scales are so
    /// where these are.
    CUTLASS_DEVICE void clear_unseen(int stage, int begin, int end) const {
      if (begin <= 0 && end >= kStageKeys) return;
      if constexpr (kInt4) {
        for (int plane = 0; plane < 2 * params.groups_v; ++plane) {
          if (lane < begin || lane >= end) storage.scales[warp][stage][plane * Int4::kUnit + lane] = 0;
        }
      } else {
        constexpr int kVectors = kRowBytes / 16;
        uint32_t const values = stage_at(base, warp, stage);
#pragma unroll 1
        for (int i = lane; i < kStageKeys * kVectors; i += 32) {
          int const key = i / kVectors;
          if (key >= begin && key < end) continue;
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(Consumer::address_of(values, kStageKeys, key, i % kVectors)), "r"(0)
                       : "memory");
          if constexpr (kInt8) storage.scales[warp][stage][key] = 0.0f;
        }
      }
      cutlass::arch::fence_view_async_shared();  // before TMA loads into the stage again
      __syncwarp();
    }

    /// Moves a block's scores down by a stage, whose scores become the last ones.
    static CUTLASS_DEVICE void push(float (&scores)[kTokenTiles][4], float const (&of_stage)[kStageTiles][4]) {
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          scores[t][x] = t + kStageTiles < kTokenTiles ? scores[t + kStageTiles][x] : of_stage[t + kStageTiles - kTokenTiles][x];
        }
      }
    }

    CUTLASS_DEVICE int in_codes_of(Tile const& tile) const {
      if constexpr (kInt4) return Int4::in_codes(params, tile.seqlen_k);
      return tile.seqlen_k;
    }

    CUTLASS_DEVICE void compute(Tile const& tile) {
      uint32_t b[kSteps][2];
      float const of_query = load_queries(tile, b);
      float const query_scale[2] = {__shfl_sync(0xffffffffu, of_query, lane % 4 * 8), __shfl_sync(0xffffffffu, of_query, lane % 4 * 8 + 4)};
      auto const seen = Consumer::seen_keys(params, tile);
      Range const range = range_of(params, tile);
      uint32_t kept = 0xffffffffu;
      int const kv_head = Traits::kv_head_of(params, tile), in_codes = in_codes_of(tile);
      if constexpr (kSigns) kept = sign_of_keys(params, kv_head) == 0.0f ? 0 : kept;
      float output[kSteps][4], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f};
      Consumer::clear(output);
      int const last_block = range.end > range.begin ? (range.end - 1) / kBlockStages : -1, first_block = range.begin / kBlockStages;
#pragma unroll 1
      for (int block = last_block; block >= first_block; --block) {
        int const first = range.first_of(block) - block * kBlockStages, end = range.end_of(block) - block * kBlockStages;
        float scores[kTokenTiles][4], block_max[2] = {-INFINITY, -INFINITY};
        Consumer::clear(scores);
        // Loops over stages are not unrolled: with a copy for each stage, warps waited for instructions a fifth of the time.
#pragma unroll 1
        for (int i = 0; i < kBlockStages; ++i) {
          float of_stage[kStageTiles][4];
          int const key = (block * kBlockStages + i) * kStageKeys;
          if (i < first || i >= end) {
#pragma unroll
            for (int t = 0; t < kStageTiles; ++t) {
#pragma unroll
              for (int x = 0; x < 4; ++x) of_stage[t][x] = -INFINITY;
            }
          } else if (kInt4 && key >= in_codes) {
            if constexpr (kInt4) multiply_residual_keys(Consumer::residual_of(params, params.keys, tile, seen), key, b, of_stage);
          } else {
            if constexpr (kInt4) {
              multiply_int4_keys(wait(), kv_head, b, of_stage);
            } else {
              multiply_keys(wait(), kept, b, of_stage);
            }
            release();
          }
          push(scores, of_stage);
        }
        int own = lane;
        if constexpr (kInt4) make_opaque(own);  // what is computed from it is computed anew for each block: kept, it would be spilled
        auto const rows = Consumer::rows_of(params, query_scale, tile, own);
        Consumer::cap_and_mask(params, rows, block * kTileN, own, scores);
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) block_max[x % 2] = fmaxf(block_max[x % 2], scores[t][x]);
        }
        // As OnlineSoftmax::step().
        float rescale[2], offset[2];
        bool raised = false;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int x = 4; x < 32; x *= 2) block_max[e] = fmaxf(block_max[e], __shfl_xor_sync(0xffffffffu, block_max[e], x));
          block_max[e] = __fmul_rn(block_max[e], rows.scale_log2[e]);
          rescale[e] = 1.0f;
          if (block_max[e] > row_max[e] + kRaiseThreshold) {
            rescale[e] = exp2_fast(row_max[e] - block_max[e]);
            row_max[e] = block_max[e];
            raised = true;
          }
          offset[e] = row_max[e] == -INFINITY ? 0.0f : row_max[e];
        }
        uint2 p[kTokenTiles];
        float sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            scores[t][x] = exp2_fast(fmaf(scores[t][x], rows.scale_log2[x % 2], -offset[x % 2]));
            sum[x % 2] += scores[t][x];
          }
          using F = Float16<kMmaType>;
          p[t] = make_uint2(transpose_matrix(F::pack(scores[t][0], scores[t][1])), transpose_matrix(F::pack(scores[t][2], scores[t][3])));
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], 4);
          row_sum[e] = fmaf(row_sum[e], rescale[e], sum[e]);
        }
        if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
#pragma unroll
            for (int x = 0; x < 4; ++x) output[i][x] *= rescale[x % 2];
          }
        }
#pragma unroll 1
        for (int i = 0; i < kBlockStages; ++i) {
          int const key = (block * kBlockStages + i) * kStageKeys;
          if (i < first || i >= end) {
            // probabilities of zero add nothing
          } else if (kInt4 && key >= in_codes) {
            if constexpr (kInt4) multiply_residual_values(Consumer::residual_of(params, params.values, tile, seen), key, p, output);
          } else {
            int const stage = wait();
            clear_unseen(stage, seen.begin - key, seen.end - key);
            if constexpr (kInt4) {
              multiply_int4_values(stage, kv_head, p, output);
            } else {
              multiply_values(stage, p, output);
            }
            release();
          }
#pragma unroll
          for (int t = kStageTiles; t < kTokenTiles; ++t) p[t - kStageTiles] = p[t];  // the next stage's come first
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        row_sum[e] += __shfl_xor_sync(0xffffffffu, row_sum[e], 8);
        row_sum[e] += __shfl_xor_sync(0xffffffffu, row_sum[e], 16);
      }
      // As a fold of the only split; the kernel that folds splits does it otherwise.
      SplitState total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        SplitWeights const weights = fold_state(total[e], {row_max[e], row_sum[e]});
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int x = e; x < 4; x += 2) output[i][x] = fold_output(0.0f, output[i][x], weights);
        }
      }
      auto const column_of = [&](int i, int x) { return Codes::row_of(i, lane / 4, x / 2); };
      if (tile.split >= 0) {
        Consumer::template store_partial<kSteps>(params, tile, total, output, lane, column_of);
      } else {
        Consumer::template store<kSteps>(params, tile, Consumer::value_scale(params, tile), total, output, lane, column_of);
      }
    }
  };
};

template <class Config>
__global__ void __launch_bounds__(FewRowsWarpsSm90<Config>::kThreads, 1)
    few_rows_warps_sm90_kernel(__grid_constant__ typename FewRowsWarpsSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  FewRowsWarpsSm90<Config>::run(params, smem);
#endif
}

}  // namespace minfer::attention
