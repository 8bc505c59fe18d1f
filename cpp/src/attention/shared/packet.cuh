// Numbers that CTAs hand to each other in one launch. A packet is 16 bytes that are written and read at once: 8 of data, and a tag, which says
// that they are there. So a reader waits for nothing but the data itself, where a flag of many would cost the writer a fence and the reader a
// second trip. After NCCL's LL protocol.
//
// The launch's nonce is a tag that all CTAs know, but a replay of the launch has the same one: who has read such a packet must forget it. A
// stamp is a tag that its writer has made up, and no packet before has; the reader learns it from a packet with the nonce. Packets with a stamp
// need not be forgotten, which would cost as much as reading them.
#pragma once

#include <cstdint>

namespace minfer::attention {

struct alignas(16) Packet {
  uint64_t numbers, tag;

  __device__ float2 get() const { return make_float2(__uint_as_float(uint32_t(numbers)), __uint_as_float(uint32_t(numbers >> 32))); }
};

__device__ __forceinline__ void send(Packet* to, uint64_t numbers, uint64_t tag) {
  asm volatile("{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], packet;\n}" ::"l"(to), "l"(numbers),
               "l"(tag)
               : "memory");
}
__device__ __forceinline__ uint64_t numbers_of(float x, float y) {
  return uint64_t(__float_as_uint(x)) | uint64_t(__float_as_uint(y)) << 32;
}

/// What lies there now, if `wanted`: complete if its tag is the one waited for. In place, so that no load waits for the one before.
__device__ __forceinline__ void peek(bool wanted, Packet& packet, Packet const* from) {
  asm volatile(
      "{\n.reg .b128 packet;\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\nmov.b128 packet, {%0, %1};\n"
      "@wanted ld.relaxed.gpu.global.b128 packet, [%2];\nmov.b128 {%0, %1}, packet;\n}"
      : "+l"(packet.numbers), "+l"(packet.tag)
      : "l"(from), "r"(uint32_t(wanted))
      : "memory");
}

/// A packet with the launch's nonce, after it was read by all that do: a replay of the launch finds nothing.
__device__ __forceinline__ void forget(Packet* packet) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&packet->tag), "l"(uint64_t(0)) : "memory");
}

/// Of a block's first packets, and what none had before: made from the cycles of this SM's clock, the SM, the block and the launch's nonce.
/// Stamps look like random numbers: that tags of many packets have the exclusive or that is waited for says that each is the one waited for.
__device__ __forceinline__ uint64_t new_stamp(uint64_t nonce) {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  uint64_t x = nonce + (uint64_t(clock64()) << 12 | sm) + blockIdx.x * 0x9e3779b97f4a7c15u;  // SplitMix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Of its next ones. Two pieces of a unit in the same block must not have the same stamp: an exclusive or would not show whether both are there.
__device__ __forceinline__ uint64_t next_stamp(uint64_t stamp) { return stamp * 0xd1342543de82ef95u + 1; }

}  // namespace minfer::attention
