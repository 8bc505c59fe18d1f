// The functions library.cpp registers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/tensor.h"

namespace minfer::torch_binding {

Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha, double beta,
            std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& kernel);
Tensor gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha,
                double beta, std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& kernel,
                Tensor const& out);
Tensor gemm_gated(Tensor const& a, Tensor const& b, std::optional<Tensor> const& bias, std::string const& activation,
                  std::optional<std::string> const& kernel);

Tensor w4a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                  std::string const& activation, std::string const& w4_format, bool constant_weights,
                  std::optional<std::string> const& kernel);
Tensor w4a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                      double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                      std::string const& activation, std::string const& w4_format, bool constant_weights,
                      std::optional<std::string> const& kernel, Tensor const& out);
Tensor w4a16_gemm_gated(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                        int64_t group_size, double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias,
                        std::string const& activation, std::string const& w4_format, bool constant_weights,
                        std::optional<std::string> const& kernel);
Tensor w4a16_pack(Tensor const& codes, std::string const& w4_format);
Tensor w8a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                  std::string const& activation, std::string const& w8_format, bool constant_weights,
                  std::optional<std::string> const& kernel);
Tensor w8a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                      double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
                      std::string const& activation, std::string const& w8_format, bool constant_weights,
                      std::optional<std::string> const& kernel, Tensor const& out);
Tensor w8a16_gemm_gated(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                        int64_t group_size, double alpha, std::optional<Tensor> const& perm, std::optional<Tensor> const& bias,
                        std::string const& activation, std::string const& w8_format, bool constant_weights,
                        std::optional<std::string> const& kernel);
Tensor w8a16_pack(Tensor const& codes);
Tensor w4a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w4_format, std::optional<ScalarType> out_dtype);
Tensor w8a16_dequantize(Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size, double alpha,
                        int64_t n, int64_t k, std::string const& w8_format);

std::tuple<Tensor, Tensor> moe_router(Tensor const& logits, int64_t top_k, std::string const& scoring, bool renormalize,
                                      std::optional<Tensor> const& correction_bias, int64_t n_group, int64_t topk_group, double scale);
std::tuple<Tensor, Tensor> moe_router_gemm(Tensor const& x, Tensor const& w_gate, int64_t top_k, std::string const& scoring,
                                           bool renormalize, std::optional<Tensor> const& correction_bias, int64_t n_group,
                                           int64_t topk_group, double scale);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_sort(Tensor const& ids, int64_t num_experts, std::optional<Tensor> const& weights);
Tensor moe_combine(Tensor const& y, Tensor const& inverse, std::optional<Tensor> const& weights);

std::tuple<Tensor, Tensor> attention(Tensor const& q, Tensor const& k, Tensor const& v, bool causal, std::optional<double> scale,
                                     int64_t window_left, int64_t window_right, double softcap, std::optional<Tensor> const& sinks,
                                     std::optional<std::string> const& kernel);
std::tuple<Tensor, Tensor> attention_varlen(Tensor const& q, Tensor const& k, Tensor const& v, Tensor const& cu_seqlens_q,
                                            Tensor const& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k, bool causal,
                                            std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                                            std::optional<Tensor> const& sinks, std::optional<std::string> const& kernel);
std::tuple<Tensor, Tensor> attention_paged(Tensor const& q, Tensor const& k_cache, Tensor const& v_cache, Tensor const& seq_lens,
                                           std::optional<Tensor> const& block_table, std::optional<Tensor> const& cu_seqlens_q,
                                           int64_t max_seqlen_q, std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale,
                                           std::optional<Tensor> const& k_residual, std::optional<Tensor> const& v_residual,
                                           std::string const& kv_format, bool causal, std::optional<double> scale, int64_t window_left,
                                           double softcap, std::optional<Tensor> const& sinks, std::optional<int64_t> num_splits,
                                           std::optional<std::string> const& kernel);
void kv_cache_append(Tensor const& k, Tensor const& v, Tensor const& k_cache, Tensor const& v_cache, Tensor const& slot_mapping,
                     std::optional<Tensor> const& k_scale, std::optional<Tensor> const& v_scale, std::optional<Tensor> const& k_residual,
                     std::optional<Tensor> const& v_residual, std::optional<Tensor> const& cu_seqlens, std::string const& kv_format);
std::tuple<Tensor, Tensor> merge_attention_states(std::vector<Tensor> const& outs, std::vector<Tensor> const& lses);
std::string plan_attention_json(std::vector<int64_t> const& sizes, std::string const& type, int64_t window_left, int64_t window_right,
                                bool varlen, std::optional<std::string> const& kernel, bool only_runnable, int64_t device);

Tensor grouped_gemm(Tensor const& a, Tensor const& b, Tensor const& offsets, std::optional<Tensor> const& bias,
                    std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                    std::string const& gate_layout, std::optional<std::string> const& kernel);
Tensor grouped_gemm_out(Tensor const& a, Tensor const& b, Tensor const& offsets, std::optional<Tensor> const& bias,
                        std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale, std::string const& activation,
                        bool gated, std::string const& gate_layout, std::optional<std::string> const& kernel, Tensor const& out);
Tensor grouped_gemm_masked(Tensor const& a, Tensor const& b, Tensor const& counts, std::optional<Tensor> const& bias,
                           std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                           std::string const& gate_layout, std::optional<std::string> const& kernel);
Tensor grouped_gemm_masked_out(Tensor const& a, Tensor const& b, Tensor const& counts, std::optional<Tensor> const& bias,
                               std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                               std::string const& gate_layout, std::optional<std::string> const& kernel, Tensor const& out);

Tensor moe_ffn(Tensor const& x, Tensor const& w13, Tensor const& w2, Tensor const& weights, Tensor const& ids,
               std::string const& activation, std::optional<Tensor> const& b13, std::optional<Tensor> const& b2,
               std::string const& gate_layout);

Tensor grouped_w4a16_gemm(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                          Tensor const& offsets, int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha,
                          std::optional<Tensor> const& bias, std::optional<Tensor> const& gather, std::optional<Tensor> const& row_scale,
                          std::string const& activation, bool gated, std::optional<std::string> const& kernel);
Tensor grouped_w4a16_gemm_out(Tensor const& a, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros,
                              Tensor const& offsets, int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha,
                              std::optional<Tensor> const& bias, std::optional<Tensor> const& gather,
                              std::optional<Tensor> const& row_scale, std::string const& activation, bool gated,
                              std::optional<std::string> const& kernel, Tensor const& out);
Tensor moe_ffn_w4a16(Tensor const& x, Tensor const& w13, Tensor const& w13_scales, std::optional<Tensor> const& w13_zeros, Tensor const& w2,
                     Tensor const& w2_scales, std::optional<Tensor> const& w2_zeros, Tensor const& weights, Tensor const& ids,
                     int64_t group_size, std::string const& w4_format, std::optional<Tensor> const& alpha13,
                     std::optional<Tensor> const& alpha2, std::string const& activation, std::optional<Tensor> const& b13,
                     std::optional<Tensor> const& b2);

std::string build_info();
std::string kernels(std::string const& family);
std::string device_properties_json(int64_t index);
std::string device_file_name_text(std::string const& device_name);
std::string plan_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                           std::string const& a_major, std::string const& b_major, std::vector<int64_t> const& alignments, bool has_c,
                           bool gated, std::optional<std::string> const& kernel, bool use_tuned, bool only_runnable, int64_t device);
std::string enumerate_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                                std::string const& a_major, std::string const& b_major, std::vector<int64_t> const& alignments, bool has_c,
                                bool gated, bool only_runnable, int64_t device, int64_t limit);
std::string plan_w4a16_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& w4_format, int64_t group_size,
                            bool has_zeros, bool has_c, bool gated, std::optional<std::string> const& kernel, bool use_tuned,
                            bool only_runnable, int64_t device);
std::string enumerate_w4a16_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& w4_format,
                                 int64_t group_size, bool has_zeros, bool has_c, bool gated, bool only_runnable, int64_t device,
                                 int64_t limit);
std::string plan_grouped_json(std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool gathered,
                              std::optional<std::string> const& kernel, bool only_runnable, int64_t device,
                              std::optional<std::string> const& w4_format, int64_t group_size, bool has_zeros);
int64_t load_tuned(std::string const& csv, int64_t device);
bool is_done(int64_t event);
Tensor allocate_for_tests(Tensor const& like, std::vector<int64_t> const& shape, std::string const& what);

}  // namespace minfer::torch_binding
