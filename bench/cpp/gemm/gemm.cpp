// bench/gemm: any kernel of the registry on any problem, checked against a reference, then timed beside cuBLAS.
//
//   bench/gemm --m 1:64:x2 --n 4096 --k 4096 --dtype bf16 --baseline cublas,cublaslt      what plan_gemm chooses
//   bench/gemm --m 512 --n 4096 --k 4096 --kernel '*_64x*pingpong*' --all-launches       every launch of some kernels
//   bench/gemm --list --kernel 'gemm_sm90_bf16_tn_*'
#include "gemm/gemm_bench.h"

namespace minfer::bench {
namespace {

constexpr char kUsage[] =
    "bench/gemm: D = activation(alpha * A.B + beta * C + bias), checked against a reference, then timed.\n"
    "Without --kernel and --all-launches it runs what plan_gemm chooses. Integers are lists (1,2,4) or ranges (128:1024:128, 1:64:x2).";

std::vector<Option> options() {
  return {
      {"m", "INTS", "4096", "rows of A and D"},
      {"n", "INTS", "4096", "columns of B (gated: gate and up together)"},
      {"k", "INTS", "4096", "reduction"},
      {"batch", "INTS", "1", "batch"},
      {"cube", "INTS", "", "m = n = k, instead of --m --n --k"},
      {"dtype", "LIST", "f16", "f16, bf16"},
      {"out", "TYPE", "", "type of D: as A and B, or f32"},
      {"layout", "LIST", "tn", "tn, tt, nn, nt: BLAS letters of A and B (tn: B is weight.t())"},
      {"c", nullptr, nullptr, "add beta * C"},
      {"alpha", "X", "1", "alpha"},
      {"beta", "X", "1", "beta, with --c"},
      {"bias", nullptr, nullptr, "add a bias of n elements"},
      {"activation", "NAME", "none", "none, relu, gelu, gelu_tanh, silu"},
      {"gated", nullptr, nullptr, "D = activation(gate) * up over blocks of 8 columns of B"},
  };
}

std::vector<GemmCase> cases_of(Arguments const& arguments) {
  struct Sizes {
    int64_t m, n, k;
  };
  std::vector<Sizes> sizes;
  if (arguments.given("cube")) {
    for (int64_t s : arguments.integers("cube")) sizes.push_back({s, s, s});
  } else {
    for (int64_t k : arguments.integers("k"))
      for (int64_t n : arguments.integers("n"))
        for (int64_t m : arguments.integers("m")) sizes.push_back({m, n, k});
  }
  if (arguments.given("gated") && arguments.given("c")) throw std::invalid_argument("--gated has no C: leave out --c");
  std::vector<GemmCase> cases;
  for (std::string const& dtype : arguments.list("dtype")) {
    for (std::string const& layout : arguments.list("layout")) {
      if (layout != "tn" && layout != "tt" && layout != "nn" && layout != "nt")
        throw std::invalid_argument("--layout: tn, tt, nn or nt, got \"" + layout + "\"");
      for (Sizes const& size : sizes) {
        for (int64_t batch : arguments.integers("batch")) {
          GemmCase c;
          GemmProblem& p = c.problem;
          p.m = size.m, p.n = size.n, p.k = size.k, p.batch = batch;
          p.ab_type = parse_type(dtype);
          p.d_type = arguments.given("out") ? parse_type(arguments.text("out")) : p.ab_type;
          p.a_major = layout[0] == 't' ? Major::kK : Major::kMN;
          p.b_major = layout[1] == 'n' ? Major::kK : Major::kMN;
          p.gated = arguments.given("gated");
          p.has_c = arguments.given("c");
          c.alpha = float(arguments.number("alpha"));
          c.beta = p.has_c ? float(arguments.number("beta")) : 0.0f;
          c.bias = arguments.given("bias");
          c.activation = parse_activation(arguments.text("activation"));
          set_alignments(&p, c.d_columns());
          cases.push_back(c);
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
  return bench_main({"gemm", kUsage, options(), 3, cases_of}, argc, argv);
}
