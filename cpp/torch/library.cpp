// Every operator's schema, on one screen. CUDA implementations are registered here; the CPU ones (ATen compositions) and the fakes are Python's.
#include "bindings.h"
#include "core/boxing.h"

STABLE_TORCH_LIBRARY(minfer, m) {
  // D = activation(alpha * A.B + beta * C + bias)
  m.def(
      "gemm(Tensor a, Tensor b, *, Tensor? c=None, Tensor? bias=None, float alpha=1.0, float beta=0.0, str activation=\"none\", "
      "ScalarType? out_dtype=None, str? kernel=None) -> Tensor");
  m.def(
      "gemm.out(Tensor a, Tensor b, *, Tensor? c=None, Tensor? bias=None, float alpha=1.0, float beta=0.0, str activation=\"none\", "
      "ScalarType? out_dtype=None, str? kernel=None, Tensor(a!) out) -> Tensor(a!)");
  m.def("gemm_gated(Tensor a, Tensor b, *, Tensor? bias=None, str activation=\"silu\", str? kernel=None) -> Tensor");

  // D = activation(alpha * A.W^T + C + bias) with W [n, k] in packed 4-bit codes: (code - zero) * scale, or a code book's value * scale
  m.def(
      "w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, Tensor? perm=None, "
      "Tensor? c=None, Tensor? bias=None, str activation=\"none\", str w4_format=\"int4\", bool constant_weights=False, str? kernel=None) "
      "-> Tensor");
  m.def(
      "w4a16_gemm.out(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, Tensor? "
      "perm=None, Tensor? c=None, Tensor? bias=None, str activation=\"none\", str w4_format=\"int4\", bool constant_weights=False, str? "
      "kernel=None, Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "w4a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, Tensor? "
      "perm=None, Tensor? bias=None, str activation=\"silu\", str w4_format=\"int4\", bool constant_weights=False, str? kernel=None) -> "
      "Tensor");
  m.def("w4a16_pack(Tensor codes, *, str w4_format=\"int4\") -> Tensor");
  m.def(
      "w4a16_dequantize(Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=128, float alpha=1.0, int n, int k, str "
      "w4_format=\"int4\", ScalarType? out_dtype=None) -> Tensor");
  // likewise in 8-bit codes
  m.def(
      "w8a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, Tensor? perm=None, "
      "Tensor? c=None, Tensor? bias=None, str activation=\"none\", str w8_format=\"int8\", bool constant_weights=False, str? kernel=None) "
      "-> Tensor");
  m.def(
      "w8a16_gemm.out(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, Tensor? "
      "perm=None, Tensor? c=None, Tensor? bias=None, str activation=\"none\", str w8_format=\"int8\", bool constant_weights=False, str? "
      "kernel=None, Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "w8a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, Tensor? "
      "perm=None, Tensor? bias=None, str activation=\"silu\", str w8_format=\"int8\", bool constant_weights=False, str? kernel=None) -> "
      "Tensor");
  m.def("w8a16_pack(Tensor codes) -> Tensor");
  m.def(
      "w8a16_dequantize(Tensor qweight, Tensor scales, Tensor? zeros=None, *, int group_size=-1, float alpha=1.0, int n, int k, str "
      "w8_format=\"int8\") -> Tensor");

  // a mixture of experts around its GEMMs: each token's experts, its rows in their order, the weighted sum of what they return
  m.def(
      "moe_router(Tensor logits, int top_k, *, str scoring=\"softmax\", bool renormalize=True, Tensor? correction_bias=None, "
      "int n_group=1, int topk_group=1, float scale=1.0) -> (Tensor weights, Tensor ids)");
  m.def(
      "moe_router_gemm(Tensor x, Tensor w_gate, int top_k, *, str scoring=\"softmax\", bool renormalize=True, Tensor? "
      "correction_bias=None, int n_group=1, int topk_group=1, float scale=1.0) -> (Tensor weights, Tensor ids)");
  m.def(
      "moe_sort(Tensor ids, int num_experts, *, Tensor? weights=None) -> (Tensor token_index, Tensor offsets, Tensor inverse, Tensor "
      "sorted_weights)");
  m.def("moe_combine(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor");

  // d[rows of expert e] = row_scale * activation(a[gather or rows] . b[e] + bias[e]), rows sorted by expert: ends in `offsets`, or `counts` of
  // slabs; gated: activation(gate) * up
  m.def(
      "grouped_gemm(Tensor a, Tensor b, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str gate_layout=\"halves\", "
      "str? kernel=None) -> Tensor");
  m.def(
      "grouped_gemm.out(Tensor a, Tensor b, Tensor offsets, *, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str gate_layout=\"halves\", "
      "str? kernel=None, Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "grouped_gemm_masked(Tensor a, Tensor b, Tensor counts, *, Tensor? bias=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str gate_layout=\"halves\", "
      "str? kernel=None) -> Tensor");
  m.def(
      "grouped_gemm_masked.out(Tensor a, Tensor b, Tensor counts, *, Tensor? bias=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str gate_layout=\"halves\", "
      "str? kernel=None, Tensor(a!) out) -> Tensor(a!)");

  // a layer's experts: sort, the two products, the sum; w13 [experts, 2 inter, hidden], w2 [experts, hidden, inter]
  m.def(
      "moe_ffn(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, *, str activation=\"silu\", Tensor? b13=None, Tensor? b2=None, "
      "str gate_layout=\"halves\") -> Tensor");

  // likewise with b[e] [n, k] in packed 4-bit codes, alpha[e] * (code - zero) * scale; gated rows are in blocks of 8 gate and 8 up
  m.def(
      "grouped_w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros, Tensor offsets, *, int group_size=128, "
      "str w4_format=\"int4\", Tensor? alpha=None, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str? kernel=None) -> Tensor");
  m.def(
      "grouped_w4a16_gemm.out(Tensor a, Tensor qweight, Tensor scales, Tensor? zeros, Tensor offsets, *, int group_size=128, "
      "str w4_format=\"int4\", Tensor? alpha=None, Tensor? bias=None, Tensor? gather=None, Tensor? row_scale=None, "
      "str activation=\"none\", bool gated=False, str? kernel=None, Tensor(a!) out) -> Tensor(a!)");
  m.def(
      "moe_ffn_w4a16(Tensor x, Tensor w13, Tensor w13_scales, Tensor? w13_zeros, Tensor w2, Tensor w2_scales, Tensor? w2_zeros, "
      "Tensor weights, Tensor ids, *, int group_size=128, str w4_format=\"int4\", Tensor? alpha13=None, Tensor? alpha2=None, "
      "str activation=\"silu\", Tensor? b13=None, Tensor? b2=None) -> Tensor");

  // softmax(scale q k^T) v over the keys that each query sees (causal and windows aligned to the bottom right), and the logarithm of what the
  // softmax divided by; q [batch, seqlen_q, heads_q, head_dim], k and v [batch, seqlen_k, heads_kv, ..], varlen without the batch
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1, int window_right=-1, "
      "float softcap=0.0, Tensor? sinks=None, str? kernel=None) -> (Tensor, Tensor)");
  m.def(
      "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, *, "
      "bool causal=False, float? scale=None, int window_left=-1, int window_right=-1, float softcap=0.0, Tensor? sinks=None, "
      "str? kernel=None) -> (Tensor, Tensor)");
  // .. over a cache: k and v [pages, page_size, heads_kv, head_dim], or [batch, length, ..] without a block_table
  m.def(
      "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, *, Tensor? block_table=None, Tensor? cu_seqlens_q=None, "
      "int max_seqlen_q=1, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_residual=None, Tensor? v_residual=None, "
      "str kv_format=\"auto\", bool causal=True, float? scale=None, int window_left=-1, float softcap=0.0, Tensor? sinks=None, "
      "int? num_splits=None, str? kernel=None) -> (Tensor, Tensor)");
  m.def(
      "kv_cache_append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, *, Tensor(c!)? k_scale=None, "
      "Tensor(d!)? v_scale=None, Tensor(e!)? k_residual=None, Tensor(f!)? v_residual=None, Tensor? cu_seqlens=None, "
      "str kv_format=\"auto\") -> ()");
  m.def("merge_attention_states(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)");

  // What this build holds and what it would do; JSON texts.
  m.def("_build_info() -> str");
  m.def("_kernels(str family) -> str");
  m.def("_device_properties(int index) -> str");
  m.def("_device_file_name(str device_name) -> str");
  m.def(
      "_plan_gemm(int[] sizes, str ab_type, str d_type, str a_major, str b_major, int[] alignments, bool has_c, bool gated, str? kernel, "
      "bool use_tuned, bool only_runnable, int device) -> str");
  m.def(
      "_enumerate_gemm(int[] sizes, str ab_type, str d_type, str a_major, str b_major, int[] alignments, bool has_c, bool gated, "
      "bool only_runnable, int device, int limit) -> str");
  m.def(
      "_plan_w4a16(int[] sizes, str ab_type, str w4_format, int group_size, bool has_zeros, bool has_c, bool gated, str? kernel, "
      "bool use_tuned, bool only_runnable, int device) -> str");
  m.def(
      "_enumerate_w4a16(int[] sizes, str ab_type, str w4_format, int group_size, bool has_zeros, bool has_c, bool gated, "
      "bool only_runnable, int device, int limit) -> str");
  m.def(
      "_plan_grouped(int[] sizes, str type, bool gated, bool gathered, str? kernel, bool only_runnable, int device, str? w4_format=None, "
      "int group_size=128, bool has_zeros=False) -> str");
  m.def(
      "_plan_attention(int[] sizes, str type, int window_left, int window_right, bool varlen, str? kernel, bool only_runnable, int device) "
      "-> str");
  m.def("_load_tuned(str csv, int device=-1) -> int");
  m.def("_is_done(int event) -> bool");                              // a CUDA event's handle
  m.def("_allocate(Tensor like, int[] shape, str what) -> Tensor");  // as operators do; for tests
}

STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) {
  using namespace minfer::torch_binding;
  m.impl("gemm", boxed<&gemm>);
  m.impl("gemm.out", boxed<&gemm_out>);
  m.impl("gemm_gated", boxed<&gemm_gated>);
  m.impl("w4a16_gemm", boxed<&w4a16_gemm>);
  m.impl("w4a16_gemm.out", boxed<&w4a16_gemm_out>);
  m.impl("w4a16_gemm_gated", boxed<&w4a16_gemm_gated>);
  m.impl("w4a16_pack", boxed<&w4a16_pack>);
  m.impl("w4a16_dequantize", boxed<&w4a16_dequantize>);
  m.impl("w8a16_gemm", boxed<&w8a16_gemm>);
  m.impl("w8a16_gemm.out", boxed<&w8a16_gemm_out>);
  m.impl("w8a16_gemm_gated", boxed<&w8a16_gemm_gated>);
  m.impl("w8a16_pack", boxed<&w8a16_pack>);
  m.impl("w8a16_dequantize", boxed<&w8a16_dequantize>);
  m.impl("moe_router", boxed<&moe_router>);
  m.impl("moe_router_gemm", boxed<&moe_router_gemm>);
  m.impl("moe_sort", boxed<&moe_sort>);
  m.impl("moe_combine", boxed<&moe_combine>);
  m.impl("moe_ffn", boxed<&moe_ffn>);
  m.impl("grouped_gemm", boxed<&grouped_gemm>);
  m.impl("grouped_gemm.out", boxed<&grouped_gemm_out>);
  m.impl("grouped_gemm_masked", boxed<&grouped_gemm_masked>);
  m.impl("grouped_gemm_masked.out", boxed<&grouped_gemm_masked_out>);
  m.impl("grouped_w4a16_gemm", boxed<&grouped_w4a16_gemm>);
  m.impl("grouped_w4a16_gemm.out", boxed<&grouped_w4a16_gemm_out>);
  m.impl("moe_ffn_w4a16", boxed<&moe_ffn_w4a16>);
  m.impl("attention", boxed<&attention>);
  m.impl("attention_varlen", boxed<&attention_varlen>);
  m.impl("attention_paged", boxed<&attention_paged>);
  m.impl("kv_cache_append", boxed<&kv_cache_append>);
  m.impl("merge_attention_states", boxed<&merge_attention_states>);
}

STABLE_TORCH_LIBRARY_IMPL(minfer, CompositeExplicitAutograd, m) {
  using namespace minfer::torch_binding;
  m.impl("_build_info", boxed<&build_info>);
  m.impl("_kernels", boxed<&kernels>);
  m.impl("_device_properties", boxed<&device_properties_json>);
  m.impl("_device_file_name", boxed<&device_file_name_text>);
  m.impl("_plan_gemm", boxed<&plan_gemm_json>);
  m.impl("_enumerate_gemm", boxed<&enumerate_gemm_json>);
  m.impl("_plan_w4a16", boxed<&plan_w4a16_json>);
  m.impl("_enumerate_w4a16", boxed<&enumerate_w4a16_json>);
  m.impl("_plan_grouped", boxed<&plan_grouped_json>);
  m.impl("_plan_attention", boxed<&plan_attention_json>);
  m.impl("_load_tuned", boxed<&load_tuned>);
  m.impl("_is_done", boxed<&is_done>);
  m.impl("_allocate", boxed<&allocate_for_tests>);
}
