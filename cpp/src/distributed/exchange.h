// How exchange buffers are laid out: all_reduce's, and that of experts (minfer/expert_exchange.h).
#pragma once

#include <cstddef>
#include <cstdint>

namespace minfer::distributed {

/// What a kind of launches counts, at the beginning of a buffer.
struct alignas(128) ExchangeHeader {
  uint64_t epoch;     // launches that have ended
  uint32_t finished;  // CTAs of the launch that runs
};

constexpr int kVectorElements = 8;  // 16 bytes of 16-bit numbers; of a sum, they travel as two packets

// Of a sum. Behind the header: packets [2 epochs][ranks][2 halves of vectors][most / 8], of 16 bytes. A launch writes those of its epoch
// while other ranks may still read those of the one before; it cannot be further ahead, since it needs the packets of every rank.
constexpr int kPacketBytes = 16, kEpochs = 2, kHalves = 2;

// Of experts. Two headers, that of sending tokens and that of returning sums; then flags, epochs: [2][ranks][kMostBlocks], what a rank says
// of each block of its tokens; then the parts of ExpertExchangeLayout. There is one of everything: a rank sends the next call's tokens when
// it has the sums of this one, for which every rank has read its tokens, and it has read all sums by then.
constexpr int kFlagSets = 2, kMostBlocks = 1024;
constexpr size_t kFlagsBegin = kFlagSets * sizeof(ExchangeHeader), kPartAlignment = 256;

}  // namespace minfer::distributed
