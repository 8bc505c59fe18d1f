// Attention forward of many queries for sm_90a: TMA + WGMMA, persistent, warp specialised. After FlashAttention-3 (Shah et al., 2024).
//
// Warp roles. Warpgroup 0 is the producer: its warp 0 publishes tiles of queries and loads their queries; its warps load keys (even ones)
// and values (odd ones), some of the columns each, the last key block first. Warpgroups 1 to kConsumers are the consumers: each computes 64
// rows of the tile, over the key blocks that these rows visit, and passes on the stages of the others. While one warpgroup computes the
// softmax of a block, the tensor cores compute the two products of another; with kPingpong, order barriers let the warpgroups issue their
// MMAs in turns.
// Pipelines. q: kQueryStages tiles, full by TMA's bytes, empty by an arrival of each consumer warp. k and v: a ring of kStages key blocks
// each, likewise. tile: two published tiles, full by the producer, empty by an arrival of each warp that reads it.
// Packed heads. A tile holds `packed_heads` query heads of one KV head next to each other. With few queries they share the loads of K
// and V.
// Registers. Scores stay in registers: S = Q.K^T accumulates in fp32, and P = exp2(S - max) is rounded to 16 bits in place, in the layout
// of the A operand of P.V.
// Masks. Only key blocks on the edge of a mask are masked (mask.h). Values that no query sees are set to zero in shared memory before they
// are multiplied, since 0 * NaN is NaN.
// Codes. With kConverts, keys and values are codes of a cache, and all of warpgroup 0 is the producer: it converts them into the stages
// (convert.cuh), whose full barriers then count its four warps; one of its lanes loads the queries and publishes the tiles.
// Batch-invariant kernels (kInvariant) divide the keys into splits at fixed positions: shared/splits.h. Those that divide only (kDivides)
// have their arithmetic, and one split for an item.
// Shared memory: traits.cuh. Tile walk: tile_scheduler.cuh.
// Limits: 16-bit q and output; q, k and v aligned to 16 bytes in base and strides; head_dim a multiple of 8 up to kHeadDim, filled up with
// zeros by TMA.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <algorithm>

#include "attention/prefill/arguments.cuh"
#include "attention/prefill/consumer.cuh"
#include "attention/prefill/producer.cuh"
#include "attention/shared/launch_kernel.cuh"
#include "common/dependent_launch.cuh"
#include "common/tensor_map.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/cutlass.h"
#include "minfer/types.h"

namespace minfer::attention {

template <class Config>
struct PrefillSm90 {
  using Traits = PrefillTraits<Config>;
  using Producer = PrefillProducer<Traits>;
  using Consumer = PrefillConsumer<Traits>;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;
  using TileScheduler = typename Traits::TileScheduler;
  using FullBarrier = typename Traits::FullBarrier;
  using EmptyBarrier = typename Traits::EmptyBarrier;
  static constexpr int kThreads = Traits::kThreads, kSmemBytes = Traits::kSmemBytes;
  static_assert(kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  static CUTLASS_DEVICE void run(Params const& params, char* smem) {
    SharedStorage& storage = *reinterpret_cast<SharedStorage*>(smem);
    if (cute::cast_smem_ptr_to_uint(smem) % 1024 != 0) __trap();
    int const thread = int(threadIdx.x);
    int const warpgroup = cutlass::canonical_warp_group_idx(), warp = cutlass::canonical_warp_idx_sync();

    allow_dependent_launch();
    if (warp == 0 && cute::elect_one_sync()) init_barriers(params, storage);
    if constexpr (Traits::kConverts) {
      if (params.keys.head_dim < Traits::kHeadDim || params.values.head_dim < Traits::kHeadDimV) {
        clear_padding(cute::cast_smem_ptr_to_uint(storage.k), int(sizeof(storage.k) + sizeof(storage.v)), thread, kThreads);
        cutlass::arch::fence_view_async_shared();
      }
    }
    wait_for_predecessor();
    TileScheduler::build(storage.tiles, params, thread, kThreads);
    __syncthreads();

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if constexpr (Traits::kConverts) {
        Traits::for_format(params.format, [&](auto format) { Producer::template convert<format()>(params, storage, warp, thread % 32); });
      } else {
        Producer::produce(params, storage, warp, thread % 32);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      Consumer::consume(params, storage, warpgroup - 1, thread % 128);
    }
  }

  static CUTLASS_DEVICE void init_barriers(Params const& params, SharedStorage& storage) {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers;
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
    cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
    for (int s = 0; s < Traits::kQueryStages; ++s) {
      FullBarrier::init(&storage.full_q[s], 1);
      EmptyBarrier::init(&storage.empty_q[s], kConsumerWarps);
    }
    for (int s = 0; s < 2; ++s) {
      EmptyBarrier::init(&storage.full_tile[s], 1);
      // Warps of the producer read the tiles, too, but for the one that writes them.
      EmptyBarrier::init(&storage.empty_tile[s], kConsumerWarps + (Traits::kConverts ? 4 : Producer::kLoaders - 1));
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      FullBarrier::init(&storage.full_k[s], Traits::kConverts ? 4 : 1);
      FullBarrier::init(&storage.full_v[s], Traits::kConverts ? 4 : 1);
      EmptyBarrier::init(&storage.empty_k[s], kConsumerWarps);
      EmptyBarrier::init(&storage.empty_v[s], kConsumerWarps);
    }
    cutlass::arch::fence_barrier_init();
  }
};

template <class Config>
__global__ void __launch_bounds__(PrefillSm90<Config>::kThreads, 1)
    prefill_sm90_kernel(__grid_constant__ typename PrefillSm90<Config>::Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  PrefillSm90<Config>::run(params, smem);
#endif
}

/// The stride of a mode in bytes. A mode of extent 1 may have any stride, but TMA requires a multiple of 16.
inline int64_t stride_bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }

/// The tensor map of queries or output: [batch, head tiles, rows, packed heads, head_dim]. batch, row, head: strides in elements.
inline Status describe_queries(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t packed_heads, int64_t head_dim,
                               int64_t batch, int64_t row, int64_t head, int box_rows) {
  int64_t const head_tiles = p.heads_q / packed_heads, rows = p.varlen ? p.tokens_q : p.seqlen_q, batches = p.varlen ? 1 : p.batch;
  int64_t const extents[5] = {head_dim, packed_heads, rows, head_tiles, batches};
  int64_t const strides[4] = {stride_bytes(packed_heads, head), stride_bytes(rows, row), stride_bytes(head_tiles, packed_heads * head),
                              stride_bytes(batches, batch)};
  int const box[5] = {64, int(packed_heads), int(box_rows / packed_heads), 1, 1};
  return encode_tensor_map_rows(map, 5, base, extents, strides, box, 2, RowFetch::kAlone);
}

/// The tensor map of keys or values: [batch, rows, heads_kv, head_dim], or [pages, page_size, heads_kv, head_dim] of a cache.
inline Status describe_keys(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t head_dim, int64_t const (&stride)[3],
                            int box_rows) {
  int64_t const rows = p.cached ? p.page_size : p.varlen ? p.tokens_k : p.seqlen_k, batches = p.cached ? p.pages : p.varlen ? 1 : p.batch;
  int64_t const extents[4] = {head_dim, p.heads_kv, rows, batches};
  int64_t const strides[3] = {stride_bytes(p.heads_kv, stride[2]), stride_bytes(rows, stride[1]), stride_bytes(batches, stride[0])};
  int const box[4] = {64, 1, box_rows, 1};
  return encode_tensor_map_rows(map, 4, base, extents, strides, box, 2, RowFetch::kAlone);
}

/// The tensor maps of queries, keys and values, or what a cache of codes has instead.
template <class Config, class Params>
Status describe_operands(AttentionLaunchArguments const& arguments, Params* params) {
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  Status status =
      describe_queries(&params->q, o.q, p, plan.packed_heads, p.head_dim, o.q_strides[0], o.q_strides[1], o.q_strides[2], Config::kTileM);
  if (!status.ok()) return status;
  params->k = params->v = params->q;
  if constexpr (Config::kFormat != WeightFormat::kDense) {
    describe_codes(params, p, o);
  } else if (p.tokens_k > 0) {  // without keys, nothing is loaded and the maps are not used
    status = describe_keys(&params->k, o.k, p, p.head_dim, o.k_strides, int(plan.box_rows));
    if (status.ok()) status = describe_keys(&params->v, o.v, p, p.head_dim_v, o.v_strides, int(plan.box_rows));
  }
  return status;
}

template <class Config>
Status launch_prefill_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = PrefillSm90<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const packed_heads = plan.packed_heads, out_row = p.heads_q * p.head_dim_v;
  typename Kernel::Params params{};
  Status status = describe_operands<Config>(arguments, &params);
  if (status.ok())
    status = describe_queries(&params.o, o.out, p, packed_heads, p.head_dim_v, p.seqlen_q * out_row, out_row, p.head_dim_v, 64);
  if (!status.ok()) return status;
  set_prefill_arguments(arguments, Config::kTileM, &params);
  if constexpr (Config::kInvariant) set_split_arguments<typename Kernel::Traits>(arguments, &params);
  if (status = clear_tile_counter(arguments, params); !status.ok()) return status;
  int64_t tiles = p.varlen ? arguments.device->sm_count : int64_t(params.q_tiles) * params.head_tiles * params.batch;
  if constexpr (Config::kInvariant) tiles = plan.split_rows > 0 ? params.max_items : tiles;
  status = launch_kernel<Kernel>(&prefill_sm90_kernel<Config>, params, arguments, std::min<int64_t>(arguments.device->sm_count, tiles));
  if constexpr (Kernel::Traits::kSplits) {
    if (status.ok() && plan.split_rows > 0) status = launch_split_merge<typename Kernel::Traits>(params, arguments);
  }
  return status;
}

}  // namespace minfer::attention
