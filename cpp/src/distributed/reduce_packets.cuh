// A sum's numbers on their way between GPUs: what all_reduce and all_reduce_rms_norm have in common.
//
// A vector of 8 numbers is two packets (peer_packets.cuh), which lie in the other ranks' buffers where the vector's number among all
// vectors of the sum says. That place does not depend on the kernel, nor on which thread has the vector, so that both kernels may use a
// buffer by turns: a launch of either kind is an epoch.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/opaque.cuh"
#include "distributed/epoch.cuh"
#include "distributed/peer_packets.cuh"
#include "distributed/vector_sum.cuh"
#include "minfer/all_reduce.h"

namespace minfer::distributed {

/// The ranks' exchange buffers, as kernels take them.
struct ReduceBuffers {
  int64_t most;  // vectors that they are for
  int32_t rank;
  char* buffers[kMostReduceRanks];

  static ReduceBuffers of(void* const* given, int32_t ranks, int32_t rank, int64_t most) {
    ReduceBuffers found{};
    found.most = (most + kVectorElements - 1) / kVectorElements;
    found.rank = rank;
    for (int i = 0; i < ranks; ++i) found.buffers[i] = static_cast<char*>(given[i]);
    return found;
  }
};

/// The packets of a launch's epoch. All threads of all CTAs begin and end it.
template <int kRanks>
class ReduceEpoch {
 public:
  /// What has come from each rank; nothing from the own one.
  using Found = PeerPacket[kRanks][kHalves];

  __device__ __forceinline__ explicit ReduceEpoch(ReduceBuffers const& buffers)
      : buffers_(buffers), header_(reinterpret_cast<ExchangeHeader*>(buffers.buffers[buffers.rank])), epoch_(begin_epoch(header_)) {
    flag_ = flag_of(epoch_);
  }
  __device__ __forceinline__ void end() const { end_epoch(header_, epoch_); }

  /// Vector v of the sum to all other ranks.
  __device__ __forceinline__ void send(int64_t v, uint4 const& own) const {
    int const rank = buffers_.rank;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      int const to = rank + i < kRanks ? rank + i : rank + i - kRanks;
      PeerPacket* const place = packets(to, rank) + v;
      distributed::send(place, own.x, own.y, flag_);
      distributed::send(place + buffers_.most, own.z, own.w, flag_);
    }
  }

  /// Waits until every other rank's vectors v, v + step, .. are here, of which the first `count` are asked for. They are polled together.
  template <int kVectors>
  __device__ __forceinline__ void receive(Found (&found)[kVectors], int64_t v, int64_t step, int count) const {
    PeerPacket const* const places = packets(buffers_.rank, 0) + v;
    for (Patience patience;; patience.poll()) {
      PeerPacket const* of_vector = places;
      make_opaque(of_vector);  // or the addresses of all packets are kept in registers
#pragma unroll
      for (int j = 0; j < kVectors; ++j, of_vector += step) {
        PeerPacket const* place = of_vector;
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half, place += buffers_.most) {
            if (j < count && rank != buffers_.rank) found[j][rank][half] = poll(place);
          }
        }
      }
      bool all = true;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) {
          all = all && (j >= count || rank == buffers_.rank || (has_come(found[j][rank][0], flag_) && has_come(found[j][rank][1], flag_)));
        }
      }
      if (all) return;
    }
  }

  /// Adds up a vector of all ranks, in their order.
  template <DataType kType>
  __device__ __forceinline__ void add_all(float (&sums)[kVectorElements], Found const& found, uint4 const& own) const {
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      auto const& [low, high] = found[rank];
      bool const here = rank == buffers_.rank;
      add<kType>(sums, here ? own : make_uint4(uint32_t(low.first), uint32_t(low.second), uint32_t(high.first), uint32_t(high.second)));
    }
  }

 private:
  __device__ __forceinline__ PeerPacket* packets(int buffer, int rank) const {
    int64_t const place = (int64_t(epoch_ % kEpochs) * kRanks + rank) * kHalves * buffers_.most;
    return reinterpret_cast<PeerPacket*>(buffers_.buffers[buffer] + sizeof(ExchangeHeader)) + place;
  }

  ReduceBuffers const& buffers_;
  ExchangeHeader* header_;
  uint64_t epoch_;
  uint32_t flag_;
};

/// The kernels are compiled for each number of ranks: launch_of(constant) for a count of them; kRanks is its value.
template <int kRanks>
struct RankCount {
  static constexpr int value = kRanks;
};
template <class Launch>
Status for_ranks(int32_t ranks, Launch&& launch_of) {
  switch (ranks) {
    case 2: return launch_of(RankCount<2>{});
    case 3: return launch_of(RankCount<3>{});
    case 4: return launch_of(RankCount<4>{});
    case 5: return launch_of(RankCount<5>{});
    case 6: return launch_of(RankCount<6>{});
    case 7: return launch_of(RankCount<7>{});
    case 8: return launch_of(RankCount<8>{});
    default: return Status::failure(StatusCode::kNotSupported, "%d ranks; there are kernels for 2 to %d", ranks, kMostReduceRanks);
  }
}

}  // namespace minfer::distributed
