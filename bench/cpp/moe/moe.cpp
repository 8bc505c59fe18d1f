// bench/moe: each launch of a mixture-of-experts layer of 16 or 8 bits, and the whole layer, checked against a reference, then timed.
//
//   bench/moe --model qwen3-30b-a3b,deepseek-v3 --tokens 1:4096:x4                   every launch as the layer has it
//   bench/moe --model gpt-oss-120b --tokens 64 --stage gemm1 --gather on,off --gated on,off --kernel '*'
//   bench/moe --model deepseek-v3 --tokens 64 --dtype e4m3,s8 --stage gemm1,gemm2,layer --h-group 128,64
//   bench/moe --experts 64 --top-k 6 --hidden 2048 --inter 1408 --tokens 512 --routing uniform,zipf,one_hot --stage layer
#include <cuda_runtime.h>

#include <limits>
#include <optional>

#include "common/programmatic_launch.h"
#include "common/table.h"
#include "common/timing.h"
#include "gemm/gemm_bench.h"
#include "moe/moe_case.h"
#include "moe/moe_reference.h"

namespace minfer::bench {
namespace {

constexpr char kUsage[] =
    "bench/moe: the launches of a mixture-of-experts layer, checked against a reference, then timed.\n"
    "  router_gemm  route_tokens: the router's matrix, scores and top-k, up to 64 tokens\n"
    "  router       route_logits: scores and top-k\n"
    "  sort         sort_by_expert\n"
    "  gemm1        run_grouped, gathered and gated: activation(x.gate^T) * (x.up^T)\n"
    "  gemm2        run_grouped, with the routing weights\n"
    "  combine      sum_experts\n"
    "  layer        router to combine, one after the other; its bytes and floor are the sums of theirs\n"
    "Scales of e4m3 are of 128 of k of a row, and of 128 x 128 of the weights, those of s8 of rows of both. Results are bf16, but those "
    "of\n"
    "gemm1 in a layer, which are codes with scales; the other launches are those of bf16.\n"
    "Without --kernel the GEMMs run what plan_grouped chooses. Integers are lists (1,2,4) or ranges (128:1024:128, 1:64:x2).";

std::vector<Option> options() {
  std::vector<Option> all = {
      {"model", "LIST", "", "mixtral-8x7b, mixtral-8x22b, qwen3-30b-a3b, deepseek-v3, gpt-oss-120b, instead of the next four"},
      {"experts", "INTS", "128", "experts"},
      {"top-k", "INTS", "8", "experts of a token"},
      {"hidden", "INTS", "2048", "columns of x"},
      {"inter", "INTS", "768", "gate rows of an expert, as many up rows"},
      {"tokens", "INTS", "1,64,1024", "rows of x"},
      {"routing", "LIST", "uniform", "uniform; zipf: expert e has weight 1 / (e + 1); one_hot: all tokens choose the same experts"},
      {"dtype", "LIST", "bf16", "f16, bf16, e4m3, s8"},
      {"h-group", "INTS", "64", "of gemm2 in 8 bits: k of a scale of a row, 128, 64 or 32; 0: all of k. A layer has what its gemm1 makes"},
      {"stage", "LIST", "", "of those above [all]"},
      {"gather", "LIST", "on", "of gemm1: on; off: its rows are in the order of the experts already"},
      {"gated", "LIST", "on", "of gemm1: on; off: the product alone"},
      {"activation", "NAME", "silu", "of a gated gemm1 and the layer: none, relu, gelu, gelu_tanh, silu"},
      {"kernel", "GLOB", "", "of the GEMMs: every compiled kernel of that name instead of the plan's choice, in a layer in both"},
      {"plan", nullptr, nullptr, "print what plan_grouped chooses and why; run nothing (works without a GPU: plans for an H200)"},
  };
  for (Option const& option : protocol_options()) all.push_back(option);
  return all;
}

// ---- What is asked for --------------------------------------------------------------------------------------------------------

std::vector<MoeShape> shapes_of(Arguments const& arguments) {
  std::vector<MoeShape> shapes;
  if (arguments.given("model")) {
    for (char const* size : {"experts", "top-k", "hidden", "inter"})
      if (arguments.given(size)) throw std::invalid_argument(std::string("--model has its own sizes: leave out --") + size);
    for (std::string const& name : arguments.list("model")) {
      size_t const before = shapes.size();
      for (MoeShape const& shape : kModels)
        if (name == shape.model) shapes.push_back(shape);
      if (shapes.size() == before) throw std::invalid_argument("--model: \"" + name + "\" is not one of its names (--help)");
    }
    return shapes;
  }
  for (int64_t experts : arguments.integers("experts"))
    for (int64_t top_k : arguments.integers("top-k"))
      for (int64_t hidden : arguments.integers("hidden"))
        for (int64_t inter : arguments.integers("inter")) shapes.push_back({"", experts, top_k, hidden, inter});
  for (MoeShape const& s : shapes) {
    if (s.experts < 1 || s.experts > kMaxGroupedExperts)
      throw std::invalid_argument("--experts: 1 to " + std::to_string(kMaxGroupedExperts) + ", got " + std::to_string(s.experts));
    int64_t const most = std::min(s.experts, kMaxTopK);
    if (s.top_k < 1 || s.top_k > most)
      throw std::invalid_argument("--top-k: 1 to " + std::to_string(most) + " of " + std::to_string(s.experts) + " experts, got " +
                                  std::to_string(s.top_k));
    if (s.hidden < 1 || s.inter < 1) throw std::invalid_argument("--hidden and --inter: 1 or more");
  }
  return shapes;
}

template <typename E, size_t kCount>
std::vector<E> named(Arguments const& arguments, char const* option, E const (&all)[kCount]) {
  std::vector<E> chosen;
  for (std::string const& name : arguments.list(option)) {
    size_t const before = chosen.size();
    for (E e : all)
      if (name == name_of(e)) chosen.push_back(e);
    if (chosen.size() == before)
      throw std::invalid_argument(std::string("--") + option + ": \"" + name + "\" is not one of its names (--help)");
  }
  if (chosen.empty()) throw std::invalid_argument(std::string("--") + option + " needs at least one name");
  return chosen;
}

std::vector<int32_t> h_groups_of(Arguments const& arguments) {
  std::vector<int32_t> groups;
  for (int64_t group : arguments.integers("h-group")) {
    if (group != 0 && group != 32 && group != 64 && group != 128)
      throw std::invalid_argument("--h-group: 128, 64, 32 or 0, got " + std::to_string(group));
    groups.push_back(int32_t(group));
  }
  return groups;
}

/// Cases that share a routing.
struct Block {
  MoeCase head;
  std::vector<MoeCase> cases;
};

std::vector<Block> blocks_of(Arguments const& arguments) {
  std::vector<Stage> const stages =
      arguments.given("stage") ? named(arguments, "stage", kStages) : std::vector<Stage>(std::begin(kStages), std::end(kStages));
  std::vector<bool> const gathers = arguments.switches("gather"), gates = arguments.switches("gated");
  std::vector<int32_t> const h_groups = h_groups_of(arguments);
  std::vector<Block> blocks;
  for (std::string const& dtype : arguments.list("dtype")) {
    DataType const type = parse_type(dtype, {DataType::kF16, DataType::kBF16, DataType::kE4M3, DataType::kS8});
    for (MoeShape const& shape : shapes_of(arguments)) {
      for (Routing routing : named(arguments, "routing", kRoutings)) {
        for (int64_t tokens : arguments.integers("tokens")) {
          if (tokens < 1) throw std::invalid_argument("--tokens: 1 or more, got " + std::to_string(tokens));
          Block block;
          MoeCase& head = block.head;
          head.shape = shape;
          head.tokens = tokens;
          head.routing = routing;
          head.type = type;
          head.activation = parse_activation(arguments.text("activation"));
          for (Stage stage : stages) {
            if (stage == Stage::kRouterGemm && tokens > kRouteTokensMax) continue;
            if (stage == Stage::kGemm2 && head.narrow()) {
              for (int32_t group : h_groups) {
                block.cases.push_back(head.at(stage));
                block.cases.back().h_group = group;
              }
              continue;
            }
            if (stage != Stage::kGemm1) {
              block.cases.push_back(head.at(stage));
              continue;
            }
            for (bool gathered : gathers) {
              for (bool gated : gates) {
                MoeCase c = head.at(stage);
                c.gathered = gathered;
                c.gated = gated;
                if (!gated) c.activation = Activation::kNone;
                block.cases.push_back(c);
              }
            }
          }
          blocks.push_back(std::move(block));
        }
      }
    }
  }
  return blocks;
}

// ---- Plans --------------------------------------------------------------------------------------------------------------------

/// Of the GEMMs that a stage has; the kernel of the other is null.
struct Plans {
  GroupedPlan gemm1, gemm2;
  int32_t h_group = 0;  // of 8 bits: k of a scale of a row of h

  size_t workspace_bytes() const { return std::max(gemm1.workspace_bytes, gemm2.workspace_bytes); }

  std::string text(Stage stage) const {
    switch (stage) {
      case Stage::kRouterGemm: return "route_tokens";
      case Stage::kRouter: return "route_logits";
      case Stage::kSort: return "sort_by_expert";
      case Stage::kCombine: return "sum_experts";
      default: break;
    }
    std::string all;
    for (GroupedPlan const* plan : {&gemm1, &gemm2}) {
      if (plan->kernel == nullptr) continue;
      all += (all.empty() ? "" : " + ") + std::string(plan->kernel->name) + (plan->gather_first ? "@gather_first" : "");
    }
    return all;
  }

  double predicted_us() const { return gemm1.predicted_us + gemm2.predicted_us; }
  char const* source() const {
    return gemm1.kernel != nullptr ? name_of(gemm1.source) : gemm2.kernel != nullptr ? name_of(gemm2.source) : "";
  }
};

Status plan(MoeCase const& c, DeviceProperties const& device, GroupedPlanOptions const& plan_options, Plans* plans) {
  plans->h_group = c.h_group;
  for (Stage s : {Stage::kGemm1, Stage::kGemm2}) {
    if (c.stage != s && c.stage != Stage::kLayer) continue;
    GroupedPlan* const of_stage = s == Stage::kGemm1 ? &plans->gemm1 : &plans->gemm2;
    Status const status = plan_grouped(c.problem(s, plans->h_group), device, plan_options, of_stage);
    if (!status.ok()) return status;
    if (s == Stage::kGemm1 && c.makes_codes()) plans->h_group = d_group_of(*of_stage->kernel);
  }
  return Status::success();
}

// What to time for a case; `skipped` counts kernels of the glob that cannot run it.
std::vector<Plans> plans_of(MoeCase const& c, std::string const& glob, DeviceProperties const& device, bool only_runnable, int64_t* skipped,
                            std::string* reason) {
  GroupedPlanOptions plan_options;
  plan_options.only_runnable = only_runnable;
  *skipped = 0;
  bool const has_gemm = c.stage == Stage::kGemm1 || c.stage == Stage::kGemm2 || c.stage == Stage::kLayer;
  if (glob.empty() || !has_gemm) {
    Plans plans;
    check(plan(c, device, plan_options, &plans), "plan_grouped");
    return {plans};
  }
  std::vector<Plans> all;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    if (std::string(kernel.family) != (c.narrow() ? "moe_scaled" : "moe") || kernel.ab_type != c.type || !matches(glob, kernel.name))
      continue;
    plan_options.kernel = kernel.name;
    Plans plans;
    Status const status = plan(c, device, plan_options, &plans);
    if (status.ok()) {
      all.push_back(plans);
    } else {
      ++*skipped;
      *reason = status.message;
    }
  }
  return all;
}

void print_plans(MoeCase const& c, Plans const& plans) {
  std::printf("%s%s%lld tokens, top %lld of %lld experts, hidden %lld, inter %lld, %s, %s\n", c.shape.model,
              c.shape.model[0] != '\0' ? ": " : "", (long long)c.tokens, (long long)c.shape.top_k, (long long)c.shape.experts,
              (long long)c.shape.hidden, (long long)c.shape.inter, name_of(c.type), c.stage_text().c_str());
  for (GroupedPlan const* p : {&plans.gemm1, &plans.gemm2}) {
    if (p->kernel == nullptr) continue;
    std::printf("  %s%s\n  %s; predicted %.2f us, floor %.2f us, workspace %zu bytes\n", p->kernel->name,
                p->gather_first ? "@gather_first" : "", name_of(p->source), p->predicted_us, p->floor_us, p->workspace_bytes);
    if (p->reason[0] != '\0') std::printf("  %s\n", p->reason);
  }
}

// ---- Launches -----------------------------------------------------------------------------------------------------------------

class Launcher {
 public:
  Launcher(MoeCase const& c, MoeSets const& sets, DeviceProperties const& device, void* workspace, size_t workspace_bytes)
      : c_(c),
        sets_(sets),
        device_(device),
        workspace_(workspace),
        workspace_bytes_(workspace_bytes),
        programmatic_(device.compute_capability() >= 90 && programmatic_launch_enabled()) {}

  void launch(Stage stage, Plans const& plans, int64_t set, cudaStream_t stream) const {
    switch (stage) {
      case Stage::kRouterGemm: return router_gemm(set, stream);
      case Stage::kRouter: return router(set, stream);
      case Stage::kSort: return sort(set, stream);
      case Stage::kGemm1: return grouped(stage, plans.gemm1, plans.h_group, set, stream);
      case Stage::kGemm2: return grouped(stage, plans.gemm2, plans.h_group, set, stream);
      case Stage::kCombine: return combine(set, stream);
      case Stage::kLayer:
        for (Stage s : kLayerStages) launch(s, plans, set, stream);
    }
  }

 private:
  RouterRules rules() const {
    RouterRules r;
    r.experts = int32_t(c_.shape.experts);
    r.top_k = int32_t(c_.shape.top_k);
    return r;
  }

  Routes routes(int64_t set) const { return {sets_.get<float>(set, kWeights), sets_.get<int32_t>(set, kIds)}; }

  void router_gemm(int64_t set, cudaStream_t stream) const {
    RouterGemm p;
    p.x = sets_.get(set, kX);
    p.w_gate = sets_.get(set, kRouterWeight);
    p.ldx = p.ldw = p.hidden = c_.shape.hidden;
    p.type = c_.type;
    p.tokens = c_.tokens;
    check(route_tokens(p, rules(), routes(set), device_, workspace_, workspace_bytes_, programmatic_, stream), "route_tokens");
  }

  void router(int64_t set, cudaStream_t stream) const {
    check(route_logits(sets_.get(set, kLogits), DataType::kF32, c_.shape.experts, c_.tokens, rules(), routes(set), programmatic_, stream),
          "route_logits");
  }

  void sort(int64_t set, cudaStream_t stream) const {
    ExpertSort s;
    s.ids = sets_.get<int32_t>(set, kIds);
    s.weights = sets_.get<float>(set, kWeights);
    s.tokens = c_.tokens;
    s.top_k = c_.shape.top_k;
    s.experts = c_.shape.experts;
    s.token_index = sets_.get<int32_t>(set, kTokenIndex);
    s.offsets = sets_.get<int32_t>(set, kOffsets);
    s.inverse = sets_.get<int32_t>(set, kInverse);
    s.sorted_weights = sets_.get<float>(set, kRowScale);
    check(sort_by_expert(s, device_, programmatic_, stream), "sort_by_expert");
  }

  void grouped(Stage stage, GroupedPlan const& plan, int32_t h_group, int64_t set, cudaStream_t stream) const {
    bool const first = stage == Stage::kGemm1;
    Tensor const a = first ? (c_.gathered ? kX : kA) : kH, w = first ? kW13 : kW2;
    GroupedProblem const p = c_.problem(stage, h_group);
    GroupedOperands o;
    o.a = sets_.get(set, a);
    o.lda = o.ldb = p.k;
    o.a_rows = p.gathered ? c_.tokens : p.rows;
    o.b = sets_.get(set, w);
    o.b_expert_stride = p.n * p.k;
    o.offsets = sets_.get<int32_t>(set, kOffsets);
    o.gather = p.gathered ? sets_.get<int32_t>(set, kTokenIndex) : nullptr;
    o.row_scale = first ? nullptr : sets_.get<float>(set, kRowScale);
    o.d = sets_.get(set, first ? kH : kY);
    o.ldd = p.gated ? p.n / 2 : p.n;
    o.activation = first ? c_.activation : Activation::kNone;
    o.gate_max = o.up_max = std::numeric_limits<float>::infinity();
    if (c_.narrow()) {
      o.a_scale = sets_.row_scales(set, a, p.a_group);
      o.b_scale = sets_.weight_scales(set, w);
      o.b_scale_expert_stride = sets_.expert_scales(w);
    }
    if (p.d_groups) {
      o.d_scales = sets_.get<float>(set, kHScale);
      o.d_scales_stride = MoeCase::groups_of(c_.shape.inter, h_group);
    }
    check(run_grouped(plan, p, o, device_, workspace_, workspace_bytes_, stream), plan.kernel->name);
  }

  void combine(int64_t set, cudaStream_t stream) const {
    ExpertSum s;
    s.y = sets_.get(set, kY);
    s.type = c_.d_type();
    s.rows = c_.rows();
    s.n = s.ld = c_.shape.hidden;
    s.inverse = sets_.get<int32_t>(set, kInverse);
    s.tokens = c_.tokens;
    s.top_k = c_.shape.top_k;
    s.out = sets_.get(set, kOut);
    check(sum_experts(s, programmatic_, stream), "sum_experts");
  }

  MoeCase const& c_;
  MoeSets const& sets_;
  DeviceProperties const& device_;
  void* workspace_;
  size_t workspace_bytes_;
  bool programmatic_;
};

// ---- The run ------------------------------------------------------------------------------------------------------------------

class Runner {
 public:
  Runner(Arguments const& arguments, DeviceProperties const& device)
      : arguments_(arguments), device_(device), table_(table_columns()), csv_(arguments.text("csv"), csv_header()) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    timing_.rounds = int(std::max<int64_t>(1, arguments.integer("rounds")));
    timing_.graph_us = arguments.number("graph-us");
    table_.header();
  }
  ~Runner() { cudaStreamDestroy(stream_); }
  Runner(Runner const&) = delete;
  Runner& operator=(Runner const&) = delete;

  void run(MoeCase const& c, HostRouting const& routing) {
    int64_t skipped = 0;
    std::string reason;
    std::vector<Plans> const plans = plans_of(c, arguments_.text("kernel"), device_, true, &skipped, &reason);
    if (plans.empty()) std::printf("no kernel can run it%s%s\n", reason.empty() ? "" : ": ", reason.c_str());
    if (plans.empty()) return;
    MoeSets const sets(operands_, c, routing, device_.l2_bytes, arguments_.integer("sets"), stream_);
    size_t workspace_bytes = 0;
    for (Plans const& p : plans) workspace_bytes = std::max(workspace_bytes, p.workspace_bytes());
    if (c.stage == Stage::kRouterGemm) workspace_bytes = route_tokens_workspace(c.tokens, c.shape.hidden, c.shape.experts, device_);
    workspace_.reset(int64_t(workspace_bytes));
    void* workspace = workspace_.carve(int64_t(workspace_bytes));
    poison(workspace, int64_t(workspace_bytes), stream_);
    Launcher const launcher(c, sets, device_, workspace, workspace_bytes);
    Work const work(c, routing, device_);
    bool const checking = !arguments_.given("no-check");
    std::optional<Reference> reference;
    if (checking) reference.emplace(reference_, c, routing, sets, stream_);

    std::vector<Contestant> group;
    std::vector<Plans const*> group_plans;
    std::vector<double> errors;
    auto const time_group = [&] {
      if (group.empty()) return;
      std::vector<Timing> const timings = time_interleaved(group, sets.count(), timing_, stream_);
      for (size_t i = 0; i < timings.size(); ++i) report(c, routing, work, *group_plans[i], timings[i], errors[i], "");
      group.clear();
      group_plans.clear();
      errors.clear();
    };
    for (Plans const& p : plans) {
      Contestant ours{p.text(c.stage), [&](int64_t set, cudaStream_t stream) { launcher.launch(c.stage, p, set, stream); }};
      double error = std::numeric_limits<double>::quiet_NaN();
      if (checking) {
        sets.poison_results(stream_);
        ours.launch(0, stream_);
        check(cudaStreamSynchronize(stream_), ours.name.c_str());
        error = reference->error();
      }
      if (checking && !(error <= reference->limit())) {
        ++wrong_;
        report(c, routing, work, p, {}, error, "WRONG: not timed");
      } else if (arguments_.given("check")) {
        report(c, routing, work, p, {}, error, "ok");
      } else {
        group.push_back(std::move(ours));
        group_plans.push_back(&p);
        errors.push_back(error);
      }
      // Small groups, so that all are timed in the same power state.
      if (group.size() == 8) time_group();
    }
    time_group();
    if (skipped > 0)
      std::printf("%lld kernels of the glob cannot run this problem, the last because: %s\n", (long long)skipped, reason.c_str());
  }

  int64_t wrong() const { return wrong_; }

 private:
  static std::vector<Column> table_columns() {
    return {{"tokens", 6},  {"experts", 7},  {"top_k", 5},    {"hidden", 6}, {"inter", 6}, {"routing", 7}, {"type", 4},
            {"stage", 21},  {"us", 9},       {"p10", 9},      {"p90", 9},    {"MB", 9},    {"GB/s", 6},    {"of read", 7},
            {"TFLOP/s", 7}, {"floor us", 8}, {"of floor", 8}, {"error", 8},  {"kernel", 0}};
  }

  static std::vector<std::string> csv_header() {
    return {"model", "tokens",  "experts",  "top_k",   "hidden",     "inter",    "routing",      "active",  "type",
            "stage", "h_group", "gathered", "gated",   "activation", "kernel",   "source",       "us",      "p10",
            "p90",   "bytes",   "gb_per_s", "of_read", "tflops",     "floor_us", "predicted_us", "rel_err", "note"};
  }

  void report(MoeCase const& c, HostRouting const& routing, Work const& work, Plans const& plans, Timing const& ours, double error,
              std::string const& note) {
    auto const whole = [](int64_t v) { return std::to_string(v); };
    auto const us = [](double v) { return v > 0 ? format("%.2f", v) : std::string(); };
    bool const timed = ours.us > 0;
    std::string const rate = timed ? format("%.0f", work.bytes / ours.us * 1e-3) : "";
    std::string const of_read = timed ? format("%.3f", work.bytes / ours.us / device_.read_bandwidth) : "";
    std::string const tflops = timed && work.flops > 0 ? format("%.1f", work.flops / ours.us * 1e-6) : "";
    std::string const fraction = timed ? format("%.3f", work.floor_us / ours.us) : "";
    std::string const kernel = plans.text(c.stage), type = name_of(c.type);
    MoeShape const& s = c.shape;
    table_.row({whole(c.tokens), whole(s.experts), whole(s.top_k), whole(s.hidden), whole(s.inter), name_of(c.routing), type,
                c.stage_text(), us(ours.us), us(ours.p10), us(ours.p90), format("%.2f", work.bytes * 1e-6), rate, of_read, tflops,
                us(work.floor_us), fraction, format("%.1e", error), kernel + (note.empty() ? "" : "  " + note)});
    csv_.row({s.model,
              whole(c.tokens),
              whole(s.experts),
              whole(s.top_k),
              whole(s.hidden),
              whole(s.inter),
              name_of(c.routing),
              whole(routing.active),
              type,
              name_of(c.stage),
              whole(plans.h_group),
              whole(c.gathered),
              whole(c.gated),
              name_of(c.activation),
              kernel,
              plans.source(),
              us(ours.us),
              us(ours.p10),
              us(ours.p90),
              format("%.0f", work.bytes),
              rate,
              of_read,
              tflops,
              us(work.floor_us),
              us(plans.predicted_us()),
              format("%.3e", error),
              note});
  }

  Arguments const& arguments_;
  DeviceProperties device_;
  Table table_;
  Csv csv_;
  TimingOptions timing_;
  Arena operands_, workspace_, reference_;
  cudaStream_t stream_ = nullptr;
  int64_t wrong_ = 0;
};

int run(int argc, char** argv) {
  Arguments const arguments(argc, argv, options());
  if (arguments.given("help")) {
    arguments.print_help(kUsage);
    return 0;
  }
  std::string const glob = arguments.text("kernel");
  if (arguments.given("list")) {
    print_registry({"moe", "moe_scaled"}, glob);
    return 0;
  }
  std::vector<Block> const blocks = blocks_of(arguments);
  int const index = int(arguments.integer("device"));
  DeviceProperties device;
  if (arguments.given("plan")) {
    bool const present = query_device(index, &device).ok();
    if (!present) device = h200_properties();
    for (Block const& block : blocks) {
      for (MoeCase const& c : block.cases) {
        bool const other = c.stage == Stage::kLayer && c.narrow();  // products with codes in between
        if (c.stage != Stage::kGemm1 && c.stage != Stage::kGemm2 && !other) continue;
        int64_t skipped = 0;
        std::string reason;
        for (Plans const& plans : plans_of(c, glob, device, present, &skipped, &reason)) print_plans(c, plans);
        if (skipped > 0) std::printf("%lld kernels of the glob cannot run it, the last because: %s\n", (long long)skipped, reason.c_str());
      }
    }
    return 0;
  }
  check(query_device(index, &device), "query_device");
  check(cudaSetDevice(index), "cudaSetDevice");
  print_device(device);
  Runner runner(arguments, device);
  for (Block const& block : blocks) {
    HostRouting const routing(block.head);
    for (MoeCase const& c : block.cases) runner.run(c, routing);
  }
  if (runner.wrong() > 0) std::fprintf(stderr, "%lld results were wrong\n", (long long)runner.wrong());
  return runner.wrong() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace minfer::bench

int main(int argc, char** argv) {
  try {
    return minfer::bench::run(argc, argv);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "bench/moe: %s\n", error.what());
    return 2;
  }
}
