// Tensors as rows that kernels walk with two strides (minfer::RowTensor).
#pragma once

#include "core/checks.h"
#include "core/readable.h"
#include "minfer/fused.h"

namespace minfer::torch_binding {

/// All modes of a tensor but the last, as rows. Rows r and r + 1 are `inner_stride` apart, but for each `inner`-th, where the next outer
/// one begins.
struct RowModes {
  int64_t rows = 1, inner = 1, outer_stride = 0, inner_stride = 0;
  bool walks = true;  // false: two strides do not describe them, or rows are not contiguous

  explicit RowModes(Tensor const& x);
  /// The same rows with another `inner`; only where inner is 1.
  RowModes split(int64_t inner) const;
};

/// Rows of several tensors of the same modes but the last, which are walked together.
class RowWalk {
 public:
  /// `x` is read.
  RowWalk(char const* op, char const* name, Tensor const& x);

  /// Adds a tensor that is written. One that does not go with the others is replaced by a new one, which `store` copies
  /// back. `reads`: its elements are read, too. The name is for messages.
  RowTensor write(char const* name, Tensor const& x, bool reads);
  void store();

  RowTensor x() const { return first_; }
  int64_t rows() const { return modes_.rows; }
  int64_t inner() const { return modes_.inner; }

 private:
  /// Whether a tensor's rows can be walked with those before; takes its `inner` where those have none.
  bool joins(Tensor const& x, RowTensor* rows);

  char const* op_;
  Tensor x_;
  RowModes modes_;
  RowTensor first_;
  Held held_;
  int others_ = 0;                                               // tensors beside x
  std::vector<std::tuple<char const*, Tensor, Tensor>> copies_;  // name, to, from
};

}  // namespace minfer::torch_binding
