// Packets: how CTAs hand numbers to each other within a launch. A packet is 16 bytes that are written and read at once: 8 of data, and a tag that
// says that they are there. So a reader waits for nothing but the data itself, where a flag for many numbers would cost the writer a fence and
// the reader a second trip to L2. After NCCL's LL protocol.
//
// Tags are of two kinds.
//   The launch's nonce (nonce.h) is known to all CTAs, but a replay of the launch in a CUDA graph has the same one: such a packet is cleared
//   after its last reader.
//   A stamp is made up by the packet's writer and no earlier packet has it; readers learn it from a packet with the nonce. Packets with a stamp
//   need not be cleared, which would cost as much as reading them.
#pragma once

#include <cstdint>

namespace minfer {

struct alignas(16) Packet {
  uint64_t numbers, tag;

  __device__ __forceinline__ float2 get() const {
    return make_float2(__uint_as_float(uint32_t(numbers)), __uint_as_float(uint32_t(numbers >> 32)));
  }
};

__device__ __forceinline__ uint64_t numbers_of(float x, float y) {
  return uint64_t(__float_as_uint(x)) | uint64_t(__float_as_uint(y)) << 32;
}

__device__ __forceinline__ void store_packet(Packet* to, uint64_t numbers, uint64_t tag) {
  asm volatile("{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], packet;\n}" ::"l"(to), "l"(numbers),
               "l"(tag)
               : "memory");
}

/// Reads what is there now: the packet has arrived if its tag is the one that is waited for.
__device__ __forceinline__ void poll_packet(Packet& packet, Packet const* from) {
  asm volatile("{\n.reg .b128 packet;\nld.relaxed.gpu.global.b128 packet, [%2];\nmov.b128 {%0, %1}, packet;\n}"
               : "=l"(packet.numbers), "=l"(packet.tag)
               : "l"(from)
               : "memory");
}

/// The same if `wanted`, else `packet` stays as it is. By a predicate and in place, so that no load waits for the one before it.
__device__ __forceinline__ void poll_packet(bool wanted, Packet& packet, Packet const* from) {
  asm volatile(
      "{\n.reg .b128 packet;\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\nmov.b128 packet, {%0, %1};\n"
      "@wanted ld.relaxed.gpu.global.b128 packet, [%2];\nmov.b128 {%0, %1}, packet;\n}"
      : "+l"(packet.numbers), "+l"(packet.tag)
      : "l"(from), "r"(uint32_t(wanted))
      : "memory");
}

/// Clears a packet with the launch's nonce after its last reader, so that a replay of the launch does not find the nonce.
__device__ __forceinline__ void clear_packet(Packet* packet) { store_packet(packet, 0, 0); }
/// Clears the tag alone, which is as good: 8 bytes.
__device__ __forceinline__ void clear_tag(Packet* packet) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&packet->tag), "l"(uint64_t(0)) : "memory");
}

/// A stamp for a CTA's first packets, made from this SM's clock, the SM, the CTA and the launch's nonce. Stamps look like random numbers: if the
/// exclusive or of several packets' tags is the one that is waited for, each of the tags is.
__device__ __forceinline__ uint64_t new_stamp(uint64_t nonce) {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  uint64_t x = nonce + (uint64_t(clock64()) << 12 | sm) + blockIdx.x * 0x9e3779b97f4a7c15u;  // SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// The stamp of the CTA's next packets. Two groups of packets from the same CTA must differ in it: an exclusive or of equal tags would not show
/// whether both groups are there.
__device__ __forceinline__ uint64_t next_stamp(uint64_t stamp) { return stamp * 0xd1342543de82ef95u + 1; }

}  // namespace minfer
