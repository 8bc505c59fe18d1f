// plan_gemm: explicit kernel, else tuned row, else the analytic model over every legal candidate. Always answers for a legal problem.
#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "gemm/candidates.h"
#include "gemm/invariant_splits.h"
#include "minfer/gemm.h"

namespace minfer {

namespace gemm {
namespace {

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;  // tile coordinates are 32-bit; leaves room for the last tile's overhang

Status check(GemmProblem const& p) {
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) {
    return Status::failure(StatusCode::kInvalidArgument, "sizes must not be negative, got m = %lld, n = %lld, k = %lld, batch = %lld",
                           (long long)p.m, (long long)p.n, (long long)p.k, (long long)p.batch);
  }
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent || p.batch > kMaxExtent) {
    return Status::failure(StatusCode::kNotSupported,
                           "an extent above %lld is not supported, got m = %lld, n = %lld, k = %lld, batch = %lld", (long long)kMaxExtent,
                           (long long)p.m, (long long)p.n, (long long)p.k, (long long)p.batch);
  }
  bool const narrow = has_8_bits(p);
  if (!narrow && p.ab_type != DataType::kF16 && p.ab_type != DataType::kBF16) {
    return Status::failure(StatusCode::kInvalidArgument, "A and B must be f16, bf16, e4m3 or s8, got %s", name_of(p.ab_type));
  }
  bool const f16 = p.d_type == DataType::kF16 || p.d_type == DataType::kBF16;
  if (!(narrow ? f16 : p.d_type == p.ab_type) && p.d_type != DataType::kF32) {
    return Status::failure(StatusCode::kInvalidArgument, "D must be %s or f32, got %s", narrow ? "f16, bf16" : name_of(p.ab_type),
                           name_of(p.d_type));
  }
  bool const e4m3 = p.ab_type == DataType::kE4M3, s8 = p.ab_type == DataType::kS8;
  if (((p.block_scaled || p.fast_accum) && !e4m3) || (p.d_int32 && !s8)) {
    return Status::failure(StatusCode::kInvalidArgument, "block scales and fast accumulation are of e4m3, a D of int32 is of s8, got %s",
                           name_of(p.ab_type));
  }
  if (p.d_int32 && (p.gated || p.has_c || p.d_fp8)) {
    return Status::failure(StatusCode::kInvalidArgument, "a D of int32 holds the sums themselves");
  }
  if (p.b_format != WeightFormat::kDense) {
    int const fixed = fixed_group_of(p.b_format);
    bool const power = p.group_size >= 32 && (p.group_size & (p.group_size - 1)) == 0;
    if (p.group_size != 0 && (fixed != 0 ? p.group_size != fixed : !power)) {
      return Status::failure(StatusCode::kInvalidArgument, "group_size of %s must be %s, got %d", name_of(p.b_format),
                             fixed == 32   ? "32"
                             : fixed == 16 ? "16"
                                           : "0 (all of k) or a power of two from 32 on",
                             p.group_size);
    }
    bool const in_groups = p.group_size == 0 || p.group_size >= p.k || p.group_size % 128 == 0;
    if (narrow && (p.b_format != WeightFormat::kInt4 || p.has_zeros || !in_groups || p.block_scaled || p.fast_accum || p.d_int32)) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "beside an A of 8 bits, quantised weights must be int4 without zero points, in groups of a multiple of 128");
    }
    if (p.n % 8 != 0 || p.k % 8 != 0 || p.batch != 1) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "quantised weights need n and k to be multiples of 8 and batch 1, got %lld, %lld, %lld", (long long)p.n,
                             (long long)p.k, (long long)p.batch);
    }
  }
  if (p.gated && p.n % 16 != 0) {
    return Status::failure(StatusCode::kInvalidArgument,
                           "a gated GEMM needs n to be a multiple of 16 (blocks of 8 gate and 8 up columns), got n = %lld", (long long)p.n);
  }
  return Status::success();
}

void finish(GemmPlan* plan, KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
            double predicted_us) {
  plan->kernel = &kernel;
  plan->launch = launch;
  plan->workspace_bytes = problem.m == 0 || problem.n == 0 || problem.batch == 0
                              ? 0
                              : workspace_of(kernel, schedule_of(kernel, realigned(problem, launch), launch, device));
  if (size_t const copies = copies_bytes(problem, launch)) plan->workspace_bytes = (plan->workspace_bytes + 255) / 256 * 256 + copies;
  plan->floor_us = gemm_floor_us(problem, device);
  plan->predicted_us = std::max(predicted_us, plan->floor_us);
}

struct Pick {
  KernelInfo const* kernel = nullptr;
  GemmLaunch launch;
  double us = 0;                                             // predicted
  double weighed = std::numeric_limits<double>::infinity();  // the least of all candidates
  int64_t candidates = 0;
};

/// What the busiest SM has to do, relative to an even share of it all.
double busiest_share(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  if (launch.decomposition == Decomposition::kStreamK) return 1.0;
  TileSchedulerParams const schedule = schedule_of(kernel, problem, launch, device);
  int64_t const items = int64_t(schedule.tiles()) * schedule.splits, ctas = int64_t(kernel.cluster_m) * kernel.cluster_n;
  int64_t const of_worker = ceil_div(items, schedule.workers), workers_of_sm = ceil_div(schedule.workers * ctas, device.sm_count);
  return double(of_worker * workers_of_sm) * device.sm_count / double(items * ctas);
}

/// Whether whole tiles leave less than a third of the SMs idle in a first wave, or have several: what stream-K that continues sums may do
/// better. Of 16-bit weights and 16 rows, on an H200, in us, whole tiles and continued ones: 6144 x 4096 15.6 and 14.7, 10240 x 8192 43.6
/// and 40.1, 16384 x 3072 24.4 and 24.9; fewer tiles are chains of CTAs that wait for each other: 4096 x 4096 9.7 and 13.0.
bool may_be_continued(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  if (launch.decomposition != Decomposition::kDataParallel || problem.m <= kMostWholeRows) return false;
  return 3 * int64_t(schedule_of(kernel, problem, launch, device).tiles()) > 2 * int64_t(resident_workers(kernel, device));
}

/// What predictions of few rows are multiplied by. They are of launches by themselves. In a step of a model each launch begins, and loads
/// its first weights, under the end of the one in front of it, and then it counts more that all SMs have the same to load, and that the
/// next launch finds room beside this one. The factors are those with which the plans of the products of layers take least time in place:
/// of Llama-3.1-8B (1, 8 and 16 rows, int4; 1 and 16, FP8, also in the batch-invariant mode), Qwen2.5-7B and Llama-3.1-70B (1 row, int4)
/// on an H200. There a layer in FP8 takes 6 us less than by the predictions alone, of 91, and 4 in the mode; one in int4 2 us less, of 55,
/// in the mean. By themselves such launches are predicted to take 1 % more. Of 16-bit weights in the mode, it is predictions of whole tiles
/// that are too short.
/// At least 1.
double factor_in_place(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  constexpr int64_t kFewRows = 16;
  constexpr double kLeastUs = 1.0;
  constexpr double kUneven = 0.15, kTwoCtas = 1.06;            // two CTAs of one launch on an SM
  constexpr double kCooperative = 1.04, kTokensByRows = 1.25;  // 8 bits; the latter: the tokens are the MMA's rows
  bool const quantised = problem.b_format != WeightFormat::kDense, dense = !quantised && !has_8_bits(problem);
  if (problem.m > kFewRows || problem.m == 0 || problem.batch != 1 || kernel.arch < 90 || (dense && !problem.batch_invariant)) return 1.0;
  if (dense && !may_be_continued(kernel, problem, launch, device)) return 1.0;
  if (gemm_floor_us(problem, device) < kLeastUs) return 1.0;  // too little for it to matter which SM has what
  double const uneven = 1.0 + kUneven * (busiest_share(kernel, problem, launch, device) - 1.0);
  if (dense) return uneven;
  if (quantised) return uneven * (kernel.ctas_per_sm > 1 ? kTwoCtas : 1.0);
  return uneven * (kernel.schedule == Schedule::kCooperative ? kCooperative : 1.0) * (kernel.swap ? 1.0 : kTokensByRows);
}

/// The candidate with the least predicted time, of few rows in place.
Pick pick(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, Candidates candidates) {
  Pick best;
  if (has_dense_model(problem)) candidates.orders = Orders::kLater;
  // What is predicted to take longer than the best is weighed is not visited: factors are at least 1.
  for_each_candidate(problem, device, options, candidates, best.weighed,
                     [&](KernelInfo const& kernel, GemmLaunch const& launch, double us) {
                       ++best.candidates;
                       double const weighed = us * factor_in_place(kernel, problem, launch, device);
                       if (best.kernel != nullptr && weighed >= best.weighed) return;
                       best.kernel = &kernel;
                       best.launch = launch;
                       best.us = us;
                       best.weighed = weighed;
                     });
  if (best.kernel != nullptr && candidates.orders == Orders::kLater) choose_order(*best.kernel, problem, device, &best.launch);
  return best;
}

/// The candidates among which batch-invariant plans choose, for every m: those of one way to add up k, the first of these that any kernel
/// of the device has for operands of these types, and of invariant_splits ranges. Neither C, the epilogue nor how A lies in memory have a
/// say in it.
Candidates batch_invariant_candidates(GemmProblem problem, DeviceProperties const& device, GemmPlanOptions const& options) {
  Candidates candidates;
  candidates.splits = invariant_splits(problem);
  problem.m = kInvariantTile;
  problem.batch = 1;
  problem.has_c = problem.gated = problem.d_fp8 = false;
  problem.a_major = Major::kK;
  problem.a_alignment = 16;
  for (char const* sums : {"wgmma16", "mma16", "mma16_unaligned", "wgmma8", "mma8", "wgmma8_groups"}) {
    bool found = false;
    candidates.sums = sums;
    Candidates any = candidates;
    any.orders = Orders::kLater;
    double const bound = std::numeric_limits<double>::infinity();
    for_each_candidate(problem, device, options, any, bound, [&](KernelInfo const&, GemmLaunch const&, double) { found = true; });
    if (found) break;
  }
  return candidates;
}

/// Why a launch that was asked for adds up k in another way than batch-invariant plans do, or null.
char const* not_invariant(KernelInfo const& kernel, GemmLaunch const* launch, Candidates const& invariant) {
  if (std::strcmp(kernel.sums, invariant.sums) != 0)
    return "its kernel adds up k in another order than the kernels of other numbers of rows";
  if (continues_sums(kernel) && invariant.splits > 1) return "its CTAs continue sums, which are of several ranges of k";
  if (launch == nullptr) return nullptr;
  bool const split = launch->decomposition == Decomposition::kSplitK || launch->decomposition == Decomposition::kRanges;
  bool const cut = launch->decomposition == Decomposition::kStreamK && !continues_sums(kernel);
  if (cut || (split ? launch->splits : 1) != invariant.splits) {
    return "it cuts k in other ranges than the launches of other numbers of rows";
  }
  return nullptr;
}

/// Edit distance, for the names nearest to a misspelt one.
int distance(char const* a, char const* b) {
  size_t const n = std::strlen(b);
  std::vector<int> row(n + 1);
  for (size_t j = 0; j <= n; ++j) row[j] = int(j);
  for (size_t i = 1; a[i - 1] != 0; ++i) {
    int diagonal = row[0];
    row[0] = int(i);
    for (size_t j = 1; j <= n; ++j) {
      int const above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[n];
}

Status unknown_kernel(char const* name) {
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  std::vector<std::pair<int, char const*>> names;
  for (int64_t i = 0; i < count; ++i) {
    if (is_gemm(kernels[i])) names.emplace_back(distance(name, kernels[i].name), kernels[i].name);
  }
  std::sort(names.begin(), names.end());
  std::string nearest;
  for (size_t i = 0; i < names.size() && i < 3; ++i) nearest += (i ? ", " : "") + std::string(names[i].second);
  return Status::failure(StatusCode::kUnknownKernel, "kernel '%.90s' is not in the registry; nearest: %s", name, nearest.c_str());
}

/// k of a scale; 0 where one scale is that of all k, which a problem can state in several ways.
int64_t normal_group(int64_t group_size, int64_t k) { return group_size >= k || group_size < 0 ? 0 : group_size; }

/// Whether a tuned row applies to a problem: of its m, or of an m that is an eighth smaller at most and that its kernel covers with the
/// same tiles, with the same weight format and groups. For fewer tokens the model knows better. find_row considers the zero points.
bool matches(GemmTunedRow const& row, GemmProblem const& p) {
  if (row.n != p.n || row.k != p.k || row.batch != p.batch || row.ab_type != p.ab_type || row.a_major != p.a_major ||
      row.b_major != p.b_major || row.b_format != p.b_format || row.gated != p.gated || row.has_c != p.has_c || p.m > row.m) {
    return false;
  }
  if (p.b_format != WeightFormat::kDense && normal_group(row.group_size, row.k) != normal_group(p.group_size, p.k)) return false;
  if (p.m == row.m) return true;
  if (8 * p.m < 7 * row.m) return false;
  KernelInfo const* kernel = find_kernel(row.kernel);
  if (kernel == nullptr) return false;
  int64_t const tile = kernel->swap ? tile_columns(*kernel, row.launch) : kernel->tile_m;
  return ceil_div(p.m, tile) == ceil_div(row.m, tile);
}

/// The launch of a row, with the copies in front of it: rows are of contiguous operands, and those that its kernel cannot read were copied
/// when it was measured, no others.
GemmLaunch launch_of(GemmTunedRow const& row, KernelInfo const& kernel) {
  GemmLaunch launch = row.launch;
  if (row.b_format != WeightFormat::kDense || kernel.alignment < 16) return launch;
  bool const portable = kernel.arch < 90;
  auto const misplaced = [&](Major major, Major read, int64_t extent) {
    int64_t const contiguous = major == Major::kK ? row.k : extent, lines = major == Major::kK ? extent : row.k;
    return major != read || (contiguous % 8 != 0 && (lines > 1 || portable));
  };
  launch.realign_a = misplaced(row.a_major, kernel.a_major, row.m);
  launch.realign_b = misplaced(row.b_major, kernel.b_major, row.n);
  if (portable && row.k % 8 != 0) launch.realign_a = launch.realign_b = launch.realign_a || launch.realign_b;
  return launch;
}

/// Zero points do not rule a row out: kernels run the same instructions with and without them (symmetric weights subtract a constant
/// from the same registers), and the additional bytes, 2 for each group, 3 % with groups of 128, slow all candidates alike. A row that was
/// measured with zero points where the problem has them, or without where it has none, comes first.
GemmTunedRow const* find_row(GemmTunedRow const* rows, int64_t count, GemmProblem const& problem, GemmPlanOptions const& options,
                             DeviceProperties const& device) {
  GemmTunedRow const* best = nullptr;
  auto const better = [&](GemmTunedRow const& row) {
    if (best == nullptr) return true;
    bool const own = row.has_zeros == problem.has_zeros, best_own = best->has_zeros == problem.has_zeros;
    return own != best_own ? own : row.m < best->m;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!matches(rows[i], problem) || !better(rows[i])) continue;
    KernelInfo const* kernel = find_kernel(rows[i].kernel);
    if (kernel == nullptr || (options.only_runnable && kernel->launch == nullptr) || illegal(*kernel, rows[i].launch) != nullptr ||
        (options.force_arch != 0 && kernel->arch != options.force_arch)) {
      continue;
    }
    GemmLaunch const launch = launch_of(rows[i], *kernel);
    GemmProblem const own = realigned(problem, launch);
    if (illegal(problem, launch) != nullptr || illegal(*kernel, own, device) != nullptr || !fits(*kernel, own, launch)) continue;
    best = &rows[i];
  }
  return best;
}

}  // namespace
}  // namespace gemm

double gemm_bytes(GemmProblem const& p) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return 0.0;
  double const outputs = double(p.batch) * p.m * (p.gated ? p.n / 2 : p.n);
  double const element = size_of(p.ab_type);
  double const b_bytes = p.b_format == WeightFormat::kDense ? element * p.batch * double(p.n) * p.k : w4a16::weight_bytes(p);
  return element * p.batch * double(p.m) * p.k + b_bytes + outputs * (d_element_bytes(p) + (p.has_c ? size_of(p.d_type) : 0));
}

double gemm_floor_us(GemmProblem const& p, DeviceProperties const& device) {
  double const flops = 2.0 * p.batch * double(p.m) * p.n * p.k;
  return std::max(gemm_bytes(p) / device.read_bandwidth, flops / (device.matrix_rate * 2.0 / double(size_of(p.ab_type))));
}

// The compiler's comparison takes in every member, also one that is added later: cached plans depend on that.
bool GemmProblem::operator==(GemmProblem const&) const = default;
bool GemmLaunch::operator==(GemmLaunch const&) const = default;

Status plan_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plan) {
  using namespace gemm;
  *plan = GemmPlan{};
  if (Status status = check(problem); !status.ok()) return status;

  Candidates const candidates = problem.batch_invariant ? batch_invariant_candidates(problem, device, options) : Candidates{};
  if (options.kernel != nullptr) {
    KernelInfo const* kernel = find_kernel(options.kernel);
    if (kernel == nullptr) return unknown_kernel(options.kernel);
    if (problem.batch_invariant) {
      if (char const* why = not_invariant(*kernel, options.launch, candidates)) {
        return Status::failure(StatusCode::kInvalidArgument, "kernel %s is not batch invariant as it was asked for: %s", kernel->name, why);
      }
    }
    GemmLaunch const asked = options.launch != nullptr ? *options.launch : GemmLaunch{};
    if (char const* why = illegal(problem, asked)) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "kernel %s cannot be launched with decomposition=%s,realign_a=%d,realign_b=%d: %s", kernel->name,
                             name_of(asked.decomposition), asked.realign_a, asked.realign_b, why);
    }
    GemmProblem const own = realigned(problem, asked);
    if (char const* why = illegal(*kernel, own, device)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", kernel->name, why);
    }
    if (options.only_runnable && kernel->launch == nullptr) {
      return Status::failure(StatusCode::kNotCompiled, "kernel %s is in the table but not in this build (archs: %s)", kernel->name,
                             build_archs()[0] ? build_archs() : "none");
    }
    if (options.launch != nullptr) {
      if (char const* why = illegal(*kernel, *options.launch)) {
        return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot be launched with columns=%d: %s", kernel->name,
                               options.launch->columns, why);
      }
      if (!fits(*kernel, own, asked)) {
        return Status::failure(StatusCode::kNotSupported, "kernel %s needs more than 2^31 work items for this problem", kernel->name);
      }
      finish(plan, *kernel, problem, asked, device,
             predict_us(*kernel, own, asked, device, model_of(options, device)) +
                 predict_copies_us(problem, asked, device, model_of(options, device)));
    } else {
      double best_us = std::numeric_limits<double>::infinity();
      for_each_prediction(*kernel, problem, Copies{}, device, model_of(options, device), candidates, best_us,
                          [&](GemmLaunch const& launch, double us) {
                            if (us >= best_us && plan->kernel != nullptr) return;
                            best_us = us;
                            finish(plan, *kernel, problem, launch, device, us);
                          });
      if (plan->kernel == nullptr) {
        return Status::failure(StatusCode::kNotSupported, "kernel %s needs more than 2^31 work items for this problem", kernel->name);
      }
    }
    plan->source = PlanSource::kOverride;
    std::snprintf(plan->reason, sizeof(plan->reason), "asked for by name");
    return Status::success();
  }

  if (options.use_tuned && !problem.batch_invariant && problem.m > 0) {
    GemmTunedRow const* row = find_row(options.user_rows, options.user_row_count, problem, options, device);
    char const* table = "user table";
    if (row == nullptr) {
      int64_t count = 0;
      GemmTunedRow const* rows = shipped_gemm_rows(device.name, &count);
      row = find_row(rows, count, problem, options, device);
      table = "shipped table";
    }
    if (row != nullptr) {
      KernelInfo const& kernel = *find_kernel(row->kernel);
      finish(plan, kernel, problem, launch_of(*row, kernel), device, row->us);
      plan->predicted_us = row->us;
      plan->source = PlanSource::kTuned;
      char const* other = row->has_zeros == problem.has_zeros ? "" : row->has_zeros ? ", with zero points" : ", without zero points";
      std::snprintf(plan->reason, sizeof(plan->reason), "%s: fastest measured for m = %lld%s", table, (long long)row->m, other);
      return Status::success();
    }
  }

  Pick const best = pick(problem, device, options, candidates);
  if (best.kernel == nullptr) {
    return Status::failure(
        StatusCode::kNotSupported, "no kernel %s computes %s%s%s %lld x %lld x %lld on compute capability %d.%d (archs of the build: %s)",
        options.only_runnable ? "of this build" : "of the table", name_of(problem.ab_type),
        problem.b_format == WeightFormat::kDense ? "" : " with weights in ",
        problem.b_format == WeightFormat::kDense ? "" : name_of(problem.b_format), (long long)problem.m, (long long)problem.n,
        (long long)problem.k, device.compute_major, device.compute_minor, build_archs()[0] ? build_archs() : "none");
  }
  finish(plan, *best.kernel, problem, best.launch, device, best.us);
  plan->source = PlanSource::kAnalytic;
  char sums[64] = "";
  if (problem.batch_invariant) {
    std::snprintf(sums, sizeof(sums), " that add up k by %s in %d %s", candidates.sums, candidates.splits,
                  candidates.splits > 1 ? "ranges" : "range");
  }
  std::snprintf(plan->reason, sizeof(plan->reason), "least predicted time of %lld candidates%s: %.1f us, floor %.1f us",
                (long long)best.candidates, sums, plan->predicted_us, plan->floor_us);
  return Status::success();
}

Status enumerate_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plans,
                      int64_t capacity, int64_t* count) {
  using namespace gemm;
  *count = 0;
  if (Status status = check(problem); !status.ok()) return status;
  std::vector<GemmPlan> all;
  double const no_bound = std::numeric_limits<double>::infinity();
  Candidates candidates = problem.batch_invariant ? batch_invariant_candidates(problem, device, options) : Candidates{};
  candidates.orders = Orders::kAll;
  for_each_candidate(problem, device, options, candidates, no_bound, [&](KernelInfo const& kernel, GemmLaunch const& launch, double us) {
    all.emplace_back();
    finish(&all.back(), kernel, problem, launch, device, us);
  });
  std::stable_sort(all.begin(), all.end(), [](GemmPlan const& a, GemmPlan const& b) { return a.predicted_us < b.predicted_us; });
  *count = int64_t(all.size());
  for (int64_t i = 0; i < *count && i < capacity; ++i) plans[i] = all[size_t(i)];
  return Status::success();
}

}  // namespace minfer
