// JSON texts: the form in which plans and lists of kernels reach Python.
#pragma once

#include <cstdint>
#include <string>

namespace minfer::torch_binding {

/// A JSON text built from left to right. Strings are escaped.
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
