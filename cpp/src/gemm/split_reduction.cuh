// Split reduction: the partials of one output tile are passed through the workspace and added in ascending k order.
//
// Workspace: [slots] flags of 8 bytes, rounded up to 256 bytes, then [slots] partials of fp32, each in fragment order (value i of thread t
// at (i / 4 * threads + t) * 4 + i % 4), so that every access is a coalesced 16-byte one.
//
// The flags need neither initialisation nor a memset node: a flag is raised by writing the launch's nonce (common/nonce.h), and cleared by
// the owner that has read it. Whatever the memory held before differs from the nonce, and a replayed CUDA graph, whose nonce is the same
// each time, finds the flags cleared by its previous run. Each launch has a workspace of its own, so launches on several streams cannot
// interfere.
//
// Tagged (kernels with few values a thread): the partials are packets (common/packet.cuh) of two values and the nonce. There is no fence
// and no barrier, and one trip to L2 in each direction instead of three (values, fence, flag). They take twice the bytes, which is why
// large tiles have flags.
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
  int32_t values = 0;  // of a thread in a block of 64 rows, in kernels whose launches choose the tiles' width
};

constexpr int kMaxTaggedValues = 16;  // of a thread

inline size_t split_flag_bytes(int64_t slots) { return size_t((slots * 8 + 255) / 256 * 256); }
inline size_t split_workspace_bytes(int64_t slots, int64_t tile_elements, bool tagged = false) {
  if (slots == 0) return 0;
  return tagged ? size_t(slots) * size_t(tile_elements) * 8 : split_flag_bytes(slots) + size_t(slots) * size_t(tile_elements) * 4;
}

#if defined(__CUDACC__)

/// For kThreads threads that hold a tile, or a part of its rows, as kValues floats a thread; with kChosenOf, only the first of every
/// kChosenOf of them, as many as the workspace says. `barrier` synchronises the threads. kInFlight: 16-byte loads of a thread, in registers
/// beside the accumulators.
template <int kThreads, int kValues, int kChosenOf = 0, int kInFlight = kValues <= 96 ? 16 : 8>
struct SplitReduction {
  static constexpr bool kChosen = kChosenOf > 0;
  static constexpr int kBlock = kChosen ? kChosenOf : kValues;  // values
  static_assert(kBlock % 4 == 0 && kValues % kBlock == 0, "a fragment is moved in 16-byte accesses");

  /// After a work item's mainloop. A split that does not own its tile publishes its partial; the owner adds those of the others. Returns
  /// whether the fragment now holds the tile. slot_of: where the partial with a schedule's slot lies in the workspace.
  template <class WorkItem, class SlotOf, class Fragment, class Barrier>
  static __device__ __forceinline__ bool fixup(SplitWorkspace const& workspace, WorkItem const& item, SlotOf const& slot_of,
                                               Fragment& fragment, int thread, Barrier const& barrier) {
    if (!item.owner()) {
      publish(workspace, slot_of(item.slot), fragment, thread, barrier);
      return false;
    }
    if (item.partials > 0)
      gather(workspace, [&](int i) { return slot_of(item.first_partial + i); }, item.partials, fragment, thread, barrier);
    return true;
  }

  /// After the mainloop of a range of k that the CTA computes itself: adds what its own threads left of the ranges before, and leaves the
  /// sum unless that was the last one. No other thread reads what a thread has left: there is no flag.
  template <class WorkItem, class SlotOf, class Fragment>
  static __device__ __forceinline__ bool fixup_in_place(SplitWorkspace const& workspace, WorkItem const& item, SlotOf const& slot_of,
                                                        Fragment& fragment, int thread) {
    int64_t const slot = slot_of(item.first_partial);
    if (item.partials > 0) add(workspace, [slot](int) { return slot; }, 1, fragment, thread);
    if (!item.owner()) leave(workspace, slot, fragment, thread);
    return item.owner();
  }

  template <class Fragment, class Barrier>
  static __device__ void publish(SplitWorkspace const& workspace, int64_t slot, Fragment const& fragment, int thread, Barrier&& barrier) {
    leave(workspace, slot, fragment, thread);
    __threadfence();
    barrier();
    if (thread == 0) {
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(workspace.flags + slot), "l"(workspace.nonce) : "memory");
    }
  }
  template <class Fragment>
  static __device__ void leave(SplitWorkspace const& workspace, int64_t slot, Fragment const& fragment, int thread) {
    float4* base = reinterpret_cast<float4*>(workspace.partials + slot * int64_t(kThreads) * kValues) + thread;
#pragma unroll
    for (int block = 0; block < kValues / 4; block += kBlock / 4) {
#pragma unroll
      for (int i = block; i < block + kBlock / 4; ++i) {
        if (kChosen && 4 * (i - block) >= workspace.values) break;
        __stcg(base + i * kThreads, make_float4(fragment(4 * i), fragment(4 * i + 1), fragment(4 * i + 2), fragment(4 * i + 3)));
      }
    }
  }

  /// Adds `count` partials in ascending order, of which the i-th is in slot_of(i). Their flags are waited for together, and small partials
  /// are read together: a trip to L2 for each would be most of the fix-up's time.
  template <class SlotOf, class Fragment, class Barrier>
  static __device__ void gather(SplitWorkspace const& workspace, SlotOf&& slot_of, int count, Fragment& fragment, int thread,
                                Barrier&& barrier) {
    for (int i = thread; i < count; i += kThreads) {
      uint64_t* const flag = workspace.flags + slot_of(i);
      uint64_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
      } while (seen != workspace.nonce);
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(uint64_t(0)) : "memory");
    }
    barrier();
    add(workspace, slot_of, count, fragment, thread);
  }
  /// Adds `count` partials that are there, in ascending order.
  template <class SlotOf, class Fragment>
  static __device__ void add(SplitWorkspace const& workspace, SlotOf&& slot_of, int count, Fragment& fragment, int thread) {
    constexpr int kTogether = kInFlight / (kValues / 4) > 0 ? kInFlight / (kValues / 4) : 1;  // partials
    constexpr int kBatch = kBlock / 4 < kInFlight ? kBlock / 4 : kInFlight;
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
      float4 const* base[kTogether];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        int64_t const slot = slot_of(first + p);
        base[p] = reinterpret_cast<float4 const*>(workspace.partials + slot * int64_t(kThreads) * kValues) + thread;
      }
#pragma unroll
      for (int block = 0; block < kValues / 4; block += kBlock / 4) {
        int const end = block + kBlock / 4;
#pragma unroll
        for (int i = block; i < end; i += kBatch) {
          if (kChosen && 4 * (i - block) >= workspace.values) break;
          float4 part[kTogether][kBatch];
#pragma unroll
          for (int p = 0; p < kTogether; ++p) {
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
              bool const has = (!kChosen || 4 * (i + j - block) < workspace.values) && (p == 0 || first + p < count);
              if (i + j < end && has) {
                part[p][j] = __ldcg(base[p] + (i + j) * kThreads);
              } else if constexpr (kInFlight <= 4) {  // else its registers are taken over all iterations, which few can be
                part[p][j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
              }
            }
          }
#pragma unroll
          for (int p = 0; p < kTogether; ++p) {
            bool const inside = p == 0 || first + p < count;  // else -0, which alone leaves every number as it is
#pragma unroll
            for (int j = 0; j < kBatch; ++j) {
              if (i + j < end) {
                fragment(4 * (i + j)) += inside ? part[p][j].x : -0.0f;
                fragment(4 * (i + j) + 1) += inside ? part[p][j].y : -0.0f;
                fragment(4 * (i + j) + 2) += inside ? part[p][j].z : -0.0f;
                fragment(4 * (i + j) + 3) += inside ? part[p][j].w : -0.0f;
              }
            }
          }
        }
      }
    }
  }
};

/// The same by packets: `partials` is the whole workspace, packet i (two values) of thread t is number i * kThreads + t of its slot.
template <int kThreads, int kValues>
struct TaggedReduction {
  static_assert(kValues % 2 == 0 && kValues <= kMaxTaggedValues);
  static constexpr int kPackets = kValues / 2;

  /// As SplitReduction's, without a barrier: each thread waits for its own packets.
  template <class WorkItem, class SlotOf, class Fragment, class Barrier>
  static __device__ __forceinline__ bool fixup(SplitWorkspace const& workspace, WorkItem const& item, SlotOf const& slot_of,
                                               Fragment& fragment, int thread, Barrier const&) {
    if (!item.owner()) {
      publish(workspace, slot_of(item.slot), fragment, thread);
      return false;
    }
    auto const partial_of = [&](int i) { return slot_of(item.first_partial + i); };
    if (item.partials > 0) gather(workspace, partial_of, item.partials, fragment, thread);
    return true;
  }

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

  /// Adds `count` partials in ascending order, of which the i-th is in slot_of(i). Several are waited for together.
  template <class Fragment, class SlotOf>
  static __device__ void gather(SplitWorkspace const& workspace, SlotOf&& slot_of, int count, Fragment& fragment, int thread) {
    constexpr int kTogether = 8 / kPackets;  // 8 loads in flight a thread
#pragma unroll 1
    for (int first = 0; first < count; first += kTogether) {
      Packet packets[kTogether][kPackets];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int p = 0; p < kTogether; ++p) {
          Packet const* const from = packets_of(workspace, slot_of(first + p < count ? first + p : count - 1), thread);
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
        bool const inside = first + p < count;
#pragma unroll
        for (int i = 0; i < kPackets; ++i) {
          float2 const part = packets[p][i].get();
          fragment(2 * i) += inside ? part.x : -0.0f;
          fragment(2 * i + 1) += inside ? part.y : -0.0f;
        }
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {  // cleared for a replay of the launch
        if (first + p < count) {
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
