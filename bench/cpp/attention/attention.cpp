// bench/attention: attention over tensors and over KV caches, checked against a reference, then timed.
//
//   bench/attention --stage prefill --batch 1 --seqlen 4096:32768:x2 --heads 32/8 --head-dim 64,128      what plan_attention chooses
//   bench/attention --stage prefill --causal on --kernel 'attention_*_prefill'                           every kernel that can
//   bench/attention --stage decode --batch 1,8,64 --context 1024,4096,32768 --page 0,64 --format 16bit,fp8_e4m3,int8,int4
//   bench/attention --stage decode --queries 512 --context 8192 --format int8                            a chunk of a prompt
//   bench/attention --list
#include <cuda_runtime.h>

#include <limits>
#include <optional>

#include "attention/attention_case.h"
#include "common/table.h"
#include "common/timing.h"
#include "gemm/gemm_bench.h"

namespace minfer::bench {
namespace {

constexpr char kUsage[] =
    "bench/attention: attention over tensors and over KV caches, checked against a reference, then timed.\n"
    "  prefill  q, k and v are tensors of --seqlen rows\n"
    "  decode   --queries new queries of each sequence over a cache of --context keys\n"
    "Without --kernel it runs what plan_attention chooses. Integers are lists (1,2,4) or ranges (128:1024:128, 1:64:x2).";

std::vector<Option> options() {
  std::vector<Option> all = {
      {"stage", "LIST", "prefill,decode", "of those above"},
      {"batch", "INTS", "1", "sequences"},
      {"heads", "LIST", "32/8", "query heads / KV heads"},
      {"head-dim", "INTS", "128", "of keys and values"},
      {"dtype", "LIST", "bf16", "f16, bf16: of queries"},
      {"seqlen", "INTS", "4096", "of prefill: queries, and as many keys"},
      {"causal", "LIST", "on", "on, off"},
      {"context", "INTS", "4096", "of decode: keys, the new queries' own with them; whole pages"},
      {"queries", "INTS", "1", "of decode: of each sequence"},
      {"page", "INTS", "64", "of decode: tokens of a page; 0: contiguous"},
      {"format", "LIST", "16bit", "of decode: 16bit, fp8_e4m3, int8, int4"},
      {"splits", "N", "0", "of decode: parts of every sequence's keys; 0: as many as fill the device"},
      {"kernel", "GLOB", "", "every compiled kernel of that name instead of the plan's choice"},
      {"plan", nullptr, nullptr, "print what plan_attention chooses and why; run nothing (works without a GPU: plans for an H200)"},
  };
  for (Option const& option : protocol_options()) all.push_back(option);
  return all;
}

// ---- What is asked for --------------------------------------------------------------------------------------------------------

WeightFormat parse_format(std::string const& text) {
  if (text == "16bit") return WeightFormat::kDense;
  for (WeightFormat format : {WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4})
    if (text == name_of(format)) return format;
  throw std::invalid_argument("--format: 16bit, fp8_e4m3, int8 or int4, got \"" + text + "\"");
}

struct Heads {
  int64_t q, kv;
};

Heads parse_heads(std::string const& text) {
  std::vector<std::string> const parts = split(text, '/');
  if (parts.size() != 2) throw std::invalid_argument("--heads: query heads / KV heads as in 32/8, got \"" + text + "\"");
  Heads const heads{parse_integer(parts[0], "heads"), parse_integer(parts[1], "heads")};
  if (heads.kv < 1 || heads.q < 1 || heads.q % heads.kv != 0)
    throw std::invalid_argument("--heads: query heads must be a multiple of KV heads, got \"" + text + "\"");
  return heads;
}

/// Decode's, of sizes that all its cases share.
void add_decode_cases(Arguments const& arguments, DataType type, Heads const& heads, int64_t head_dim, bool causal,
                      std::vector<AttentionCase>* cases) {
  for (std::string const& name : arguments.list("format")) {
    WeightFormat const format = parse_format(name);
    int64_t const unit = format == WeightFormat::kDense ? 8 : format == WeightFormat::kInt4 ? 32 : 16;
    if (head_dim % unit != 0) throw std::invalid_argument("--head-dim: " + name + " needs multiples of " + std::to_string(unit));
    for (int64_t page : arguments.integers("page")) {
      for (int64_t queries : arguments.integers("queries")) {
        for (int64_t context : arguments.integers("context")) {
          int64_t const rows = page > 0 ? page : context, tokens = format == WeightFormat::kInt4 ? 32 : 8;
          if (rows < 1 || context % rows != 0 || ((page > 0 || format != WeightFormat::kDense) && rows % tokens != 0)) {
            throw std::invalid_argument("--context " + std::to_string(context) + " must be whole pages of " + std::to_string(rows) +
                                        ", and " + name + "'s multiples of " + std::to_string(tokens));
          }
          for (int64_t batch : arguments.integers("batch")) {
            AttentionCase c(AttentionStage::kDecode, type, batch, heads.q, heads.kv, head_dim, queries, context, causal);
            c.set_cache(format, page, arguments.integer("splits"));
            cases->push_back(c);
          }
        }
      }
    }
  }
}

std::vector<AttentionCase> cases_of(Arguments const& arguments) {
  std::vector<AttentionCase> cases;
  for (char const* size : {"batch", "seqlen", "context", "queries"})
    for (int64_t value : arguments.integers(size))
      if (value < 1) throw std::invalid_argument(std::string("--") + size + ": 1 or more, got " + std::to_string(value));
  for (std::string const& stage : arguments.list("stage")) {
    if (stage != "prefill" && stage != "decode") throw std::invalid_argument("--stage: prefill or decode, got \"" + stage + "\"");
    for (std::string const& dtype : arguments.list("dtype")) {
      DataType const type = parse_type(dtype);
      if (type == DataType::kF32) throw std::invalid_argument("--dtype: f16 or bf16, got \"f32\"");
      for (std::string const& text : arguments.list("heads")) {
        Heads const heads = parse_heads(text);
        for (int64_t head_dim : arguments.integers("head-dim")) {
          if (head_dim < 8 || head_dim % 8 != 0 || head_dim > 256)
            throw std::invalid_argument("--head-dim: a multiple of 8 up to 256, got " + std::to_string(head_dim));
          for (std::string const& causal : arguments.list("causal")) {
            if (causal != "on" && causal != "off") throw std::invalid_argument("--causal: on or off, got \"" + causal + "\"");
            if (stage == "decode") {
              add_decode_cases(arguments, type, heads, head_dim, causal == "on", &cases);
              continue;
            }
            for (int64_t seqlen : arguments.integers("seqlen"))
              for (int64_t batch : arguments.integers("batch"))
                cases.emplace_back(AttentionStage::kPrefill, type, batch, heads.q, heads.kv, head_dim, seqlen, seqlen, causal == "on");
          }
        }
      }
    }
  }
  return cases;
}

// What to time for a case; `skipped` counts kernels of the glob that cannot run it.
std::vector<AttentionPlan> plans_of(AttentionCase const& c, std::string const& glob, DeviceProperties const& device, bool only_runnable,
                                    int64_t* skipped, std::string* reason) {
  AttentionPlanOptions plan_options;
  plan_options.only_runnable = only_runnable;
  *skipped = 0;
  std::vector<AttentionPlan> plans;
  if (glob.empty()) {
    AttentionPlan plan;
    Status const status = plan_attention(c.problem, device, plan_options, &plan);
    if (status.ok()) {
      plans.push_back(plan);
    } else {
      *reason = status.message;
    }
    return plans;
  }
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    if (std::string(kernel.family) != "attention" || kernel.ab_type != c.problem.type || !matches(glob, kernel.name)) continue;
    plan_options.kernel = kernel.name;
    AttentionPlan plan;
    Status const status = plan_attention(c.problem, device, plan_options, &plan);
    if (status.ok()) {
      plans.push_back(plan);
    } else {
      ++*skipped;
      *reason = status.message;
    }
  }
  return plans;
}

void print_skipped(int64_t skipped, std::string const& reason) {
  if (skipped > 0) std::printf("%lld kernels of the glob cannot run it, the last because: %s\n", (long long)skipped, reason.c_str());
}

void print_plan(AttentionCase const& c, AttentionPlan const& plan) {
  AttentionProblem const& p = c.problem;
  std::printf("%s: batch %lld, %lld queries, %lld keys, heads %lld/%lld of %lld, %s%s, %s in %s\n", name_of(c.stage), (long long)p.batch,
              (long long)p.seqlen_q, (long long)p.seqlen_k, (long long)p.heads_q, (long long)p.heads_kv, (long long)p.head_dim,
              name_of(p.type), c.causal ? ", causal" : "", c.format(), c.problem.cached ? c.layout().c_str() : "tensors");
  std::printf("  %s\n  %s; predicted %.2f us, workspace %zu bytes\n", plan.kernel->name, name_of(plan.source), plan.predicted_us,
              plan.workspace_bytes);
  if (plan.reason[0] != '\0') std::printf("  %s\n", plan.reason);
}

// ---- The run ------------------------------------------------------------------------------------------------------------------

/// What set 0's results must be, for up to kSamples queries of all sequences, the first and the last among them.
class AttentionReference {
 public:
  bool const rounds_keys;

  AttentionReference(Arena& arena, AttentionCase const& c, AttentionSets const& sets, bool rounds_keys, cudaStream_t stream)
      : rounds_keys(rounds_keys), c_(c), sets_(sets), stream_(stream), samples_(std::min<int64_t>(c.problem.tokens_q, kSamples)) {
    AttentionProblem const& p = c.problem;
    row_ = p.heads_q * p.head_dim_v;
    int64_t const bytes[] = {p.heads_q * p.seqlen_k * 8, samples_ * row_ * 4, samples_ * p.heads_q * 4, samples_ * 4, samples_ * row_ * 2};
    int64_t total = 0;
    for (int64_t b : bytes) total += round_up(b, kCarveAlignment);
    arena.reset(total);
    double* const scores = static_cast<double*>(arena.carve(bytes[0]));
    out_ = static_cast<float*>(arena.carve(bytes[1]));
    float* const lse = static_cast<float*>(arena.carve(bytes[2]));
    index_ = static_cast<int32_t*>(arena.carve(bytes[3]));
    gathered_ = arena.carve(bytes[4]);
    for (int64_t i = 0; i < samples_; ++i) {
      int64_t const token = samples_ > 1 ? i * (p.tokens_q - 1) / (samples_ - 1) : 0;
      tokens_.push_back(int32_t(token));
      attention_reference(p, sets[0], rounds_keys, token / p.seqlen_q, token % p.seqlen_q, scores, out_ + i * row_, lse + i * p.heads_q,
                          stream);
    }
    check(cudaMemcpyAsync(index_, tokens_.data(), size_t(samples_) * 4, cudaMemcpyHostToDevice, stream), "upload");
    lse_ = download<float>(lse, samples_ * p.heads_q, stream);
  }

  /// Of out, norm-wise; infinite where lse is wrong.
  double error() const {
    AttentionProblem const& p = c_.problem;
    std::vector<float> const lse = download<float>(sets_[0].lse, p.tokens_q * p.heads_q, stream_);
    for (int64_t i = 0; i < samples_; ++i) {
      int64_t const sequence = tokens_[size_t(i)] / p.seqlen_q, query = tokens_[size_t(i)] % p.seqlen_q;
      for (int64_t head = 0; head < p.heads_q; ++head) {
        float const have = lse[size_t((sequence * p.heads_q + head) * p.seqlen_q + query)], want = lse_[size_t(i * p.heads_q + head)];
        if (have != want && !(std::fabs(have - want) <= kLseErrorLimit)) return std::numeric_limits<double>::infinity();
      }
    }
    gather_rows(sets_[0].out, index_, samples_, row_, gathered_, stream_);
    return relative_error(gathered_, p.type, row_, 0, out_, 1, samples_, row_, stream_);
  }

 private:
  static constexpr int64_t kSamples = 64;
  AttentionCase const& c_;
  AttentionSets const& sets_;
  cudaStream_t stream_;
  int64_t samples_, row_ = 0;
  std::vector<int32_t> tokens_;
  std::vector<float> lse_;
  float* out_ = nullptr;
  int32_t* index_ = nullptr;
  void* gathered_ = nullptr;
};

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

  void run(AttentionCase const& c) {
    int64_t skipped = 0;
    std::string reason;
    std::vector<AttentionPlan> const plans = plans_of(c, arguments_.text("kernel"), device_, true, &skipped, &reason);
    if (plans.empty()) std::printf("no kernel can run it%s%s\n", reason.empty() ? "" : ": ", reason.c_str());
    if (plans.empty()) return;
    AttentionSets const sets(operands_, c, device_.l2_bytes, arguments_.integer("sets"), stream_);
    size_t workspace_bytes = 0;
    for (AttentionPlan const& plan : plans) workspace_bytes = std::max(workspace_bytes, plan.workspace_bytes);
    workspace_.reset(int64_t(workspace_bytes));
    void* const workspace = workspace_.carve(int64_t(workspace_bytes));
    poison(workspace, int64_t(workspace_bytes), stream_);
    bool const checking = !arguments_.given("no-check");
    std::optional<AttentionReference> reference;

    std::vector<Contestant> group;
    std::vector<AttentionPlan const*> group_plans;
    std::vector<double> errors;
    auto const time_group = [&] {
      if (group.empty()) return;
      std::vector<Timing> const timings = time_interleaved(group, sets.count(), timing_, stream_);
      for (size_t i = 0; i < timings.size(); ++i) report(c, *group_plans[i], timings[i], errors[i], "");
      group.clear();
      group_plans.clear();
      errors.clear();
    };
    for (AttentionPlan const& plan : plans) {
      Contestant ours{plan.kernel->name, [this, &plan, &c, &sets, workspace](int64_t set, cudaStream_t stream) {
                        check(run_attention(plan, c.problem, sets[set], device_, workspace, plan.workspace_bytes, stream),
                              plan.kernel->name);
                      }};
      double error = std::numeric_limits<double>::quiet_NaN();
      if (checking) {
        bool const scaled = c.problem.kv_format == WeightFormat::kInt8 || c.problem.kv_format == WeightFormat::kInt4;
        bool const rounds_keys = scaled && plan.kernel->schedule != Schedule::kSplitKv;
        if (!reference || reference->rounds_keys != rounds_keys) reference.emplace(reference_, c, sets, rounds_keys, stream_);
        sets.poison_results(stream_);
        ours.launch(0, stream_);
        check(cudaStreamSynchronize(stream_), ours.name.c_str());
        error = reference->error();
      }
      if (checking && !(error <= attention_error_limit(c.problem.type))) {
        ++wrong_;
        report(c, plan, {}, error, "WRONG: not timed");
      } else if (arguments_.given("check")) {
        report(c, plan, {}, error, "ok");
      } else {
        group.push_back(std::move(ours));
        group_plans.push_back(&plan);
        errors.push_back(error);
      }
      // Small groups, so that all are timed in the same power state.
      if (group.size() == 8) time_group();
    }
    time_group();
    print_skipped(skipped, reason);
  }

  int64_t wrong() const { return wrong_; }

 private:
  static std::vector<Column> table_columns() {
    return {{"stage", 7},  {"batch", 5},   {"queries", 7}, {"keys", 6},     {"heads", 7},    {"d", 3},     {"type", 4},
            {"causal", 6}, {"page", 10},   {"format", 8},  {"us", 9},       {"p10", 9},      {"p90", 9},   {"MB", 9},
            {"TB/s", 6},   {"of read", 7}, {"TFLOP/s", 7}, {"floor us", 8}, {"of floor", 8}, {"error", 8}, {"kernel", 0}};
  }

  static std::vector<std::string> csv_header() {
    return {"stage",  "batch", "queries",  "keys",   "heads_q",  "heads_kv",     "head_dim", "type",
            "causal", "page",  "format",   "splits", "kernel",   "source",       "us",       "p10",
            "p90",    "bytes", "tb_per_s", "tflops", "floor_us", "predicted_us", "rel_err",  "note"};
  }

  void report(AttentionCase const& c, AttentionPlan const& plan, Timing const& ours, double error, std::string const& note) {
    AttentionProblem const& p = c.problem;
    AttentionWork const work(c, device_);
    auto const whole = [](int64_t v) { return std::to_string(v); };
    auto const us = [](double v) { return v > 0 ? format("%.2f", v) : std::string(); };
    auto const timed = [&](char const* pattern, double value) { return ours.us > 0 ? format(pattern, value) : std::string(); };
    std::string const rate = timed("%.3f", work.bytes / ours.us * 1e-6), tflops = timed("%.1f", work.flops / ours.us * 1e-6);
    std::string const causal = c.causal ? "on" : "off";
    table_.row({name_of(c.stage),
                whole(p.batch),
                whole(p.seqlen_q),
                whole(p.seqlen_k),
                whole(p.heads_q) + "/" + whole(p.heads_kv),
                whole(p.head_dim),
                name_of(p.type),
                causal,
                c.layout(),
                c.format(),
                us(ours.us),
                us(ours.p10),
                us(ours.p90),
                format("%.2f", work.bytes * 1e-6),
                rate,
                timed("%.3f", work.bytes / ours.us / device_.read_bandwidth),
                tflops,
                us(work.floor_us),
                timed("%.3f", work.floor_us / ours.us),
                format("%.1e", error),
                plan.kernel->name + (note.empty() ? std::string() : "  " + note)});
    csv_.row({name_of(c.stage),
              whole(p.batch),
              whole(p.seqlen_q),
              whole(p.seqlen_k),
              whole(p.heads_q),
              whole(p.heads_kv),
              whole(p.head_dim),
              name_of(p.type),
              causal,
              c.layout(),
              c.format(),
              whole(p.num_splits),
              plan.kernel->name,
              name_of(plan.source),
              us(ours.us),
              us(ours.p10),
              us(ours.p90),
              format("%.0f", work.bytes),
              rate,
              tflops,
              us(work.floor_us),
              us(plan.predicted_us),
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
    print_registry({"attention"}, glob);
    return 0;
  }
  std::vector<AttentionCase> const cases = cases_of(arguments);
  int const index = int(arguments.integer("device"));
  DeviceProperties device;
  if (arguments.given("plan")) {
    bool const present = query_device(index, &device).ok();
    if (!present) device = h200_properties();
    for (AttentionCase const& c : cases) {
      int64_t skipped = 0;
      std::string reason;
      std::vector<AttentionPlan> const plans = plans_of(c, glob, device, present, &skipped, &reason);
      if (plans.empty() && skipped == 0) std::printf("no kernel can run it%s%s\n", reason.empty() ? "" : ": ", reason.c_str());
      for (AttentionPlan const& plan : plans) print_plan(c, plan);
      print_skipped(skipped, reason);
    }
    return 0;
  }
  check(query_device(index, &device), "query_device");
  check(cudaSetDevice(index), "cudaSetDevice");
  print_device(device);
  Runner runner(arguments, device);
  for (AttentionCase const& c : cases) runner.run(c);
  if (runner.wrong() > 0) std::fprintf(stderr, "%lld results were wrong\n", (long long)runner.wrong());
  return runner.wrong() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace minfer::bench

int main(int argc, char** argv) {
  try {
    return minfer::bench::run(argc, argv);
  } catch (std::exception const& error) {
    std::fprintf(stderr, "bench/attention: %s\n", error.what());
    return 2;
  }
}
