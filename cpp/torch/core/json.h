// JSON texts, which plans and lists of kernels arrive in Python as.
#pragma once

#include <cstdint>
#include <string>

namespace minfer::torch_binding {

/// A JSON object or list built left to right; strings are escaped.
class Json {
 public:
  Json& open(char bracket);
  Json& close(char bracket);
  Json& key(char const* name);
  Json& value(char const* text);
  Json& value(std::string const& text) { return value(text.c_str()); }
  Json& value(int64_t number);
  Json& value(double number);
  Json& value(bool flag);
  std::string text() const { return text_; }

 private:
  void separate();
  std::string text_;
  bool first_ = true;
};

}  // namespace minfer::torch_binding
