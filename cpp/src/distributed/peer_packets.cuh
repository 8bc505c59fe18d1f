// Packets that GPUs of a host write in each other's memory: 16 bytes, twice four bytes of numbers and a flag, which says the epoch. The two
// halves are 8 bytes each, which arrive whole over NVLink and PCIe; so the data says by itself that it is there, without a fence and a
// second trip. After NCCL's LL protocol.
#pragma once

#include <cstdint>

namespace minfer::distributed {

struct PeerPacket {
  uint64_t first, second;  // numbers in the low half, the flag in the high one
};

__device__ __forceinline__ void send(PeerPacket* to, uint32_t first, uint32_t second, uint32_t flag) {
  uint64_t const tag = uint64_t(flag) << 32;
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(tag | first), "l"(tag | second) : "memory");
}
__device__ __forceinline__ PeerPacket poll(PeerPacket const* from) {
  PeerPacket packet;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];" : "=l"(packet.first), "=l"(packet.second) : "l"(from) : "memory");
  return packet;
}
__device__ __forceinline__ bool has_come(PeerPacket const& packet, uint32_t flag) {
  return uint32_t(packet.first >> 32) == flag && uint32_t(packet.second >> 32) == flag;
}
/// Of an epoch: never that of zeros, and the next epoch's is another.
__device__ __forceinline__ uint32_t flag_of(uint64_t epoch) { return uint32_t(epoch % 0xffffffffu) + 1; }

}  // namespace minfer::distributed
