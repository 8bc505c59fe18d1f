// How a binding says no.
#pragma once

#include <sstream>
#include <stdexcept>

namespace minfer::torch_binding {

/// Raises a Python RuntimeError whose text is the parts, streamed one after the other: `if (x.dim() != 2) fail(op, ": x must be ..., got ", x)`.
/// Nothing of a text is made before it is known to be needed: it would cost more than all of a call's checks.
template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void fail(Parts const&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

}  // namespace minfer::torch_binding
