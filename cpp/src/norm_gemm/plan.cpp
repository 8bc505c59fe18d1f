// Whether norm and GEMM are one launch or two, and which kernel one launch is of.
//
// One launch saves a launch, the row kernel's turn and the trip of the normalised rows through memory: about 1.5 us of which dependent
// launches hide a part. It costs that every CTA computes the norms of all rows, which grows with m k, and that the GEMM is the one kernel
// here instead of the best of many, which matters the more the longer the GEMM takes. Hence the rules: a token, a weight that is read in
// a few times the time that is saved, and a tile for each SM. On an H100, in us, one launch and two operators with a residual:
//
//   k x n          1 token        2 tokens       4 tokens       8 tokens
//   3584 x 3584    12.4 | 13.8    12.8 | 13.3    13.6 | 12.5    15.4 | 12.1
//   4096 x 4096    14.0 | 14.8    14.6 | 14.5    15.3 | 14.2    18.1 | 17.4
//   4096 x 6144    19.5 | 19.0    20.0 | 19.5    20.7 | 20.3    23.4 | 20.7
//
// A B that is constant is read by the GEMM of two launches while the norm, and what is in front of it, still run; one launch reads it in
// its turn. A step of one token is 5 to 6 us a layer shorter with two launches then (gpt-oss-20b, Qwen2.5-7B), or as long (Qwen3-30B-A3B).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "common/nonce.h"
#include "norm_gemm/norm_gemm_params.h"

namespace minfer {

namespace {

using norm_gemm::kTileColumns;
using norm_gemm::kUnit;

constexpr int64_t kMostTokens = 1;            // for which one launch is chosen
constexpr int64_t kMostRowBytes = 128 << 10;  // of x, which every CTA loads and normalises
constexpr double kMostWeightUs = 13.0;        // that the weight takes at the device's read bandwidth
constexpr int64_t kManyWarpsUnits = 64;       // from this many units of k on, 16 warps share a tile instead of 8
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;
constexpr int32_t kDependentLaunches = 90;  // the compute capability from which launches overlap

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_of_family(KernelInfo const& kernel) { return std::strcmp(kernel.family, "norm_gemm") == 0; }
int64_t warps_of(KernelInfo const& kernel) { return kernel.threads / 32; }
int64_t smem_of(KernelInfo const& kernel, NormGemmProblem const& p) { return kernel.smem_bytes + norm_gemm::activation_bytes(p.m, p.k); }

/// Why no kernel computes the problem in one launch, or null.
char const* unfit(NormGemmProblem const& p) {
  if (p.m < 1 || p.n < 1 || p.k < 1) return "there must be something to multiply";
  if (p.b_major != Major::kK) return "b must be contiguous along k, as weight.t() is";
  if (p.k % 8 != 0) return "k must be a multiple of 8";
  if (!p.vectors) return "x, residual, norm_weight and b must begin at multiples of 16 bytes, and so must their rows";
  if (!p.even_rows) return "rows of x and of residual must be evenly spaced";
  return nullptr;
}

/// Why this one does not, or null.
char const* unfit(KernelInfo const& kernel, NormGemmProblem const& p, DeviceProperties const& device) {
  if (char const* why = unfit(p)) return why;
  if (kernel.ab_type != p.type) return "its numbers are of another type";
  if (p.m > kernel.tile_m) return "it takes fewer tokens";
  if (device.compute_capability() < kernel.arch) return "the device is older than the kernel";
  if (smem_of(kernel, p) > device.smem_per_block) return "the normalised rows do not fit into shared memory";
  return nullptr;
}

/// The family's kernels; calls do not look through the whole registry.
std::vector<KernelInfo const*> const& kernels_of_family() {
  static std::vector<KernelInfo const*> const found = [] {
    std::vector<KernelInfo const*> result;
    int64_t count = 0;
    KernelInfo const* kernels = registry(&count);
    for (int64_t i = 0; i < count; ++i) {
      if (is_of_family(kernels[i])) result.push_back(&kernels[i]);
    }
    return result;
  }();
  return found;
}

/// The kernel of one launch where none is given: as many tokens as are needed, and 16 warps where each gets several units of k.
KernelInfo const* best(NormGemmProblem const& p, DeviceProperties const& device, bool only_runnable) {
  int64_t const warps = ceil_divide(p.k, kUnit) >= kManyWarpsUnits ? 16 : 8;
  auto const better = [&](KernelInfo const& a, KernelInfo const& b) {
    if (a.tile_m != b.tile_m) return a.tile_m < b.tile_m;
    return (warps_of(a) == warps) > (warps_of(b) == warps);
  };
  KernelInfo const* found = nullptr;
  for (KernelInfo const* kernel : kernels_of_family()) {
    if ((only_runnable && kernel->launch == nullptr) || unfit(*kernel, p, device) != nullptr) continue;
    if (found == nullptr || better(*kernel, *found)) found = kernel;
  }
  return found;
}

/// Why two launches are expected to be faster, or null.
char const* slower(NormGemmProblem const& p, DeviceProperties const& device) {
  if (p.m > kMostTokens) return "every CTA would normalise all rows";
  if (p.b_is_constant && device.compute_capability() >= kDependentLaunches) return "constant weights are read while the norm runs";
  if (2 * p.m * p.k > kMostRowBytes) return "every CTA would normalise long rows";
  if (ceil_divide(p.n, kTileColumns) < device.sm_count) return "there are fewer tiles than SMs";
  if (double(2 * p.n) * double(p.k) > kMostWeightUs * device.read_bandwidth) return "a launch is little beside reading the weight";
  return nullptr;
}

void set_launch(NormGemmProblem const& p, DeviceProperties const& device, KernelInfo const* kernel, NormGemmPlan* plan) {
  constexpr int64_t kReserved = 1024;  // of an SM's shared memory, for each CTA
  plan->kernel = kernel;
  plan->smem_bytes = int32_t(smem_of(*kernel, p));
  int64_t const fit = (device.smem_per_block + kReserved) / (plan->smem_bytes + kReserved);
  int64_t const resident = std::clamp<int64_t>(fit, 1, kernel->ctas_per_sm);
  plan->ctas = int32_t(std::min(ceil_divide(p.n, kTileColumns), std::max<int64_t>(device.sm_count, 1) * resident));
  plan->workspace_bytes = p.has_residual ? size_t(plan->ctas) * sizeof(uint64_t) : 0;
}

Status check(NormGemmProblem const& p) {
  if (p.type != DataType::kF16 && p.type != DataType::kBF16) {
    return Status::failure(StatusCode::kInvalidArgument, "numbers must be of 16 bits, got %s", name_of(p.type));
  }
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent) {
    return Status::failure(StatusCode::kInvalidArgument, "sizes must be 0 to %lld, got m = %lld, n = %lld, k = %lld", (long long)kMaxExtent,
                           (long long)p.m, (long long)p.n, (long long)p.k);
  }
  if (p.gated && p.n % (2 * 8) != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "n must be a multiple of 16 where gated, got %lld", (long long)p.n);
  }
  return Status::success();
}

}  // namespace

Status plan_norm_gemm(NormGemmProblem const& problem, DeviceProperties const& device, NormGemmPlanOptions const& options,
                      NormGemmPlan* plan) {
  *plan = NormGemmPlan{};
  if (Status const status = check(problem); !status.ok()) return status;
  auto const because = [&](PlanSource source, char const* text) {
    plan->source = source;
    std::snprintf(plan->reason, sizeof(plan->reason), "%s", text);
    return Status::success();
  };
  if (problem.batch_invariant) {
    if (options.kernel != nullptr || options.launches == Launches::kOne) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "one launch is not batch invariant: it is of few rows alone and adds up k in an order of its own");
    }
    return because(PlanSource::kAnalytic, "batch invariant: one launch is of few rows alone and adds up k in an order of its own");
  }
  if (options.kernel != nullptr) {
    KernelInfo const* const kernel = find_kernel(options.kernel);
    if (kernel == nullptr || !is_of_family(*kernel)) {
      return Status::failure(StatusCode::kUnknownKernel, "kernel '%.90s' is not in the registry of norm_gemm", options.kernel);
    }
    if (char const* why = unfit(*kernel, problem, device)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", kernel->name, why);
    }
    if (options.only_runnable && kernel->launch == nullptr) {
      return Status::failure(StatusCode::kNotCompiled, "kernel %s is not in this build", kernel->name);
    }
    set_launch(problem, device, kernel, plan);
    return because(PlanSource::kOverride, "one launch, by name");
  }
  if (options.launches == Launches::kTwo) return because(PlanSource::kOverride, "two launches, by name");
  KernelInfo const* const kernel = best(problem, device, options.only_runnable);
  if (options.launches == Launches::kOne) {
    if (kernel == nullptr) {
      char const* const why = unfit(problem);
      return Status::failure(StatusCode::kInvalidArgument, "no kernel computes this problem in one launch: %s",
                             why != nullptr ? why : "too many tokens, or rows that do not fit into shared memory");
    }
    set_launch(problem, device, kernel, plan);
    return because(PlanSource::kOverride, "one launch, by name");
  }
  if (kernel == nullptr) {
    char const* const why = unfit(problem);
    return because(PlanSource::kAnalytic, why != nullptr ? why : "no kernel takes so many tokens, or rows so long");
  }
  if (char const* why = slower(problem, device)) return because(PlanSource::kAnalytic, why);
  set_launch(problem, device, kernel, plan);
  return because(PlanSource::kAnalytic, "one token, and a launch is much beside reading the weight");
}

Status run_norm_gemm(NormGemmPlan const& plan, NormGemmProblem const& problem, NormGemmOperands const& operands,
                     DeviceProperties const& device, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream) {
  if (plan.kernel == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the plan has two launches, which run_rows and run_gemm are");
  if (plan.kernel->launch == nullptr) return Status::failure(StatusCode::kNotCompiled, "kernel %s is not in this build", plan.kernel->name);
  if (char const* why = unfit(*plan.kernel, problem, device)) {
    return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", plan.kernel->name, why);
  }
  if (workspace_bytes < plan.workspace_bytes || (plan.workspace_bytes > 0 && workspace == nullptr)) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "the workspace must have %zu bytes, got %zu", plan.workspace_bytes,
                           workspace_bytes);
  }
  norm_gemm::NormGemmLaunchArguments arguments{};
  norm_gemm::NormGemmParams& params = arguments.params;
  params.x = operands.x;
  params.residual = problem.has_residual ? operands.residual : nullptr;
  params.norm_weight = operands.norm_weight;
  params.b = operands.b;
  params.bias = operands.bias;
  params.d = operands.d;
  params.ldx = operands.ldx;
  params.ld_residual = operands.ld_residual;
  params.ldb = operands.ldb;
  params.ldd = operands.ldd;
  params.m = uint32_t(problem.m);
  params.n = uint32_t(problem.n);
  params.k = uint32_t(problem.k);
  params.tiles = uint32_t(ceil_divide(problem.n, kTileColumns));
  params.groups = uint32_t(ceil_divide(ceil_divide(problem.k, kUnit), warps_of(*plan.kernel) * plan.kernel->stages));
  params.pitch = uint32_t(norm_gemm::activation_pitch(problem.k));
  params.eps = operands.eps;
  params.weight_offset = operands.norm_weight != nullptr ? operands.weight_offset : 0.0f;
  params.activation = make_activation(operands.activation);
  params.gated = problem.gated;
  params.bias_f32 = operands.bias_type == DataType::kF32;
  params.read = static_cast<uint64_t*>(workspace);
  params.nonce = problem.has_residual ? next_nonce() : 0;
  arguments.ctas = plan.ctas;
  arguments.smem_bytes = plan.smem_bytes;
  arguments.smem_limit = device.smem_per_block;
  arguments.programmatic = programmatic;
  arguments.stream = stream;
  auto* const function = reinterpret_cast<Status (*)(norm_gemm::NormGemmLaunchArguments const&)>(const_cast<void*>(plan.kernel->launch));
  return function(arguments);
}

}  // namespace minfer
