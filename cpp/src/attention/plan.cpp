// plan_attention: the kernel asked for by name, else the legal kernel of which the analytic model predicts the shortest time.
// run_attention.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "attention/cost_model.h"
#include "attention/shared/launch.h"
#include "common/context.h"
#include "common/nonce.h"
#include "common/programmatic_launch.h"

namespace minfer {

namespace attention {
namespace {

constexpr int64_t kFewRows = 32;                 // of a KV head in a sequence, up to which a tile of 8 rows is taken in the mode
constexpr int64_t kDrafts = 8;                   // queries of a sequence, up to which they are probably drafted tokens
constexpr int64_t kMaxItems = int64_t(1) << 30;  // that 32 bits count, and sums of two
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;
constexpr CostModel kCostModel{};
// The fraction of a device's memory that num_splits may ask for: each split of each output tile has a partial slot, and many splits of many
// queries would take hundreds of GiB.
constexpr double kMaxMemoryFraction = 0.25;

/// CTAs of a persistent kernel: as many as are resident at once.
int64_t workers_of(KernelInfo const& kernel, DeviceProperties const& device) {
  constexpr int64_t kReserved = 1024;  // bytes of shared memory that an SM reserves for each CTA in addition to its own
  int64_t const fit = (device.smem_per_block + kReserved) / (kernel.smem_bytes + kReserved);
  return device.sm_count * std::clamp<int64_t>(fit, 1, kernel.ctas_per_sm);
}

/// Whether this build holds code of the kernel that the device runs: portable kernels are compiled for all of build_archs() but 90a, and
/// code for x.y runs on x.z, z >= y.
bool has_code(KernelInfo const& kernel, DeviceProperties const& device) {
  if (kernel.launch == nullptr) return false;
  if (kernel.arch_exact) return true;
  for (char const* at = build_archs(); *at != 0;) {
    char* end = nullptr;
    long const arch = std::strtol(at, &end, 10);
    if (*end != 'a' && arch / 10 == device.compute_major && arch % 10 <= device.compute_minor) return true;
    at = end;
    while (*at != 0 && (*at < '0' || *at > '9')) ++at;
  }
  return false;
}

/// The largest number of KV heads in lockstep that leaves no more than a few CTAs idle.
int64_t choose_lockstep(AttentionProblem const& p, int64_t ctas) {
  constexpr double kUsed = 0.96;
  int64_t best = 1;
  for (int64_t heads = 2; heads <= std::min(p.heads_kv, ctas); ++heads) {
    if (p.heads_kv % heads != 0 || double(ctas / heads * heads) < kUsed * double(ctas)) continue;
    best = heads;
  }
  return best;
}

/// Whether a split-KV launch has more steps (decode/tile_scheduler.cuh) than it can number: those of all output tiles that there may be,
/// with as many keys as there is room for.
bool too_many_steps(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  constexpr double kMaxTiles = double(1 << 20), kMaxSteps = double(1 << 30);
  if (p.heads_kv == 0) return false;
  double const group = double(p.heads_q / p.heads_kv), heads = double(p.heads_kv / choose_lockstep(p, workers_of(kernel, device)));
  auto const tiles = [&](int64_t queries) { return heads * (std::floor(double(queries) * group / 8.0) + 1.0); };
  double const steps = p.num_splits > 0 ? double(p.num_splits) : double(p.seqlen_k) / kernel.tile_n + 8.0;
  return tiles(p.varlen ? p.tokens_q : p.seqlen_q) >= kMaxTiles || tiles(p.seqlen_q) * steps >= kMaxSteps;
}

char const* illegal(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  if (std::strcmp(kernel.family, "attention") != 0) return "it is not an attention kernel";
  if (kernel.arch_exact ? device.compute_capability() != kernel.arch : device.compute_capability() < kernel.arch) {
    return "it does not run on this device's compute capability";
  }
  if (p.batch_invariant && !is_invariant(kernel)) return "its results depend on what else is computed";
  if (kernel.ab_type != p.type) return "it computes another element type";
  if (kernel.smem_bytes > device.smem_per_block) return "it needs more shared memory than a block of this device has";
  if (p.head_dim > kernel.tile_k || p.head_dim_v > kernel.head_dim_v) return "its head dimensions are smaller";
  if ((splits_keys(kernel) || converts(kernel)) && !p.cached) return "it reads keys and values from a cache";
  if (!reads(kernel, p.kv_format)) return "it reads another cache format";
  int64_t const bits = bits_of(p.kv_format);
  if (converts(kernel) && (p.head_dim * bits % 128 != 0 || p.head_dim_v * bits % 128 != 0)) {
    return "it reads codes of 16 bytes at a time, which head dimensions must be multiples of";
  }
  if (!splits_keys(kernel) && p.num_splits > 1) return "it does not split the keys";
  if (splits_keys(kernel) && too_many_steps(kernel, p, device))
    return "it would cut the keys of all rows into more pieces than it can number";
  return nullptr;
}

Status check(AttentionProblem const& p) {
  if (p.batch < 0 || p.heads_q < 0 || p.heads_kv < 0 || p.seqlen_q < 0 || p.seqlen_k < 0 || p.tokens_q < 0 || p.tokens_k < 0) {
    return Status::failure(StatusCode::kInvalidArgument, "sizes must not be negative");
  }
  if (p.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "operands must be f16 or bf16, got f32");
  if (p.heads_kv > 0 ? p.heads_q % p.heads_kv != 0 : p.heads_q != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "heads_q must be a multiple of heads_kv, got %lld and %lld", (long long)p.heads_q,
                           (long long)p.heads_kv);
  }
  if (p.head_dim <= 0 || p.head_dim % 8 != 0 || p.head_dim_v <= 0 || p.head_dim_v % 8 != 0 || p.head_dim_v > p.head_dim) {
    return Status::failure(StatusCode::kInvalidArgument,
                           "head_dim and head_dim_v must be multiples of 8 with head_dim_v <= head_dim, got %lld and %lld",
                           (long long)p.head_dim, (long long)p.head_dim_v);
  }
  if (p.batch_invariant && p.num_splits > 0) {
    return Status::failure(StatusCode::kInvalidArgument,
                           "num_splits must not be given in the batch-invariant mode, where keys are divided at fixed positions, got %lld",
                           (long long)p.num_splits);
  }
  int64_t const largest = std::max({p.tokens_q, p.tokens_k, p.seqlen_q, p.seqlen_k});
  double const tiles = (double(p.tokens_q) / 64 + double(p.batch)) * double(p.heads_q);
  if (largest > kMaxExtent || tiles >= 2147483648.0) {
    return Status::failure(StatusCode::kNotSupported, "tokens_q = %lld, tokens_k = %lld and %lld heads are more than 32 bits count",
                           (long long)p.tokens_q, (long long)p.tokens_k, (long long)p.heads_q);
  }
  return Status::success();
}

/// The largest number of heads of one KV head that a tile can pack: short queries then read K and V as rarely as possible.
int64_t choose_packed_heads_invariant(KernelInfo const& kernel, AttentionProblem const& p) {
  int64_t best = 1, group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 1;
  int64_t const most = std::min<int64_t>(kernel.tile_m, 64);  // a warpgroup's rows hold whole queries
  for (int64_t packed = 2; packed <= most && group % packed == 0; packed *= 2) {
    if (tiles_of(p, kernel.tile_m, packed) < tiles_of(p, kernel.tile_m, best)) best = packed;
  }
  return best;
}

constexpr double kMergeUs = 2.5;          // of the launch that folds splits
constexpr int64_t kMaxMergeCtas = 65535;  // of a sequence

/// Slots for the splits of sequences of at most split_rows packed rows, if they take no more memory and CTAs than they may.
bool make_slots(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device, int64_t split_rows, int64_t splits,
                AttentionPlan* plan) {
  constexpr double kMaxBytes = double(1 << 30), kMaxSharesOfMemory = 16.0;
  int64_t const packed = plan->packed_heads, rows = p.seqlen_q * packed, slot_rows = std::min<int64_t>(split_rows, kernel.tile_m);
  int64_t const tiles = p.varlen ? p.tokens_q * packed / kernel.tile_m + p.batch : p.batch * ((rows + kernel.tile_m - 1) / kernel.tile_m);
  double const slots = double(tiles) * double(p.heads_q / packed) * double(splits);
  double const bytes = slots * double(slot_rows) * double(kernel.head_dim_v + 2) * 4.0;
  double const limit = device.memory_bytes > 0 ? std::min(kMaxBytes, double(device.memory_bytes) / kMaxSharesOfMemory) : kMaxBytes;
  if (bytes > limit || slots > double(kMaxItems) || (split_rows / packed * p.heads_q + 7) / 8 > kMaxMergeCtas) return false;
  plan->split_rows = split_rows;
  plan->max_splits = splits;
  plan->slot_rows = slot_rows;
  plan->partial_slots = int64_t(slots);
  return true;
}

/// Chooses which sequences' splits are computed by CTAs of their own: whatever is chosen has the same bits.
void plan_splits(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device, AttentionPlan* plan) {
  constexpr int64_t kShortRows = 16;  // beside longer sequences
  constexpr double kFold = 0.14;      // of the time of a tile, for the totals over its splits in shared memory
  int64_t const split = split_keys_of(kernel.tile_n), packed = plan->packed_heads, rows = p.seqlen_q * packed;
  plan->predicted_us = predict_us(kCostModel, kernel, with_last_page(p, kFullPage), device);
  if (!has_splits(kernel.tile_k)) return;
  plan->split_keys = split;
  int64_t splits = (p.seqlen_k + split - 1) / split;
  if (p.window_left >= 0) splits = std::min(splits, (p.window_left + p.seqlen_q + split - 1) / split + 1);
  if (splits <= 1 || p.batch == 0 || p.heads_q == 0) return;
  // Every split as a sequence of its own, and what is written and read of each item in addition.
  AttentionProblem items = p;
  items.batch *= splits, items.tokens_q *= splits, items.pages *= splits;
  items.seqlen_k = std::min(split, p.seqlen_k);
  items.window_left = items.window_right = -1;  // most of them are not on the edge of a mask
  if (!is_for_few_rows(kernel)) plan->predicted_us *= 1.0 + kFold * double(splits - 1) / double(splits);
  double const item_rows = double(std::min<int64_t>(rows, kernel.tile_m));
  double const partial_bytes = tiles_of(p, kernel.tile_m, packed) * double(splits) * item_rows * kernel.head_dim_v * 4.0;
  CostModel model = kCostModel;
  model.residual_us /= double(splits);  // the last split alone has it
  double const items_us = predict_us(model, kernel, items, device) + 2.0 * partial_bytes / device.read_bandwidth + kMergeUs;
  bool const mixed = !is_for_few_rows(kernel) && !(items_us < plan->predicted_us);
  if (mixed && (!p.varlen || !p.cached || p.batch == 1 || rows <= kShortRows)) return;
  if (make_slots(kernel, p, device, mixed ? std::max(kShortRows, packed) : rows, splits, plan) && !mixed) plan->predicted_us = items_us;
}

/// Outside of the batch-invariant mode: chooses into how many splits a sequence's keys are cut, so that few tiles of queries fill the SMs,
/// and predicts how long that takes. The plan's split_count stays 0 where there are tiles enough, or keys too few.
void plan_split_count(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device, AttentionPlan* plan) {
  constexpr int kMaxWaves = 3;
  constexpr double kLaunchesUs = 4.5;  // that a division takes beside the bytes of its partials (H200, 32 to 256 queries)
  int64_t const packed = plan->packed_heads, rows = p.seqlen_q * packed;
  int64_t const seen = p.window_left < 0 ? p.seqlen_k : std::min(p.seqlen_k, p.window_left + p.seqlen_q);
  int64_t const blocks = (seen + kernel.tile_n - 1) / kernel.tile_n;
  double const tiles = tiles_of(p, kernel.tile_m, packed);
  plan->predicted_us = HUGE_VAL;
  if (p.batch == 0 || p.heads_q == 0 || tiles > double(device.sm_count)) return;
  int64_t best = 0;
  for (int waves = 1; waves <= kMaxWaves; ++waves) {
    int64_t const count = std::min(int64_t(waves * device.sm_count / tiles), blocks / kLeastSplitBlocks);
    if (count <= std::max<int64_t>(best, 1)) continue;
    AttentionProblem items = p;  // every split as a sequence of its own
    items.batch *= count, items.tokens_q *= count, items.pages *= count;
    items.seqlen_k = (blocks + count - 1) / count * kernel.tile_n;
    items.window_left = items.window_right = -1;
    double const partial_bytes = tiles * double(count) * double(std::min<int64_t>(rows, kernel.tile_m) * kernel.head_dim_v) * 4.0;
    double const us = predict_us(kCostModel, kernel, items, device) + 2.0 * partial_bytes / device.read_bandwidth + kLaunchesUs;
    if (us < plan->predicted_us) plan->predicted_us = us, best = count;
  }
  if (best == 0) return;
  // With a window, what is seen need not begin where a split does, and takes one more.
  if (make_slots(kernel, p, device, rows, best + (p.window_left < 0 ? 0 : 1), plan)) plan->split_count = best;
}

/// Whether CTAs take their tiles from a counter, which a memset of 2 to 3 us clears in front of the launch. Up to two tiles a CTA, the
/// longest first, are the same ones without it where the second ones are taken in reverse (tile_scheduler.cuh).
bool wants_counter(KernelInfo const& kernel, AttentionProblem const& p, int64_t packed_heads, DeviceProperties const& device) {
  double const most = (converts(kernel) ? 1.0 : 2.0) * double(device.sm_count);
  return !tiles_cost_the_same(p) && (p.varlen || tiles_of(p, kernel.tile_m, packed_heads) > most);
}

/// What every plan has.
AttentionPlan plan_with(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  AttentionPlan plan;
  plan.kernel = &kernel;
  plan.floor_us = floor_us(p, device);
  // A box lies within a page; where scales belong to tokens, within the one page of a contiguous sequence, too.
  bool const within = p.paged || p.kv_format == WeightFormat::kInt8 || p.kv_format == WeightFormat::kInt4;
  plan.box_rows = within ? std::gcd(int64_t(kernel.tile_n), p.page_size) : kernel.tile_n;
  return plan;
}

AttentionPlan describe(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  AttentionPlan plan = plan_with(kernel, p, device);
  if (splits_keys(kernel)) {
    plan.row_tiles = rows_of(p) <= 8 ? 1 : kernel.tile_m / 8;
    int64_t const rows = 8 * plan.row_tiles;
    int64_t const tiles = p.varlen ? p.batch + p.tokens_q * (p.heads_q / p.heads_kv) / rows : p.batch * ((rows_of(p) + rows - 1) / rows);
    plan.min_key_blocks = std::max<int64_t>(kMinSplitKeys / kernel.tile_n, 1);
    int64_t const workers = workers_of(kernel, device);
    plan.lockstep = choose_lockstep(p, workers);
    int64_t const units = tiles * p.heads_kv / plan.lockstep, ranges = workers / plan.lockstep;
    plan.ctas = (p.num_splits > 0 ? std::clamp<int64_t>(units * p.num_splits, 1, ranges) : ranges) * plan.lockstep;
    plan.partial_slots = p.num_splits > 0 ? units * p.num_splits * plan.lockstep : plan.ctas;
    // With one split, an output tile has no partials.
    plan.workspace_bytes = p.num_splits == 1 ? 0 : size_t(plan.partial_slots * rows * (kernel.tile_k / 64) * kPacketsOfPartial * 16);
    plan.predicted_us = std::max(predict_us(kCostModel, kernel, with_last_page(p, kFullPage), device), plan.floor_us);
    return plan;
  }
  plan.packed_heads = is_invariant(kernel) ? choose_packed_heads_invariant(kernel, p) : choose_packed_heads(kernel, p);
  if (is_invariant(kernel)) {
    plan_splits(kernel, p, device, &plan);
    plan.predicted_us = std::max(plan.predicted_us, plan.floor_us);
    bool const all_divided = plan.split_rows >= p.seqlen_q * plan.packed_heads;  // items that cost the same
    plan.counted = !all_divided && wants_counter(kernel, p, plan.packed_heads, device);
    plan.workspace_bytes = split_workspace_of(kernel, plan, device).bytes;
    return plan;
  }
  plan.predicted_us = std::max(predict_us(kCostModel, kernel, with_last_page(p, kFullPage), device), plan.floor_us);
  plan.counted = wants_counter(kernel, p, plan.packed_heads, device);
  if (kernel.arch < 90) {  // a CTA for each tile where the host knows their number; else persistent CTAs and a counter
    constexpr double kMaxCtas = double(1 << 20);
    plan.counted = p.varlen;
    plan.ctas = p.varlen ? workers_of(kernel, device) : int64_t(std::clamp(tiles_of(p, kernel.tile_m, plan.packed_heads), 1.0, kMaxCtas));
  }
  plan.workspace_bytes = plan.counted ? kCounterBytes : 0;
  return plan;
}

/// A plan of a batch-invariant kernel outside of that mode; split_count is 0 where it is of no use.
AttentionPlan describe_divided(KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  AttentionPlan plan = plan_with(kernel, p, device);
  plan.packed_heads = choose_packed_heads_invariant(kernel, p);
  plan_split_count(kernel, p, device, &plan);
  plan.predicted_us = std::max(plan.predicted_us, plan.floor_us);
  plan.workspace_bytes = split_workspace_of(kernel, plan, device).bytes;
  return plan;
}

/// Refuses splits whose partials would take more memory than they may.
Status check_splits(AttentionPlan const& plan, AttentionProblem const& p, DeviceProperties const& device) {
  double const bytes = double(plan.workspace_bytes), max_bytes = kMaxMemoryFraction * double(device.memory_bytes);
  if (p.num_splits == 0 || device.memory_bytes == 0 || bytes <= max_bytes) return Status::success();
  constexpr double kGiB = double(1 << 30);
  return Status::failure(StatusCode::kNotSupported,
                         "num_splits = %lld would take a workspace of %.1f GiB for the parts of %lld tokens and %lld KV heads, more than a "
                         "quarter of the device's %.1f GiB; with these it can be at most %lld",
                         (long long)p.num_splits, bytes / kGiB, (long long)p.tokens_q, (long long)p.heads_kv,
                         double(device.memory_bytes) / kGiB, (long long)std::max(1.0, max_bytes * double(p.num_splits) / bytes));
}

/// Whether the kernel is considered where none is named. A given number of splits holds whatever the batch is.
bool considered(KernelInfo const& kernel, AttentionProblem const& p) {
  return is_invariant(kernel) == p.batch_invariant && !is_dividing(kernel) && (p.num_splits == 0 || splits_keys(kernel));
}

/// Whether the kernel can divide keys among CTAs that each compute a tile of many rows. Most of them are those of the batch-invariant mode.
bool divides(KernelInfo const& kernel, AttentionProblem const& p) {
  if (p.batch_invariant || p.num_splits > 0 || !has_splits(kernel.tile_k)) return false;
  return is_dividing(kernel) || (is_invariant(kernel) && !is_for_few_rows(kernel));
}

/// The range of the family's kernels in the registry, so that a call does not look at the others, which are several times as many.
struct Candidates {
  KernelInfo const *begin, *end;
};
Candidates const& candidates_of_family() {
  static Candidates const found = [] {
    int64_t count = 0;
    KernelInfo const* begin = registry(&count);
    KernelInfo const* end = begin + count;
    auto const ours = [](KernelInfo const& kernel) { return std::strcmp(kernel.family, "attention") == 0; };
    while (begin != end && !ours(*begin)) ++begin;
    while (begin != end && !ours(end[-1])) --end;
    return Candidates{begin, end};
  }();
  return found;
}

}  // namespace

}  // namespace attention

// The compiler's comparison takes in every member, also one that is added later: cached plans depend on that.
bool AttentionProblem::operator==(AttentionProblem const&) const = default;

Status plan_attention(AttentionProblem const& problem, DeviceProperties const& device, AttentionPlanOptions const& options,
                      AttentionPlan* plan) {
  using namespace attention;
  *plan = AttentionPlan{};
  if (Status status = check(problem); !status.ok()) return status;
  if (options.kernel != nullptr) {
    KernelInfo const* kernel = find_kernel(options.kernel);
    if (kernel == nullptr) return Status::failure(StatusCode::kUnknownKernel, "kernel '%.90s' is not in the registry", options.kernel);
    if (char const* why = illegal(*kernel, problem, device)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", kernel->name, why);
    }
    if (options.only_runnable && !has_code(*kernel, device)) {
      return Status::failure(StatusCode::kNotCompiled, "kernel %s is in the table but not in this build (archs: %s)", kernel->name,
                             build_archs()[0] ? build_archs() : "none");
    }
    *plan = describe(*kernel, problem, device);
    plan->source = PlanSource::kOverride;
    std::snprintf(plan->reason, sizeof(plan->reason), "asked for by name");
    return check_splits(*plan, problem, device);
  }
  int candidates = 0;
  auto const [begin, end] = candidates_of_family();
  // Times as predicted, whatever the floor is: below it they still rank kernels.
  struct Candidate {
    KernelInfo const* kernel;
    double full_us, empty_us;
  };
  std::vector<Candidate> found;  // of the newest architecture: sm_90's kernels before portable ones
  found.reserve(16);
  std::vector<KernelInfo const*> few;       // kernels for few rows, of the same key blocks as one of `found`
  std::vector<KernelInfo const*> dividing;  // outside of the batch-invariant mode, those of it
  for (KernelInfo const* at = begin; at != end; ++at) {
    KernelInfo const& kernel = *at;
    if (illegal(kernel, problem, device) != nullptr) continue;
    if (options.only_runnable && !has_code(kernel, device)) continue;
    if (divides(kernel, problem)) dividing.push_back(&kernel);
    if (!considered(kernel, problem)) continue;
    if (is_for_few_rows(kernel)) {  // none without the kernel whose blocks it has, which some builds leave out
      few.push_back(&kernel);
      continue;
    }
    ++candidates;
    if (!found.empty() && kernel.arch > found[0].kernel->arch) found.clear();
    if (found.empty() || kernel.arch == found[0].kernel->arch) found.push_back({&kernel, 0.0, 0.0});
  }
  // Of split-KV kernels the smallest that has the head dimensions: another one would only read as much, and with a given number of splits
  // the bits of a sequence would depend on what else is in the batch if that decided between them.
  int32_t least_k = INT32_MAX;
  for (Candidate const& c : found) least_k = splits_keys(*c.kernel) ? std::min(least_k, c.kernel->tile_k) : least_k;
  std::erase_if(found, [&](Candidate const& c) { return splits_keys(*c.kernel) && c.kernel->tile_k > least_k; });
  if (problem.batch_invariant && !found.empty()) {
    // The key blocks by the head dimensions alone: with others the bits would be others. Of the kernels that have them the one that is
    // expected to be fastest; few rows take one of their own.
    auto const smaller = [](Candidate const& a, Candidate const& b) {
      return std::pair(a.kernel->tile_k, a.kernel->head_dim_v) < std::pair(b.kernel->tile_k, b.kernel->head_dim_v);
    };
    KernelInfo const& whole = *std::min_element(found.begin(), found.end(), smaller)->kernel;
    auto const has_blocks_of_whole = [&](KernelInfo const& kernel) {
      return kernel.tile_k == whole.tile_k && kernel.tile_n == whole.tile_n && kernel.head_dim_v == whole.head_dim_v;
    };
    *plan = describe(whole, problem, device);
    for (Candidate const& c : found) {
      if (c.kernel == &whole || !has_blocks_of_whole(*c.kernel)) continue;
      AttentionPlan const other = describe(*c.kernel, problem, device);
      if (other.predicted_us < plan->predicted_us) *plan = other;
    }
    int64_t const packed = plan->packed_heads;
    for (KernelInfo const* at : few) {
      KernelInfo const& kernel = *at;
      if (!has_blocks_of_whole(kernel) || problem.seqlen_q * packed > kFewRows) continue;
      *plan = describe(kernel, problem, device);
    }
    char divided[128] = "; all keys are one split";
    if (plan->split_rows > 0) {
      std::snprintf(divided, sizeof(divided), ", splits of %lld keys; of sequences with up to %lld rows each has a CTA of its own",
                    (long long)plan->split_keys, (long long)plan->split_rows);
    } else if (plan->split_keys > 0) {
      std::snprintf(divided, sizeof(divided), ", splits of %lld keys", (long long)plan->split_keys);
    }
    std::snprintf(plan->reason, sizeof(plan->reason), "batch-invariant: key blocks by head dimensions and cache alone%s", divided);
    return Status::success();
  }
  AttentionProblem const full = with_last_page(problem, kFullPage), empty = with_last_page(problem, kEmptyPage);
  bool const differ = full.seqlen_k != empty.seqlen_k;
  double least_full_us = HUGE_VAL, least_empty_us = HUGE_VAL, least_loss = HUGE_VAL;
  for (Candidate& c : found) {
    c.full_us = predict_us(kCostModel, *c.kernel, full, device);
    c.empty_us = differ ? predict_us(kCostModel, *c.kernel, empty, device) : c.full_us;
    least_full_us = std::min(least_full_us, c.full_us);
    least_empty_us = std::min(least_empty_us, c.empty_us);
  }
  KernelInfo const* best = nullptr;
  for (Candidate const& c : found) {
    double const loss = c.full_us / least_full_us + c.empty_us / least_empty_us;
    if (loss >= least_loss) continue;
    least_loss = loss;
    best = c.kernel;
  }
  if (candidates == 0) {
    return Status::failure(
        StatusCode::kNotSupported,
        "no kernel %s computes %sattention of %s with head dimensions %lld and %lld over %s keys on compute capability %d.%d (archs of the "
        "build: %s)",
        options.only_runnable ? "of this build" : "of the table", problem.batch_invariant ? "batch-invariant " : "", name_of(problem.type),
        (long long)problem.head_dim, (long long)problem.head_dim_v,
        problem.kv_format == WeightFormat::kDense ? "16-bit" : name_of(problem.kv_format), device.compute_major, device.compute_minor,
        build_archs()[0] ? build_archs() : "none");
  }
  *plan = describe(*best, problem, device);
  std::snprintf(plan->reason, sizeof(plan->reason), "least expected loss of %d candidates: %.1f us, floor %.1f us", candidates,
                plan->predicted_us, plan->floor_us);
  // Decode and drafts keep a split-KV kernel: graphs hold plans of calls with as many keys as there is room for; over fewer it is faster.
  bool const drafts = problem.seqlen_q <= kDrafts && rows_of(problem) <= kFewRows;
  if (splits_keys(*best) && (drafts || rows_of(problem) <= best->tile_m)) dividing.clear();
  auto const has_longer_blocks = [&](KernelInfo const& kernel) {  // another one for the same tile, beside the mode's
    return is_invariant(kernel) && std::ranges::any_of(dividing, [&](KernelInfo const* other) {
             return is_dividing(*other) && other->tile_m == kernel.tile_m && other->tile_k == kernel.tile_k;
           });
  };
  for (KernelInfo const* kernel : dividing) {
    constexpr double kMargin = 0.9;  // of a prediction that has more parts
    if (has_longer_blocks(*kernel)) continue;
    AttentionPlan const divided = describe_divided(*kernel, problem, device);
    if (divided.split_count == 0 || divided.predicted_us >= (plan->split_count > 0 ? 1.0 : kMargin) * plan->predicted_us) continue;
    *plan = divided;
    std::snprintf(plan->reason, sizeof(plan->reason), "few tiles over many keys: %lld splits of each sequence, %.1f us, floor %.1f us",
                  (long long)plan->split_count, plan->predicted_us, plan->floor_us);
  }
  return check_splits(*plan, problem, device);
}

Status run_attention(AttentionPlan const& plan, AttentionProblem const& problem, AttentionOperands const& operands,
                     DeviceProperties const& device, void* workspace, size_t workspace_bytes, Stream stream) {
  if (problem.tokens_q == 0 || problem.heads_q == 0) return Status::success();
  if (plan.kernel == nullptr || plan.kernel->launch == nullptr) {
    return Status::failure(StatusCode::kNotCompiled, "the plan's kernel is not in this build");
  }
  if (workspace_bytes < plan.workspace_bytes) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", workspace_bytes,
                           plan.workspace_bytes);
  }
  if (Status status = bind_context(device); !status.ok()) return status;
  attention::AttentionLaunchArguments const arguments{
      &plan, &problem, &operands, &device, workspace, next_nonce(), programmatic_launch_enabled(), stream};
  return reinterpret_cast<attention::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
