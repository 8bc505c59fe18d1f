// Errors of operators.
#pragma once

#include <sstream>
#include <stdexcept>

namespace minfer::torch_binding {

/// Raises a Python RuntimeError whose text is the parts, streamed one after the other: `if (x.dim() != 2) fail(op, ": x must be ..., got ",
/// x)`. The text is made only when it is needed: to make it costs more than all checks of a call.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(Parts const&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

}  // namespace minfer::torch_binding
