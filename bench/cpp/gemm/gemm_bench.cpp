#include "gemm/gemm_bench.h"

#include <cuda_runtime.h>
#include <fnmatch.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "common/table.h"
#include "common/timing.h"
#include "gemm/gemm_baseline.h"

namespace minfer::bench {

DataType parse_type(std::string const& text, std::initializer_list<DataType> types) {
  std::string names;
  for (DataType const& type : types) {
    if (text == name_of(type)) return type;
    names += (names.empty() ? "" : &type + 1 == types.end() ? " or " : ", ") + std::string(name_of(type));
  }
  throw std::invalid_argument("\"" + text + "\" is not " + names);
}

Activation parse_activation(std::string const& text) {
  for (int32_t i = 0; i <= int32_t(Activation::kSilu); ++i)
    if (text == name_of(Activation(i))) return Activation(i);
  throw std::invalid_argument("--activation: none, relu, gelu, gelu_tanh or silu, got \"" + text + "\"");
}

std::vector<Option> protocol_options() {
  return {
      {"list", nullptr, nullptr, "print the registry (of --kernel); run nothing"},
      {"check", nullptr, nullptr, "check only, no timing"},
      {"no-check", nullptr, nullptr, "no check: for profilers"},
      {"rounds", "N", "15", "timed replays of each contestant"},
      {"graph-us", "US", "1000", "work in one replay"},
      {"sets", "N", "0", "sets of operands to rotate (0: three L2s' worth; 1: warm L2 for small problems)"},
      {"device", "N", "0", "CUDA device"},
      {"csv", "FILE", "", "also write every row there"},
      {"help", nullptr, nullptr, "this"},
  };
}

bool matches(std::string const& glob, char const* name) { return glob.empty() || fnmatch(glob.c_str(), name, 0) == 0; }

void print_registry(std::vector<std::string> const& families, std::string const& glob) {
  int64_t count = 0, shown = 0, compiled = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    if (std::find(families.begin(), families.end(), kernel.family) == families.end() || !matches(glob, kernel.name)) continue;
    std::printf("%-8s  %2d stages  %3d threads  %6d bytes shared  %s\n", kernel.launch ? "compiled" : "-", kernel.stages, kernel.threads,
                kernel.smem_bytes, kernel.name);
    ++shown;
    compiled += kernel.launch != nullptr;
  }
  std::printf("%lld kernels, %lld compiled (archs: %s, CUTLASS %s)\n", (long long)shown, (long long)compiled, build_archs(),
              build_cutlass_version());
}

void print_device(DeviceProperties const& device) {
  std::printf("%s, %d SMs, L2 %.0f MB; floors: %.2f TB/s, %.0f TFLOP/s\n", device.name, device.sm_count, double(device.l2_bytes) / 1e6,
              device.read_bandwidth * 1e-6, device.matrix_rate * 1e-6);
}

namespace {

Option const kGemmOptions[] = {
    {"kernel", "GLOB", "", "every compiled kernel of that name instead of the plan's choice"},
    {"launch", "K=V,..", "", "decomposition=persistent|stream_k|split_k, splits, swizzle, raster=along_m|along_n, columns, realign_a|b=1"},
    {"all-launches", nullptr, nullptr, "every legal kernel x launch (of --kernel), best predicted first"},
    {"limit", "N", "0", "with --all-launches: the N best predicted (0: all)"},
    {"no-tuned", nullptr, nullptr, "plan without the tuned table"},
    {"plan", nullptr, nullptr, "print what plan_gemm chooses and why; run nothing (works without a GPU: plans for an H200)"},
    {"baseline", "LIST", nullptr, "cublas, cublaslt (best of 32 heuristics), none [cublas where it was built in]"},
};

GemmLaunch parse_launch(std::string const& text) {
  GemmLaunch launch;
  for (std::string const& item : split(text, ',')) {
    size_t const equals = item.find('=');
    std::string const key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (key == "splits") {
      launch.splits = int32_t(parse_integer(value, "launch splits"));
    } else if (key == "columns") {
      launch.columns = int32_t(parse_integer(value, "launch columns"));
    } else if ((key == "realign_a" || key == "realign_b") && (value == "0" || value == "1")) {
      (key == "realign_a" ? launch.realign_a : launch.realign_b) = value == "1";
    } else if (key == "swizzle") {
      launch.max_swizzle_size = int32_t(parse_integer(value, "launch swizzle"));
    } else if (key == "raster" && (value == "along_m" || value == "along_n")) {
      launch.raster_order = value == "along_m" ? RasterOrder::kAlongM : RasterOrder::kAlongN;
    } else if (key == "decomposition" && (value == "persistent" || value == "stream_k" || value == "split_k")) {
      launch.decomposition = value == "persistent" ? Decomposition::kDataParallel
                             : value == "stream_k" ? Decomposition::kStreamK
                                                   : Decomposition::kSplitK;
    } else {
      throw std::invalid_argument("--launch: \"" + item + "\" is not one of its keys and values (--help)");
    }
  }
  return launch;
}

std::string launch_text(GemmLaunch const& launch) {
  std::string text = std::string("decomposition=") + name_of(launch.decomposition) + ",splits=" + std::to_string(launch.splits) +
                     ",swizzle=" + std::to_string(launch.max_swizzle_size) + ",raster=" + name_of(launch.raster_order);
  if (launch.columns > 0) text += ",columns=" + std::to_string(launch.columns);
  if (launch.realign_a) text += ",realign_a=1";
  if (launch.realign_b) text += ",realign_b=1";
  return text;
}

// The plans to time for a case; `skipped` counts kernels of the glob that cannot run it.
std::vector<GemmPlan> plans_of(GemmCase const& c, Arguments const& arguments, DeviceProperties const& device, bool only_runnable,
                               int64_t* skipped, std::string* reason) {
  GemmPlanOptions plan_options;
  plan_options.use_tuned = !arguments.given("no-tuned");
  plan_options.only_runnable = only_runnable;
  std::optional<GemmLaunch> launch;
  if (arguments.given("launch")) plan_options.launch = &launch.emplace(parse_launch(arguments.text("launch")));
  std::string const glob = arguments.text("kernel");
  std::vector<GemmPlan> plans;
  *skipped = 0;
  if (arguments.given("all-launches")) {
    int64_t count = 0;
    check(enumerate_gemm(c.problem, device, plan_options, nullptr, 0, &count), "enumerate_gemm");
    std::vector<GemmPlan> all(static_cast<size_t>(count));
    check(enumerate_gemm(c.problem, device, plan_options, all.data(), count, &count), "enumerate_gemm");
    int64_t const limit = arguments.integer("limit");
    for (GemmPlan const& plan : all) {
      bool const wanted = matches(glob, plan.kernel->name) && (!launch || launch_text(*launch) == launch_text(plan.launch));
      if (wanted && (limit == 0 || int64_t(plans.size()) < limit)) plans.push_back(plan);
    }
    return plans;
  }
  if (glob.empty()) {
    GemmPlan plan;
    check(plan_gemm(c.problem, device, plan_options, &plan), "plan_gemm");
    if (launch) {  // a launch is forced on a named kernel: the one that the plan chose
      plan_options.kernel = plan.kernel->name;
      check(plan_gemm(c.problem, device, plan_options, &plan), "plan_gemm");
    }
    plans.push_back(plan);
    return plans;
  }
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    bool const realign_a = launch && launch->realign_a, realign_b = launch && launch->realign_b;
    bool const same_operands = kernel.ab_type == c.problem.ab_type && kernel.a_major == (realign_a ? Major::kK : c.problem.a_major) &&
                               kernel.b_major == (realign_b ? Major::kK : c.problem.b_major) && kernel.b_format == c.problem.b_format;
    if (!same_operands || !matches(glob, kernel.name)) continue;
    plan_options.kernel = kernel.name;
    GemmPlan plan;
    Status const status = plan_gemm(c.problem, device, plan_options, &plan);
    if (status.ok()) {
      plans.push_back(plan);
    } else {
      ++*skipped;
      *reason = status.message;
    }
  }
  return plans;
}

void print_plan(GemmCase const& c, GemmPlan const& plan) {
  GemmProblem const& p = c.problem;
  std::printf("%lldx%lldx%lld batch %lld %s %s%s%s\n  %s@%s\n  %s; predicted %.2f us, floor %.2f us, workspace %zu bytes\n", (long long)p.m,
              (long long)p.n, (long long)p.k, (long long)p.batch, name_of(p.ab_type), c.operands().c_str(), p.has_c ? " +C" : "",
              p.gated ? " gated" : "", plan.kernel->name, launch_text(plan.launch).c_str(), name_of(plan.source), plan.predicted_us,
              plan.floor_us, plan.workspace_bytes);
  if (plan.reason[0] != '\0') std::printf("  %s\n", plan.reason);
}

class Runner {
 public:
  Runner(Family const& family, Arguments const& arguments, DeviceProperties const& device, std::vector<std::unique_ptr<Baseline>> baselines)
      : arguments_(arguments),
        device_(device),
        baselines_(std::move(baselines)),
        table_(table_columns(family)),
        csv_(arguments.text("csv"), csv_header()) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    timing_.rounds = int(std::max<int64_t>(1, arguments.integer("rounds")));
    timing_.graph_us = arguments.number("graph-us");
    table_.header();
  }
  ~Runner() { cudaStreamDestroy(stream_); }
  Runner(Runner const&) = delete;
  Runner& operator=(Runner const&) = delete;

  void run(GemmCase const& c) {
    int64_t skipped = 0;
    std::string reason;
    std::vector<GemmPlan> const plans = plans_of(c, arguments_, device_, true, &skipped, &reason);
    if (plans.empty()) std::printf("no kernel can run it%s%s\n", reason.empty() ? "" : ": ", reason.c_str());
    GemmSets const sets(operands_, c, device_.l2_bytes, arguments_.integer("sets"), !baselines_.empty(), stream_);
    size_t workspace_bytes = 0;
    for (GemmPlan const& plan : plans) workspace_bytes = std::max(workspace_bytes, plan.workspace_bytes);
    workspace_.reset(int64_t(workspace_bytes));
    void* workspace = workspace_.carve(int64_t(workspace_bytes));
    poison(workspace, int64_t(workspace_bytes), stream_);
    bool const checking = !arguments_.given("no-check");
    float* reference = checking ? compute_reference(c, sets) : nullptr;

    std::vector<Contestant> peers;
    for (std::unique_ptr<Baseline>& baseline : baselines_) {
      if (sets.dense().empty()) break;  // nothing that it multiplies
      std::string const refusal = baseline->prepare(c.dense(), sets.dense());
      Baseline* b = baseline.get();
      Contestant peer{b->name(), [b, &sets](int64_t set, cudaStream_t stream) { b->launch(sets.dense()[size_t(set)], stream); }};
      if (!refusal.empty()) {
        std::printf("%s is left out: %s\n", b->name(), refusal.c_str());
      } else if (!checking || verify(c, sets, peer, reference) <= error_limit(c.problem)) {
        peers.push_back(std::move(peer));
      } else {
        std::printf("%s is left out: its values are wrong\n", b->name());
      }
    }

    std::vector<Contestant> group;
    std::vector<GemmPlan const*> group_plans;
    std::vector<double> errors;
    for (GemmPlan const& plan : plans) {
      Contestant ours{plan.kernel->name, [this, &plan, &c, &sets, workspace](int64_t set, cudaStream_t stream) {
                        check(run_gemm(plan, c.problem, sets[set], device_, workspace, plan.workspace_bytes, stream), plan.kernel->name);
                      }};
      double const error = checking ? verify(c, sets, ours, reference) : std::numeric_limits<double>::quiet_NaN();
      if (checking && !(error <= error_limit(c.problem))) {
        ++wrong_;
        report(c, plan, nullptr, {}, {}, error, "WRONG: not timed");
      } else if (arguments_.given("check")) {
        report(c, plan, nullptr, {}, {}, error, "ok");
      } else {
        group.push_back(std::move(ours));
        group_plans.push_back(&plan);
        errors.push_back(error);
      }
      // Small groups, so that ours and the baseline are timed in the same power state.
      if (!group.empty() && (group.size() == 8 || &plan == &plans.back())) {
        time_group(c, sets, group, group_plans, errors, peers);
        group.clear();
        group_plans.clear();
        errors.clear();
      }
    }
    if (!group.empty()) time_group(c, sets, group, group_plans, errors, peers);
    if (skipped > 0)
      std::printf("%lld kernels of the glob cannot run this problem, the last because: %s\n", (long long)skipped, reason.c_str());
  }

  int64_t wrong() const { return wrong_; }

 private:
  static std::vector<Column> table_columns(Family const& family) {
    return {{"m", 6},        {"n", 6},        {"k", 6},      {"batch", 5},   {"type", 4},  {"B", family.operands_width},
            {"us", 9},       {"p10", 9},      {"p90", 9},    {"TFLOP/s", 7}, {"GB/s", 6},  {"floor us", 8},
            {"of floor", 8}, {"baseline", 8}, {"its us", 9}, {"ratio", 6},   {"error", 8}, {"kernel@launch", 0}};
  }

  static std::vector<std::string> csv_header() {
    return {"m",           "n",      "k",          "batch", "ab_type", "d_type",     "layout",   "b_format",     "group_size",
            "has_zeros",   "scales", "fast_accum", "has_c", "bias",    "activation", "gated",    "kernel",       "launch",
            "source",      "us",     "p10",        "p90",   "tflops",  "gb_per_s",   "floor_us", "predicted_us", "baseline",
            "baseline_us", "ratio",  "rel_err",    "note"};
  }

  float* compute_reference(GemmCase const& c, GemmSets const& sets) {
    GemmProblem const& p = c.problem;
    int64_t const full = p.batch * p.m * p.n * 4, kept = p.batch * p.m * c.d_columns() * 4;
    reference_.reset((p.gated ? round_up(full, kCarveAlignment) : 0) + kept);
    float* scratch = p.gated ? static_cast<float*>(reference_.carve(full)) : nullptr;
    float* reference = static_cast<float*>(reference_.carve(kept));
    gemm_reference(c.reference(), sets.reference(), scratch, reference, stream_);
    return reference;
  }

  double verify(GemmCase const& c, GemmSets const& sets, Contestant const& contestant, float const* reference) {
    poison(sets[0].d, sets.d_bytes(), stream_);
    contestant.launch(0, stream_);
    check(cudaStreamSynchronize(stream_), contestant.name.c_str());
    GemmOperands const& o = sets[0];
    return relative_error(o.d, c.problem.d_type, o.ldd, o.d_batch_stride, reference, c.problem.batch, c.problem.m, c.d_columns(), stream_);
  }

  void time_group(GemmCase const& c, GemmSets const& sets, std::vector<Contestant> group, std::vector<GemmPlan const*> const& plans,
                  std::vector<double> const& errors, std::vector<Contestant> const& peers) {
    group.insert(group.end(), peers.begin(), peers.end());
    std::vector<Timing> const timings = time_interleaved(group, sets.count(), timing_, stream_);
    for (size_t i = 0; i < plans.size(); ++i) {
      if (peers.empty()) report(c, *plans[i], nullptr, timings[i], {}, errors[i], "");
      for (size_t j = 0; j < peers.size(); ++j)
        report(c, *plans[i], peers[j].name.c_str(), timings[i], timings[plans.size() + j], errors[i], "");
    }
  }

  void report(GemmCase const& c, GemmPlan const& plan, char const* peer, Timing const& ours, Timing const& theirs, double error,
              std::string const& note) {
    GemmProblem const& p = c.problem;
    auto const whole = [](int64_t v) { return std::to_string(v); };
    auto const us = [](double v) { return v > 0 ? format("%.2f", v) : std::string(); };
    bool const timed = ours.us > 0;
    std::string const tflops = timed ? format("%.1f", c.flops() / ours.us * 1e-6) : "";
    std::string const rate = timed ? format("%.0f", gemm_bytes(p) / ours.us * 1e-3) : "";
    std::string const fraction = timed ? format("%.3f", plan.floor_us / ours.us) : "";
    std::string const ratio = peer != nullptr ? format("%.3f", theirs.us / ours.us) : "";
    std::string const launch = launch_text(plan.launch), type = name_of(p.ab_type);
    table_.row({whole(p.m), whole(p.n), whole(p.k), whole(p.batch), type, c.operands(), us(ours.us), us(ours.p10), us(ours.p90), tflops,
                rate, us(plan.floor_us), fraction, peer != nullptr ? peer : "", us(theirs.us), ratio, format("%.1e", error),
                std::string(plan.kernel->name) + "@" + launch + (note.empty() ? "" : "  " + note)});
    std::string launch_cell = launch;
    for (char& character : launch_cell)
      if (character == ',') character = ';';
    csv_.row({whole(p.m),
              whole(p.n),
              whole(p.k),
              whole(p.batch),
              type,
              name_of(p.d_type),
              c.layout(),
              name_of(p.b_format),
              whole(p.group_size),
              whole(p.has_zeros),
              has_8_bits(p) ? name_of(c.scales) : "",
              whole(p.fast_accum),
              whole(p.has_c),
              whole(c.bias),
              name_of(c.activation),
              whole(p.gated),
              plan.kernel->name,
              launch_cell,
              name_of(plan.source),
              us(ours.us),
              us(ours.p10),
              us(ours.p90),
              tflops,
              rate,
              us(plan.floor_us),
              us(plan.predicted_us),
              peer != nullptr ? peer : "",
              us(theirs.us),
              ratio,
              format("%.3e", error),
              note});
  }

  Arguments const& arguments_;
  DeviceProperties device_;
  std::vector<std::unique_ptr<Baseline>> baselines_;
  Table table_;
  Csv csv_;
  TimingOptions timing_;
  Arena operands_, workspace_, reference_;
  cudaStream_t stream_ = nullptr;
  int64_t wrong_ = 0;
};

std::vector<std::unique_ptr<Baseline>> baselines_of(Arguments const& arguments) {
  std::vector<std::unique_ptr<Baseline>> baselines;
  if (!arguments.given("baseline")) {
    if (has_cublas()) {
      baselines.push_back(make_baseline("cublas"));
    } else {
      std::printf("this build has no cuBLAS baseline\n");
    }
    return baselines;
  }
  for (std::string const& name : arguments.list("baseline"))
    if (name != "none") baselines.push_back(make_baseline(name));
  return baselines;
}

int run(Family const& family, int argc, char** argv) {
  std::vector<Option> options = family.options;
  for (Option const& option : kGemmOptions) options.push_back(option);
  for (Option const& option : protocol_options()) options.push_back(option);
  Arguments const arguments(argc, argv, options);
  if (arguments.given("help")) {
    arguments.print_help(family.usage);
    return 0;
  }
  if (arguments.given("list")) {
    print_registry(family.families, arguments.text("kernel"));
    return 0;
  }
  std::vector<GemmCase> const cases = family.cases(arguments);
  int const index = int(arguments.integer("device"));
  DeviceProperties device;
  if (arguments.given("plan")) {
    bool const present = query_device(index, &device).ok();
    if (!present) device = h200_properties();
    for (GemmCase const& c : cases) {
      int64_t skipped = 0;
      std::string reason;
      for (GemmPlan const& plan : plans_of(c, arguments, device, present, &skipped, &reason)) print_plan(c, plan);
      if (skipped > 0) std::printf("%lld kernels of the glob cannot run it, the last because: %s\n", (long long)skipped, reason.c_str());
    }
    return 0;
  }
  check(query_device(index, &device), "query_device");
  check(cudaSetDevice(index), "cudaSetDevice");
  print_device(device);
  Runner runner(family, arguments, device, baselines_of(arguments));
  for (GemmCase const& c : cases) runner.run(c);
  if (runner.wrong() > 0) std::fprintf(stderr, "%lld results were wrong\n", (long long)runner.wrong());
  return runner.wrong() == 0 ? 0 : 1;
}

}  // namespace

int bench_main(Family const& family, int argc, char** argv) {
  try {
    return run(family, argc, argv);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "bench/%s: %s\n", family.name, error.what());
    return 2;
  }
}

}  // namespace minfer::bench
