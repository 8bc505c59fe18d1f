// Which kernel computes an operator on rows, and with how many threads a row; the launch itself.
//
// Rules, not a fitted model: these kernels move their bytes at the same rate with nearly every choice, and what is decided here is that a
// thread has enough vectors in flight, that few threads are idle, and that a row stays in registers while it fits there.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <limits>

#include "common/aligned_vector.cuh"
#include "common/without_cuda.h"
#include "fused/row_params.h"
#include "minfer/sampling.h"

namespace minfer {

namespace {

using fused::kVectorElements;

constexpr int64_t kLimit = int64_t(1) << 31;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Whether the results of a row need all of it.
bool takes_whole_rows(RowProblem const& problem) {
  switch (problem.operation) {
    case RowOperation::kRmsNorm:
    case RowOperation::kLayerNorm:
    case RowOperation::kSoftmax: return true;
    default: return problem.quant == RowQuant::kFp8Token || problem.quant == RowQuant::kInt8Token;
  }
}

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t vectors_of(RowProblem const& problem) { return std::max<int64_t>(ceil_divide(problem.width, kVectorElements), 1); }

KernelInfo const* find(RowProblem const& problem, int vectors) {
  char name[128];
  std::snprintf(name, sizeof(name), "fused_sm80_%s_%s%s%s_x%d", name_of(problem.type), name_of(problem.operation),
                problem.quant != RowQuant::kNone ? "_quantized" : "", takes_whole_rows(problem) ? "_rows" : "", vectors * kVectorElements);
  return find_kernel(name);
}

KernelInfo const* find_ring(RowProblem const& problem) {
  if (problem.quant != RowQuant::kNone || !takes_whole_rows(problem)) return nullptr;
  char name[128];
  std::snprintf(name, sizeof(name), "fused_sm90_%s_%s_rows_ring_x%d", name_of(problem.type), name_of(problem.operation),
                fused::kRingVectors * 2 / int(size_of(problem.type)) * kVectorElements);
  return find_kernel(name);
}
bool has_ring(KernelInfo const& kernel) { return kernel.arch == 90; }

/// Most of a thread.
int vectors_of(KernelInfo const& kernel) { return kernel.tile_n / kVectorElements; }
int most_vectors_of(KernelInfo const& kernel, RowProblem const& problem) {
  return has_ring(kernel) && problem.adds ? vectors_of(kernel) / 2 : vectors_of(kernel);
}
/// Of a row; those at its end may be outside.
int64_t vectors_of_thread(RowProblem const& problem, KernelInfo const& kernel, RowLaunch const& launch) {
  int64_t const together = has_ring(kernel) ? fused::kTileVectors : 1;
  return ceil_divide(vectors_of(problem), together * launch.threads * launch.cluster) * together;
}
/// Clusters that are resident at once where each CTA fills an SM.
int32_t resident_clusters(int32_t cluster, DeviceProperties const& device) {
  int32_t const known = device.max_clusters[std::countr_zero(uint32_t(cluster))];
  return std::max(known > 0 ? known : device.sm_count / cluster, 1);
}

/// Threads for so many: a part of a warp, or whole warps.
int32_t whole_threads(int64_t needed, int32_t least, int32_t most) {
  int64_t const threads = needed <= 32 ? int64_t(std::bit_ceil(uint64_t(std::max<int64_t>(needed, 1)))) : ceil_divide(needed, 32) * 32;
  return int32_t(std::clamp<int64_t>(threads, least, most));
}

constexpr int32_t kPackedThreads = 128;                   // of a CTA with several rows
constexpr int64_t kRegisterVectors = 4 * kMaxRowThreads;  // of a row that the registers of one CTA hold

/// What a launch must be for a kernel. Null: it is legal.
char const* illegal(RowProblem const& problem, KernelInfo const& kernel, RowLaunch const& launch, DeviceProperties const& device) {
  bool const part_of_warp = launch.threads <= 32, whole = takes_whole_rows(problem);
  if (launch.threads < 1 || launch.threads > kernel.threads) return "threads must be 1 to the kernel's";
  if (part_of_warp ? !std::has_single_bit(uint32_t(launch.threads)) : launch.threads % 32 != 0) {
    return "threads must be a power of two up to 32, or a multiple of 32";
  }
  if (launch.rows_per_cta < 1) return "rows must be 1 or more";
  if (whole && !part_of_warp && launch.rows_per_cta > 1) return "a CTA has several whole rows only of up to 32 threads each";
  if (launch.rows_per_cta > 1 && !std::has_single_bit(uint32_t(launch.threads))) return "a CTA has several rows of a power of two threads";
  if (launch.threads * launch.rows_per_cta % 32 != 0 || launch.threads * launch.rows_per_cta > kernel.threads) {
    return "a CTA must have whole warps, and no more threads than the kernel";
  }
  if (launch.cluster < 1 || launch.cluster > 8 || !std::has_single_bit(uint32_t(launch.cluster))) return "cluster must be 1, 2, 4 or 8";
  if (launch.cluster > 1 && part_of_warp) return "the CTAs of a cluster share a row of more than 32 threads";
  if (launch.cluster > 1 && device.compute_major < 9) return "clusters need compute capability 9.0";
  if (launch.parts < 1 || (launch.parts > 1 && whole)) return "a row that is taken whole has one part";
  if (launch.cluster > 1 && !whole) return "parts have one CTA";
  if (!whole && int64_t(launch.parts) * launch.threads < vectors_of(problem)) return "the parts must cover the row";
  if (has_ring(kernel)) {
    if (device.compute_capability() != 90) return "rings in shared memory need compute capability 9.0";
    if (part_of_warp) return "a row in a ring has more than 32 threads";
    if (vectors_of_thread(problem, kernel, launch) > most_vectors_of(kernel, problem)) {
      return "a thread has more vectors of a row than its ring is for";
    }
  }
  if (problem.quant == RowQuant::kFp8Block128 && launch.threads < 16) return "128 columns are quantised by 16 threads";
  return nullptr;
}

Status check(RowProblem const& problem) {
  if (problem.rows < 0 || problem.width < 0 || problem.rows >= kLimit || problem.width >= kLimit) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows of %lld are more than 2^31 - 1", (long long)problem.rows,
                           (long long)problem.width);
  }
  if (problem.operation == RowOperation::kGatedActivation && problem.width >= kLimit / 2) {
    return Status::failure(StatusCode::kNotSupported, "gated rows of %lld outputs are more than 2^30 - 1", (long long)problem.width);
  }
  return Status::success();
}

/// Of a thread. Pairs of gate and up take two registers' room each.
int most_vectors(RowProblem const& problem) { return problem.operation == RowOperation::kGatedActivation ? 4 : 8; }

/// Whole rows: many take the least time with four vectors a thread, which leaves the SM enough bytes in flight and few threads that meet at
/// barriers. Few rows are done soonest by many threads with a vector or two each. A row that is wider than the threads of a CTA has several
/// CTAs. Times are of an H100.
int vectors_for_whole_rows(RowProblem const& problem, DeviceProperties const& device) {
  constexpr int64_t kThreads = kMaxRowThreads;
  int64_t const vectors = vectors_of(problem), ctas_of_row = device.compute_major >= 9 ? 8 : 1;
  auto const choose = [&] {
    if (vectors <= 32) return 1;
    if (vectors <= 64) return 2;
    // Between what is best for few rows and for many.
    if (problem.batch_invariant) return problem.operation != RowOperation::kSoftmax && vectors <= 2 * kThreads ? 2 : 4;
    if (problem.rows > 2 * int64_t(device.sm_count)) return 4;
    // What a thread does for itself, exponentials beside two exchanges, is a small part then: 64 rows of 4096 take 3.2 us with one vector
    // and 2.6 with four. One row of 2048 takes 1.5 and 1.8.
    bool const long_or_many = problem.rows > 16 || vectors > kThreads / 2;
    if (problem.operation == RowOperation::kSoftmax && vectors <= kThreads && long_or_many) return 4;
    if (problem.operation == RowOperation::kRmsNorm) {  // with one exchange alone
      if (vectors > kThreads / 2 && vectors <= 2 * kThreads) return 2;
      bool const halves = problem.quant == RowQuant::kNone && problem.rows <= device.sm_count / 2;
      if (halves && vectors > 2 * kThreads && vectors <= ctas_of_row * kThreads) return 1;  // a cluster: a row of 16384 in 2.4 us, not 2.8
    }
    return vectors <= kThreads ? 1 : vectors <= 2 * kThreads ? 2 : 4;
  };
  int const chosen = choose();
  return vectors <= chosen * kThreads * ctas_of_row ? chosen : most_vectors(problem);
}
RowLaunch launch_of_whole_rows(RowProblem const& problem, int per_thread, DeviceProperties const& device) {
  RowLaunch launch;
  int64_t const vectors = vectors_of(problem);
  if (device.compute_major >= 9) {
    while (launch.cluster < 8 && vectors > int64_t(per_thread) * kMaxRowThreads * launch.cluster) launch.cluster *= 2;
  }
  int32_t const least = launch.cluster > 1 ? 64 : problem.quant == RowQuant::kFp8Block128 ? 16 : 1;
  launch.threads = whole_threads(ceil_divide(ceil_divide(vectors, launch.cluster), per_thread), least, kMaxRowThreads);
  return launch;
}

/// Rows that would need a cluster's registers, and enough of them: in a ring, with the smallest cluster whose threads' rings hold a row.
/// False: there are too few, too narrow or too wide ones.
bool launch_of_ring(RowProblem const& problem, KernelInfo const& kernel, DeviceProperties const& device, RowLaunch* launch) {
  constexpr int32_t kThreads = 32 * fused::kRingWarps;
  int64_t const vectors = vectors_of(problem), most = int64_t(most_vectors_of(kernel, problem)) * kThreads;
  int32_t cluster = 1;
  while (cluster < 8 && vectors > most * cluster) cluster *= 2;
  int64_t const of_thread = ceil_divide(vectors, int64_t(fused::kTileVectors) * kThreads * cluster) * fused::kTileVectors;
  launch->cluster = cluster;
  launch->threads = whole_threads(ceil_divide(vectors, of_thread * cluster), 64, kThreads);
  return vectors > kRegisterVectors && vectors <= most * cluster && problem.rows >= resident_clusters(cluster, device);
}

/// Threads of a CTA that computes elements, a vector each. The GPU starts one CTA in 1.2 ns, however small, so that many vectors take large
/// CTAs, while few are spread over the SMs, 4 CTAs on each of them. Times are of an H100: 64 rows of 2048 take 1.36 us with 32 threads and
/// 1.44 with 128, 512 rows of 4096 take 4.2 us with 128 and 3.3 with 256.
int32_t threads_for_parts(RowProblem const& problem, DeviceProperties const& device) {
  int64_t const sms = std::max(device.sm_count, 1), all = vectors_of(problem) * std::max<int64_t>(problem.rows, 1);
  if (all > 1200 * sms) return 256;
  if (all <= 64 * sms) return 128;
  int32_t threads = 32;
  while (threads < 128 && all > 4 * sms * threads) threads *= 2;
  return threads;
}
/// Elements. forced_threads: 0, or of a launch that is asked for.
RowLaunch launch_of_parts(RowProblem const& problem, DeviceProperties const& device, int32_t forced_threads) {
  RowLaunch launch;
  int32_t const of_cta = forced_threads > 0 ? forced_threads : threads_for_parts(problem, device);
  int64_t const vectors = vectors_of(problem);
  launch.parts = int32_t(std::min<int64_t>(ceil_divide(vectors, of_cta), std::numeric_limits<int32_t>::max()));
  int32_t const least = problem.quant == RowQuant::kFp8Block128 ? 16 : 1;
  launch.threads = whole_threads(ceil_divide(vectors, launch.parts), least, of_cta);
  int32_t const power_of_two = int32_t(std::bit_ceil(uint32_t(launch.threads)));
  if (power_of_two <= of_cta / 2) {  // several rows to a CTA
    launch.threads = power_of_two;
    launch.rows_per_cta = std::max(of_cta, 32) / power_of_two;
  }
  return launch;
}

}  // namespace

Status plan_rows(RowProblem const& problem, DeviceProperties const& device, RowOverride const* forced, RowPlan* plan) {
  if (Status const status = check(problem); !status.ok()) return status;
  bool const whole = takes_whole_rows(problem), is_forced = forced != nullptr && forced->kernel != nullptr;
  int per_thread = whole ? vectors_for_whole_rows(problem, device) : 1;
  if (is_forced) per_thread = vectors_of(*forced->kernel);
  // The usual case looks for no ring. In one, a row lies in other threads than in registers or memory, where misaligned rows are.
  bool const fits_registers = vectors_of(problem) <= kRegisterVectors || problem.batch_invariant;
  KernelInfo const* const ring = fits_registers && !is_forced ? nullptr : find_ring(problem);
  RowLaunch in_ring;
  bool const rings = ring != nullptr && (is_forced ? forced->kernel == ring
                                                   : device.compute_capability() == 90 && launch_of_ring(problem, *ring, device, &in_ring));
  plan->kernel = find(problem, per_thread);
  // A build for sm_90 rather than sm_90a has no rings.
  if (rings && (is_forced || ring->launch != nullptr || plan->kernel == nullptr || plan->kernel->launch == nullptr)) plan->kernel = ring;
  if (forced != nullptr && forced->kernel != nullptr && forced->kernel != plan->kernel) {
    return Status::failure(StatusCode::kInvalidArgument, "kernel %s does not compute %s of %s%s%s", forced->kernel->name,
                           name_of(problem.operation), name_of(problem.type), problem.quant != RowQuant::kNone ? " as " : "",
                           problem.quant != RowQuant::kNone ? name_of(problem.quant) : "");
  }
  if (plan->kernel == nullptr) {
    return Status::failure(StatusCode::kNotSupported, "no kernel computes %s of %s", name_of(problem.operation), name_of(problem.type));
  }
  RowLaunch& launch = plan->launch;
  RowLaunch const none{0, 0, 0, 0}, &asked = forced != nullptr ? forced->launch : none;
  launch = whole ? launch_of_whole_rows(problem, per_thread, device) : launch_of_parts(problem, device, asked.threads);
  if (plan->kernel == ring) {
    if (is_forced) launch_of_ring(problem, *ring, device, &in_ring);
    launch = in_ring;
  }
  if (asked.threads > 0) launch.threads = asked.threads;
  if (asked.cluster > 0) launch.cluster = asked.cluster;
  if (asked.parts > 0) launch.parts = asked.parts;
  if (plan->kernel == ring) launch.groups = int32_t(std::clamp<int64_t>(problem.rows, 1, resident_clusters(launch.cluster, device)));
  if (whole || asked.threads > 0) {
    bool const packed = launch.threads < 32 || (whole && launch.threads == 32 && launch.cluster == 1);
    launch.rows_per_cta = packed ? kPackedThreads / launch.threads : 1;
  }
  if (asked.rows_per_cta > 0) launch.rows_per_cta = asked.rows_per_cta;
  if (problem.batch_invariant && whole && forced != nullptr) {
    RowPlan own;
    if (Status const status = plan_rows(problem, device, nullptr, &own); !status.ok()) return status;
    if (own.kernel != plan->kernel || own.launch.threads != launch.threads || own.launch.cluster != launch.cluster) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "kernel %s with threads=%d,cluster=%d is not batch invariant: rows of %lld take %s@threads=%d,cluster=%d",
                             plan->kernel->name, launch.threads, launch.cluster, (long long)problem.width, own.kernel->name,
                             own.launch.threads, own.launch.cluster);
    }
  }
  if (char const* why = illegal(problem, *plan->kernel, launch, device)) {
    return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot be launched with threads=%d,rows=%d,cluster=%d,parts=%d: %s",
                           plan->kernel->name, launch.threads, launch.rows_per_cta, launch.cluster, launch.parts, why);
  }
  return Status::success();
}

Status run_rows(RowPlan const& plan, RowProblem const& problem, RowOperands const& operands, bool programmatic, Stream stream) {
  if (Status const status = check(problem); !status.ok()) return status;
  if (problem.rows == 0 || problem.width == 0) return Status::success();
  if (problem.adds != (operands.residual.data != nullptr)) {  // a ring has room for half of a row with a residual
    return Status::failure(StatusCode::kInvalidArgument, "the problem %s a residual, the operands %s", problem.adds ? "has" : "lacks",
                           problem.adds ? "do not" : "do");
  }
  if (plan.kernel == nullptr || plan.kernel->launch == nullptr) {
    return plan.kernel == nullptr ? Status::failure(StatusCode::kInvalidArgument, "no kernel")
                                  : Status::failure(StatusCode::kNotCompiled, "kernel %s is not in this build", plan.kernel->name);
  }
  RowLaunch const& launch = plan.launch;
  fused::RowLaunchArguments arguments{};
  fused::RowParams& params = arguments.params;
  params.x = operands.x;
  params.y = operands.y;
  params.residual = operands.residual;
  params.weight = operands.weight;
  params.bias = operands.bias;
  params.q = operands.q;
  params.scale = operands.scale;
  params.scales = operands.scales;
  params.scales_stride = operands.scales_stride;
  params.activation =
      operands.activation == Activation::kSilu ? make_sigmoid(operands.sigmoid_slope) : make_activation(operands.activation);
  params.gate_max = operands.gate_max;
  params.up_max = operands.up_max;
  params.up_shift = operands.up_shift;
  params.clamps = params.gate_max < kInfinity || params.up_max < kInfinity || params.up_shift != 0.0f;
  params.eps = operands.eps;
  params.weight_offset = operands.weight_offset;
  params.quant = problem.quant;
  params.gate_layout = operands.gate_layout;
  params.logarithm = operands.logarithm;
  int64_t const element = size_of(problem.type), vector = kVectorElements;  // 8 codes are 8 bytes, of 8 bytes' alignment
  auto const rows_fit = [&](RowTensor const& t) {
    return t.data == nullptr || begin_vectors(t.data, element, {t.outer_stride, t.inner_stride});
  };
  bool const aligned = problem.width % vector == 0 && rows_fit(operands.x) && rows_fit(operands.y) && rows_fit(operands.residual) &&
                       reinterpret_cast<uintptr_t>(operands.q) % vector == 0 && begins_vector(operands.weight) &&
                       begins_vector(operands.bias);
  params.rows = uint32_t(problem.rows);
  params.inner = uint32_t(std::max<int64_t>(operands.inner, 1));
  params.width = uint32_t(problem.width);
  params.threads = uint32_t(launch.threads);
  params.rows_per_cta = uint32_t(launch.rows_per_cta);
  params.cluster = uint32_t(launch.cluster);
  params.parts = uint32_t(launch.parts);
  params.vectors = uint32_t(vectors_of_thread(problem, *plan.kernel, launch));
  params.fast = aligned && (!takes_whole_rows(problem) || params.vectors <= uint32_t(most_vectors_of(*plan.kernel, problem)));
  params.groups = uint32_t(launch.groups);
  int64_t const items = problem.rows * launch.parts;
  if (items > std::numeric_limits<int32_t>::max()) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows of %lld are more than a launch covers", (long long)problem.rows,
                           (long long)problem.width);
  }
  arguments.programmatic = programmatic;
  arguments.stream = stream;
  auto* const function = reinterpret_cast<Status (*)(fused::RowLaunchArguments const&)>(const_cast<void*>(plan.kernel->launch));
  return function(arguments);
}

#if !MINFER_WITH_CUDA
Status rotate(Rope const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
Status embed(Embedding const&, bool, Stream) { return without_cuda(); }
Status dequantize(Dequantize const&, bool, Stream) { return without_cuda(); }
Status transform(Hadamard const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
Status sample(Sampling const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
#endif

}  // namespace minfer
