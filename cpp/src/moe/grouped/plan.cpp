// plan_grouped: explicit kernel, else the analytic model over every legal one. run_grouped.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/context.h"
#include "common/programmatic_launch.h"
#include "moe/grouped/cost_model.h"
#include "moe/grouped/launch.h"

namespace minfer {

namespace moe {
namespace {

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;
constexpr CostModel kCostModel{};

char const* illegal(KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device) {
  bool known = false;
  for (char const* family : {"moe", "moe_scaled", "moe_w4a16"}) known = known || std::strcmp(kernel.family, family) == 0;
  if (!known) return "it is not a grouped kernel";
  if (kernel.b_format != p.b_format) return "its weights have another format";
  if (quantised(p) && p.group_size > 0 && p.group_size < p.k && p.group_size % kernel.group_multiple != 0) {
    return "its groups are multiples of another size";
  }
  if (kernel.arch_exact ? device.compute_capability() != kernel.arch : device.compute_capability() < kernel.arch) {
    return "it does not run on this device's compute capability";
  }
  if (kernel.ab_type != p.type) return "it computes another element type";
  if (has_8_bits(p) && p.a_group > 0 && p.a_group < kernel.group_multiple) return "its scales of rows are of larger groups";
  if (kernel.smem_bytes > device.smem_per_block) return "it needs more shared memory than a block of this device has";
  bool const unaligned = p.a_alignment < 16 || p.b_alignment < 16;
  if (unaligned && (has_8_bits(p) ? p.k > 0 : kernel.arch >= 90)) return "an operand's pointer or stride is not a multiple of 16 bytes";
  if (kernel.arch >= 90) {
    if (!has_8_bits(p) && (p.k % 8 != 0 || p.k == 0)) return "k is not a positive multiple of 8";
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
  if (p.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "operands must be f16, bf16, e4m3 or s8, got f32");
  if (has_8_bits(p)) {
    if (p.d_type != DataType::kF16 && p.d_type != DataType::kBF16) {
      return Status::failure(StatusCode::kInvalidArgument, "d must be f16 or bf16, got %s", name_of(p.d_type));
    }
    if (p.a_group != 0 && p.a_group != 32 && p.a_group != 64 && p.a_group != 128) {
      return Status::failure(StatusCode::kInvalidArgument, "scales of a are of 128, 64 or 32 of k, got %d", p.a_group);
    }
    if (p.type == DataType::kS8 && (p.b_blocks || p.fast_accum || p.d_fp8)) {
      return Status::failure(StatusCode::kInvalidArgument, "scales of blocks, fast accumulation and e4m3 codes are of e4m3, got s8");
    }
    if (p.d_groups && (!p.gated || p.d_fp8)) {
      return Status::failure(StatusCode::kInvalidArgument, "codes with scales of their own are of gated products");
    }
  } else if (p.a_group != 0 || p.b_blocks || p.fast_accum || p.d_groups) {
    return Status::failure(StatusCode::kInvalidArgument, "scales are of operands of 8 bits, got %s", name_of(p.type));
  }
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
  plan.predicted_us = std::max(predict_us(kCostModel, kernel, problem, even_routing(problem), device, gather_first), plan.floor_us);
  plan.gather_first = gather_first;
  plan.workspace_bytes = gather_first ? size_t(problem.rows) * size_t(problem.k) * size_t(size_of(problem.type)) : 0;
  return plan;
}

/// Whether a launch of its own can gather the rows: it copies 16 bytes at a time.
bool can_gather_first(GroupedProblem const& p) { return p.gathered && p.k > 0 && p.k * size_of(p.type) % 16 == 0 && p.a_alignment == 16; }

/// In which way batch-invariant plans add up k: the first of these that any kernel has for the weight and operands of these types, wherever
/// a lies. Null: there is none.
char const* invariant_sums(GroupedProblem problem, DeviceProperties const& device, GroupedPlanOptions const& options) {
  problem.a_alignment = 16;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (char const* sums : {"wgmma16", "mma16", "wgmma8", "mma8"}) {
    for (int64_t i = 0; i < count; ++i) {
      KernelInfo const& kernel = kernels[i];
      if (std::strcmp(kernel.sums, sums) != 0 || (options.only_runnable && kernel.launch == nullptr) ||
          (options.force_arch != 0 && kernel.arch != options.force_arch)) {
        continue;
      }
      if (illegal(kernel, problem, device) == nullptr) return sums;
    }
  }
  return nullptr;
}

/// Columns that share a scale where a batch-invariant launch finds it (GroupedProblem::d_groups): kernels for a few tokens have no others.
constexpr int32_t kInvariantGroup = 32;

/// Why batch-invariant plans leave a kernel out, or null.
char const* not_invariant(KernelInfo const& kernel, GroupedProblem const& p, char const* sums) {
  if (sums == nullptr || std::strcmp(kernel.sums, sums) != 0) {
    return "it adds up k in another order than the kernels of other numbers of rows";
  }
  return p.d_groups && d_group_of(kernel) != kInvariantGroup ? "its codes have scales of more columns" : nullptr;
}

/// The plan that is expected to lose least against the fastest one of the routing that comes; returns how many there are. A portable kernel
/// only where no other computes the problem.
int choose(GroupedProblem const& problem, DeviceProperties const& device, GroupedPlanOptions const& options, GroupedPlan* best) {
  // Times as predicted, whatever the floor is: below it they still rank kernels.
  struct Candidate {
    KernelInfo const* kernel;
    bool gather_first;
    double even_us, zipf_us, same_us;
  };
  std::vector<Candidate> candidates;
  candidates.reserve(32);
  bool const can_copy = can_gather_first(problem);
  int64_t count = 0;
  int total = 0;
  char const* const sums = problem.batch_invariant ? invariant_sums(problem, device, options) : nullptr;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    KernelInfo const& kernel = kernels[i];
    if ((options.only_runnable && kernel.launch == nullptr) || (options.force_arch != 0 && kernel.arch != options.force_arch) ||
        illegal(kernel, problem, device) != nullptr) {
      continue;
    }
    if (problem.batch_invariant ? not_invariant(kernel, problem, sums) != nullptr : kernel.invariant_only) continue;
    total += can_copy ? 2 : 1;
    bool const native = kernel.arch >= 90, others_native = !candidates.empty() && candidates[0].kernel->arch >= 90;
    if (others_native && !native) continue;
    if (native && !others_native) candidates.clear();
    candidates.push_back({&kernel, false, 0.0, 0.0, 0.0});
    if (can_copy) candidates.push_back({&kernel, true, 0.0, 0.0, 0.0});
  }
  if (candidates.empty()) return 0;
  Routing const even = even_routing(problem), zipf = zipf_routing(kCostModel, problem), same = same_routing(kCostModel, problem);
  Candidate least{nullptr, false, HUGE_VAL, HUGE_VAL, HUGE_VAL};
  for (Candidate& c : candidates) {
    auto const us = [&](Routing const& routing) { return predict_us(kCostModel, *c.kernel, problem, routing, device, c.gather_first); };
    c.even_us = us(even), c.zipf_us = us(zipf), c.same_us = us(same);
    least.even_us = std::min(least.even_us, c.even_us);
    least.zipf_us = std::min(least.zipf_us, c.zipf_us);
    least.same_us = std::min(least.same_us, c.same_us);
  }
  double least_loss = HUGE_VAL;
  for (Candidate const& c : candidates) {
    double const loss = kCostModel.even_weight * c.even_us / least.even_us + kCostModel.zipf_weight * c.zipf_us / least.zipf_us +
                        kCostModel.same_weight * c.same_us / least.same_us;
    if (loss >= least_loss) continue;
    least_loss = loss;
    least.kernel = c.kernel;
    least.gather_first = c.gather_first;
  }
  *best = describe(*least.kernel, problem, device, least.gather_first);
  return total;
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

int32_t d_group_of(KernelInfo const& kernel) {
  int32_t const warpgroups = kernel.arch >= 90 ? kernel.threads / 128 - 1 : 1;  // that share a tile's rows
  return (kernel.swap ? kernel.tile_m / warpgroups : kernel.tile_n) / 2;
}

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
    if (problem.batch_invariant) {
      if (char const* why = not_invariant(*kernel, problem, invariant_sums(problem, device, options))) {
        return Status::failure(StatusCode::kInvalidArgument, "kernel %s is not batch invariant: %s", kernel->name, why);
      }
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
                           quantised(problem)    ? name_of(problem.b_format)
                           : has_8_bits(problem) ? "8-bit"
                                                 : "16-bit",
                           (long long)problem.n, device.compute_major, device.compute_minor, build_archs()[0] ? build_archs() : "none");
  }
  std::snprintf(plan->reason, sizeof(plan->reason),
                "least expected loss of %d candidates, whatever the routing; if even, %.1f us, floor %.1f us", count, plan->predicted_us,
                plan->floor_us);
  return Status::success();
}

Status run_grouped(GroupedPlan const& plan, GroupedProblem const& problem, GroupedOperands const& operands, DeviceProperties const& device,
                   void* workspace, size_t workspace_bytes, Stream stream) {
  if (problem.rows == 0 || problem.n == 0) return Status::success();
  if (plan.kernel == nullptr || plan.kernel->launch == nullptr) {
    return Status::failure(StatusCode::kNotCompiled, "the plan's kernel is not in this build");
  }
  if (problem.d_fp8 && operands.d_scale == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the problem's d has a scale, the operands do not");
  if (Status status = bind_context(device); !status.ok()) return status;
  GroupedProblem launched = problem;
  GroupedOperands rows = operands;
  bool const programmatic = programmatic_launch_enabled();
  if (plan.gather_first) {
    if (workspace_bytes < plan.workspace_bytes) {
      return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", workspace_bytes,
                             plan.workspace_bytes);
    }
    int64_t const bytes = size_of(problem.type);
    Status const status = moe::gather_rows(operands.a, operands.lda * bytes, operands.a_rows, operands.gather, problem.rows,
                                           problem.k * bytes, workspace, programmatic && device.compute_capability() >= 90, stream);
    if (!status.ok()) return status;
    launched.gathered = false;
    rows.gather = nullptr;
    rows.a = workspace;
    rows.lda = problem.k;
    rows.a_rows = problem.rows;
  }
  if (problem.d_groups && operands.d_scales == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the problem's d has scales of its own, the operands do not");
  moe::GroupedLaunchArguments const arguments{&launched, &rows, &device, operands.gather, operands.a_rows, programmatic, stream};
  return reinterpret_cast<moe::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
