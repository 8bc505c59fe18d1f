// A launch's nonce: the number that marks what its CTAs write for each other in a workspace that nobody initialises.
#pragma once

#include <cstdint>

namespace minfer {

/// A number that no earlier launch of this process had and, but for one chance in 2^64, no word of memory holds. Never 0, which is the value of
/// a cleared mark.
uint64_t next_nonce();

}  // namespace minfer
