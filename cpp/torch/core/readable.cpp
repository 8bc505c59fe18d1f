#include "core/readable.h"

namespace minfer::torch_binding {

bool fits(Tensor const& x, RowAccess const& access) {
  if (x.numel() == 0) return true;
  if (!x.is_aligned(access.bytes)) return false;
  int64_t const last = x.dim() - 1;
  for (int64_t i = 0; i <= last; ++i) {
    if (x.size(i) == 1) continue;
    int64_t const stride = x.stride(i);
    if (i == last ? stride != 1 : stride * x.element_size() % access.bytes != 0 || (stride == 0 && !access.broadcast)) return false;
  }
  return true;
}

Tensor aligned_rows(char const* op, char const* name, Tensor const& x) {
  bool const unit = x.stride(1) == 1 || x.size(1) <= 1;
  int64_t const row_bytes = x.stride(0) * x.element_size();
  if (unit && x.is_aligned(16) && (x.size(0) <= 1 || (row_bytes > 0 && row_bytes % 16 == 0))) return x;
  int64_t const row = round_up(x.size(1), 16 / x.element_size());
  return copy_with_strides(op, name, x, {row, 1}, x.size(0) * row);
}

}  // namespace minfer::torch_binding
