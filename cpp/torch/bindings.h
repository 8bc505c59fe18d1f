// The functions library.cpp registers.
#pragma once

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

std::string build_info();
std::string kernels(std::string family);
std::string device_properties_json(int64_t index);
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
int64_t load_tuned(std::string csv);

}  // namespace minfer::torch_binding
