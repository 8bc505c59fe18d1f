// A cache of plans.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <unordered_map>

namespace minfer::torch_binding {

inline size_t hash_of(std::initializer_list<uint64_t> numbers) {
  uint64_t h = 0xcbf29ce484222325u;
  for (uint64_t number : numbers) {
    h = (h ^ number) * 0x9e3779b97f4a7c15u;
    h ^= h >> 29;
  }
  return size_t(h);
}

/// The plans of one thread by problem and device, so that no lock is needed. What get() returns is valid until the next get(). A plan
/// holds numbers and pointers to the registry's kernels, nothing that belongs to a caller. All plans are dropped when there are too many,
/// and when the tuned tables have changed.
/// Problem: its == takes in every member, so that no plan is another problem's. kHash need only take in those in which the calls of a
/// process differ most.
template <class Problem, class Plan, size_t (*kHash)(Problem const&)>
class PlanCache {
 public:
  /// generation: changes with everything that plans depend on and a problem does not hold, such as the tuned tables.
  template <class Make>
  Plan const& get(Problem const& problem, int32_t device, uint64_t generation, Make&& make) {
    if (generation != generation_ || plans_.size() >= kMaxPlans) {
      plans_.clear();
      generation_ = generation;
    }
    Key const key{problem, device};
    auto const found = plans_.find(key);
    return found != plans_.end() ? found->second : plans_.emplace(key, make()).first->second;
  }

 private:
  static constexpr size_t kMaxPlans = 16384;

  struct Key {
    Problem problem;
    int32_t device;
    bool operator==(Key const&) const = default;
  };
  struct Hash {
    size_t operator()(Key const& key) const { return kHash(key.problem) + size_t(key.device); }
  };

  std::unordered_map<Key, Plan, Hash> plans_;
  uint64_t generation_ = 0;
};

}  // namespace minfer::torch_binding
