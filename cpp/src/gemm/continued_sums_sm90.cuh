// Stream-K whose tiles have the bits of one CTA's: the CTA with the next k of a tile continues the sums of the CTA in front, instead of
// adding its own to them. So the batch-invariant mode can divide tiles that do not fill the SMs, and that it must not cut into ranges.
//
// The walk is tile_scheduler.h's: a worker's range is walked from its end to its start, so that the sums that another worker waits for are
// its first item, and those that it waits for itself its last. While it waits its ring fills: the wait costs as long as the ring is full.
// A tile of three workers and more is a chain, each of which waits for the one in front alone.
//
// Sums travel as packets (split_reduction.cuh). The first ones are added to -0, which leaves every number as it is.
#pragma once

#include "gemm/mainloop_sm90.cuh"
#include "gemm/tiles_sm90.cuh"

namespace minfer::gemm {

/// Of pingpong kernels without clusters: a warpgroup has the tile.
template <class Config>
struct ContinuedMainloopSm90 : MainloopSm90<Config> {
  using Base = MainloopSm90<Config>;
  using typename Base::Collective, typename Base::PipelineState, typename Base::TiledMma;
  static_assert(Base::kPingpong && Base::kCluster == 1);
  using Reduction = TaggedReduction<128, Base::kValues>;

  struct Params : Base::Params {
    SplitWorkspace split;
  };

  static Params to_underlying_arguments(cute::Shape<int, int, int, int> const& problem, typename Base::Arguments const& arguments) {
    return {Base::to_underlying_arguments(problem, arguments), {}};
  }

  using Base::Base;
  int k_begin = 0;  // the work item's first k tile; kernel_sm90.cuh sets it

  /// As CollectiveMma's, but for the first MMA, which may add to what there is. The last k tile's stage is left to mma_tail.
  template <class Storage, class Accumulator, class Output, class AfterLast>
  CUTLASS_DEVICE void mma(Params const& params, Storage& storage, PipelineState& state, Accumulator& accumulator, int k_count,
                          Output const&, int, int thread, AfterLast const& after_last) {
    using namespace cute;
    fill(accumulator, -0.0f);
    if (k_begin > 0) {
      int const slot = reread_block_index() - 1;
      Reduction::gather(params.split, [slot](int) { return slot; }, 1, accumulator, thread);
    }
    Tensor sA = make_tensor(make_smem_ptr(storage.tensors.smem_A.data()), typename Collective::SmemLayoutA{});  // (BLK_M,BLK_K,PIPE)
    Tensor sB = make_tensor(make_smem_ptr(storage.tensors.smem_B.data()), typename Collective::SmemLayoutB{});  // (BLK_N,BLK_K,PIPE)
    TiledMma mma;
    mma.accumulate_ = k_begin > 0 ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    auto const warpgroup_mma = mma.get_slice(0);
    Tensor tCrA = warpgroup_mma.make_fragment_A(warpgroup_mma.partition_A(sA));  // (MMA,MMA_M,MMA_K,PIPE)
    Tensor tCrB = warpgroup_mma.make_fragment_B(warpgroup_mma.partition_B(sB));  // (MMA,MMA_N,MMA_K,PIPE)
    PipelineState read = state, release = state;
    auto const multiply = [&] {
      this->pipeline.consumer_wait(read, this->pipeline.consumer_try_wait(read));
      warpgroup_fence_operand(accumulator);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < size<2>(tCrA); ++block) {
        cute::gemm(mma, tCrA(_, _, block, read.index()), tCrB(_, _, block, read.index()), accumulator);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      ++read;
    };
    multiply();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int k = 1; k < k_count; ++k) {
      multiply();
      warpgroup_wait<1>();
      warpgroup_fence_operand(accumulator);
      this->pipeline.consumer_release(release);
      ++release;
    }
    after_last();
  }
};

/// Sums that go on leave for the next worker; the last worker of a tile stores.
template <int kValues>
struct ContinuedTileSchedulerSm90 : SplitTileSchedulerSm90<1, 1, 1, kValues> {
  using Base = SplitTileSchedulerSm90<1, 1, 1, kValues>;
  using typename Base::Location, typename Base::Params, typename Base::Reduction, typename Base::SharedStorage;
  static_assert(kValues <= kMaxTaggedValues);

  class WorkItems : public Base::WorkItems {
   public:
    CUTLASS_DEVICE WorkItems(Params const& params, SharedStorage& storage, Location const& at)
        : Base::WorkItems(params, storage, at), split_(params.split) {}
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int, int thread, Barrier const&, Store const& store) const {
      if (item.owner()) {
        store();
      } else {
        Reduction::publish(split_, item.slot, accumulator, thread);
      }
      return true;
    }

   private:
    SplitWorkspace const& split_;
  };
};

}  // namespace minfer::gemm
