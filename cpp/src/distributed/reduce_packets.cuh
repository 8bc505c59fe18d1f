// A sum's numbers on their way between GPUs: what all_reduce and all_reduce_rms_norm have in common.
//
// Packets are of 16 bytes: twice four bytes of numbers and a flag, which says the epoch. The two halves are 8 bytes each, which arrive
// whole over NVLink and PCIe; so the data says by itself that it is there, without a fence and a second trip. After NCCL's LL protocol.
//
// A vector of 8 numbers is two packets, which lie in the other ranks' buffers where the vector's number among all vectors of the sum says.
// That place does not depend on the kernel, nor on which thread has the vector, so that both kernels may use a buffer by turns: a launch
// of either kind is an epoch.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/opaque.cuh"
#include "distributed/epoch.cuh"
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

struct ReducePacket {
  uint64_t first, second;  // numbers in the low half, the flag in the high one
};

/// The packets of a launch's epoch. All threads of all CTAs begin and end it.
template <int kRanks>
class ReduceEpoch {
 public:
  /// What has come from each rank; nothing from the own one.
  using Found = ReducePacket[kRanks][kHalves];

  __device__ __forceinline__ explicit ReduceEpoch(ReduceBuffers const& buffers)
      : buffers_(buffers), header_(reinterpret_cast<ExchangeHeader*>(buffers.buffers[buffers.rank])), epoch_(begin_epoch(header_)) {
    flag_ = uint32_t(epoch_ % 0xffffffffu) + 1;  // never that of zeros; the next epoch's is another
  }
  __device__ __forceinline__ void end() const { end_epoch(header_, epoch_); }

  /// Vector v of the sum to all other ranks.
  __device__ __forceinline__ void send(int64_t v, uint4 const& own) const {
    int const rank = buffers_.rank;
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      int const to = rank + i < kRanks ? rank + i : rank + i - kRanks;
      ReducePacket* const place = packets(to, rank) + v;
      store(place, own.x, own.y);
      store(place + buffers_.most, own.z, own.w);
    }
  }

  /// Waits until every other rank's vectors v, v + step, .. are here, of which the first `count` are asked for. They are polled together.
  template <int kVectors>
  __device__ __forceinline__ void receive(Found (&found)[kVectors], int64_t v, int64_t step, int count) const {
    ReducePacket const* const places = packets(buffers_.rank, 0) + v;
    for (Patience patience;; patience.poll()) {
      ReducePacket const* of_vector = places;
      make_opaque(of_vector);  // or the addresses of all packets are kept in registers
#pragma unroll
      for (int j = 0; j < kVectors; ++j, of_vector += step) {
        ReducePacket const* place = of_vector;
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half, place += buffers_.most) {
            if (j < count && rank != buffers_.rank) found[j][rank][half] = load(place);
          }
        }
      }
      bool all = true;
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
#pragma unroll
        for (int rank = 0; rank < kRanks; ++rank) {
          all = all && (j >= count || rank == buffers_.rank || (has_come(found[j][rank][0]) && has_come(found[j][rank][1])));
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
  __device__ __forceinline__ ReducePacket* packets(int buffer, int rank) const {
    int64_t const place = (int64_t(epoch_ % kEpochs) * kRanks + rank) * kHalves * buffers_.most;
    return reinterpret_cast<ReducePacket*>(buffers_.buffers[buffer] + sizeof(ExchangeHeader)) + place;
  }
  __device__ __forceinline__ void store(ReducePacket* to, uint32_t first, uint32_t second) const {
    uint64_t const tag = uint64_t(flag_) << 32;
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(tag | first), "l"(tag | second) : "memory");
  }
  static __device__ __forceinline__ ReducePacket load(ReducePacket const* from) {
    ReducePacket packet;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(packet.first), "=l"(packet.second) : "l"(from) : "memory");
    return packet;
  }
  __device__ __forceinline__ bool has_come(ReducePacket const& packet) const {
    return uint32_t(packet.first >> 32) == flag_ && uint32_t(packet.second >> 32) == flag_;
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
