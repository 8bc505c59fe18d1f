#include "core/json.h"

#include <cstdio>

namespace minfer::torch_binding {

void Json::separate() {
  if (!first_) text_ += ", ";
  first_ = true;
}
Json& Json::open(char bracket) {
  separate();
  text_ += bracket;
  return *this;
}
Json& Json::close(char bracket) {
  text_ += bracket;
  first_ = false;
  return *this;
}
Json& Json::key(char const* name) {
  separate();
  text_ += '"';
  text_ += name;
  text_ += "\": ";
  return *this;
}
Json& Json::value(char const* text) {
  separate();
  text_ += '"';
  for (char const* c = text; *c != 0; ++c) {
    if (*c == '"' || *c == '\\') text_ += '\\';
    if (static_cast<unsigned char>(*c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", *c);
      text_ += escaped;
    } else {
      text_ += *c;
    }
  }
  text_ += '"';
  first_ = false;
  return *this;
}
Json& Json::value(int64_t number) {
  separate();
  text_ += std::to_string(number);
  first_ = false;
  return *this;
}
Json& Json::value(double number) {
  separate();
  char buffer[32];
  std::snprintf(buffer, sizeof(buffer), "%.6g", number);
  text_ += buffer;
  first_ = false;
  return *this;
}
Json& Json::value(bool flag) {
  separate();
  text_ += flag ? "true" : "false";
  first_ = false;
  return *this;
}

}  // namespace minfer::torch_binding
