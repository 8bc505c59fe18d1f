// Tile scheduler of the sm_90 GEMM with quantised weights: the dense one's walk (gemm/tiles_sm90.cuh), and two more ways for the partials
// of a split tile. Few values a thread carry their own tags through the workspace (split_reduction.cuh); split-K of one tile to a cluster
// sends them straight into the shared memory of the tile's owner (cluster_split.h).
#pragma once

#include "cutlass/arch/barrier.h"
#include "gemm/tiles_sm90.cuh"
#include "quantized_gemm/cluster_split.h"

namespace minfer::w4a16 {

/// kClusterM CTAs of a cluster have different rows of the weight. kMaxPartials: of a cluster's other CTAs. Where four warpgroups share a
/// tile, each has half the registers for partials.
template <int kClusterM, int kRowGroups, int kValues, int kMaxPartials, bool kInPlace = false>
struct ClusterSplitTileSchedulerSm90 {
  static constexpr bool kTagged = kValues <= gemm::kMaxTaggedValues;
  using Reduction = cute::conditional_t<kTagged, gemm::TaggedReduction<128, cute::min(kValues, gemm::kMaxTaggedValues)>,
                                        gemm::SplitReduction<128, kValues, 0, kRowGroups <= 2 && kValues <= 96 ? 16 : 8>>;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

  static constexpr bool kTileInSharedMemory = false;

  struct Params {
    gemm::TileSchedulerParams schedule;
    gemm::SplitWorkspace split;
    int32_t cluster_partials;  // > 0: the splits of a tile are the CTAs of a cluster, its last one owns the tile
  };

  struct Partials {
    alignas(16) float4 of[cute::max(1, kMaxPartials)][kRowGroups][kValues / 4][128];
    alignas(8) uint64_t full[kRowGroups];
  };
  using SharedStorage = cute::conditional_t<(kMaxPartials > 0), Partials, cute::tuple<>>;

  static CUTLASS_DEVICE void init_barriers(Params const& params, SharedStorage& storage) {
    if constexpr (kMaxPartials > 0) {
      if (params.cluster_partials > 0) {
        for (int c = 0; c < kRowGroups; ++c) {
          Barrier::init(&storage.full[c], 1);
          Barrier::arrive_and_expect_tx(&storage.full[c], uint32_t(params.cluster_partials * kValues * 128 * 4));
        }
      }
    }
  }

  struct Location {
    int rank;  // in the cluster
    static CUTLASS_DEVICE int thread_in_warpgroup() { return int(threadIdx.x) % 128; }
    CUTLASS_DEVICE int worker() const { return int(blockIdx.x) / kClusterM; }
  };
  static CUTLASS_DEVICE Location locate(int) { return {kClusterM > 1 ? int(cute::block_rank_in_cluster()) : 0}; }
  static CUTLASS_DEVICE void initialize(Params const& params, SharedStorage&, int) {
    if (kClusterM > 1 || (kMaxPartials > 0 && params.cluster_partials > 0)) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  struct Tile {
    gemm::TileCoord cluster_tile;
    Location at;
    CUTLASS_DEVICE int m() const { return cluster_tile.m * kClusterM + at.rank; }
    CUTLASS_DEVICE int n() const { return cluster_tile.n; }
    CUTLASS_DEVICE int l() const { return 0; }
  };

  class WorkItems : public gemm::StaticWorkItems<kInPlace> {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage& storage, Location const& at)
        : gemm::StaticWorkItems<kInPlace>(params.schedule, at.worker()), params_(params), storage_(storage), at_(at) {}
    CUTLASS_DEVICE Tile tile(gemm::WorkItem item) const { return {gemm::TileScheduler::coordinate(params_.schedule, item.tile), at_}; }

    template <class Accumulator, class GroupBarrier, class Store>
    CUTLASS_DEVICE bool fixup(gemm::WorkItem item, Accumulator& accumulator, int row_group, int thread, GroupBarrier const& barrier,
                              Store const& store) const {
      if constexpr (kMaxPartials > 0) {
        if (params_.cluster_partials > 0) {  // the CTA's only tile
          if (!item.owner()) {
            send_partial(accumulator, int(cute::block_rank_in_cluster()), params_.cluster_partials, row_group, thread);
            return false;
          }
          add_partials(accumulator, params_.cluster_partials, row_group, thread);
          store();
          return false;
        }
      }
      // Partial slots hold the cluster's CTAs, and a CTA's warpgroups, one after the other.
      auto const partial_slot = [&](int slot) { return (slot * kClusterM + at_.rank) * kRowGroups + row_group; };
      if (Reduction::fixup(params_.split, item, partial_slot, accumulator, thread, barrier)) store();
      return true;
    }

   private:
    // Straight into the owner's shared memory, whose barrier counts the bytes: 0.2 us, where the way through L2 takes 1 to 2.
    template <class Accumulator>
    CUTLASS_DEVICE void send_partial(Accumulator const& accumulator, int partial, int owner, int row_group, int thread) const {
      uint32_t const barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage_.full[row_group]), owner);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues / 4; ++i) {
        uint32_t const at = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage_.of[partial][row_group][i][thread]), owner);
        asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(at),
                     "f"(accumulator(4 * i)), "f"(accumulator(4 * i + 1)), "f"(accumulator(4 * i + 2)), "f"(accumulator(4 * i + 3)),
                     "r"(barrier)
                     : "memory");
      }
    }
    template <class Accumulator>
    CUTLASS_DEVICE void add_partials(Accumulator& accumulator, int partials, int row_group, int thread) const {
      Barrier::wait(&storage_.full[row_group], 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int partial = 0; partial < partials; ++partial) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues / 4; ++i) {
          float4 const part = storage_.of[partial][row_group][i][thread];
          accumulator(4 * i) += part.x;
          accumulator(4 * i + 1) += part.y;
          accumulator(4 * i + 2) += part.z;
          accumulator(4 * i + 3) += part.w;
        }
      }
    }

    Params const& params_;
    SharedStorage& storage_;
    Location at_;
  };
};

}  // namespace minfer::w4a16
