// How an exchange buffer of all_reduce is laid out.
#pragma once

#include <cstdint>

namespace minfer::distributed {

/// The beginning of a buffer.
struct alignas(128) ExchangeHeader {
  uint64_t epoch;     // launches that have ended
  uint32_t finished;  // CTAs of the launch that runs
};

constexpr int kVectorElements = 8;  // 16 bytes of 16-bit numbers, which travel as two packets

// Behind the header: packets [2 epochs][ranks][2 halves of vectors][most / 8], of 16 bytes. A launch writes those of its epoch while other
// ranks may still read those of the one before; it cannot be further ahead, since it needs the packets of every rank.
constexpr int kPacketBytes = 16, kEpochs = 2, kHalves = 2;

}  // namespace minfer::distributed
