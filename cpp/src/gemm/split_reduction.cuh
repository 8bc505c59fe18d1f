// Split reduction: pieces of one output tile meet in the workspace and are added in ascending k order.
//
// Workspace: [slots] flags of 8 bytes, rounded up to 256, then [slots] partial tiles of fp32, each in fragment order (value i of thread t at
// (i / 4 * threads + t) * 4 + i % 4), so that every access is a coalesced 16-byte one.
//
// The flags need no initialisation and no memset node: a flag is raised by writing the launch's 64-bit nonce, which no earlier launch used,
// and lowered by the owner that consumed it. Whatever the memory held before differs from the nonce (but for one chance in 2^64), and a
// replayed CUDA graph, whose nonce is the same each time, finds the flags lowered by its previous run. Each launch has a workspace of its own,
// so launches on several streams cannot meet.
//
// Tagged (kernels with few values a thread): every 16 bytes hold two values and the nonce, written and read as one, so the data is its own flag:
// no fence, no barrier, and one trip to L2 each way instead of three (values, fence, flag). Twice the bytes, which is why large tiles have flags.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include "common/packet.cuh"
#endif

namespace minfer::gemm {

struct SplitWorkspace {
  uint64_t* flags = nullptr;
  float* partials = nullptr;
  uint64_t nonce = 0;
};

constexpr int kMaxTaggedValues = 16;  // a thread

inline size_t split_flag_bytes(int64_t slots) { return size_t((slots * 8 + 255) / 256 * 256); }
inline size_t split_workspace_bytes(int64_t slots, int64_t tile_elements, bool tagged = false) {
  if (slots == 0) return 0;
  return tagged ? size_t(slots) * size_t(tile_elements) * 8 : split_flag_bytes(slots) + size_t(slots) * size_t(tile_elements) * 4;
}

#if defined(__CUDACC__)

/// One group of kThreads threads that holds a tile, or its share of one, as kValues floats a thread. `barrier` synchronises the group.
template <int kThreads, int kValues>
struct SplitReduction {
  static_assert(kValues % 4 == 0, "a fragment is moved in 16-byte accesses");

  template <class Fragment, class Barrier>
  static __device__ void publish(SplitWorkspace const& workspace, int64_t slot, Fragment const& fragment, int thread, Barrier&& barrier) {
    float4* base = reinterpret_cast<float4*>(workspace.partials + slot * int64_t(kThreads) * kValues) + thread;
#pragma unroll
    for (int i = 0; i < kValues / 4; ++i) {
      __stcg(base + i * kThreads, make_float4(fragment(4 * i), fragment(4 * i + 1), fragment(4 * i + 2), fragment(4 * i + 3)));
    }
    __threadfence();
    barrier();
    if (thread == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(workspace.flags + slot), "l"(workspace.nonce) : "memory");
    }
  }

  template <class Fragment, class Barrier>
  static __device__ void add(SplitWorkspace const& workspace, int64_t slot, Fragment& fragment, int thread, Barrier&& barrier) {
    if (thread == 0) {
      uint64_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(workspace.flags + slot) : "memory");
      } while (seen != workspace.nonce);
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(workspace.flags + slot), "l"(uint64_t(0)) : "memory");
    }
    barrier();
    float4 const* base = reinterpret_cast<float4 const*>(workspace.partials + slot * int64_t(kThreads) * kValues) + thread;
    constexpr int kBatch = kValues / 4 < 8 ? kValues / 4 : 8;  // loads in flight: 8 x 16 bytes a thread
#pragma unroll
    for (int i = 0; i < kValues / 4; i += kBatch) {
      float4 part[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j < kValues / 4) part[j] = __ldcg(base + (i + j) * kThreads);
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (i + j < kValues / 4) {
          fragment(4 * (i + j)) += part[j].x;
          fragment(4 * (i + j) + 1) += part[j].y;
          fragment(4 * (i + j) + 2) += part[j].z;
          fragment(4 * (i + j) + 3) += part[j].w;
        }
      }
    }
  }
};

/// The same with tags: `partials` is the whole workspace, vector i (two values) of thread t at 16 (i * kThreads + t) bytes of its slot.
template <int kThreads, int kValues>
struct TaggedReduction {
  static_assert(kValues % 2 == 0 && kValues <= kMaxTaggedValues);
  static constexpr int kPackets = kValues / 2;

  static __device__ Packet* packets_of(SplitWorkspace const& workspace, int64_t slot, int thread) {
    return reinterpret_cast<Packet*>(workspace.partials) + slot * kPackets * kThreads + thread;
  }

  template <class Fragment>
  static __device__ void publish(SplitWorkspace const& workspace, int64_t slot, Fragment const& fragment, int thread) {
    Packet* const packets = packets_of(workspace, slot, thread);
#pragma unroll
    for (int i = 0; i < kPackets; ++i) {
      store_packet(packets + i * kThreads, numbers_of(fragment(2 * i), fragment(2 * i + 1)), workspace.nonce);
    }
  }

  /// Adds `pieces` pieces in ascending order, slot_of(i) being where the i-th lies; several are awaited together.
  template <class Fragment, class SlotOf>
  static __device__ void gather(SplitWorkspace const& workspace, SlotOf&& slot_of, int pieces, Fragment& fragment, int thread) {
    constexpr int kTogether = 8 / kPackets;  // 8 loads in flight a thread
#pragma unroll 1
    for (int first = 0; first < pieces; first += kTogether) {
      Packet packets[kTogether][kPackets];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          Packet const* const from = packets_of(workspace, slot_of(first + p < pieces ? first + p : pieces - 1), thread);
#pragma unroll
          for (int i = 0; i < kPackets; ++i) poll_packet(packets[p][i], from + i * kThreads);
        }
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
#pragma unroll
          for (int i = 0; i < kPackets; ++i) all = all && packets[p][i].tag == workspace.nonce;
        }
      } while (!all);
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        bool const counts = first + p < pieces;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          float2 const part = packets[p][i].get();
          fragment(2 * i) += counts ? part.x : 0.0f;
          fragment(2 * i + 1) += counts ? part.y : 0.0f;
        }
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {  // lowered for a replay of the same launch
        if (first + p < pieces) {
          Packet* const read = packets_of(workspace, slot_of(first + p), thread);
#pragma unroll
          for (int i = 0; i < kPackets; ++i) clear_packet(read + i * kThreads);
        }
      }
    }
  }
};

#endif

}  // namespace minfer::gemm
