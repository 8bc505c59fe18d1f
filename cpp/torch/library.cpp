// The namespace torch.ops.minfer. Each family's file adds its operators to it, as core/operators.h says.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(minfer, m) { (void)m; }
