#include "common/nonce.h"

#include <atomic>
#include <chrono>

namespace minfer {

namespace {

uint64_t mix(uint64_t x) {  // SplitMix64's finaliser
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t next_nonce() {
  static std::atomic<uint64_t> counter{0};
  static uint64_t const seed =
      mix(uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()) ^ uint64_t(reinterpret_cast<uintptr_t>(&counter)));
  uint64_t const nonce = mix(seed + counter.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15ull);
  return nonce != 0 ? nonce : 1;
}

}  // namespace minfer
