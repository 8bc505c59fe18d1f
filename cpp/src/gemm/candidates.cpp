#include "gemm/candidates.h"

namespace minfer::gemm {

bool is_gemm(KernelInfo const& kernel) {
  for (char const* family : {"gemm", "scaled_gemm", "w4a16", "w4a8"}) {
    if (std::strcmp(kernel.family, family) == 0) return true;
  }
  return false;
}

char const* illegal(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device) {
  if (!is_gemm(kernel)) return "it is not a GEMM kernel";
  if (kernel.b_format != problem.b_format) return "it reads B in another format";
  if (kernel.arch_exact ? device.compute_capability() != kernel.arch : device.compute_capability() < kernel.arch) {
    return "it does not run on this device's compute capability";
  }
  if (kernel.ab_type != problem.ab_type) return "it computes another element type";
  if (problem.b_format != WeightFormat::kDense && problem.group_size > 0 && problem.group_size < problem.k &&
      problem.group_size % kernel.group_multiple != 0) {
    return "its scales are of larger groups";
  }
  if (kernel.a_major != problem.a_major || kernel.b_major != problem.b_major) return "it reads other operand layouts";
  if (kernel.smem_bytes > device.smem_per_block) return "it needs more shared memory than a block of this device has";
  if (problem.k > 0 && (problem.a_alignment < kernel.alignment || problem.b_alignment < kernel.alignment)) {
    return "an operand's pointer or stride is not a multiple of 16 bytes";
  }
  if (kernel.arch >= 90 && problem.k == 0) return "it needs k > 0";
  if (problem.gated && kernel.tile_n == 1) return "its tiles are columns, without pairs of gate and up";
  // Vectors of 16 bytes along the contiguous mode, without a tail. Kernels of e4m3 have one.
  if (kernel.arch < 90 && kernel.alignment == 16 && kernel.ab_type != DataType::kE4M3) {
    int64_t const a_extent = problem.a_major == Major::kK ? problem.k : problem.m;
    int64_t const b_extent = problem.b_major == Major::kK ? problem.k : problem.n;
    int64_t const vector = 16 / size_of(problem.ab_type);
    if (a_extent % vector != 0 || b_extent % vector != 0) {
      return has_8_bits(problem) ? "k is not a multiple of 16" : "a contiguous extent is not a multiple of 8";
    }
  }
  return nullptr;
}

/// Of the family no others are for batch-invariant plans alone: tests/cpp/test_registry.cpp.
bool continues_sums(KernelInfo const& kernel) { return std::strcmp(kernel.family, "gemm") == 0 && kernel.invariant_only; }

char const* illegal(KernelInfo const& kernel, GemmLaunch const& launch) {
  if (continues_sums(kernel) && launch.decomposition == Decomposition::kSplitK) return "its CTAs continue sums, and do not add them up";
  if (launch.decomposition == Decomposition::kRanges && !kernel.in_place_ranges) return "its CTAs do not compute several ranges of k";
  if (launch.columns == 0) return nullptr;
  if (kernel.column_step == 0) return "its tiles have columns of their own";
  if (launch.columns < 0 || launch.columns > kernel.tile_n || launch.columns % kernel.column_step != 0) {
    return "columns must be a multiple of its column_step, at most its tile_n";
  }
  return nullptr;
}

char const* illegal(GemmProblem const& problem, GemmLaunch const& launch) {
  if (problem.d_int32 && launch.decomposition != Decomposition::kDataParallel) return "sums of int32 are not split";
  if ((launch.realign_a || launch.realign_b) && has_8_bits(problem)) return "operands of 8 bits are not realigned";
  if (!launch.realign_a && !launch.realign_b) return nullptr;
  if (problem.b_format != WeightFormat::kDense) return "operands of a quantised GEMM are not realigned";
  if (!copies_fit(problem, launch)) return "the copies need more than 2^31 CTAs";
  return nullptr;
}

bool fits(KernelInfo const& kernel, GemmProblem const& p, GemmLaunch const& launch) {
  int64_t const rows = kernel.swap ? p.n : p.m, columns = kernel.swap ? p.m : p.n;
  double const tiles = double(ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m)) *
                       double(ceil_div(columns, int64_t(tile_columns(kernel, launch)) * kernel.cluster_n)) * double(p.batch);
  double const items = launch.decomposition == Decomposition::kDataParallel ? tiles : tiles * double(ceil_div(p.k, kernel.tile_k) + 1);
  return items < 2147483648.0;
}

bool has_native_8_bits(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options) {
  if (!has_8_bits(problem) || options.force_arch != 0) return false;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  return std::any_of(kernels, kernels + count, [&](KernelInfo const& kernel) {
    return kernel.arch >= 90 && !(options.only_runnable && kernel.launch == nullptr) && illegal(kernel, problem, device) == nullptr;
  });
}

}  // namespace minfer::gemm
