// The batch-invariant mode: a row's bits depend on its own inputs, the weights and the mode alone. A thread computes in the mode where it
// says so itself, else where the process does (MINFER_BATCH_INVARIANT=1, minfer.set_batch_invariant). Problems say it to the planners.
#pragma once

namespace minfer::torch_binding {

/// Whether the calling thread computes in the mode.
bool batch_invariant();

/// Fails in the mode where an operator cannot compute in it. Every operator calls it, with its name, before it launches anything.
void check_batch_invariance(char const* op);

}  // namespace minfer::torch_binding
