// A cache of plans.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace minfer::torch_binding {

/// Everything that a plan depends on, as numbers.
template <size_t kNumbers>
using PlanKey = std::array<uint64_t, kNumbers>;

template <size_t kNumbers>
size_t hash_of(PlanKey<kNumbers> const& key) {
  uint64_t h = 0xcbf29ce484222325u;
  for (uint64_t number : key) {
    h = (h ^ number) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return size_t(h);
}

/// The plans of one thread by problem and device, so that no lock is needed. Key: a PlanKey, or a type with == and hash_of(). What get()
/// returns is valid until the next get(). A plan holds numbers and pointers to the registry's kernels, nothing that belongs to a caller.
/// All plans are dropped when there are too many, and when the tuned tables have changed.
template <class Key, class Plan>
class PlanCache {
 public:
  /// generation: changes with everything that plans depend on and the key does not hold, such as the tuned tables.
  template <class Make>
  Plan const& get(Key const& key, uint64_t generation, Make&& make) {
    if (generation != generation_ || plans_.size() >= kMaxPlans) {
      plans_.clear();
      generation_ = generation;
    }
    auto const found = plans_.find(key);
    return found != plans_.end() ? found->second : plans_.emplace(key, make()).first->second;
  }

 private:
  static constexpr size_t kMaxPlans = 16384;

  struct Hash {
    size_t operator()(Key const& key) const { return hash_of(key); }
  };

  std::unordered_map<Key, Plan, Hash> plans_;
  uint64_t generation_ = 0;
};

}  // namespace minfer::torch_binding
