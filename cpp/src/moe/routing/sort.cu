// Stable counting sort of token-expert pairs by expert, in one launch: of one CTA, or above 4096 pairs of a cluster of eight (sm_90).
//
// A CTA sorts a range of consecutive pairs, in tiles whose size shared memory bounds: of up to 16384 pairs, so that most ranges are one
// tile. A tile's pairs are divided among the warps, and a warp's pairs are read in steps of 32, in order. The position of a pair in the
// result is
//   the expert's first position                     from the totals of all CTAs, by a scan over the experts
//   + the expert's pairs in CTAs and tiles before   from totals that the CTAs of the cluster read from each other
//   + ... in warps before                           from counters [warps][bins], by a scan over the warps
//   + ... in steps before                           from the warp's own counter, as it goes
//   + ... in lanes before                           from one ballot for each bit of the bin's number
// and nothing depends on the order of atomics. A bin is an expert; ids outside 0..experts - 1 go to one more bin, behind all others. A tile
// is first sorted in shared memory, so that an expert's pairs of a tile leave in coalesced stores: each scattered store would take a clock
// of an SM, and there are at most eight SMs. Shared memory: a tile's sorted pairs and weights, 4 bytes each; a 2-byte counter for each warp
// and bin; four numbers for each bin.
#include "common/block_scan.cuh"
#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "minfer/moe_routing.h"

namespace minfer {

namespace moe {
namespace {

constexpr int kMaxThreads = 1024, kClusterSize = 8;
constexpr int kMaxCtaPairs = 4096;         // without a cluster, whose two barriers and remote reads cost about a microsecond
constexpr int kMaxWeightLoads = 4;         // of a thread in flight; a thread with no more pairs loads their weights with the ids
constexpr uint32_t kAbsent = 0xffffffffu;  // the bin of a pair behind the last
constexpr int kInTileBits = 20;            // of a sorted pair, for its number in the tile; the bin is above them
static_assert(kMaxExperts < 1 << (32 - kInTileBits - 1));

/// Division of 0..2^31 - 1 by a constant.
struct Divisor {
  uint32_t value = 1, multiplier = 0, shift = 0;

  explicit Divisor(uint32_t value) : value(value) {
    if (value < 2) return;
    uint32_t log2 = 0;
    while ((uint64_t(1) << log2) < value) ++log2;
    multiplier = uint32_t(((uint64_t(1) << (31 + log2)) + value - 1) / value);
    shift = log2 - 1;
  }
  __device__ __forceinline__ uint32_t quotient(uint32_t x) const { return value < 2 ? x : __umulhi(x, multiplier) >> shift; }
};

struct SortParams {
  int32_t const* ids;
  float const* weights;  // or null
  int32_t *token_index, *offsets, *inverse;
  float* sorted_weights;
  int32_t pairs, cta_pairs;
  int32_t experts, bins, stride;  // bins is experts + 1, stride the next multiple of 8
  int32_t bits;                   // of a bin's number
  Divisor top_k;
};

/// Offsets in the dynamic shared memory, in bytes.
struct SortLayout {
  int weights, counters, numbers, scan, total;

  __host__ __device__ SortLayout(int threads, int tile_pairs, int stride, bool has_weights) {
    weights = tile_pairs * 4;
    counters = weights + (has_weights ? tile_pairs * 4 : 0);
    numbers = counters + threads / 32 * stride * 2;
    scan = numbers + 4 * stride * 4;
    total = scan + 32 * 8;
  }
};

/// What a CTA does. A thread has kItems pairs of every tile.
template <int kItems>
class SortCta {
 public:
  __device__ __forceinline__ SortCta(SortParams const& params, char* smem)
      : params(params),
        thread(int(threadIdx.x)),
        threads(int(blockDim.x)),
        lane(thread % 32),
        warp(thread / 32),
        warps(threads / 32),
        tile_pairs(threads * kItems),
        bins(params.bins),
        stride(params.stride) {
    SortLayout const layout(threads, tile_pairs, stride, params.weights != nullptr);
    sorted = reinterpret_cast<uint32_t*>(smem);
    sorted_weights = reinterpret_cast<float*>(smem + layout.weights);
    counters = reinterpret_cast<uint16_t*>(smem + layout.counters);
    totals = reinterpret_cast<int*>(smem + layout.numbers);
    counts = totals + stride;
    begin = counts + stride;
    base = begin + stride;
    scan = reinterpret_cast<uint64_t*>(smem + layout.scan);
    rank = cluster_rank();
    ctas = cluster_size();
    range_begin = min(params.pairs, rank * params.cta_pairs);
    range_end = min(params.pairs, range_begin + params.cta_pairs);
    tiles = max(1, (range_end - range_begin + tile_pairs - 1) / tile_pairs);
  }

  __device__ __forceinline__ void run() {
#if __CUDA_ARCH__ >= 900
    allow_dependent_launch();
#endif
    clear_counters();
    for (int bin = thread; bin < stride; bin += threads) totals[bin] = 0;
#if __CUDA_ARCH__ >= 900
    wait_for_predecessor();
#endif
    __syncthreads();
    if (tiles > 1) count_range();
    int const thread_bins = (bins + threads - 1) / threads;
    bins_begin = min(bins, thread * thread_bins);
    bins_end = min(bins, bins_begin + thread_bins);
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
      Tile tile(*this, t);
      load_bins(tile);
      if constexpr (kWeightLoads == kItems) load_weights(tile, 0);
      count_in_warp(tile);
      __syncthreads();
      scan_warps(t);
      scan_bins(t);
      __syncthreads();
      sort_in_shared(tile);
      __syncthreads();
      store(tile);
      if (t + 1 < tiles) {
        clear_counters();
        __syncthreads();
      }
    }
    if (ctas > 1) cluster_wait();
  }

 private:
  static constexpr int kWeightLoads = kItems < kMaxWeightLoads ? kItems : kMaxWeightLoads;

  /// A tile, and what a thread holds of it: every 32nd pair from number thread_first on.
  struct Tile {
    int first, count;  // pairs of the problem
    int thread_first;
    uint32_t pair[kItems];  // the bin; after count_in_warp bin << 16 | pairs of the bin before it in the warp
    float weight[kWeightLoads];

    __device__ __forceinline__ Tile(SortCta const& cta, int t)
        : first(cta.range_begin + t * cta.tile_pairs),
          count(min(cta.tile_pairs, cta.range_end - first)),
          thread_first(cta.warp * (32 * kItems) + cta.lane) {}
  };

  __device__ __forceinline__ int bin_of(int id) const { return min(unsigned(id), unsigned(params.experts)); }

  __device__ __forceinline__ void clear_counters() const {
    for (int i = thread; i < warps * stride / 8; i += threads) reinterpret_cast<uint4*>(counters)[i] = make_uint4(0, 0, 0, 0);
  }

  /// The range's totals, where they are more than those of one tile.
  __device__ __forceinline__ void count_range() const {
    for (int pair = range_begin + thread; pair < range_end; pair += threads) atomicAdd(&totals[bin_of(params.ids[pair])], 1);
  }

  __device__ __forceinline__ void load_bins(Tile& tile) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      tile.pair[i] = tile.thread_first + i * 32 < tile.count ? bin_of(params.ids[tile.first + tile.thread_first + i * 32]) : kAbsent;
    }
  }

  /// Weights of the thread's pairs `from` to from + kWeightLoads - 1.
  __device__ __forceinline__ void load_weights(Tile& tile, int from) const {
    if (params.weights == nullptr) return;
#pragma unroll
    for (int i = 0; i < kWeightLoads; ++i) {
      bool const inside = tile.thread_first + (from + i) * 32 < tile.count;
      tile.weight[i] = inside ? load_operand(params.weights + tile.first + tile.thread_first + (from + i) * 32) : 0.0f;
    }
  }

  /// Counts the warp's pairs of each bin, and for each pair those before it.
  __device__ __forceinline__ void count_in_warp(Tile& tile) const {
    uint16_t* const warp_counters = counters + warp * stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      uint32_t const bin = tile.pair[i];
      uint32_t equals = __ballot_sync(0xffffffffu, bin != kAbsent);
      if (equals != 0) {
#pragma unroll
        for (int bit = 0; bit < 11; ++bit) {
          if (bit < params.bits) {
            bool const set = bin >> bit & 1;
            uint32_t const vote = __ballot_sync(0xffffffffu, set);
            equals &= set ? vote : ~vote;
          }
        }
        uint32_t const before_in_step = __popc(equals & ((1u << lane) - 1));
        uint32_t const before = bin != kAbsent ? warp_counters[bin] : 0;
        __syncwarp();
        if (bin != kAbsent) {
          if (before_in_step == 0) warp_counters[bin] = uint16_t(before + __popc(equals));
          tile.pair[i] = bin << 16 | (before + before_in_step);
        }
        __syncwarp();
      }
    }
  }

  /// The warps' counters become positions within the bin of the tile, for the thread's bins.
  __device__ __forceinline__ void scan_warps(int t) const {
#pragma unroll 1
    for (int bin = bins_begin; bin < bins_end; ++bin) {
      int w = 0;
      uint32_t sum = 0;
#pragma unroll 1
      for (; w < warps; w += 8) {  // there are at least eight warps
        uint32_t count[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) count[i] = counters[(w + i) * stride + bin];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          counters[(w + i) * stride + bin] = uint16_t(sum);
          sum += count[i];
        }
      }
      if (t > 0) base[bin] += counts[bin];
      counts[bin] = int(sum);
      if (tiles == 1) totals[bin] = int(sum);
    }
  }

  /// Bins' positions in the tile and, with the first tile, in the result. Both are scanned together: pairs of the tile in the low half of a
  /// 64-bit number, pairs of all CTAs in the high half.
  __device__ __forceinline__ void scan_bins(int t) const {
    uint64_t sum = 0;
    if (t == 0 && ctas > 1) {  // all CTAs have their totals
      cluster_arrive();
      cluster_wait();
    }
#pragma unroll 1
    for (int bin = bins_begin; bin < bins_end; ++bin) {
      sum += uint32_t(counts[bin]);
      if (t == 0) {
        int all = 0, before = 0;
#pragma unroll
        for (int cta = 0; cta < kClusterSize; ++cta) {
          if (cta < ctas) {
            int const total = ctas > 1 ? load_from_cta(totals + bin, cta) : totals[bin];
            all += total;
            before += cta < rank ? total : 0;
          }
        }
        base[bin] = before;
        begin[bin] = all;  // kept here for the loop below
        sum += uint64_t(uint32_t(all)) << 32;
      }
    }
    if (t == 0 && ctas > 1) cluster_arrive();  // the totals have been read: their CTAs may end after the wait at the end of run()
    uint64_t positions = block_exclusive_sum(sum, scan, lane, warp, warps);
#pragma unroll 1
    for (int bin = bins_begin; bin < bins_end; ++bin) {
      if (t == 0) {
        int const all = begin[bin], position = int(positions >> 32);
        base[bin] += position;
        if (rank == 0 && bin < params.experts) params.offsets[bin] = position + all;
        positions += uint64_t(uint32_t(all)) << 32;
      }
      begin[bin] = int(uint32_t(positions));
      positions += uint32_t(counts[bin]);
    }
  }

  __device__ __forceinline__ void sort_in_shared(Tile& tile) const {
    uint16_t const* const warp_counters = counters + warp * stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if constexpr (kWeightLoads < kItems) {
        if (i % kWeightLoads == 0) load_weights(tile, i);
      }
      if (tile.pair[i] != kAbsent) {
        int const bin = int(tile.pair[i] >> 16), in_tile = tile.thread_first + i * 32;
        int const in_bin = warp_counters[bin] + int(tile.pair[i] & 0xffff), position = begin[bin] + in_bin;
        sorted[position] = uint32_t(bin) << kInTileBits | uint32_t(in_tile);
        if (params.weights != nullptr) sorted_weights[position] = tile.weight[i % kWeightLoads];
        params.inverse[tile.first + in_tile] = bin < params.experts ? base[bin] + in_bin : -1;
      }
    }
  }

  __device__ __forceinline__ void store(Tile const& tile) const {
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      int const i = j * threads + thread;
      if (i >= tile.count) break;
      int const bin = int(sorted[i] >> kInTileBits), in_tile = int(sorted[i] & ((1u << kInTileBits) - 1));
      int const position = base[bin] + i - begin[bin];
      bool const valid = bin < params.experts;
      params.token_index[position] = valid ? int(params.top_k.quotient(uint32_t(tile.first + in_tile))) : 0;
      if (params.weights != nullptr) params.sorted_weights[position] = valid ? sorted_weights[i] : 0.0f;
    }
  }

  SortParams const& params;
  int const thread, threads, lane, warp, warps, tile_pairs, bins, stride;
  int rank, ctas;                     // of the cluster
  int range_begin, range_end, tiles;  // of this CTA
  int bins_begin, bins_end;           // that this thread scans
  // Shared memory.
  uint32_t* sorted;       // [tile_pairs] bin << kInTileBits | number in the tile
  float* sorted_weights;  // [tile_pairs]
  uint16_t* counters;     // [warps][stride]
  int* totals;            // [stride] pairs of each bin in the CTA's range
  int* counts;            // [stride] pairs of each bin in the tile
  int* begin;             // [stride] position of the bin's first pair in the tile
  int* base;              // [stride] position of the same pair in the result
  uint64_t* scan;         // [32]
};

template <int kItems>
__global__ void __launch_bounds__(kMaxThreads) sort_kernel(__grid_constant__ SortParams const params) {
  extern __shared__ __align__(16) char smem_sort[];
  SortCta<kItems>(params, smem_sort).run();
}

}  // namespace
}  // namespace moe

Status sort_by_expert(ExpertSort const& sort, DeviceProperties const& device, bool programmatic, Stream stream) {
  using namespace moe;
  int64_t const pairs = sort.tokens * sort.top_k;
  if (pairs > 0x7fffffff - kMaxThreads * 16) {
    return Status::failure(StatusCode::kNotSupported, "%lld pairs are more than places of 32 bits", (long long)pairs);
  }
  bool const has_weights = sort.weights != nullptr;
  SortParams params{sort.ids,
                    has_weights ? sort.weights : nullptr,
                    sort.token_index,
                    sort.offsets,
                    sort.inverse,
                    sort.sorted_weights,
                    int32_t(pairs),
                    int32_t(pairs),
                    int32_t(sort.experts),
                    int32_t(sort.experts) + 1,
                    (int32_t(sort.experts) + 8) / 8 * 8,
                    0,
                    Divisor(uint32_t(sort.top_k > 0 ? sort.top_k : 1))};
  while ((params.experts >> params.bits) != 0) ++params.bits;
  LaunchShape shape;
  shape.programmatic = programmatic;
  shape.stream = stream;
  if (device.compute_capability() >= 90 && pairs > kMaxCtaPairs) {
    shape.cluster = dim3(kClusterSize);
    params.cta_pairs = int32_t(((pairs + kClusterSize - 1) / kClusterSize + 31) / 32 * 32);
  }
  shape.grid = shape.cluster;
  // As few threads as keep the steps of a warp few: the counters of all warps are added up.
  shape.threads = params.cta_pairs <= 512 ? 256 : params.cta_pairs <= 2048 ? 512 : kMaxThreads;
  int items = 1;
  auto const bytes = [&](int items) {
    return SortLayout(int(shape.threads), int(shape.threads) * items, params.stride, has_weights).total;
  };
  while (items < 16 && int(shape.threads) * items < params.cta_pairs && bytes(2 * items) <= device.smem_per_block) items *= 2;
  shape.smem_bytes = size_t(bytes(items));
  auto const run = [&](auto kernel, std::atomic<uint64_t>& allowed) {
    cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), device.smem_per_block, allowed);
    return error == cudaSuccess ? launch(shape, "launch of moe_sort", kernel, params)
                                : cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  };
  static std::atomic<uint64_t> allowed[5];
  switch (items) {
    case 1: return run(&sort_kernel<1>, allowed[0]);
    case 2: return run(&sort_kernel<2>, allowed[1]);
    case 4: return run(&sort_kernel<4>, allowed[2]);
    case 8: return run(&sort_kernel<8>, allowed[3]);
    default: return run(&sort_kernel<16>, allowed[4]);
  }
}

}  // namespace minfer
