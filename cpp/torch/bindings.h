// The functions library.cpp registers.
#pragma once

#include <tuple>

#include "common.h"

namespace minfer::torch_binding {

Tensor gemm(Tensor a, Tensor b, std::optional<Tensor> c, std::optional<Tensor> bias, double alpha, double beta, std::string activation,
            std::optional<ScalarType> out_dtype, std::optional<std::string> kernel);
Tensor gemm_out(Tensor a, Tensor b, std::optional<Tensor> c, std::optional<Tensor> bias, double alpha, double beta, std::string activation,
                std::optional<ScalarType> out_dtype, std::optional<std::string> kernel, Tensor out);
Tensor gemm_gated(Tensor a, Tensor b, std::optional<Tensor> bias, std::string activation, std::optional<std::string> kernel);

Tensor w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                  std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                  std::string w4_format, std::optional<std::string> kernel);
Tensor w4a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                      std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                      std::string w4_format, std::optional<std::string> kernel, Tensor out);
Tensor w4a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                        std::optional<Tensor> perm, std::optional<Tensor> bias, std::string activation, std::string w4_format,
                        std::optional<std::string> kernel);
Tensor w4a16_pack(Tensor codes, std::string w4_format);
Tensor w8a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                  std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                  std::string w8_format, std::optional<std::string> kernel);
Tensor w8a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                      std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                      std::string w8_format, std::optional<std::string> kernel, Tensor out);
Tensor w8a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                        std::optional<Tensor> perm, std::optional<Tensor> bias, std::string activation, std::string w8_format,
                        std::optional<std::string> kernel);
Tensor w8a16_pack(Tensor codes);
Tensor w4a16_dequantize(Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha, int64_t n, int64_t k,
                        std::string w4_format, std::optional<ScalarType> out_dtype);
Tensor w8a16_dequantize(Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha, int64_t n, int64_t k,
                        std::string w8_format);

std::tuple<Tensor, Tensor> moe_router(Tensor logits, int64_t top_k, std::string scoring, bool renormalize,
                                      std::optional<Tensor> correction_bias, int64_t n_group, int64_t topk_group, double scale);
std::tuple<Tensor, Tensor> moe_router_gemm(Tensor x, Tensor w_gate, int64_t top_k, std::string scoring, bool renormalize,
                                           std::optional<Tensor> correction_bias, int64_t n_group, int64_t topk_group, double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_sort(Tensor ids, int64_t num_experts, std::optional<Tensor> weights);
Tensor moe_combine(Tensor y, Tensor inverse, std::optional<Tensor> weights);

std::tuple<Tensor, Tensor> attention(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t window_left,
                                     int64_t window_right, double softcap, std::optional<Tensor> sinks, std::optional<std::string> kernel);
std::tuple<Tensor, Tensor> attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, int64_t max_seqlen_q,
                                            int64_t max_seqlen_k, bool causal, std::optional<double> scale, int64_t window_left,
                                            int64_t window_right, double softcap, std::optional<Tensor> sinks,
                                            std::optional<std::string> kernel);
std::tuple<Tensor, Tensor> attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, std::optional<Tensor> block_table,
                                           std::optional<Tensor> cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> k_scale,
                                           std::optional<Tensor> v_scale, std::optional<Tensor> k_residual,
                                           std::optional<Tensor> v_residual, std::string kv_format, bool causal,
                                           std::optional<double> scale, int64_t window_left, double softcap, std::optional<Tensor> sinks,
                                           std::optional<int64_t> num_splits, std::optional<std::string> kernel);
void kv_cache_append(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slot_mapping, std::optional<Tensor> k_scale,
                     std::optional<Tensor> v_scale, std::optional<Tensor> k_residual, std::optional<Tensor> v_residual,
                     std::optional<Tensor> cu_seqlens, std::string kv_format);
std::tuple<Tensor, Tensor> merge_attention_states(std::vector<Tensor> outs, std::vector<Tensor> lses);
std::string plan_attention_json(std::vector<int64_t> sizes, std::string type, int64_t window_left, int64_t window_right, bool varlen,
                                std::optional<std::string> kernel, bool only_runnable, int64_t device);

Tensor grouped_gemm(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                    std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                    std::optional<std::string> kernel);
Tensor grouped_gemm_out(Tensor a, Tensor b, Tensor offsets, std::optional<Tensor> bias, std::optional<Tensor> gather,
                        std::optional<Tensor> row_scale, std::string activation, bool gated, std::string gate_layout,
                        std::optional<std::string> kernel, Tensor out);
Tensor grouped_gemm_masked(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                           std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel);
Tensor grouped_gemm_masked_out(Tensor a, Tensor b, Tensor counts, std::optional<Tensor> bias, std::optional<Tensor> row_scale,
                               std::string activation, bool gated, std::string gate_layout, std::optional<std::string> kernel, Tensor out);

Tensor moe_ffn(Tensor x, Tensor w13, Tensor w2, Tensor weights, Tensor ids, std::string activation, std::optional<Tensor> b13,
               std::optional<Tensor> b2, std::string gate_layout);

Tensor grouped_w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, Tensor offsets, int64_t group_size,
                          std::string w4_format, std::optional<Tensor> alpha, std::optional<Tensor> bias, std::optional<Tensor> gather,
                          std::optional<Tensor> row_scale, std::string activation, bool gated, std::optional<std::string> kernel);
Tensor grouped_w4a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, Tensor offsets, int64_t group_size,
                              std::string w4_format, std::optional<Tensor> alpha, std::optional<Tensor> bias, std::optional<Tensor> gather,
                              std::optional<Tensor> row_scale, std::string activation, bool gated, std::optional<std::string> kernel,
                              Tensor out);
Tensor moe_ffn_w4a16(Tensor x, Tensor w13, Tensor w13_scales, std::optional<Tensor> w13_zeros, Tensor w2, Tensor w2_scales,
                     std::optional<Tensor> w2_zeros, Tensor weights, Tensor ids, int64_t group_size, std::string w4_format,
                     std::optional<Tensor> alpha13, std::optional<Tensor> alpha2, std::string activation, std::optional<Tensor> b13,
                     std::optional<Tensor> b2);

std::string build_info();
std::string kernels(std::string family);
std::string device_properties_json(int64_t index);
std::string device_file_name_text(std::string device_name);
std::string plan_gemm_json(std::vector<int64_t> sizes, std::string ab_type, std::string d_type, std::string a_major, std::string b_major,
                           std::vector<int64_t> alignments, bool has_c, bool gated, std::optional<std::string> kernel, bool use_tuned,
                           bool only_runnable, int64_t device);
std::string enumerate_gemm_json(std::vector<int64_t> sizes, std::string ab_type, std::string d_type, std::string a_major,
                                std::string b_major, std::vector<int64_t> alignments, bool has_c, bool gated, bool only_runnable,
                                int64_t device, int64_t limit);
std::string plan_w4a16_json(std::vector<int64_t> sizes, std::string ab_type, std::string w4_format, int64_t group_size, bool has_zeros,
                            bool has_c, bool gated, std::optional<std::string> kernel, bool use_tuned, bool only_runnable, int64_t device);
std::string enumerate_w4a16_json(std::vector<int64_t> sizes, std::string ab_type, std::string w4_format, int64_t group_size, bool has_zeros,
                                 bool has_c, bool gated, bool only_runnable, int64_t device, int64_t limit);
std::string plan_grouped_json(std::vector<int64_t> sizes, std::string type, bool gated, bool gathered, std::optional<std::string> kernel,
                              bool only_runnable, int64_t device, std::optional<std::string> w4_format, int64_t group_size, bool has_zeros);
int64_t load_tuned(std::string csv, int64_t device);

}  // namespace minfer::torch_binding
