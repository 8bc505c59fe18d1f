// Stable counting sort of (token, expert) pairs, in one launch: a CTA, or from 4097 pairs on a cluster of eight (sm_90).
//
// A CTA has a range of consecutive pairs and takes it in tiles, which shared memory bounds; up to eight tiles' worth of pairs there is one to a
// CTA. A tile's pairs are divided among warps, and a warp's among its steps of 32, in order: so a pair's place is
//   the expert's first place                        of all CTAs' totals, a scan over experts
//   + the expert's pairs in CTAs and tiles before   totals, read from the cluster's other CTAs
//   + ... in warps before                           [warps][bins] counters, a scan over warps
//   + ... in steps before                           the warp's own counter as it goes
//   + ... in lanes before                           one ballot for each bit of the bin
// and nothing depends on the order of atomics. Ids outside 0..experts - 1 are one more bin behind all others.
// A tile is put in order in shared memory first: an expert's run of it then goes out in coalesced stores, where scattered ones would take the
// eight SMs a clock each.
// Shared memory: sorted pairs and weights of a tile, 4 bytes each; 2-byte counters of warps and bins; four numbers a bin.
#include "common/block_scan.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "minfer/moe_routing.h"

namespace minfer {

namespace moe {
namespace {

constexpr int kMaxThreads = 1024, kClusterSize = 8;
constexpr int kAloneUpTo = 4096;  // pairs of one CTA: a cluster's two barriers and reads across cost about a microsecond
constexpr int kMaxGroup = 4;      // weights of a thread that are under way together; up to as many pairs they come with the ids
constexpr uint32_t kAbsent = 0xffffffffu;
constexpr int kLocalBits = 20;  // of a sorted pair: its number in the tile, below the bin
static_assert(kMaxExperts < 1 << (32 - kLocalBits - 1));

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
  int32_t pairs, chunk;           // chunk: pairs of a CTA
  int32_t experts, bins, stride;  // bins = experts + 1; stride: bins in steps of 8
  int32_t bits;                   // of a bin
  Divisor top_k;
};

/// Places of the dynamic shared memory, in bytes.
struct SortLayout {
  int weights, counters, numbers, scan, total;

  __host__ __device__ SortLayout(int threads, int tile, int stride, bool has_weights) {
    weights = tile * 4;
    counters = weights + (has_weights ? tile * 4 : 0);
    numbers = counters + threads / 32 * stride * 2;
    scan = numbers + 4 * stride * 4;
    total = scan + 32 * 8;
  }
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return int(size);
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ int load_from_cta(int const* own, int rank) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(own)), value;
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(rank));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return int(value);
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ int cluster_size() { return 1; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() {}
__device__ __forceinline__ int load_from_cta(int const* own, int) { return *own; }
#endif

template <int kItems>
__global__ void __launch_bounds__(kMaxThreads) sort_kernel(__grid_constant__ SortParams const params) {
  constexpr int kGroup = kItems < kMaxGroup ? kItems : kMaxGroup;
  extern __shared__ __align__(16) char smem_sort[];
  int const thread = int(threadIdx.x), threads = int(blockDim.x), lane = thread % 32, warp = thread / 32, warps = threads / 32;
  int const tile = threads * kItems, bins = params.bins, stride = params.stride;
  SortLayout const layout(threads, tile, stride, params.weights != nullptr);
  uint32_t* sorted = reinterpret_cast<uint32_t*>(smem_sort);
  float* sorted_weights = reinterpret_cast<float*>(smem_sort + layout.weights);
  uint16_t* counters = reinterpret_cast<uint16_t*>(smem_sort + layout.counters);
  int* totals = reinterpret_cast<int*>(smem_sort + layout.numbers);  // of the CTA's range
  int *counts = totals + stride, *begin = counts + stride;           // of the tile: pairs of a bin, place of its first
  int* base = begin + stride;                                        // place of the bin's next pair in the result
  uint64_t* scan = reinterpret_cast<uint64_t*>(smem_sort + layout.scan);
  int const rank = cluster_rank(), ctas = cluster_size();
  int const range_begin = min(params.pairs, rank * params.chunk), range_end = min(params.pairs, range_begin + params.chunk);
  int const tiles = max(1, (range_end - range_begin + tile - 1) / tile);
  auto const bin_of = [&](int id) { return min(unsigned(id), unsigned(params.experts)); };
  auto const clear_counters = [&] {
    for (int i = thread; i < warps * stride / 8; i += threads) reinterpret_cast<uint4*>(counters)[i] = make_uint4(0, 0, 0, 0);
  };

#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  clear_counters();
  for (int bin = thread; bin < stride; bin += threads) totals[bin] = 0;
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  __syncthreads();
  if (tiles > 1) {
    for (int pair = range_begin + thread; pair < range_end; pair += threads) atomicAdd(&totals[bin_of(params.ids[pair])], 1);
  }

  // Of bins and of the numbers beside them a thread has consecutive ones.
  int const own_bins = (bins + threads - 1) / threads, own_begin = min(bins, thread * own_bins), own_end = min(bins, own_begin + own_bins);
#pragma unroll 1
  for (int t = 0; t < tiles; ++t) {
    int const first = range_begin + t * tile, count = min(tile, range_end - first);
    int const mine = warp * (32 * kItems) + lane;  // and every 32nd
    uint32_t pair[kItems];                         // its bin, then bin << 16 | pairs of the bin before it in the warp
#pragma unroll
    for (int i = 0; i < kItems; ++i) pair[i] = mine + i * 32 < count ? bin_of(params.ids[first + mine + i * 32]) : kAbsent;
    float weight[kGroup];
    auto const load_weights = [&](int from) {
      if (params.weights == nullptr) return;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        weight[i] = mine + (from + i) * 32 < count ? load_operand(params.weights + first + mine + (from + i) * 32) : 0.0f;
      }
    };
    if constexpr (kGroup == kItems) load_weights(0);
    uint16_t* own = counters + warp * stride;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      uint32_t const bin = pair[i];
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
        uint32_t const before = bin != kAbsent ? own[bin] : 0;
        __syncwarp();
        if (bin != kAbsent) {
          if (before_in_step == 0) own[bin] = uint16_t(before + __popc(equals));
          pair[i] = bin << 16 | (before + before_in_step);
        }
        __syncwarp();
      }
    }
    __syncthreads();

    // Counters become places within the bin of the tile.
#pragma unroll 1
    for (int bin = own_begin; bin < own_end; ++bin) {
      uint32_t sum = 0;
#pragma unroll 1
      for (int w = 0; w < warps; w += 8) {  // at least eight warps
        uint32_t part[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) part[i] = counters[(w + i) * stride + bin];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          counters[(w + i) * stride + bin] = uint16_t(sum);
          sum += part[i];
        }
      }
      if (t > 0) base[bin] += counts[bin];
      counts[bin] = int(sum);
      if (tiles == 1) totals[bin] = int(sum);
    }
    // Scanned together: pairs of the tile in the low half, those of all CTAs in the high one.
    uint64_t sum = 0;
    if (t == 0 && ctas > 1) {
      cluster_arrive();
      cluster_wait();
    }
#pragma unroll 1
    for (int bin = own_begin; bin < own_end; ++bin) {
      sum += uint32_t(counts[bin]);
      if (t == 0) {
        int all = 0, before = 0;
#pragma unroll
        for (int cta = 0; cta < kClusterSize; ++cta) {
          if (cta < ctas) {
            int const theirs = ctas > 1 ? load_from_cta(totals + bin, cta) : totals[bin];
            all += theirs;
            before += cta < rank ? theirs : 0;
          }
        }
        base[bin] = before;
        begin[bin] = all;
        sum += uint64_t(uint32_t(all)) << 32;
      }
    }
    if (t == 0 && ctas > 1) cluster_arrive();  // has read what others hold; they may leave after the wait at the end
    uint64_t places = block_exclusive_sum(sum, scan, thread, threads);
#pragma unroll 1
    for (int bin = own_begin; bin < own_end; ++bin) {
      if (t == 0) {
        int const all = begin[bin], place = int(places >> 32);
        base[bin] += place;
        if (rank == 0 && bin < params.experts) params.offsets[bin] = place + all;
        places += uint64_t(uint32_t(all)) << 32;
      }
      begin[bin] = int(uint32_t(places));
      places += uint32_t(counts[bin]);
    }
    __syncthreads();

#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if constexpr (kGroup < kItems) {
        if (i % kGroup == 0) load_weights(i);
      }
      if (pair[i] != kAbsent) {
        int const bin = int(pair[i] >> 16), in_tile = mine + i * 32;
        int const within = own[bin] + int(pair[i] & 0xffff), place = begin[bin] + within;
        sorted[place] = uint32_t(bin) << kLocalBits | uint32_t(in_tile);
        if (params.weights != nullptr) sorted_weights[place] = weight[i % kGroup];
        params.inverse[first + in_tile] = bin < params.experts ? base[bin] + within : -1;
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      int const i = j * threads + thread;
      if (i >= count) break;
      int const bin = int(sorted[i] >> kLocalBits), in_tile = int(sorted[i] & ((1u << kLocalBits) - 1));
      int const place = base[bin] + i - begin[bin];
      bool const valid = bin < params.experts;
      params.token_index[place] = valid ? int(params.top_k.quotient(uint32_t(first + in_tile))) : 0;
      if (params.weights != nullptr) params.sorted_weights[place] = valid ? sorted_weights[i] : 0.0f;
    }
    if (t + 1 < tiles) {
      clear_counters();
      __syncthreads();
    }
  }
  if (ctas > 1) cluster_wait();
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
  if (device.compute_capability() >= 90 && pairs > kAloneUpTo) {
    shape.cluster = dim3(kClusterSize);
    params.chunk = int32_t(((pairs + kClusterSize - 1) / kClusterSize + 31) / 32 * 32);
  }
  shape.grid = shape.cluster;
  // Few steps of 32 follow each other in a warp, and few warps' counters are added up.
  shape.threads = params.chunk <= 512 ? 256 : params.chunk <= 2048 ? 512 : kMaxThreads;
  int items = 1;
  auto const bytes = [&](int items) {
    return SortLayout(int(shape.threads), int(shape.threads) * items, params.stride, has_weights).total;
  };
  while (items < 16 && int(shape.threads) * items < params.chunk && bytes(2 * items) <= device.smem_per_block) items *= 2;
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
