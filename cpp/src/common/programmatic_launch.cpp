#include "common/programmatic_launch.h"

#include <cstdlib>
#include <cstring>

namespace minfer {

bool programmatic_launch_enabled() {
  static bool const enabled = [] {
    char const* value = std::getenv("MINFER_PDL");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

}  // namespace minfer
