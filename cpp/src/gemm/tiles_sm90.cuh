// Tile scheduler of the sm_90 kernels whose tiles the host knows: the walk of tile_scheduler.h (data-parallel, split-K or stream-K, chosen
// at run time) in the form of the kernel layer (kernel_sm90.cuh). Partials of a split tile go through the workspace and are added in k
// order by the tile's owner (split_reduction.cuh), or, where the splits of a tile are launched as a cluster, straight into the owner's
// shared memory: 0.2 us, where the way through L2 takes 1 to 2.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/opaque.cuh"
#include "cute/arch/cluster_sm90.hpp"
#include "cutlass/arch/barrier.h"
#include "gemm/split_reduction.cuh"
#include "gemm/tile_scheduler.h"

namespace minfer::gemm {

/// One role's walk over the work items of its CTA. kInPlace: ranges in place are among its launches.
template <bool kInPlace = false>
class StaticWorkItems {
 public:
  CUTLASS_DEVICE StaticWorkItems(TileSchedulerParams const& schedule, int worker) : scheduler_(schedule, worker) {}
  CUTLASS_DEVICE WorkItem first() { return scheduler_.template next<kInPlace>(); }
  CUTLASS_DEVICE WorkItem next(WorkItem const&) { return scheduler_.template next<kInPlace>(); }
  CUTLASS_DEVICE static bool valid(WorkItem const& item) { return item.valid; }
  CUTLASS_DEVICE static void begin() { wait_for_predecessor(); }

 private:
  TileScheduler scheduler_;
};

/// Accumulators whose neighbours change places: accesses of several want them in registers one after the other, in this order.
template <class Accumulator>
struct SwappedPairs {
  Accumulator& of;
  CUTLASS_DEVICE float& operator()(int i) { return of(i ^ 1); }
  CUTLASS_DEVICE float operator()(int i) const { return of(i ^ 1); }
};

/// What some kernels ask of their tile scheduler.
struct SplitTileOptions {
  bool swaps_pairs = false;  // partials hold SwappedPairs
  /// A launch may have the splits of each tile as a cluster's CTAs, each with that one item; the last of them owns the tile.
  bool splits_by_cluster = false;
  bool in_place = false;      // a launch may have the ranges of a tile computed by one CTA
  bool rereads_rank = false;  // of a CTA in its cluster: there is no register to keep it in over a mainloop
};

/// kRowGroups: consumer warpgroups that share a tile. kValues: accumulators of a thread. kBlockValues: of a block of 64 rows, where the
/// launch chooses how many of them a tile has.
template <int kClusterM, int kClusterN, int kRowGroups, int kValues, int kBlockValues = 0, SplitTileOptions kOptions = SplitTileOptions{}>
struct SplitTileSchedulerSm90 {
  static constexpr bool kSwapsPairs = kOptions.swaps_pairs, kSplitsByCluster = kOptions.splits_by_cluster;
  static constexpr int kCluster = kClusterM * kClusterN;
  static constexpr bool kTileInSharedMemory = false;
  static_assert(!kSplitsByCluster || (kCluster == 1 && kBlockValues == kValues));
  using Reduction = cute::conditional_t<kValues <= kMaxTaggedValues, TaggedReduction<128, cute::min(kValues, kMaxTaggedValues)>,
                                        SplitReduction<128, kValues, kBlockValues,
                                                       kSwapsPairs                         ? 4
                                                       : (kRowGroups == 3 || kValues > 96) ? 8
                                                                                           : 16>>;

  struct Params {
    TileSchedulerParams schedule;
    SplitWorkspace split;
    int32_t cluster_partials = 0;  // > 0: the splits of a tile are the CTAs of a cluster, and so many do not own it
  };
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  struct Partials {
    uint32_t at;  // of [partial][row group][values / 4][128] of 16 bytes; the mainloop, whose ring they share, sets it
    alignas(8) uint64_t full[kRowGroups];
  };
  struct NoStorage {};
  using SharedStorage = cute::conditional_t<kSplitsByCluster, Partials, NoStorage>;
  /// Of one that a tile's owner receives.
  static CUTLASS_HOST_DEVICE int partial_bytes(Params const& params) { return kRowGroups * params.split.values * 128 * int(sizeof(float)); }

  static CUTLASS_DEVICE void init_barriers(Params const& params, SharedStorage& storage) {
    if constexpr (kSplitsByCluster) {
      if (params.cluster_partials == 0) return;
      for (int group = 0; group < kRowGroups; ++group) {
        Barrier::init(&storage.full[group], 1);
        Barrier::arrive_and_expect_tx(&storage.full[group], uint32_t(params.cluster_partials * partial_bytes(params) / kRowGroups));
      }
    }
  }

  /// Where a thread is: in its warpgroup, its CTA in the cluster, and which worker that cluster is.
  struct Location {
    int thread;
    uint32_t rank;
    int m, n;
    /// Read where a role's walk begins: kept from the start on, it is spilled where roles have few registers.
    CUTLASS_DEVICE int worker() const { return reread_block_index() / kClusterM; }
    CUTLASS_DEVICE int thread_in_warpgroup() const { return thread; }
    /// With the rank, which locate() leaves out where it is read again.
    CUTLASS_DEVICE Location in_cluster() const { return kOptions.rereads_rank ? with_rank(thread) : *this; }
  };
  static CUTLASS_DEVICE Location locate(int thread) {
    return kOptions.rereads_rank ? Location{thread % 128, 0, 0, 0} : with_rank(thread % 128);
  }
  /// The CTA's threads synchronise, in a cluster with the threads of the other CTAs, whose barriers they signal.
  static CUTLASS_DEVICE void initialize(Params const& params, SharedStorage&, int) {
    if constexpr (kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else if (kSplitsByCluster && params.cluster_partials > 0) {
      cute::cluster_arrive();  // not relaxed: of the scheduler's storage not only barriers are written
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
  }

  /// A CTA's tile of a cluster tile, counted in CTA tiles.
  struct Tile {
    TileCoord cluster_tile;
    Location at;
    CUTLASS_DEVICE int m() const { return cluster_tile.m * kClusterM + at.m; }
    CUTLASS_DEVICE int n() const { return cluster_tile.n * kClusterN + at.n; }
    CUTLASS_DEVICE int l() const { return cluster_tile.l; }
  };

  /// thread: in its warpgroup.
  static CUTLASS_DEVICE Location with_rank(int thread) {
    uint32_t const rank = kCluster > 1 ? cute::block_rank_in_cluster() : 0;  // a cluster of splits is none of tiles
    return {thread, rank, int(rank) % kClusterM, int(rank) / kClusterM};
  }

  class WorkItems : public StaticWorkItems<kOptions.in_place> {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage& storage, Location const& at)
        : StaticWorkItems<kOptions.in_place>(params.schedule, at.worker()), params_(params), storage_(storage), at_(at) {}
    CUTLASS_DEVICE Tile tile(WorkItem const& item) const {
      return {TileScheduler::coordinate(params_.schedule, item.tile), at_.in_cluster()};
    }

    /// Publishes the partial of a split that does not own its tile; for the owner adds the others' and stores. Returns whether there may be
    /// another item.
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int row_group, int thread, Barrier const& barrier,
                              Store const& store) const {
      if constexpr (kSplitsByCluster) {
        if (params_.cluster_partials > 0) {  // the CTA's only item
          if (!item.owner()) {
            send_partial(accumulator, row_group, thread);
          } else {
            add_partials(accumulator, row_group, thread);
            store();
          }
          return false;
        }
      }
      // Partial slots hold the cluster's CTAs, and a CTA's warpgroups, one after the other.
      auto const partial_slot = [&](int slot) { return (slot * kCluster + int(at_.in_cluster().rank)) * kRowGroups + row_group; };
      auto const fixup_of = [&](auto& fragment) {
        if constexpr (kOptions.in_place) {
          if (item.in_place) return Reduction::fixup_in_place(params_.split, item, partial_slot, fragment, thread);
        }
        return Reduction::fixup(params_.split, item, partial_slot, fragment, thread, barrier);
      };
      SwappedPairs<Accumulator> swapped{accumulator};
      bool whole;
      if constexpr (kSwapsPairs) {
        whole = fixup_of(swapped);
      } else {
        whole = fixup_of(accumulator);
      }
      if (whole) store();
      return true;
    }

   private:
    /// Where the first four values of a thread lie in a partial; the next four 128 times 16 bytes behind them.
    CUTLASS_DEVICE uint32_t partial_at(int partial, int row_group, int thread) const {
      return storage_.at + uint32_t((partial * kRowGroups + row_group) * params_.split.values * 128 * int(sizeof(float)) + thread * 16);
    }
    /// Into the owner's shared memory, whose barrier counts the bytes.
    template <class Accumulator>
    CUTLASS_DEVICE void send_partial(Accumulator const& accumulator, int row_group, int thread) const {
      int const owner = params_.cluster_partials;
      uint32_t const barrier = cute::set_block_rank(cute::cast_smem_ptr_to_uint(&storage_.full[row_group]), owner);
      uint32_t const to = cute::set_block_rank(partial_at(int(cute::block_rank_in_cluster()), row_group, thread), owner);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kValues / 4; ++i) {
        if (4 * i >= params_.split.values) break;
        asm volatile(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to + i * (128 * 16)),
            "f"(accumulator(4 * i)), "f"(accumulator(4 * i + 1)), "f"(accumulator(4 * i + 2)), "f"(accumulator(4 * i + 3)), "r"(barrier)
            : "memory");
      }
    }
    /// In ascending k order, as through the workspace.
    template <class Accumulator>
    CUTLASS_DEVICE void add_partials(Accumulator& accumulator, int row_group, int thread) const {
      Barrier::wait(&storage_.full[row_group], 0);
      CUTLASS_PRAGMA_NO_UNROLL
      for (int partial = 0; partial < params_.cluster_partials; ++partial) {
        uint32_t const from = partial_at(partial, row_group, thread);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kValues / 4; ++i) {
          if (4 * i >= params_.split.values) break;
          float4 part;
          asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                       : "r"(from + i * (128 * 16))
                       : "memory");
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

}  // namespace minfer::gemm
