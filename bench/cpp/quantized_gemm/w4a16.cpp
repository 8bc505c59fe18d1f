// bench/w4a16: any kernel of the registry on any problem with 4-bit weights, checked against a reference, then timed: with 16-bit
// activations beside cuBLAS on the same weights in 16 bits.
//
//   bench/w4a16 --m 1:64:x2 --n 4096 --k 4096 --dtype f16,bf16 --baseline cublas           what plan_gemm chooses
//   bench/w4a16 --m 16 --n 28672 --k 4096 --group-size 32,128,-1 --zeros --all-launches    every kernel and launch
//   bench/w4a16 --m 64:4096:x2 --n 28672 --k 4096 --dtype e4m3,s8                          activations of 8 bits
//   bench/w4a16 --list --kernel 'w4a16_sm90_bf16_*'
//
// The reference multiplies by weights that the benchmark dequantises itself, from the codes before they are packed.
#include "gemm/gemm_bench.h"

namespace minfer::bench {
namespace {

constexpr char kUsage[] =
    "bench/w4a16: D = activation(A.W^T + C + bias) with W = (code - zero) * scale, checked against a reference, then timed.\n"
    "Without --kernel and --all-launches it runs what plan_gemm chooses. Integers are lists (1,2,4) or ranges (128:1024:128, 1:64:x2).";

std::vector<Option> options() {
  return {
      {"m", "INTS", "1", "rows of A and D"},
      {"n", "INTS", "4096", "rows of W (gated: gate and up together), a multiple of 8"},
      {"k", "INTS", "4096", "reduction, a multiple of 8"},
      {"dtype", "LIST", "f16", "f16, bf16: A, D and the scales; e4m3, s8: A, with a scale for each row"},
      {"group-size", "INTS", "128", "columns of W that share a scale: a power of two from 32 on, or -1: all"},
      {"zeros", nullptr, nullptr, "with zero points (else 8 everywhere)"},
      {"format", "LIST", "int4", "int4: what a code stands for"},
      {"c", nullptr, nullptr, "add C"},
      {"bias", nullptr, nullptr, "add a bias of n elements"},
      {"activation", "NAME", "none", "none, relu, gelu, gelu_tanh, silu"},
      {"gated", nullptr, nullptr, "D = activation(gate) * up over blocks of 8 rows of W"},
  };
}

WeightFormat parse_format(std::string const& text) {
  for (WeightFormat format : {WeightFormat::kInt4})
    if (text == name_of(format)) return format;
  throw std::invalid_argument("--format: int4, got \"" + text + "\"");
}

/// As GemmProblem has it: 0 where one group covers k.
int32_t group_of(int64_t group_size, int64_t k) {
  bool const power = group_size >= 32 && (group_size & (group_size - 1)) == 0;
  if (group_size != -1 && !power)
    throw std::invalid_argument("--group-size: -1 or a power of two from 32 on, got " + std::to_string(group_size));
  return group_size == -1 || group_size >= k ? 0 : int32_t(group_size);
}

std::vector<GemmCase> cases_of(Arguments const& arguments) {
  if (arguments.given("gated") && arguments.given("c")) throw std::invalid_argument("--gated has no C: leave out --c");
  std::vector<GemmCase> cases;
  for (std::string const& dtype : arguments.list("dtype")) {
    for (std::string const& format : arguments.list("format")) {
      for (int64_t group_size : arguments.integers("group-size")) {
        for (int64_t k : arguments.integers("k")) {
          for (int64_t n : arguments.integers("n")) {
            for (int64_t m : arguments.integers("m")) {
              GemmCase c;
              GemmProblem& p = c.problem;
              p.m = m, p.n = n, p.k = k;
              p.ab_type = parse_type(dtype, {DataType::kF16, DataType::kBF16, DataType::kE4M3, DataType::kS8});
              p.d_type = is_8_bits(p.ab_type) ? DataType::kBF16 : p.ab_type;
              p.b_format = parse_format(format);
              p.group_size = group_of(group_size, k);
              p.has_zeros = arguments.given("zeros");
              p.gated = arguments.given("gated");
              p.has_c = arguments.given("c");
              c.beta = p.has_c ? 1.0f : 0.0f;
              c.bias = arguments.given("bias");
              c.activation = parse_activation(arguments.text("activation"));
              set_alignments(&p, c.d_columns());
              cases.push_back(c);
            }
          }
        }
      }
    }
  }
  return cases;
}

}  // namespace
}  // namespace minfer::bench

int main(int argc, char** argv) {
  using namespace minfer::bench;
  return bench_main({"w4a16", {"w4a16", "w4a8"}, kUsage, options(), 14, cases_of}, argc, argv);
}
