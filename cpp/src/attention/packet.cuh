// Numbers that CTAs hand to each other in one launch. A packet is 16 bytes that are written and read at once: two floats, and the launch's
// nonce, which says that they are there. So a reader waits for nothing but the data itself, where a flag of many would cost the writer a
// fence and the reader a second trip. After NCCL's LL protocol.
#pragma once

#include <cstdint>

namespace minfer::attention {

struct alignas(16) Packet {
  uint64_t numbers, nonce;

  __device__ float2 get() const { return make_float2(__uint_as_float(uint32_t(numbers)), __uint_as_float(uint32_t(numbers >> 32))); }
};

__device__ __forceinline__ void send(Packet* to, float x, float y, uint64_t nonce) {
  uint64_t const numbers = uint64_t(__float_as_uint(x)) | uint64_t(__float_as_uint(y)) << 32;
  asm volatile("{\n.reg .b128 packet;\nmov.b128 packet, {%1, %2};\nst.relaxed.gpu.global.b128 [%0], packet;\n}" ::"l"(to), "l"(numbers),
               "l"(nonce)
               : "memory");
}

/// What lies there now: complete if its nonce is the launch's.
__device__ __forceinline__ Packet peek(Packet const* from) {
  Packet packet;
  asm volatile("{\n.reg .b128 packet;\nld.relaxed.gpu.global.b128 packet, [%2];\nmov.b128 {%0, %1}, packet;\n}"
               : "=l"(packet.numbers), "=l"(packet.nonce)
               : "l"(from)
               : "memory");
  return packet;
}

/// After its packet was read by all that do: a replay of the launch, which has the same nonce, finds nothing.
__device__ __forceinline__ void forget(Packet* packet) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&packet->nonce), "l"(uint64_t(0)) : "memory");
}

}  // namespace minfer::attention
