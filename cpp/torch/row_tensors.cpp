#include "row_tensors.h"

#include "core/torch_calls.h"

namespace minfer::torch_binding {

RowModes::RowModes(Tensor const& x) {
  int64_t const last = x.dim() - 1;
  walks = last < 0 || x.size(last) <= 1 || x.stride(last) == 1;
  struct Mode {
    int64_t size, stride;
  } modes[2] = {{1, 0}, {1, 0}};  // inner, outer
  int count = 0;
  for (int64_t i = last - 1; i >= 0; --i) {
    int64_t const size = x.size(i), stride = x.stride(i);
    rows *= size;
    if (size == 1) continue;
    if (count > 0 && stride == modes[count - 1].size * modes[count - 1].stride) {
      modes[count - 1].size *= size;
    } else if (count < 2) {
      modes[count++] = {size, stride};
    } else {
      walks = false;
    }
  }
  if (count < 2) {  // one stride
    outer_stride = modes[0].stride;
  } else {
    inner = modes[0].size;
    inner_stride = modes[0].stride;
    outer_stride = modes[1].stride;
  }
}

RowModes RowModes::split(int64_t by) const {
  RowModes result = *this;
  if (inner == 1 && by > 1) {
    result.inner = by;
    result.inner_stride = outer_stride;
    result.outer_stride = outer_stride * by;
  }
  return result;
}

RowWalk::RowWalk(char const* op, char const* name, Tensor const& x) : op_(op), x_(x), modes_(x) {
  if (!modes_.walks) {
    x_ = copy_of(op, name, x);
    modes_ = RowModes(x_);
  }
  first_ = {held_.keep(x_), modes_.outer_stride, modes_.inner_stride};
}

bool RowWalk::joins(Tensor const& x, RowTensor* rows) {
  RowModes modes(x);
  if (!modes.walks) return false;
  if (modes.inner > 1 && modes_.inner > 1 && modes.inner != modes_.inner) return false;
  if (modes.inner > 1 && modes_.inner == 1) {  // those before have one stride each, so they go along
    if (!copies_.empty() || others_ > 0) return false;
    modes_ = modes_.split(modes.inner);
    first_.outer_stride = modes_.outer_stride;
    first_.inner_stride = modes_.inner_stride;
  }
  modes = modes.split(modes_.inner);
  *rows = {held_.keep(x), modes.outer_stride, modes.inner_stride};
  ++others_;
  return true;
}

RowTensor RowWalk::write(char const* name, Tensor const& x, bool reads) {
  RowTensor rows;
  if (joins(x, &rows)) return rows;
  Tensor const copy = reads ? copy_of(op_, name, x) : allocate(op_, x, x.sizes(), x.scalar_type(), "a contiguous ", name);
  copies_.emplace_back(name, x, copy);
  RowModes const modes = RowModes(copy).split(modes_.inner);
  return {held_.keep(copy), modes.outer_stride, modes.inner_stride};
}

void RowWalk::store() {
  for (auto const& [name, to, from] : copies_) copy_into(op_, name, to, from);
}

}  // namespace minfer::torch_binding
