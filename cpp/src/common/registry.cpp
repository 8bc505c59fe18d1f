#include "minfer/registry.h"

#include <cstring>
#include <string_view>
#include <unordered_map>

namespace minfer {

KernelInfo const* find_kernel(char const* name) {
  static std::unordered_map<std::string_view, KernelInfo const*> const by_name = [] {
    std::unordered_map<std::string_view, KernelInfo const*> map;
    int64_t count = 0;
    KernelInfo const* kernels = registry(&count);
    for (int64_t i = 0; i < count; ++i) map.emplace(kernels[i].name, &kernels[i]);
    return map;
  }();
  auto const found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

}  // namespace minfer
