// bench/gemm: any kernel of the registry on any problem, checked against a reference, then timed beside cuBLAS.
//
//   bench/gemm --m 1:64:x2 --n 4096 --k 4096 --dtype bf16 --baseline cublas,cublaslt      what plan_gemm chooses
//   bench/gemm --m 512 --n 4096 --k 4096 --kernel '*_64x*pingpong*' --all-launches       every launch of some kernels
//   bench/gemm --m 16,4096 --n 4096 --k 4096 --dtype e4m3,s8 --scales one,rows,blocks    operands of 8 bits
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
      {"dtype", "LIST", "f16", "f16, bf16, e4m3, s8: A and B"},
      {"scales", "LIST", "rows", "of e4m3 and s8: one; rows: of A, and columns of B; of e4m3 also blocks: 1 x 128 of A, 128 x 128 of B"},
      {"fast-accum", "LIST", "off",
       "of e4m3 without blocks: on: the tensor core adds up all of k; off: sums of 128 of k are added in fp32"},
      {"out", "TYPE", "", "type of D: as A and B, or f32; of 8 bits bf16, f16 or f32 [of 8 bits bf16]"},
      {"layout", "LIST", "tn", "tn, tt, nn, nt: BLAS letters of A and B (tn: B is weight.t()); of 8 bits tn"},
      {"c", nullptr, nullptr, "add beta * C"},
      {"alpha", "X", "1", "alpha"},
      {"beta", "X", "1", "beta, with --c"},
      {"bias", nullptr, nullptr, "add a bias of n elements"},
      {"activation", "NAME", "none", "none, relu, gelu, gelu_tanh, silu"},
      {"gated", nullptr, nullptr, "D = activation(gate) * up over blocks of 8 columns of B"},
  };
}

/// A case of 16 bits once; one of 8 bits for each combination of --scales and --fast-accum that there is.
void add_cases(Arguments const& arguments, GemmCase c, std::vector<GemmCase>* cases) {
  DataType const type = c.problem.ab_type;
  if (!is_8_bits(type)) {
    cases->push_back(c);
    return;
  }
  if (c.problem.batch != 1) throw std::invalid_argument("--batch: operands of 8 bits have none, got " + std::to_string(c.problem.batch));
  if (c.layout() != "tn") throw std::invalid_argument("--layout: operands of 8 bits are read along k: tn, got \"" + c.layout() + "\"");
  size_t const before = cases->size();
  for (std::string const& name : arguments.list("scales")) {
    bool known = false;
    for (ScaleKind kind : kScaleKinds) {
      if (name != name_of(kind)) continue;
      known = true;
      for (bool fast : arguments.switches("fast-accum")) {
        if ((kind == ScaleKind::kBlocks || fast) && type != DataType::kE4M3) continue;
        if (kind == ScaleKind::kBlocks && fast) continue;  // their sums are added up in fp32 in any case
        c.scales = kind;
        c.problem.block_scaled = kind == ScaleKind::kBlocks;
        c.problem.fast_accum = fast;
        cases->push_back(c);
      }
    }
    if (!known) throw std::invalid_argument("--scales: one, rows or blocks, got \"" + name + "\"");
  }
  if (cases->size() == before)
    throw std::invalid_argument(std::string("--scales and --fast-accum leave nothing of ") + name_of(type) + " (--help says what it has)");
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
          p.ab_type = parse_type(dtype, {DataType::kF16, DataType::kBF16, DataType::kE4M3, DataType::kS8});
          p.d_type = arguments.given("out") ? parse_type(arguments.text("out")) : is_8_bits(p.ab_type) ? DataType::kBF16 : p.ab_type;
          p.a_major = layout[0] == 't' ? Major::kK : Major::kMN;
          p.b_major = layout[1] == 'n' ? Major::kK : Major::kMN;
          p.gated = arguments.given("gated");
          p.has_c = arguments.given("c");
          c.alpha = float(arguments.number("alpha"));
          c.beta = p.has_c ? float(arguments.number("beta")) : 0.0f;
          c.bias = arguments.given("bias");
          c.activation = parse_activation(arguments.text("activation"));
          set_alignments(&p, c.d_columns());
          add_cases(arguments, c, &cases);
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
  return bench_main({"gemm", {"gemm", "scaled_gemm"}, kUsage, options(), 14, cases_of}, argc, argv);
}
