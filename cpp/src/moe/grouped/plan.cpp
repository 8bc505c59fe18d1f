// plan_grouped: explicit kernel, else the analytic model over every legal one. run_grouped.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "common/context.h"
#include "common/programmatic_launch.h"
#include "moe/grouped/launch.h"

namespace minfer {

namespace moe {
namespace {

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;

// The analytic model: the larger of the busiest CTA's tiles and the bytes, plus the start. The constants are a fit to 216 timings of 36
// problems on the H200 (Mixtral, Qwen3, DeepSeek-V3 and gpt-oss from 1 to 4096 tokens; the choice costs 0.5 % on their average);
// kNarrowGather, kMany*, kTall* and kDeep* were set afterwards, by a few cells each, and the portable kernels' are a guess.
constexpr double kStartUs = 1.6;
constexpr double kCooperativeTileUs = 2.8,
                 kPingpongTileUs = 0.52;  // a tile's first bytes and stores; the other warpgroup's mainloop hides a part
constexpr double kTail = 0.48;            // of the bytes' time, for each part of a wave that is empty
constexpr double kPower = 2.9;            // how much of the smaller limit shows
constexpr double kSpread = 0.085;  // experts differ: standard deviations of a Poisson's below a tile's edge that still need a tile more
constexpr double kGatherBytes = 23e3, kGatherPower = 4;  // bytes/us into one SM by the loader's gather
constexpr double kNarrowGather = 1.2;
// Routing that is not even gives some expert many of the rows, and narrow tiles then read its weights again and again (gpt-oss, 64 tokens
// that agree: half the speed). Tiles of 64 tokens cost up to 5 % more where routing is even.
constexpr double kNarrowRisk = 1.06;
constexpr int64_t kNarrowRows = 64;  // with so few the risk is small
constexpr double kManyRows = 2048, kManyRate = 0.96, kTallRate = 0.92;
constexpr double kDeepK = 4096, kDeepRows = 96, kDeepExperts = 64, kDeepRate = 0.8;
constexpr double kCopyShare = 0.65;  // of the read bandwidth, of what a launch that gathers before writes
constexpr double kCopyUs = 4.0;
// Of the tensor cores' rate and of the read bandwidth, what a kernel's mainloop reaches.
struct Shares {
  double rate, bandwidth;
};

Shares shares_of(KernelInfo const& kernel) {
  if (kernel.arch < 90) return {0.4, 0.7};
  switch (kernel.tile_m * 1000 + kernel.tile_n) {
    case 64016: return {0.25, 1.0};
    case 64064: return {0.38, 0.96};
    case 128128: return {0.86, 0.99};
    case 128192: return {1.0, 0.98};
    case 128256: return {1.02, 0.925};
    case 256128: return {1.05, 0.95};
  }
  return {0.8, 0.95};
}

double active_experts(GroupedProblem const& p) {
  if (p.experts == 0 || p.rows == 0) return 0.0;
  double const experts = double(p.experts);
  return std::min(experts * -std::expm1(double(p.rows) * std::log1p(-1.0 / std::max(experts, 1.0 + 1e-9))), double(p.rows));
}

bool quantised(GroupedProblem const& p) { return p.b_format != WeightFormat::kDense; }

double weight_bytes(GroupedProblem const& p) {  // of an expert
  double const n = double(p.n), k = double(p.k);
  if (!quantised(p)) return 2.0 * n * k;
  double const groups = p.group_size > 0 ? std::ceil(k / p.group_size) : 1.0;
  return n * k * bits_of(p.b_format) / 8.0 + n * groups * (scale_bytes_of(p.b_format) + (p.has_zeros ? 2.0 : 0.0));
}

double bytes_of(GroupedProblem const& p) {
  double const n_out = double(p.gated ? p.n / 2 : p.n), rows = double(p.rows);
  return active_experts(p) * weight_bytes(p) + 2.0 * (rows * p.k + rows * n_out);
}

double floor_us(GroupedProblem const& p, DeviceProperties const& device) {
  return std::max(bytes_of(p) / device.read_bandwidth, 2.0 * p.rows * p.n * p.k / device.matrix_rate);
}

// Quantised weights: a stage takes as long with one token as with all that fit. A fit to 258 timings of 71 problems on the H200 (int4 in
// groups of 128, mxfp4; the choice costs 0.4 % on their average); groups of 32 and nvfp4 are guesses from the W4A16 GEMMs, the tile of 32
// tokens and the gather were set afterwards.
constexpr double kQuantisedStartUs = 3.35, kQuantisedTileUs = 1.19, kQuantisedTail = 0.84, kQuantisedPower = 6.8, kQuantisedShare = 1.05;
constexpr double kQuantisedGather = 1.55;  // the loader's copies do not keep up with stages this short

double stage_us(KernelInfo const& kernel) {
  bool const fine = kernel.group_multiple < 128;
  double const scaled = kernel.b_format == WeightFormat::kNvFp4 ? 1.15 : 1.0;
  switch (kernel.tile_n) {
    case 8: return scaled * (fine ? 0.58 : 0.446);
    case 16: return scaled * (fine ? 0.708 : 0.637);
    case 32: return 0.75;
    case 64: return scaled * (fine ? 0.536 : 0.507);
  }
  return scaled * (fine ? 0.72 : 0.71);
}

/// Expected tiles of an expert's tokens, were these a Poisson's: their normal tails.
double expected_token_tiles(double rows, int tile_n) {
  double const deviation = std::sqrt(2.0 * std::max(rows - 1.0, 1e-3));
  double tiles = 1.0;
  for (double edge = tile_n; edge < rows + 4.0 * deviation; edge += tile_n) tiles += 0.5 * std::erfc((edge + 0.5 - rows) / deviation);
  return tiles;
}

double copy_us(GroupedProblem const& p, DeviceProperties const& device) {
  return kCopyUs + 2.0 * p.rows * p.k / (device.read_bandwidth * kCopyShare);
}

double predict_quantised_us(KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device, bool gather_first) {
  double const active = active_experts(p);
  if (active == 0.0) return kQuantisedStartUs;
  double const workers = double(device.sm_count) * kernel.ctas_per_sm;
  double const tiles = active * expected_token_tiles(double(p.rows) / active, kernel.tile_n) * std::ceil(double(p.n) / kernel.tile_m);
  double const waves = tiles > 4 * workers ? tiles / workers + 0.5 : std::max(1.0, std::ceil(tiles / workers));
  double tile_us = std::ceil(double(p.k) / kernel.tile_k) * stage_us(kernel);
  if (p.gathered && !gather_first) tile_us *= kQuantisedGather;
  double const busy_us = waves * (tile_us + kQuantisedTileUs);
  double const tail = kQuantisedTail * std::min(1.0, std::max(0.0, std::ceil(tiles / workers) * workers / tiles - 1.0));
  double const stream_us = bytes_of(p) / (device.read_bandwidth * kQuantisedShare) * (1.0 + tail);
  double const us = std::pow(std::pow(busy_us, kQuantisedPower) + std::pow(stream_us, kQuantisedPower), 1.0 / kQuantisedPower);
  return kQuantisedStartUs + (gather_first ? copy_us(p, device) : 0.0) + us;
}

double predict_us(KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device, bool gather_first) {
  if (quantised(p)) return predict_quantised_us(kernel, p, device, gather_first);
  double const active = active_experts(p);
  if (active == 0.0) return kStartUs;
  double const rows = double(p.rows) / active;
  double const token_tiles = std::max(1.0, std::floor((rows + kSpread * std::sqrt(rows)) / kernel.tile_n) + 1.0);
  double const weight_tiles = std::ceil(double(p.n) / kernel.tile_m);
  double const tiles = active * token_tiles * weight_tiles, workers = double(device.sm_count) * kernel.ctas_per_sm;
  double const waves = std::max(1.0, tiles > 4 * workers ? tiles / workers + 0.5 : std::ceil(tiles / workers));
  int const step = kernel.tile_n <= 128 ? 8 : 16;
  double const tokens = std::ceil(rows / token_tiles / step) * step;
  Shares shares = shares_of(kernel);
  // Mixtral's w2 at 16384 tokens: 6824 us, 5843 with 256 x 128; w13: 13454 and 12478.
  if (kernel.tile_n == 192 && rows > kManyRows) shares.rate *= kManyRate;
  // Mixtral's w2 at 1024 tokens: 475 us with 256 x 128, 398 with 128 x 192; at 2048 807 and 744, at 4096 1578 and 1505 with 128 x 256.
  if (kernel.tile_m == 256 && p.k > 2 * kDeepK && rows < kManyRows) shares.rate *= kTallRate;
  // Deep rows of many experts' weights, several tiles of tokens for each (not understood). DeepSeek's w13 at 16384 tokens: 13765 us with
  // 128 x 192, 17403 with 128 x 256, 18925 with 256 x 128, 24111 with 128 x 128; at 4096 4181, 4506, 4669 and 4635.
  if (kernel.tile_n >= 128 && kernel.tile_n != 192 && p.k > kDeepK && active > kDeepExperts && rows > kDeepRows) shares.rate *= kDeepRate;
  double tile_us = 2.0 * kernel.tile_m * tokens * p.k / (device.matrix_rate / workers * shares.rate);
  if (p.gathered && !gather_first) {
    double const gather_us = 2.0 * tokens * p.k * kernel.ctas_per_sm / kGatherBytes;
    tile_us = std::pow(std::pow(tile_us, kGatherPower) + std::pow(gather_us, kGatherPower), 1.0 / kGatherPower);
  }
  double const busy_us = waves * (tile_us + (kernel.schedule == Schedule::kPingpong ? kPingpongTileUs : kCooperativeTileUs));
  double const tail = kTail * std::max(0.0, std::ceil(tiles / workers) * workers / tiles - 1.0);
  double const stream_us = bytes_of(p) / (device.read_bandwidth * shares.bandwidth) * (1.0 + std::min(tail, 1.0));
  // Narrow tiles of a deep k give the gathering warps little to do at a time.
  double const gathered_us = p.gathered && !gather_first && kernel.tile_m == 64 ? kNarrowGather * stream_us : stream_us;
  double const risk = kernel.tile_n < 64 && p.rows > kNarrowRows ? kNarrowRisk : 1.0;
  double const us = std::pow(std::pow(busy_us, kPower) + std::pow(gathered_us, kPower), 1.0 / kPower);
  return kStartUs + (gather_first ? copy_us(p, device) : 0.0) + risk * us;
}

char const* illegal(KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device) {
  if (std::strcmp(kernel.family, "moe") != 0 && std::strcmp(kernel.family, "moe_w4a16") != 0) return "it is not a grouped kernel";
  if (kernel.b_format != p.b_format) return "its weights have another format";
  if (quantised(p) && p.group_size > 0 && p.group_size < p.k && p.group_size % kernel.group_multiple != 0) {
    return "its groups are multiples of another size";
  }
  if (kernel.arch_exact ? device.compute_capability() != kernel.arch : device.compute_capability() < kernel.arch) {
    return "it does not run on this device's compute capability";
  }
  if (kernel.ab_type != p.type) return "it computes another element type";
  if (kernel.smem_bytes > device.smem_per_block) return "it needs more shared memory than a block of this device has";
  if (kernel.arch >= 90) {
    if (p.a_alignment < 16 || p.b_alignment < 16) return "an operand's pointer or stride is not a multiple of 16 bytes";
    if (p.k % 8 != 0 || p.k == 0) return "k is not a positive multiple of 8";
    if (quantised(p) && p.n % 8 != 0) return "n is not a multiple of 8";
    if (p.gated && p.n % 16 != 0) return "half of n is not a multiple of 8";
  }
  return nullptr;
}

Status check(GroupedProblem const& p) {
  if (p.rows < 0 || p.n < 0 || p.k < 0 || p.experts < 0 || p.max_rows < 0) {
    return Status::failure(StatusCode::kInvalidArgument, "sizes must not be negative, got rows = %lld, experts = %lld, n = %lld, k = %lld",
                           (long long)p.rows, (long long)p.experts, (long long)p.n, (long long)p.k);
  }
  if (p.rows > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) {
    return Status::failure(StatusCode::kNotSupported, "an extent above %lld is not supported, got rows = %lld, n = %lld, k = %lld",
                           (long long)kMaxExtent, (long long)p.rows, (long long)p.n, (long long)p.k);
  }
  if (p.experts > kMaxGroupedExperts) {
    return Status::failure(StatusCode::kNotSupported, "at most %d experts are supported, got %lld", kMaxGroupedExperts,
                           (long long)p.experts);
  }
  if (p.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "operands must be f16 or bf16, got f32");
  if (p.gated && p.n % 2 != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "a gated weight has an even number of rows, got n = %lld", (long long)p.n);
  }
  if (quantised(p)) {
    if (bits_of(p.b_format) != 4) {
      return Status::failure(StatusCode::kNotSupported, "experts have 16-bit or 4-bit weights, got %d bits", bits_of(p.b_format));
    }
    if (p.max_rows > 0) return Status::failure(StatusCode::kNotSupported, "quantised experts have rows in order, not a slab each");
    if (p.group_size < 0 || (p.group_size & (p.group_size - 1)) != 0) {
      return Status::failure(StatusCode::kInvalidArgument, "group_size must be 0 or a power of two, got %lld", (long long)p.group_size);
    }
  }
  // Tiles of the smallest kernel are numbered in 32 bits.
  double const tiles = (double(p.rows) / 16 + double(p.experts)) * (double(p.n) / 64 + 1);
  if (tiles >= 2147483648.0 - 65536.0) {
    return Status::failure(StatusCode::kNotSupported, "rows = %lld and n = %lld are more tiles than are numbered in 32 bits",
                           (long long)p.rows, (long long)p.n);
  }
  return Status::success();
}

GroupedPlan describe(KernelInfo const& kernel, GroupedProblem const& problem, DeviceProperties const& device, bool gather_first) {
  GroupedPlan plan;
  plan.kernel = &kernel;
  plan.floor_us = floor_us(problem, device);
  plan.predicted_us = std::max(predict_us(kernel, problem, device, gather_first), plan.floor_us);
  plan.gather_first = gather_first;
  plan.workspace_bytes = gather_first ? size_t(problem.rows) * size_t(problem.k) * 2 : 0;
  return plan;
}

/// Whether a launch of its own can gather the rows: it copies 16 bytes at a time.
bool can_gather_first(GroupedProblem const& p) { return p.gathered && p.k % 8 == 0 && p.a_alignment == 16; }

/// The fastest plan; returns how many there are. A portable kernel only where no other computes the problem.
int choose(GroupedProblem const& problem, DeviceProperties const& device, GroupedPlanOptions const& options, GroupedPlan* best) {
  int candidates = 0;
  bool const can_copy = can_gather_first(problem);
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    if ((options.only_runnable && kernel.launch == nullptr) || (options.force_arch != 0 && kernel.arch != options.force_arch) ||
        illegal(kernel, problem, device) != nullptr) {
      continue;
    }
    for (bool gather_first : {false, true}) {
      if (gather_first && !can_copy) continue;
      GroupedPlan const plan = describe(kernel, problem, device, gather_first);
      bool const native = kernel.arch >= 90, best_native = candidates > 0 && best->kernel->arch >= 90;
      if (candidates == 0 || (native != best_native ? native : plan.predicted_us < best->predicted_us)) *best = plan;
      ++candidates;
    }
  }
  return candidates;
}

}  // namespace

#if !MINFER_WITH_CUDA
Status gather_rows(void const*, int64_t, int64_t, int32_t const*, int64_t, int64_t, void*, bool, Stream) {
  return Status::failure(StatusCode::kNotCompiled, "this build has no CUDA");
}
#endif

}  // namespace moe

// The compiler's comparison takes in every member, also one that is added later: cached plans depend on that.
bool GroupedProblem::operator==(GroupedProblem const&) const = default;

Status plan_grouped(GroupedProblem const& problem, DeviceProperties const& device, GroupedPlanOptions const& options, GroupedPlan* plan) {
  using namespace moe;
  *plan = GroupedPlan{};
  if (Status status = check(problem); !status.ok()) return status;
  if (options.kernel != nullptr) {
    KernelInfo const* kernel = find_kernel(options.kernel);
    if (kernel == nullptr) return Status::failure(StatusCode::kUnknownKernel, "kernel '%.90s' is not in the registry", options.kernel);
    if (char const* why = illegal(*kernel, problem, device)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", kernel->name, why);
    }
    if (options.only_runnable && kernel->launch == nullptr) {
      return Status::failure(StatusCode::kNotCompiled, "kernel %s is in the table but not in this build (archs: %s)", kernel->name,
                             build_archs()[0] ? build_archs() : "none");
    }
    if (options.gather_first && !can_gather_first(problem)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot have its rows gathered first: %s", kernel->name,
                             problem.gathered ? "they are not aligned to 16 bytes" : "the problem has no gather");
    }
    *plan = describe(*kernel, problem, device, options.gather_first);
    plan->source = PlanSource::kOverride;
    std::snprintf(plan->reason, sizeof(plan->reason), "asked for by name");
    return Status::success();
  }
  int const count = choose(problem, device, options, plan);
  if (count == 0) {
    return Status::failure(StatusCode::kNotSupported,
                           "no kernel %s computes a grouped GEMM of %s and %s weights, n = %lld, on compute capability %d.%d (archs of the "
                           "build: %s)",
                           options.only_runnable ? "of this build" : "of the table", name_of(problem.type),
                           quantised(problem) ? name_of(problem.b_format) : "16-bit", (long long)problem.n, device.compute_major,
                           device.compute_minor, build_archs()[0] ? build_archs() : "none");
  }
  std::snprintf(plan->reason, sizeof(plan->reason), "fewest predicted cycles of %d candidates: %.1f us, floor %.1f us", count,
                plan->predicted_us, plan->floor_us);
  return Status::success();
}

Status run_grouped(GroupedPlan const& plan, GroupedProblem const& problem, GroupedOperands const& operands, DeviceProperties const& device,
                   void* workspace, size_t workspace_bytes, Stream stream) {
  if (problem.rows == 0 || problem.n == 0) return Status::success();
  if (plan.kernel == nullptr || plan.kernel->launch == nullptr) {
    return Status::failure(StatusCode::kNotCompiled, "the plan's kernel is not in this build");
  }
  if (Status status = bind_context(device); !status.ok()) return status;
  GroupedProblem launched = problem;
  GroupedOperands rows = operands;
  bool const programmatic = programmatic_launch_enabled();
  if (plan.gather_first) {
    if (workspace_bytes < plan.workspace_bytes) {
      return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", workspace_bytes,
                             plan.workspace_bytes);
    }
    Status const status = moe::gather_rows(operands.a, operands.lda, operands.a_rows, operands.gather, problem.rows, problem.k, workspace,
                                           programmatic && device.compute_capability() >= 90, stream);
    if (!status.ok()) return status;
    launched.gathered = false;
    rows.gather = nullptr;
    rows.a = workspace;
    rows.lda = problem.k;
    rows.a_rows = problem.rows;
  }
  moe::GroupedLaunchArguments const arguments{&launched, &rows, &device, programmatic, stream};
  return reinterpret_cast<moe::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
