// torch.ops.minfer.merge_attention_states on CUDA tensors. The checks are those of python/minfer/checks_attention.py, in their order.
#include "bindings.h"
#include "gemm/launch.h"
#include "grouped.h"
#include "minfer/attention.h"

namespace minfer::torch_binding {

namespace {

/// As 16-byte accesses read it; one of an odd head_dim is read element by element as it is.
Tensor readable_part(Tensor const& out) {
  bool const odd = out.size(out.dim() - 1) * int64_t(out.element_size()) % kVectorRows.bytes != 0;
  return odd ? out : readable(out, kVectorRows);
}

}  // namespace

std::tuple<Tensor, Tensor> merge_attention_states(std::vector<Tensor> outs, std::vector<Tensor> lses) {
  char const* op = "minfer::merge_attention_states";
  check(!outs.empty(), op, ": outs must have at least one part, got none");
  check(lses.size() == outs.size(), op, ": lses must have as many parts as outs, ", outs.size(), ", got ", lses.size());
  Tensor const& first = outs[0];
  int64_t const lead = first.dim() - 3;  // 1 with a batch mode
  if (lead != 0 && lead != 1) {
    fail(op, ": outs[0] must be [batch, seqlen, heads, head_dim_v] or [tokens, heads, head_dim_v], got ", shape_of(first));
  }
  ScalarType const type = first.scalar_type();
  if (!is_16bit_float(type) && type != ScalarType::Float) {
    fail(op, ": outs[0] must be float16, bfloat16 or float32, got ", dtype_name(type));
  }
  std::vector<int64_t> const shape = sizes_of(first);
  AttentionMerge merge;
  merge.type = data_type(type);
  merge.count = int64_t(outs.size());
  merge.batch = lead > 0 ? first.size(0) : 1;
  merge.seqlen = first.size(lead);
  merge.heads = first.size(lead + 1);
  merge.head_dim_v = first.size(lead + 2);
  std::vector<int64_t> lse_shape = {merge.heads, merge.seqlen};
  if (lead > 0) lse_shape.insert(lse_shape.begin(), merge.batch);
  int32_t const device = first.get_device_index();
  for (size_t i = 0; i < outs.size(); ++i) {
    std::string index = std::to_string(i);
    index += ']';
    check_operand(op, std::string("outs[").append(index).c_str(), outs[i], type, shape, {"outs[0]", first});
    check_operand(op, std::string("lses[").append(index).c_str(), lses[i], ScalarType::Float, lse_shape, {"outs[0]", first});
  }
  torch::stable::accelerator::DeviceGuard const guard(device);
  Tensor const out = torch::stable::new_empty(first, shape), lse = torch::stable::new_empty(first, lse_shape, ScalarType::Float);
  std::vector<AttentionState> states(outs.size());
  for (size_t i = 0; i < outs.size(); ++i) {
    outs[i] = readable_part(outs[i]);
    states[i].out = outs[i].data_ptr();
    states[i].lse = static_cast<float const*>(lses[i].data_ptr());
    for (int64_t mode = 1 - lead; mode < 4; ++mode) states[i].out_strides[mode] = outs[i].stride(mode - 1 + lead);
    for (int64_t mode = 1 - lead; mode < 3; ++mode) states[i].lse_strides[mode] = lses[i].stride(mode - 1 + lead);
  }
  merge.states = states.data();
  merge.out = out.data_ptr();
  merge.lse = static_cast<float*>(lse.data_ptr());
  size_t const bytes = merge_attention_states_workspace(merge);
  Tensor workspace;
  if (bytes > 0) workspace = torch::stable::new_empty(out, std::vector<int64_t>{int64_t(bytes)}, ScalarType::Byte);
  bool const programmatic = device_properties(device).compute_capability() >= 90 && gemm::programmatic_launch_enabled();
  Status const status =
      minfer::merge_attention_states(merge, bytes > 0 ? workspace.data_ptr() : nullptr, bytes, programmatic, current_stream(device));
  check(status.ok(), op, ": ", merge.count, " parts of ", shape_of(out), ": ", status.message);
  return {out, lse};
}

}  // namespace minfer::torch_binding
