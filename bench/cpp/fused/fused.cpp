// bench/fused: the operators between the GEMMs on rows, checked against float64 on the host, then timed beside a copy of as many bytes.
//
//   bench/fused --op rms_norm,silu_and_mul --rows 1,64,4096 --width 4096,8192
//   bench/fused --op rms_norm --quant fp8_token,fp8_block128 --rows 4096 --width 4096
//   bench/fused --op rms_norm --rows 4096 --width 4096 --kernel '*'            every compiled kernel instead of the plan's choice
//   bench/fused --op sample --rows 1,128 --width 131072 --top-k 50 --top-p 0.9
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "common/buffers.h"
#include "common/programmatic_launch.h"
#include "common/table.h"
#include "common/timing.h"
#include "gemm/gemm_bench.h"
#include "minfer/fused.h"
#include "minfer/sampling.h"

namespace minfer::bench {
namespace {

constexpr char kUsage[] =
    "bench/fused: operators on rows, checked against float64, then timed beside a copy of as many bytes.\n"
    "  rms_norm, add_rms_norm, layer_norm, softmax, gelu, silu_and_mul, quantize, hadamard, sample\n"
    "Without --kernel the row operators run what plan_rows chooses. Integers are lists (1,2,4) or ranges (128:1024:128, 1:64:x2).";

enum class Op { kRmsNorm, kAddRmsNorm, kLayerNorm, kSoftmax, kGelu, kSiluAndMul, kQuantize, kHadamard, kSample };
constexpr struct {
  Op op;
  char const* name;
} kOps[] = {
    {Op::kRmsNorm, "rms_norm"}, {Op::kAddRmsNorm, "add_rms_norm"}, {Op::kLayerNorm, "layer_norm"}, {Op::kSoftmax, "softmax"},
    {Op::kGelu, "gelu"},        {Op::kSiluAndMul, "silu_and_mul"}, {Op::kQuantize, "quantize"},    {Op::kHadamard, "hadamard"},
    {Op::kSample, "sample"},
};
char const* name_of(Op op) {
  for (auto const& entry : kOps)
    if (entry.op == op) return entry.name;
  return "?";
}

std::vector<Option> options() {
  std::vector<Option> all = {
      {"op", "LIST", "rms_norm", "of those above"},
      {"rows", "INTS", "1,64,4096", "rows"},
      {"width", "INTS", "4096,8192", "outputs of a row; of sample the vocabulary"},
      {"dtype", "LIST", "bf16", "f16, bf16"},
      {"quant", "LIST", "none", "none, fp8_tensor, fp8_token, fp8_block128, int8_token: of rms_norm, add_rms_norm, silu_and_mul, quantize"},
      {"top-k", "N", "0", "of sample; 0: all"},
      {"top-p", "P", "1", "of sample"},
      {"temperature", "T", "1", "of sample; 0: the largest"},
      {"kernel", "GLOB", "", "every compiled kernel of that name instead of the plan's choice"},
      {"plan", nullptr, nullptr, "print what plan_rows chooses; run nothing (works without a GPU: plans for an H200)"},
  };
  for (Option const& option : protocol_options()) all.push_back(option);
  return all;
}

struct FusedCase {
  Op op;
  RowQuant quant = RowQuant::kNone;
  DataType type = DataType::kBF16;
  int64_t rows = 0, width = 0;

  bool planned() const { return op != Op::kHadamard && op != Op::kSample; }
  int64_t columns() const { return op == Op::kSiluAndMul ? 2 * width : width; }  // of x
  RowProblem problem() const {
    RowProblem p;
    p.operation = op == Op::kLayerNorm    ? RowOperation::kLayerNorm
                  : op == Op::kSoftmax    ? RowOperation::kSoftmax
                  : op == Op::kGelu       ? RowOperation::kActivation
                  : op == Op::kSiluAndMul ? RowOperation::kGatedActivation
                  : op == Op::kQuantize   ? RowOperation::kQuantize
                                          : RowOperation::kRmsNorm;
    p.type = type;
    p.quant = quant;
    p.rows = rows;
    p.width = width;
    p.adds = op == Op::kAddRmsNorm;
    return p;
  }
  /// That a call must move.
  double bytes() const {
    double const x = 2.0 * double(rows) * double(columns()), y = double(rows) * double(width);
    if (op == Op::kSample) return x;
    return (op == Op::kAddRmsNorm ? 3 : 1) * x + (quant == RowQuant::kNone ? 2 * y : y);
  }
};

/// Operands of one set: x, residual, weight, bias, y, codes, scales, ids.
struct Operands {
  void *x, *residual, *weight, *bias, *y, *codes;
  float *scale, *scales;
  int64_t* ids;
  float* logprobs;
};

double from_16bit(uint16_t bits, DataType type) {
  if (type == DataType::kBF16) {
    uint32_t const wide = uint32_t(bits) << 16;
    float v;
    std::memcpy(&v, &wide, sizeof(v));
    return double(v);
  }
  __half_raw raw;
  raw.x = bits;
  return double(__half2float(__half(raw)));
}

constexpr float kEps = 1e-6f;

/// A row's results in float64. `residual`: added first, and rounded, as the operator does.
std::vector<double> exact(FusedCase const& c, std::vector<double> x, std::vector<double> const& weight, std::vector<double> const& bias) {
  size_t const n = size_t(c.width);
  std::vector<double> y(n);
  double sum = 0, squares = 0, largest = -std::numeric_limits<double>::infinity();
  for (double v : x) sum += v, squares += v * v, largest = std::max(largest, v);
  double const mean = sum / double(n), rms = 1 / std::sqrt(squares / double(n) + double(kEps));
  double deviations = 0, exponentials = 0;
  for (double v : x) deviations += (v - mean) * (v - mean), exponentials += std::exp(v - largest);
  double const scale = 1 / std::sqrt(deviations / double(n) + double(kEps));
  for (size_t i = 0; i < n; ++i) {
    switch (c.op) {
      case Op::kRmsNorm:
      case Op::kAddRmsNorm: y[i] = x[i] * rms * weight[i]; break;
      case Op::kLayerNorm: y[i] = (x[i] - mean) * scale * weight[i] + bias[i]; break;
      case Op::kSoftmax: y[i] = std::exp(x[i] - largest) / exponentials; break;
      case Op::kGelu: y[i] = 0.5 * x[i] * std::erfc(-x[i] / std::sqrt(2.0)); break;
      case Op::kSiluAndMul: y[i] = x[i] / (1 + std::exp(-x[i])) * x[n + i]; break;
      default: y[i] = x[i];
    }
  }
  if (c.op == Op::kHadamard) {
    for (size_t step = 1; step < n; step *= 2)
      for (size_t i = 0; i < n; ++i)
        if ((i & step) == 0) {
          double const a = y[i], b = y[i + step];
          y[i] = a + b;
          y[i + step] = a - b;
        }
    for (double& v : y) v /= std::sqrt(double(n));
  }
  return y;
}

class Runner {
 public:
  Runner(Arguments const& arguments, DeviceProperties const& device)
      : arguments_(arguments),
        device_(device),
        table_({{"op", 12},
                {"quant", 12},
                {"rows", 6},
                {"width", 7},
                {"type", 4},
                {"us", 9},
                {"p10", 9},
                {"p90", 9},
                {"copy us", 9},
                {"of copy", 7},
                {"GB/s", 6},
                {"error", 8},
                {"kernel", 0}}),
        csv_(arguments.text("csv"), {"op", "quant", "rows", "width", "type", "kernel", "us", "p10", "p90", "bytes", "copy_us", "error"}),
        programmatic_(device.compute_capability() >= 90 && programmatic_launch_enabled()) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    timing_.rounds = int(std::max<int64_t>(1, arguments.integer("rounds")));
    timing_.graph_us = arguments.number("graph-us");
    table_.header();
  }
  ~Runner() { cudaStreamDestroy(stream_); }
  Runner(Runner const&) = delete;
  Runner& operator=(Runner const&) = delete;

  void run(FusedCase const& c) {
    std::vector<RowPlan> plans;
    std::string reason;
    if (c.planned()) {
      plans = plans_of(c, arguments_.text("kernel"), device_, &reason);
      if (plans.empty()) std::printf("no kernel can run it%s%s\n", reason.empty() ? "" : ": ", reason.c_str());
    } else {
      plans.emplace_back();
    }
    if (plans.empty()) return;
    make_operands(c);
    std::vector<Contestant> contestants;
    std::vector<double> errors;
    for (RowPlan const& plan : plans) {
      Contestant const ours{plan.kernel != nullptr ? plan.kernel->name : name_of(c.op),
                            [this, c, plan](int64_t set, cudaStream_t stream) { launch(c, plan, sets_[size_t(set)], stream); }};
      double error = std::numeric_limits<double>::quiet_NaN();
      if (!arguments_.given("no-check")) {
        error = error_of(c, ours);
        if (!(error <= limit(c))) {
          ++wrong_;
          report(c, ours.name + "  WRONG: not timed", {}, {}, error);
          continue;
        }
      }
      contestants.push_back(ours);
      errors.push_back(error);
    }
    if (arguments_.given("check")) {
      for (size_t i = 0; i < contestants.size(); ++i) report(c, contestants[i].name, {}, {}, errors[i]);
      return;
    }
    size_t const half = size_t(std::max(c.bytes() / 2, 16.0));
    contestants.push_back({"copy", [this, half](int64_t set, cudaStream_t stream) {
                             Copy const& copy = copies_[size_t(set)];
                             check(cudaMemcpyAsync(copy.to, copy.from, half, cudaMemcpyDeviceToDevice, stream), "copy");
                           }});
    std::vector<Timing> const timings = time_interleaved(contestants, int64_t(sets_.size()), timing_, stream_);
    for (size_t i = 0; i + 1 < contestants.size(); ++i) report(c, contestants[i].name, timings[i], timings.back(), errors[i]);
  }

  int64_t wrong() const { return wrong_; }

  static std::vector<RowPlan> plans_of(FusedCase const& c, std::string const& glob, DeviceProperties const& device, std::string* reason) {
    std::vector<RowPlan> plans;
    RowPlan plan;
    if (glob.empty()) {
      check(plan_rows(c.problem(), device, nullptr, &plan), "plan_rows");
      return {plan};
    }
    int64_t count = 0;
    KernelInfo const* kernels = registry(&count);
    for (int64_t i = 0; i < count; ++i) {
      if (std::string(kernels[i].family) != "fused" || kernels[i].launch == nullptr || !matches(glob, kernels[i].name)) continue;
      RowOverride forced;
      forced.kernel = &kernels[i];
      Status const status = plan_rows(c.problem(), device, &forced, &plan);
      if (status.ok()) plans.push_back(plan);
      if (!status.ok()) *reason = status.message;
    }
    return plans;
  }

 private:
  struct Copy {
    void *from, *to;
  };

  void make_operands(FusedCase const& c) {
    int64_t const x = c.rows * c.columns() * 2, y = c.rows * c.width * 2, factors = c.width * 2;
    int64_t const blocks = (c.width + kQuantBlock - 1) / kQuantBlock, scales = round_up(c.rows, 4) * blocks * 4;
    int64_t const half = std::max<int64_t>(int64_t(c.bytes() / 2), 16), asked = arguments_.integer("sets");
    int64_t const sets = asked > 0 ? asked : rotation_sets(int64_t(c.bytes()), device_.l2_bytes);
    int64_t const of_set = 2 * x + 2 * factors + 2 * y + scales + 2 * half + c.rows * 16 + 12 * kCarveAlignment;
    arena_.reset(sets * of_set);
    sets_.clear();
    copies_.clear();
    for (int64_t s = 0; s < sets; ++s) {
      Operands o{};
      o.x = arena_.carve(x);
      o.residual = arena_.carve(x);
      o.weight = arena_.carve(factors);
      o.bias = arena_.carve(factors);
      o.y = arena_.carve(y);
      o.codes = arena_.carve(y);
      o.scale = static_cast<float*>(arena_.carve(4));
      o.scales = static_cast<float*>(arena_.carve(scales));
      o.ids = static_cast<int64_t*>(arena_.carve(c.rows * 8));
      o.logprobs = static_cast<float*>(arena_.carve(c.rows * 4));
      fill_normal(o.x, c.type, c.rows * c.columns(), c.op == Op::kSample ? 2.0f : 1.0f, uint64_t(4 * s), stream_);
      fill_normal(o.residual, c.type, c.rows * c.columns(), 1.0f, uint64_t(4 * s + 1), stream_);
      fill_normal(o.weight, c.type, c.width, 1.0f, uint64_t(4 * s + 2), stream_);
      fill_normal(o.bias, c.type, c.width, 1.0f, uint64_t(4 * s + 3), stream_);
      fill_uniform(o.scale, DataType::kF32, 1, 0.02f, 0.021f, 1, stream_);
      sets_.push_back(o);
      copies_.push_back({arena_.carve(half), arena_.carve(half)});
    }
  }

  void launch(FusedCase const& c, RowPlan const& plan, Operands const& o, cudaStream_t stream) const {
    if (c.op == Op::kSample) {
      Sampling s;
      s.type = c.type;
      s.rows = c.rows;
      s.vocabulary = s.logits_stride = c.width;
      s.logits = o.x;
      s.temperature.value = float(arguments_.number("temperature"));
      s.top_k.value = int32_t(arguments_.integer("top-k"));
      s.top_p.value = float(arguments_.number("top-p"));
      s.ids = o.ids;
      s.logprobs = o.logprobs;
      return check(sample(s, device_, programmatic_, stream), "sample");
    }
    if (c.op == Op::kHadamard) {
      Hadamard h;
      h.type = c.type;
      h.x = {o.x, c.width, 0};
      h.y = {o.y, c.width, 0};
      h.rows = c.rows;
      h.width = h.block = c.width;
      return check(transform(h, device_, programmatic_, stream), "transform");
    }
    RowOperands r;
    r.x = {o.x, c.columns(), 0};
    if (c.quant == RowQuant::kNone) r.y = {o.y, c.width, 0};
    if (c.op == Op::kAddRmsNorm) r.residual = {o.residual, c.width, 0};
    if (c.op == Op::kRmsNorm || c.op == Op::kAddRmsNorm || c.op == Op::kLayerNorm) r.weight = o.weight;
    if (c.op == Op::kLayerNorm) r.bias = o.bias;
    r.eps = kEps;
    r.activation = c.op == Op::kGelu ? Activation::kGelu : c.op == Op::kSiluAndMul ? Activation::kSilu : Activation::kNone;
    r.q = o.codes;
    r.scale = o.scale;
    r.scales = o.scales;
    r.scales_stride = round_up(c.rows, 4);
    check(run_rows(plan, c.problem(), r, programmatic_, stream), plan.kernel->name);
  }

  std::vector<double> row_of(void const* data, DataType type, int64_t row, int64_t columns) const {
    std::vector<uint16_t> const bits = download<uint16_t>(static_cast<uint16_t const*>(data) + row * columns, columns, stream_);
    std::vector<double> values;
    for (uint16_t b : bits) values.push_back(from_16bit(b, type));
    return values;
  }

  /// The largest difference from float64 in the first and the last row, relative to the row's largest magnitude.
  double error_of(FusedCase const& c, Contestant const& ours) {
    Operands const& o = sets_[0];
    std::vector<std::vector<double>> expected;
    std::vector<double> const weight = row_of(o.weight, c.type, 0, c.width), bias = row_of(o.bias, c.type, 0, c.width);
    std::vector<int64_t> const checked = c.rows > 1 ? std::vector<int64_t>{0, c.rows - 1} : std::vector<int64_t>{0};
    for (int64_t row : checked) {
      std::vector<double> x = row_of(o.x, c.type, row, c.columns());
      if (c.op == Op::kAddRmsNorm) {
        std::vector<double> const residual = row_of(o.residual, c.type, row, c.width);
        for (size_t i = 0; i < x.size(); ++i) {
          float const sum = float(x[i] + residual[i]);
          x[i] = c.type == DataType::kBF16 ? double(__bfloat162float(__float2bfloat16(sum))) : double(__half2float(__float2half(sum)));
        }
      }
      expected.push_back(c.op == Op::kSample ? x : exact(c, x, weight, bias));
    }
    poison(o.y, c.rows * c.width * 2, stream_);
    poison(o.codes, c.rows * c.width, stream_);
    ours.launch(0, stream_);
    check(cudaStreamSynchronize(stream_), ours.name.c_str());
    double worst = 0;
    for (size_t r = 0; r < checked.size(); ++r) {
      int64_t const row = checked[r];
      std::vector<double> const& want = expected[r];
      double largest = 0;
      for (double v : want) largest = std::max(largest, std::fabs(v));
      if (c.op == Op::kSample) {
        worst = std::max(worst, sample_error(want, download<int64_t>(o.ids + row, 1, stream_)[0],
                                             double(download<float>(o.logprobs + row, 1, stream_)[0])));
        continue;
      }
      std::vector<double> const have = c.quant == RowQuant::kNone ? row_of(o.y, c.type, row, c.width) : decoded(c, o, row);
      for (size_t i = 0; i < want.size(); ++i) {
        double const off = std::fabs(have[i] - want[i]) / std::max(largest, 1e-30);
        worst = off <= worst ? worst : off;  // NaN stays
      }
    }
    return worst;
  }

  /// Of the logprob; infinite where a token is none, or with top-k is not among the k largest.
  double sample_error(std::vector<double> const& logits, int64_t id, double logprob) const {
    if (id < 0 || id >= int64_t(logits.size())) return std::numeric_limits<double>::infinity();
    double const largest = *std::max_element(logits.begin(), logits.end()), own = logits[size_t(id)];
    double sum = 0;
    int64_t before = 0;
    for (double v : logits) sum += std::exp(v - largest), before += v > own;
    int64_t const k = arguments_.number("temperature") <= 0 ? 1 : arguments_.integer("top-k");
    if (k > 0 && before >= k) return std::numeric_limits<double>::infinity();
    return std::fabs(logprob - (own - largest - std::log(sum))) / std::max(largest, 1.0);
  }

  std::vector<double> decoded(FusedCase const& c, Operands const& o, int64_t row) const {
    std::vector<uint8_t> const codes = download<uint8_t>(static_cast<uint8_t const*>(o.codes) + row * c.width, c.width, stream_);
    std::vector<double> values;
    int64_t const stride = round_up(c.rows, 4);
    bool const blocks = c.quant == RowQuant::kFp8Block128;
    std::vector<float> const scales = c.quant == RowQuant::kFp8Tensor ? download<float>(o.scale, 1, stream_)
                                      : blocks ? download<float>(o.scales, stride * ((c.width + kQuantBlock - 1) / kQuantBlock), stream_)
                                               : download<float>(o.scales + row, 1, stream_);
    for (int64_t i = 0; i < c.width; ++i) {
      float const scale = blocks ? scales[size_t(i / kQuantBlock * stride + row)] : scales[0];
      __nv_fp8_e4m3 fp8;
      fp8.__x = codes[size_t(i)];
      values.push_back(double(scale) * (c.quant == RowQuant::kInt8Token ? double(int8_t(codes[size_t(i)])) : double(float(fp8))));
    }
    return values;
  }

  /// Two roundings of the results.
  static double limit(FusedCase const& c) {
    if (c.op == Op::kSample) return 1e-4;
    if (c.quant != RowQuant::kNone) return c.quant == RowQuant::kInt8Token ? 1.0 / 127 : 1.0 / 14;
    return c.type == DataType::kBF16 ? 0x1p-7 : 0x1p-10;
  }

  void report(FusedCase const& c, std::string const& kernel, Timing const& ours, Timing const& copy, double error) {
    auto const us = [](double v) { return v > 0 ? format("%.2f", v) : std::string(); };
    bool const timed = ours.us > 0;
    std::string const quant = name_of(c.quant), type = name_of(c.type), rows = std::to_string(c.rows), width = std::to_string(c.width);
    table_.row({name_of(c.op), quant, rows, width, type, us(ours.us), us(ours.p10), us(ours.p90), us(copy.us),
                timed ? format("%.3f", copy.us / ours.us) : "", timed ? format("%.0f", c.bytes() / ours.us * 1e-3) : "",
                format("%.1e", error), kernel});
    csv_.row({name_of(c.op), quant, rows, width, type, kernel, us(ours.us), us(ours.p10), us(ours.p90), format("%.0f", c.bytes()),
              us(copy.us), format("%.3e", error)});
  }

  Arguments const& arguments_;
  DeviceProperties device_;
  Table table_;
  Csv csv_;
  TimingOptions timing_;
  Arena arena_;
  std::vector<Operands> sets_;
  std::vector<Copy> copies_;
  cudaStream_t stream_ = nullptr;
  bool programmatic_;
  int64_t wrong_ = 0;
};

std::vector<FusedCase> cases_of(Arguments const& arguments) {
  std::vector<FusedCase> cases;
  for (std::string const& name : arguments.list("op")) {
    auto const found = std::find_if(std::begin(kOps), std::end(kOps), [&](auto const& entry) { return name == entry.name; });
    if (found == std::end(kOps)) throw std::invalid_argument("--op: \"" + name + "\" is not one of its names (--help)");
    Op const op = found->op;
    for (std::string const& quant_name : arguments.list("quant")) {
      RowQuant quant = RowQuant::kNone;
      for (RowQuant q : kRowQuants)
        if (quant_name == name_of(q)) quant = q;
      if (quant == RowQuant::kNone && quant_name != "none")
        throw std::invalid_argument("--quant: \"" + quant_name + "\" is not one of its names (--help)");
      bool const quantises = op == Op::kRmsNorm || op == Op::kAddRmsNorm || op == Op::kSiluAndMul || op == Op::kQuantize;
      if (quant != RowQuant::kNone && !quantises) throw std::invalid_argument("--quant: results of " + name + " are not quantised");
      if (quant == RowQuant::kNone && op == Op::kQuantize) throw std::invalid_argument("--op quantize needs --quant");
      for (std::string const& dtype : arguments.list("dtype")) {
        DataType const type = parse_type(dtype);
        if (type == DataType::kF32) throw std::invalid_argument("--dtype: f16 or bf16, got \"f32\"");
        for (int64_t rows : arguments.integers("rows"))
          for (int64_t width : arguments.integers("width")) {
            if (rows < 1 || width < 1) throw std::invalid_argument("--rows and --width: 1 or more");
            bool const power = (width & (width - 1)) == 0 && width <= kMostHadamardBlock;
            if (op == Op::kHadamard && !power) throw std::invalid_argument("--op hadamard: --width a power of two up to 32768");
            cases.push_back({op, quant, type, rows, width});
          }
      }
    }
  }
  return cases;
}

int run(int argc, char** argv) {
  Arguments const arguments(argc, argv, options());
  if (arguments.given("help")) {
    arguments.print_help(kUsage);
    return 0;
  }
  if (arguments.given("list")) {
    print_registry({"fused"}, arguments.text("kernel"));
    return 0;
  }
  std::vector<FusedCase> const cases = cases_of(arguments);
  int const index = int(arguments.integer("device"));
  DeviceProperties device;
  if (arguments.given("plan")) {
    if (!query_device(index, &device).ok()) device = h200_properties();
    for (FusedCase const& c : cases) {
      if (!c.planned()) continue;
      std::string reason;
      for (RowPlan const& plan : Runner::plans_of(c, arguments.text("kernel"), device, &reason)) {
        RowLaunch const& l = plan.launch;
        std::printf("%s %s of %lld x %lld %s: %s@threads=%d,rows=%d,cluster=%d,parts=%d\n", name_of(c.op), name_of(c.quant),
                    (long long)c.rows, (long long)c.width, name_of(c.type), plan.kernel->name, l.threads, l.rows_per_cta, l.cluster,
                    l.parts);
      }
    }
    return 0;
  }
  check(query_device(index, &device), "query_device");
  check(cudaSetDevice(index), "cudaSetDevice");
  print_device(device);
  Runner runner(arguments, device);
  for (FusedCase const& c : cases) runner.run(c);
  if (runner.wrong() > 0) std::fprintf(stderr, "%lld results were wrong\n", (long long)runner.wrong());
  return runner.wrong() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace minfer::bench

int main(int argc, char** argv) {
  try {
    return minfer::bench::run(argc, argv);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "bench/fused: %s\n", error.what());
    return 2;
  }
}
