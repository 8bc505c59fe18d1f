#include "gemm_planning.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/device.h"
#include "core/failure.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/plan_cache.h"
#include "gemm/realign.h"
#include "minfer/w4a16.h"
#include "tuned_rows.h"

namespace minfer::torch_binding {

KernelOverride parse_override(char const* op, std::string const& text) {
  KernelOverride result;
  size_t const at = text.find('@');
  result.name = text.substr(0, at);
  if (at == std::string::npos) return result;
  GemmLaunch launch;
  std::vector<std::string> seen;
  for (std::string const& item : split(text.substr(at + 1), ',')) {
    size_t const equals = item.find('=');
    std::string const key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    std::string const what = std::string(op) + ": kernel option " + key;
    if (std::find(seen.begin(), seen.end(), key) != seen.end()) fail(what, " is given twice");
    seen.push_back(key);
    if (key == "decomposition") {
      launch.decomposition = parse_decomposition(what.c_str(), value);
    } else if (key == "splits" || key == "swizzle") {
      (key == "splits" ? launch.splits : launch.max_swizzle_size) = parse_launch_number(what.c_str(), value);
    } else if (key == "columns") {
      launch.columns = parse_launch_number(what.c_str(), value);
    } else if (key == "realign_a" || key == "realign_b") {
      (key == "realign_a" ? launch.realign_a : launch.realign_b) = parse_flag(what.c_str(), value);
    } else if (key == "raster") {
      launch.raster_order = parse_raster(what.c_str(), value);
    } else {
      fail(op, ": kernel option '", key,
           "' is not known; expected decomposition, splits, swizzle, raster, columns, realign_a or realign_b");
    }
  }
  if (launch.splits > 1 && launch.decomposition != Decomposition::kSplitK && launch.decomposition != Decomposition::kRanges) {
    fail(op, ": kernel option splits needs decomposition=split_k or ranges, got splits=", launch.splits, " with ",
         name_of(launch.decomposition));
  }
  result.launch = launch;
  return result;
}

bool tuned_enabled() {
  static bool const enabled = [] {
    char const* value = std::getenv("MINFER_TUNED");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

int32_t forced_arch() {
  static int32_t const arch = [] {
    char const* value = std::getenv("MINFER_FORCE_ARCH");
    return value == nullptr ? 0 : int32_t(std::atoi(value));
  }();
  return arch;
}

namespace {

size_t hash_of_problem(GemmProblem const& p) {
  uint64_t const formats = uint64_t(p.ab_type) | uint64_t(p.d_type) << 8 | uint64_t(p.b_format) << 16 | uint64_t(p.gated) << 24 |
                           uint64_t(p.has_zeros) << 25 | uint64_t(p.d_fp8) << 26 | uint64_t(uint32_t(p.group_size)) << 32;
  return hash_of({uint64_t(p.m), uint64_t(p.n), uint64_t(p.k), uint64_t(p.batch), formats});
}

/// The options of a call that requests no kernel.
GemmPlanOptions options_of_calls(int32_t device) {
  GemmPlanOptions options;
  options.use_tuned = tuned_enabled();
  options.force_arch = forced_arch();
  use_user_rows(&options, device);
  return options;
}

}  // namespace

GemmPlan const& plan_as_requested(char const* op, GemmProblem const& problem, KernelOverride const& requested, OnDevice const& on,
                                  GemmPlan* plan) {
  GemmPlanOptions options;
  options.kernel = requested.name.c_str();
  if (requested.launch) options.launch = &*requested.launch;
  Status const status = plan_gemm(problem, on.properties(), options, plan);
  if (!status.ok()) fail(op, ": ", status.message);
  return *plan;
}

GemmPlan const& cached_plan(char const* op, GemmProblem const& problem, OnDevice const& on) {
  thread_local PlanCache<GemmProblem, GemmPlan, hash_of_problem> cache;
  return cache.get(problem, on.index(), user_rows_generation(), [&] {
    GemmPlan plan;
    Status const status = plan_gemm(problem, on.properties(), options_of_calls(on.index()), &plan);
    if (!status.ok()) fail(op, ": ", status.message);
    return plan;
  });
}

bool cached_has_kernel(char const* op, GemmProblem const& problem, OnDevice const& on) {
  thread_local PlanCache<GemmProblem, bool, hash_of_problem> cache;
  return cache.get(problem, on.index(), user_rows_generation(), [&] {
    GemmPlan plan;
    Status const status = plan_gemm(problem, on.properties(), options_of_calls(on.index()), &plan);
    if (!status.ok() && status.code != StatusCode::kNotSupported) fail(op, ": ", status.message);
    return status.ok();
  });
}

bool cached_dequantize_first(char const* op, GemmProblem const& problem, OnDevice const& on) {
  thread_local PlanCache<GemmProblem, bool, hash_of_problem> cache;
  return cache.get(problem, on.index(), user_rows_generation(), [&] {
    bool first = false;
    Status const status = dequantize_first(problem, on.properties(), options_of_calls(on.index()), &first);
    if (!status.ok()) fail(op, ": ", status.message);
    return first;
  });
}

namespace {

GemmProblem dense_problem(char const* op, std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                          std::string const& a_major, std::string const& b_major, std::vector<int64_t> const& alignments, bool has_c,
                          bool gated) {
  if (sizes.size() != 4) fail(op, ": sizes must be [m, n, k, batch], got ", sizes.size(), " values");
  if (alignments.size() != 4) fail(op, ": alignments must be [a, b, c, d], got ", alignments.size(), " values");
  GemmProblem p;
  p.m = sizes[0];
  p.n = sizes[1];
  p.k = sizes[2];
  p.batch = sizes[3];
  p.ab_type = parse_type((op + std::string(": ab_type")).c_str(), ab_type);
  p.d_type = parse_type((op + std::string(": d_type")).c_str(), d_type);
  p.a_major = parse_major((op + std::string(": a_major")).c_str(), a_major);
  p.b_major = parse_major((op + std::string(": b_major")).c_str(), b_major);
  p.a_alignment = int32_t(alignments[0]);
  p.b_alignment = int32_t(alignments[1]);
  p.c_alignment = int32_t(alignments[2]);
  p.d_alignment = int32_t(alignments[3]);
  p.has_c = has_c;
  p.gated = gated;
  return p;
}

GemmProblem scaled_problem(char const* op, std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                           std::vector<int64_t> const& alignments, bool block_scaled, bool fast_accum, bool has_c, bool gated) {
  if (sizes.size() != 3) fail(op, ": sizes must be [m, n, k], got ", sizes.size(), " values");
  if (alignments.size() != 2) fail(op, ": alignments must be [c, d], got ", alignments.size(), " values");
  if (ab_type != "e4m3" && ab_type != "s8") fail(op, ": ab_type must be e4m3 or s8, got '", ab_type, "'");
  GemmProblem p;
  p.m = sizes[0];
  p.n = sizes[1];
  p.k = sizes[2];
  p.ab_type = ab_type == "s8" ? DataType::kS8 : DataType::kE4M3;
  p.d_type = parse_type((op + std::string(": d_type")).c_str(), d_type);
  if (p.k == 0) p.ab_type = p.d_type == DataType::kF32 ? DataType::kBF16 : p.d_type;  // as the operator does
  p.c_alignment = int32_t(alignments[0]);
  p.d_alignment = int32_t(alignments[1]);
  p.block_scaled = block_scaled && p.k > 0;
  p.fast_accum = fast_accum && p.k > 0;
  p.has_c = has_c;
  p.gated = gated;
  return p;
}

/// ab_type: of the activations. D is of it, of f16 or bf16 beside those of 8 bits, whose plans are the same.
GemmProblem w4_problem(char const* op, std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& w4_format,
                       int64_t group_size, bool has_zeros, bool has_c, bool gated) {
  if (sizes.size() != 3) fail(op, ": sizes must be [m, n, k], got ", sizes.size(), " values");
  GemmProblem p;
  p.m = sizes[0];
  p.n = sizes[1];
  p.k = sizes[2];
  bool const narrow = ab_type == "e4m3" || ab_type == "s8";
  p.ab_type = ab_type == "e4m3" ? DataType::kE4M3 : narrow ? DataType::kS8 : parse_type((op + std::string(": ab_type")).c_str(), ab_type);
  p.d_type = narrow ? DataType::kBF16 : p.ab_type;
  p.b_format = parse_format(op, 0, w4_format);
  p.group_size = group_of(op, group_size);
  p.has_zeros = has_zeros;
  p.has_c = has_c;
  p.gated = gated;
  return p;
}

/// The index by which tuned rows know a plan's device. A negative one is that of the H200 that need not be here.
int32_t device_of(int64_t device) { return device < 0 ? kAnyDevice : int32_t(device); }

void write_plan(Json& json, GemmPlan const& plan) {
  json.open('{').key("kernel").value(plan.kernel->name).key("launch").open('{');
  json.key("decomposition").value(name_of(plan.launch.decomposition)).key("splits").value(int64_t(plan.launch.splits));
  json.key("swizzle").value(int64_t(plan.launch.max_swizzle_size)).key("raster").value(name_of(plan.launch.raster_order));
  json.key("columns").value(int64_t(plan.launch.columns));
  json.key("realign_a").value(plan.launch.realign_a).key("realign_b").value(plan.launch.realign_b).close('}');
  json.key("workspace_bytes").value(int64_t(plan.workspace_bytes)).key("predicted_us").value(plan.predicted_us);
  json.key("floor_us").value(plan.floor_us).key("source").value(name_of(plan.source)).key("reason").value(plan.reason);
  json.key("compiled").value(plan.kernel->launch != nullptr).close('}');
}

std::string plan_json(char const* op, GemmProblem problem, std::optional<std::string> const& kernel, bool use_tuned, bool only_runnable,
                      int64_t device, bool batch_invariant) {
  GemmPlanOptions options;
  problem.batch_invariant = batch_invariant;
  KernelOverride override;
  bool first = problem.b_format != WeightFormat::kDense && kernel && *kernel == kDequantizeFirst;
  if (kernel && !first) {
    override = parse_override(op, *kernel);
    options.kernel = override.name.c_str();
    if (override.launch) options.launch = &*override.launch;
  }
  options.use_tuned = use_tuned && tuned_enabled();
  options.only_runnable = only_runnable;
  options.force_arch = forced_arch();
  use_user_rows(&options, device_of(device));
  DeviceProperties const& properties = device_properties(op, device);
  if (!kernel) {
    Status const status = dequantize_first(problem, properties, options, &first);
    if (!status.ok()) fail(op, ": ", status.message);
  }
  double const write_us = first ? dequantize_us(problem, properties) : 0.0;
  if (first) problem = dequantized(problem);
  GemmPlan plan;
  Status const status = plan_gemm(problem, properties, options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  if (first) {
    std::string const reason = std::string("after dequantisation: ") + plan.reason;
    std::snprintf(plan.reason, sizeof(plan.reason), "%s", reason.c_str());
    plan.predicted_us += write_us;
  }
  Json json;
  write_plan(json, plan);
  return json.text();
}

std::string enumerate_json(char const* op, GemmProblem problem, bool only_runnable, int64_t device, int64_t limit, bool batch_invariant) {
  GemmPlanOptions options;
  problem.batch_invariant = batch_invariant;
  options.only_runnable = only_runnable;
  options.force_arch = forced_arch();
  use_user_rows(&options, device_of(device));
  int64_t count = 0;
  auto const enumerate = [&](std::vector<GemmPlan>&& plans) {
    Status const status = enumerate_gemm(problem, device_properties(op, device), options, plans.data(), int64_t(plans.size()), &count);
    if (!status.ok()) fail(op, ": ", status.message);
    return std::move(plans);
  };
  enumerate({});  // sets the number of candidates
  std::vector<GemmPlan> const plans = enumerate(std::vector<GemmPlan>(size_t(std::clamp<int64_t>(limit, 0, count))));
  Json json;
  json.open('[');
  for (GemmPlan const& plan : plans) write_plan(json, plan);
  return json.close(']').text();
}

std::string plan_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                           std::string const& a_major, std::string const& b_major, std::vector<int64_t> const& alignments, bool has_c,
                           bool gated, std::optional<std::string> const& kernel, bool use_tuned, bool only_runnable, int64_t device,
                           bool batch_invariant) {
  char const* op = "minfer::_plan_gemm";
  GemmProblem const problem = dense_problem(op, sizes, ab_type, d_type, a_major, b_major, alignments, has_c, gated);
  return plan_json(op, problem, kernel, use_tuned, only_runnable, device, batch_invariant);
}

std::string enumerate_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                                std::string const& a_major, std::string const& b_major, std::vector<int64_t> const& alignments, bool has_c,
                                bool gated, bool only_runnable, int64_t device, int64_t limit, bool batch_invariant) {
  char const* op = "minfer::_enumerate_gemm";
  GemmProblem const problem = dense_problem(op, sizes, ab_type, d_type, a_major, b_major, alignments, has_c, gated);
  return enumerate_json(op, problem, only_runnable, device, limit, batch_invariant);
}

std::string plan_scaled_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                                  std::vector<int64_t> const& alignments, bool block_scaled, bool fast_accum, bool has_c, bool gated,
                                  std::optional<std::string> const& kernel, bool use_tuned, bool only_runnable, int64_t device,
                                  bool batch_invariant) {
  char const* op = "minfer::_plan_scaled_gemm";
  GemmProblem const problem = scaled_problem(op, sizes, ab_type, d_type, alignments, block_scaled, fast_accum, has_c, gated);
  return plan_json(op, problem, kernel, use_tuned, only_runnable, device, batch_invariant);
}

std::string enumerate_scaled_gemm_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& d_type,
                                       std::vector<int64_t> const& alignments, bool block_scaled, bool fast_accum, bool has_c, bool gated,
                                       bool only_runnable, int64_t device, int64_t limit, bool batch_invariant) {
  char const* op = "minfer::_enumerate_scaled_gemm";
  GemmProblem const problem = scaled_problem(op, sizes, ab_type, d_type, alignments, block_scaled, fast_accum, has_c, gated);
  return enumerate_json(op, problem, only_runnable, device, limit, batch_invariant);
}

std::string plan_w4a16_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& w4_format, int64_t group_size,
                            bool has_zeros, bool has_c, bool gated, std::optional<std::string> const& kernel, bool use_tuned,
                            bool only_runnable, int64_t device, bool batch_invariant) {
  char const* op = "minfer::_plan_w4a16";
  GemmProblem const problem = w4_problem(op, sizes, ab_type, w4_format, group_size, has_zeros, has_c, gated);
  return plan_json(op, problem, kernel, use_tuned, only_runnable, device, batch_invariant);
}

std::string enumerate_w4a16_json(std::vector<int64_t> const& sizes, std::string const& ab_type, std::string const& w4_format,
                                 int64_t group_size, bool has_zeros, bool has_c, bool gated, bool only_runnable, int64_t device,
                                 int64_t limit, bool batch_invariant) {
  char const* op = "minfer::_enumerate_w4a16";
  GemmProblem const problem = w4_problem(op, sizes, ab_type, w4_format, group_size, has_zeros, has_c, gated);
  return enumerate_json(op, problem, only_runnable, device, limit, batch_invariant);
}

/// The dense cost model that plans for a device use, as a table that _load_model reads.
std::string gemm_model_csv(int64_t device) {
  GemmPlanOptions options;
  use_user_rows(&options, device_of(device));
  gemm::ScaledModel const scaled = gemm::model_of(options, device_properties("minfer::_gemm_model", device));
  GemmRates const rates = gemm::scaled_rates(scaled);
  std::string csv;
  char line[256];
  for (GemmRateName const& rate : kGemmRateNames) {
    std::snprintf(line, sizeof(line), "rate,%s,%.7g\n", rate.name, rates.*rate.rate);
    csv += line;
  }
  std::vector<std::string> seen;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    bool const modelled = std::strcmp(kernels[i].family, "gemm") == 0 || std::strcmp(kernels[i].family, "scaled_gemm") == 0 ||
                          std::strcmp(kernels[i].family, "w4a16") == 0 || std::strcmp(kernels[i].family, "w4a8") == 0;
    if (!modelled) continue;
    std::string const name = model_name_of(kernels[i]).text;
    if (std::find(seen.begin(), seen.end(), name) != seen.end()) continue;
    seen.push_back(name);
    GemmKernelFactors const f = scaled.model->factors == nullptr ? GemmKernelFactors{} : scaled.model->factors[i];
    std::snprintf(line, sizeof(line), ",%.7g,%.7g,%.7g,%.7g,%.7g,%.7g\n", f.compute, f.tile, f.start, f.epilogue, f.latency, f.bytes);
    csv += "kernel," + name + line;
  }
  return csv;
}

/// A line of _predict_gemm: what _plan_gemm, of 8-bit operands _plan_scaled_gemm, or of quantised weights _plan_w4a16 takes from sizes to
/// gated, and a kernel override, one space between any two.
struct Candidate {
  GemmProblem problem;
  KernelInfo const* kernel;  // null: this build has none of the name
  GemmLaunch launch;
};

Candidate candidate_of(char const* op, std::string const& line) {
  std::vector<std::string> const cells = split(line, ' ');
  if (cells.size() != 15 && cells.size() != 12 && cells.size() != 10) {
    fail(op, ": expected 15 cells in a candidate's line, 12 of 8-bit operands, or 10 where its weights are quantised, got '", line, "'");
  }
  auto const number = [&](size_t i) { return parse_integer(op, cells[i], 0, INT32_MAX); };
  Candidate candidate;
  if (cells.size() == 15) {
    std::vector<int64_t> const sizes = {number(0), number(1), number(2), number(3)},
                               alignments = {number(8), number(9), number(10), number(11)};
    candidate.problem =
        dense_problem(op, sizes, cells[4], cells[5], cells[6], cells[7], alignments, parse_flag(op, cells[12]), parse_flag(op, cells[13]));
  } else if (cells.size() == 12) {
    candidate.problem =
        scaled_problem(op, {number(0), number(1), number(2)}, cells[3], cells[4], {number(5), number(6)}, parse_flag(op, cells[7]),
                       parse_flag(op, cells[8]), parse_flag(op, cells[9]), parse_flag(op, cells[10]));
  } else {
    int64_t const group_size = parse_integer(op, cells[5], -1, INT32_MAX);
    candidate.problem = w4_problem(op, {number(0), number(1), number(2)}, cells[3], cells[4], group_size, parse_flag(op, cells[6]),
                                   parse_flag(op, cells[7]), parse_flag(op, cells[8]));
  }
  KernelOverride const requested = parse_override(op, cells.back());
  candidate.kernel = find_kernel(requested.name.c_str());
  candidate.launch = requested.launch.value_or(GemmLaunch{});
  return candidate;
}

/// Writes us[i, j], what the i-th model predicts of the j-th candidate, NaN where its kernel is unknown. `models`: tables as _load_model
/// takes them, an empty line between any two. Nothing is loaded.
void predict_gemm(std::string const& models, std::string const& candidates, int64_t device, Tensor const& us) {
  char const* op = "minfer::_predict_gemm";
  std::vector<std::shared_ptr<UserModel const>> read;
  for (size_t begin = 0; begin < models.size();) {
    size_t const end = std::min(models.find("\n\n", begin), models.size());
    read.push_back(read_model(op, models.substr(begin, end - begin)));
    begin = end + 2;
  }
  std::vector<Candidate> parsed;
  for (std::string const& line : split(candidates, '\n')) {
    if (!line.empty()) parsed.push_back(candidate_of(op, line));
  }
  bool const fits = us.dim() == 2 && us.size(0) == int64_t(read.size()) && us.size(1) == int64_t(parsed.size());
  if (!fits || us.scalar_type() != ScalarType::Double || !us.is_contiguous() || !us.is_cpu()) {
    fail(op, ": us must be a contiguous float64 CPU tensor of [", read.size(), ", ", parsed.size(), "], got ", us);
  }
  DeviceProperties const& properties = device_properties(op, device);
  double* out = static_cast<double*>(us.data_ptr());
  for (std::shared_ptr<UserModel const> const& model : read) {
    for (Candidate const& c : parsed) {
      *out++ = c.kernel == nullptr
                   ? std::nan("")
                   : gemm::predict_us(*c.kernel, gemm::realigned(c.problem, c.launch), c.launch, properties, {&model->model}) +
                         gemm::predict_copies_us(c.problem, c.launch, properties, {&model->model});
    }
  }
}

constexpr Operator kOperators[] = {
    {"_gemm_model(int device) -> str", boxed<&gemm_model_csv>},
    {"_predict_gemm(str models, str candidates, int device, Tensor(a!) us) -> ()", boxed<&predict_gemm>},
    {"_plan_gemm(int[] sizes, str ab_type, str d_type, str a_major, str b_major, int[] alignments, bool has_c, bool gated, str? kernel, "
     "bool use_tuned, bool only_runnable, int device, bool batch_invariant=False) -> str",
     boxed<&plan_gemm_json>},
    {"_enumerate_gemm(int[] sizes, str ab_type, str d_type, str a_major, str b_major, int[] alignments, bool has_c, bool gated, "
     "bool only_runnable, int device, int limit, bool batch_invariant=False) -> str",
     boxed<&enumerate_gemm_json>},
    {"_plan_scaled_gemm(int[] sizes, str ab_type, str d_type, int[] alignments, bool block_scaled, bool fast_accum, bool has_c, "
     "bool gated, str? kernel, bool use_tuned, bool only_runnable, int device, bool batch_invariant=False) -> str",
     boxed<&plan_scaled_gemm_json>},
    {"_enumerate_scaled_gemm(int[] sizes, str ab_type, str d_type, int[] alignments, bool block_scaled, bool fast_accum, bool has_c, "
     "bool gated, bool only_runnable, int device, int limit, bool batch_invariant=False) -> str",
     boxed<&enumerate_scaled_gemm_json>},
    {"_plan_w4a16(int[] sizes, str ab_type, str w4_format, int group_size, bool has_zeros, bool has_c, bool gated, str? kernel, "
     "bool use_tuned, bool only_runnable, int device, bool batch_invariant=False) -> str",
     boxed<&plan_w4a16_json>},
    {"_enumerate_w4a16(int[] sizes, str ab_type, str w4_format, int group_size, bool has_zeros, bool has_c, bool gated, "
     "bool only_runnable, int device, int limit, bool batch_invariant=False) -> str",
     boxed<&enumerate_w4a16_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
