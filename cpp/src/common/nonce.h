// A launch's nonce: the number that marks what its CTAs write for each other, so that their workspace needs no initialisation.
#pragma once

#include <cstdint>

namespace minfer {

/// A number that no earlier launch of this process had and, but for one chance in 2^64, no word of memory holds. Never 0, the value
/// of a cleared flag or tag.
uint64_t next_nonce();

}  // namespace minfer
