// Merges states of attention over disjoint keys, on CUDA tensors. The checks are those of python/minfer/checks/attention.py, in the same
// order.
#include <cstdio>

#include "core/checks.h"
#include "core/device.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "minfer/attention.h"

namespace minfer::torch_binding {

namespace {

/// A state's output as kernels read it: in vectors of 16 bytes, or element by element where a row is no multiple of 16 bytes. The latter
/// works with any strides.
Tensor readable_part(char const* op, Tensor const& out) {
  bool const odd = out.size(out.dim() - 1) * out.element_size() % kVectorRows.bytes != 0;
  return odd ? out : readable(op, "outs", out, kVectorRows);
}

std::tuple<Tensor, Tensor> merge_attention_states(std::vector<Tensor> const& outs, std::vector<Tensor> const& lses) {
  char const* op = "minfer::merge_attention_states";
  if (outs.empty()) fail(op, ": outs must have at least one part, got none");
  if (lses.size() != outs.size()) fail(op, ": lses must have as many parts as outs, ", outs.size(), ", got ", lses.size());
  Tensor const& first = outs[0];
  int64_t const lead = first.dim() - 3;  // 1 where there is a batch mode
  if (lead != 0 && lead != 1) {
    fail(op, ": outs[0] must be [batch, seqlen, heads, head_dim_v] or [tokens, heads, head_dim_v], got ", first);
  }
  ScalarType const type = first.scalar_type();
  if (!is_16bit_float(type) && type != ScalarType::Float) {
    fail(op, ": outs[0] must be float16, bfloat16 or float32, got ", type);
  }
  AttentionMerge merge;
  merge.type = data_type(type);
  merge.count = int64_t(outs.size());
  merge.batch = lead > 0 ? first.size(0) : 1;
  merge.seqlen = first.size(lead);
  merge.heads = first.size(lead + 1);
  merge.head_dim_v = first.size(lead + 2);
  int64_t const lse_modes[] = {merge.batch, merge.heads, merge.seqlen};
  Shape const lse_shape(lse_modes + (1 - lead), size_t(2 + lead));
  NamedTensor const reference{"outs[0]", first};
  for (size_t i = 0; i < outs.size(); ++i) {
    char out_name[32], lse_name[32];
    std::snprintf(out_name, sizeof(out_name), "outs[%zu]", i);
    std::snprintf(lse_name, sizeof(lse_name), "lses[%zu]", i);
    check_operand(op, out_name, outs[i], type, first.sizes(), reference);
    check_operand(op, lse_name, lses[i], ScalarType::Float, lse_shape, reference);
  }
  OnDevice const on(op, first);
  Tensor const out = allocate(op, first, first.sizes(), type, "the output of ", outs.size(), " parts ", first);
  Tensor const lse = allocate(op, first, lse_shape, ScalarType::Float, "the lse of ", outs.size(), " parts ", first);
  std::vector<AttentionState> states(outs.size());
  std::vector<Tensor> parts;
  parts.reserve(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    Tensor const& part = parts.emplace_back(readable_part(op, outs[i]));
    states[i].out = part.data_ptr();
    states[i].lse = static_cast<float const*>(lses[i].data_ptr());
    for (int64_t mode = 1 - lead; mode < 4; ++mode) states[i].out_strides[mode] = part.stride(mode - 1 + lead);
    for (int64_t mode = 1 - lead; mode < 3; ++mode) states[i].lse_strides[mode] = lses[i].stride(mode - 1 + lead);
  }
  merge.states = states.data();
  merge.out = out.data_ptr();
  merge.lse = static_cast<float*>(lse.data_ptr());
  Workspace const workspace(op, out, merge_attention_states_workspace(merge), outs.size(), " parts ", first);
  Status const status = minfer::merge_attention_states(merge, workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": ", merge.count, " parts of ", out, ": ", status.message);
  return {out, lse};
}

constexpr Operator kOperators[] = {
    // out = sum of outs[i] exp(lses[i] - lse), lse = log(sum of exp(lses[i]))
    {"merge_attention_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)", boxed<&merge_attention_states>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
