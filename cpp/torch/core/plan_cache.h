// Plans that were made before.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>

namespace minfer::torch_binding {

/// All that a plan depends on, as numbers.
template <size_t kNumbers>
using PlanKey = std::array<uint64_t, kNumbers>;

/// A thread's plans by problem and device: no lock is taken, and what get() returns stays until the thread asks for another. Nothing of a user's
/// is kept, only numbers and the registry's kernels. Forgotten when there are too many, and when the tuned tables change.
template <size_t kNumbers, class Plan>
class PlanCache {
 public:
  using Key = PlanKey<kNumbers>;

  /// generation: of what plans depend on beside the key.
  template <class Make>
  Plan const& get(Key const& key, uint64_t generation, Make&& make) {
    if (generation != generation_ || plans_.size() >= kMost) {
      plans_.clear();
      generation_ = generation;
    }
    auto const found = plans_.find(key);
    return found != plans_.end() ? found->second : plans_.emplace(key, make()).first->second;
  }

 private:
  static constexpr size_t kMost = 16384;

  struct Hash {
    size_t operator()(Key const& key) const {
      uint64_t h = 0xcbf29ce484222325u;
      for (uint64_t number : key) {
        h = (h ^ number) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
      }
      return size_t(h);
    }
  };

  std::unordered_map<Key, Plan, Hash> plans_;
  uint64_t generation_ = 0;
};

}  // namespace minfer::torch_binding
