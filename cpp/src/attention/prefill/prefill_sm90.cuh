// Attention forward for sm_90a, many queries: TMA + WGMMA, persistent, warp specialised. After FlashAttention-3 (Shah et al., 2024).
//
// Warp roles. Warpgroup 0: its warp 0 is the producer, which loads a tile's queries and its blocks of keys and values, the last block first.
// Warpgroups 1 to kConsumers: 64 rows of the tile each, and of its blocks those that they meet; the others they pass on. While a warpgroup's
// softmax of one block runs, the tensor cores have the other warpgroups' two products: where kPingpong, ordered barriers let them issue in
// turns.
// Pipelines. q: full (TMA's bytes), empty (an arrival of each consumer warp), kQueryStages tiles. k and v: a ring of kStages blocks each,
// likewise. Tiles: two, as the producer hands them out.
// Rows of a tile. `pack` query heads of a KV head lie side by side: with few queries they share the loads of K and V.
// Scores never leave registers: S = Q.K^T accumulates in fp32, P = exp2(S - max) is rounded to 16 bits in place, in the layout of an A operand.
// Values that nobody sees, behind the last key or before all windows, are set to zero in shared memory before they are used (0 * NaN is NaN);
// their scores are masked.
// kConverts: keys and values are codes of a cache. The whole of warpgroup 0 is the producer then: it converts them into the stages
// (prefill_convert.cuh), whose full barriers count its warps; one lane loads the queries and hands out the tiles.
// Files: prefill_traits.cuh, prefill_producer.cuh, prefill_consumer.cuh. Tile walk: tile_scheduler.cuh. Masks: mask.h; only blocks on an edge
// are masked.
// Limits: 16-bit, q, k and v 16-byte aligned in base and strides, head_dim a multiple of 8 up to kHeadDim (TMA fills with zeros).
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
  using Tiles = typename Traits::Tiles;
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
    if (warp == 0 && cute::elect_one_sync()) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.q));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.k));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&params.v));
      for (int s = 0; s < Traits::kQueryStages; ++s) {
        FullBarrier::init(&storage.full_q[s], 1);
        EmptyBarrier::init(&storage.empty_q[s], 4 * Traits::kConsumers);
      }
      for (int s = 0; s < 2; ++s) {
        EmptyBarrier::init(&storage.full_tile[s], 1);
        EmptyBarrier::init(&storage.empty_tile[s], 4 * (Traits::kConsumers + Traits::kConverts));
      }
      for (int s = 0; s < Traits::kStages; ++s) {
        FullBarrier::init(&storage.full_k[s], Traits::kConverts ? 4 : 1);
        FullBarrier::init(&storage.full_v[s], Traits::kConverts ? 4 : 1);
        EmptyBarrier::init(&storage.empty_k[s], 4 * Traits::kConsumers);
        EmptyBarrier::init(&storage.empty_v[s], 4 * Traits::kConsumers);
      }
      cutlass::arch::fence_barrier_init();
    }
    if constexpr (Traits::kConverts) {
      if (params.keys.head_dim < Traits::kHeadDim || params.values.head_dim < Traits::kHeadDimV) {
        clear_padding(cute::cast_smem_ptr_to_uint(storage.k), int(sizeof(storage.k) + sizeof(storage.v)), thread, kThreads);
        cutlass::arch::fence_view_async_shared();
      }
    }
    wait_for_predecessor();
    Tiles::build(storage.tiles, params, thread, kThreads);
    __syncthreads();

    if (warpgroup == 0) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
      if constexpr (Traits::kConverts) {
        switch (params.format) {
          case WeightFormat::kFp8E4M3: Producer::template convert<WeightFormat::kFp8E4M3>(params, storage, warp, thread % 32); break;
          case WeightFormat::kInt8: Producer::template convert<WeightFormat::kInt8>(params, storage, warp, thread % 32); break;
          default: Producer::template convert<WeightFormat::kInt4>(params, storage, warp, thread % 32);
        }
      } else {
        if (warp == 0) Producer::produce(params, storage, thread);
      }
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
      Consumer::consume(params, storage, warpgroup - 1, thread % 128);
    }
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

/// A mode of extent 1 has any stride; TMA wants a legal one.
inline int64_t stride_bytes(int64_t extent, int64_t stride) { return extent > 1 ? stride * 2 : 16; }

/// Queries or output: [batch, head units, rows, pack, head_dim].
inline Status describe_queries(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t pack, int64_t head_dim, int64_t batch,
                               int64_t row, int64_t head, int box_rows) {
  int64_t const units = p.heads_q / pack, rows = p.varlen ? p.tokens_q : p.seqlen_q, batches = p.varlen ? 1 : p.batch;
  int64_t const extents[5] = {head_dim, pack, rows, units, batches};
  int64_t const strides[4] = {stride_bytes(pack, head), stride_bytes(rows, row), stride_bytes(units, pack * head),
                              stride_bytes(batches, batch)};
  int const box[5] = {64, int(pack), int(box_rows / pack), 1, 1};
  return encode_tensor_map_rows(map, 5, base, extents, strides, box, 2, RowFetch::kAlone);
}

/// Keys or values: [batch, rows, heads_kv, head_dim], or the pages of a cache.
inline Status describe_keys(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t head_dim, int64_t const (&stride)[3],
                            int box_rows) {
  int64_t const rows = p.cached ? p.page_size : p.varlen ? p.tokens_k : p.seqlen_k, batches = p.cached ? p.pages : p.varlen ? 1 : p.batch;
  int64_t const extents[4] = {head_dim, p.heads_kv, rows, batches};
  int64_t const strides[3] = {stride_bytes(p.heads_kv, stride[2]), stride_bytes(rows, stride[1]), stride_bytes(batches, stride[0])};
  int const box[4] = {64, 1, box_rows, 1};
  return encode_tensor_map_rows(map, 4, base, extents, strides, box, 2, RowFetch::kAlone);
}

template <class Config>
Status launch_prefill_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = PrefillSm90<Config>;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const pack = plan.pack, out_row = p.heads_q * p.head_dim_v;
  typename Kernel::Params params{};
  Status status = describe_queries(&params.q, o.q, p, pack, p.head_dim, o.q_strides[0], o.q_strides[1], o.q_strides[2], Config::kTileM);
  if (status.ok()) status = describe_queries(&params.o, o.out, p, pack, p.head_dim_v, p.seqlen_q * out_row, out_row, p.head_dim_v, 64);
  if (!status.ok()) return status;
  if constexpr (Config::kConverts) {
    describe_codes(&params, p, o);
    params.k = params.v = params.q;
  } else if (p.tokens_k > 0) {  // without keys nothing is loaded
    status = describe_keys(&params.k, o.k, p, p.head_dim, o.k_strides, int(plan.box_rows));
    if (status.ok()) status = describe_keys(&params.v, o.v, p, p.head_dim_v, o.v_strides, int(plan.box_rows));
    if (!status.ok()) return status;
  } else {
    params.k = params.v = params.q;
  }
  set_prefill_arguments(arguments, Config::kTileM, &params);
  if (status = clear_tile_counter(arguments, params); !status.ok()) return status;
  int64_t const tiles = p.varlen ? arguments.device->sm_count : int64_t(params.q_tiles) * params.head_units * params.batch;
  return launch_kernel<Kernel>(&prefill_sm90_kernel<Config>, params, arguments, std::min<int64_t>(arguments.device->sm_count, tiles));
}

}  // namespace minfer::attention
