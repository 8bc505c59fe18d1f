#include "minfer/types.h"

namespace minfer {

DeviceFileName device_file_name(char const* device_name) {
  DeviceFileName file;
  size_t length = 0;
  bool between = false;
  for (char const* at = device_name; *at != '\0' && length + 2 < sizeof(file.text); ++at) {
    char const lower = *at >= 'A' && *at <= 'Z' ? static_cast<char>(*at - 'A' + 'a') : *at;
    if (!((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9'))) {
      between = length > 0;
      continue;
    }
    if (between) file.text[length++] = '-';
    file.text[length++] = lower;
    between = false;
  }
  if (length == 0) return {"device"};
  return file;
}

}  // namespace minfer
