// run_gemm: checks what a launch needs, launches the copy of operands in front of it and calls the kernel's generated launch function.
#include <limits>

#include "common/context.h"
#include "common/programmatic_launch.h"
#include "gemm/launch.h"
#include "gemm/realign.h"
#include "minfer/gemm.h"

namespace minfer {

namespace {

/// Launches the copies of the operands that `launch` realigns, into `copies`, and puts them in the operands' places.
Status realign_operands(GemmProblem const& problem, GemmLaunch const& launch, bool programmatic, char* copies, GemmOperands* operands,
                        Stream stream) {
  gemm::RealignedOperand a, b;
  int64_t const stride = gemm::realigned_stride(problem.k);
  if (launch.realign_a) {
    a = {operands->a, problem.a_major, problem.m, operands->lda, operands->a_batch_stride, copies};
    operands->a = copies;
    operands->lda = stride;
    operands->a_batch_stride = problem.m * stride;
    copies += gemm::realigned_bytes(problem.m, problem.k, problem.batch);
  }
  if (launch.realign_b) {
    b = {operands->b, problem.b_major, problem.n, operands->ldb, operands->b_batch_stride, copies};
    operands->b = copies;
    operands->ldb = stride;
    operands->b_batch_stride = problem.n * stride;
  }
  return gemm::realign(a, b, problem.k, problem.batch, programmatic, stream);
}

/// Whether memory, not the tensor cores, is the limit.
bool streams_weights(GemmProblem const& problem, DeviceProperties const& device) {
  double const operations = 2.0 * double(problem.m) * double(problem.n) * double(problem.k);
  double const bytes = size_of(problem.ab_type) * (double(problem.m) * double(problem.k) + double(problem.n) * double(problem.k)) +
                       2.0 * double(problem.m) * double(problem.n);
  return bytes / device.read_bandwidth >= operations / device.matrix_rate;
}

/// Into the ring goes what fits of a B that nothing writes, of kernels for few rows of A: those that are swapped or have packed weights.
/// A copy of B is written by the launch in front of the kernel's. It makes the steps of Llama-3.1-8B at batch 1 3 % faster in 16 bits and
/// with fp8. Where a cluster's CTAs share k, packed weights beside several rows of A get two stages: 4096 x 14336 at m = 16 takes 10.8 us,
/// with all stages 11.7.
/// Else operands go into L2: at m = 16 on 4096 x 4096, 6144 x 4096 and 10240 x 8192 64 to 128 KiB gain 4 to 9 % over none, 256 KiB lose it
/// again to the predecessor's own stream. Both at once are slower than the ring alone. Where the tensor cores are the limit they only delay
/// the first loads: 1024 cubed takes 6.4 us with prefetches, 6.0 without.
gemm::EarlyLoads early_loads(GemmPlan const& plan, GemmProblem const& problem, GemmOperands const& operands,
                             DeviceProperties const& device) {
  constexpr int32_t kAll = std::numeric_limits<int32_t>::max(), kL2Bytes = 96 * 1024;
  if (!streams_weights(problem, device)) return {};
  bool const packed = operands.b_scales != nullptr;
  if (operands.b_is_constant && !plan.launch.realign_b && (plan.kernel->swap || packed))
    return {kAll, packed && problem.m > 8 ? 2 : kAll, 0};
  return {0, 0, kL2Bytes};
}

}  // namespace

Status run_gemm(GemmPlan const& plan, GemmProblem const& problem, GemmOperands const& operands, DeviceProperties const& device,
                void* workspace, size_t workspace_bytes, Stream stream) {
  if (plan.kernel == nullptr) return Status::failure(StatusCode::kInvalidArgument, "the plan has no kernel");
  if (plan.kernel->launch == nullptr) {
    return Status::failure(StatusCode::kNotCompiled, "%s is in the table but not in this build (archs: %s)", plan.kernel->name,
                           build_archs()[0] ? build_archs() : "none");
  }
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return Status::success();
  if (operands.d == nullptr || (problem.k > 0 && (operands.a == nullptr || operands.b == nullptr))) {
    return Status::failure(StatusCode::kInvalidArgument, "a, b and d must not be null");
  }
  if (problem.d_fp8 && operands.d_scale == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the problem's D has a scale, the operands do not");
  if (problem.has_c && operands.c == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the problem has a C, the operands do not");
  if (workspace_bytes < plan.workspace_bytes || (plan.workspace_bytes > 0 && workspace == nullptr)) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", workspace_bytes,
                           plan.workspace_bytes);
  }
  if (Status status = bind_context(device); !status.ok()) return status;
  GemmProblem const launched = gemm::realigned(problem, plan.launch);
  GemmOperands launched_operands = operands;
  if (size_t const copies = gemm::copies_bytes(problem, plan.launch); copies > 0) {  // behind the kernel's part of the workspace
    bool const programmatic = programmatic_launch_enabled() && device.compute_capability() >= 90;
    char* const to = static_cast<char*>(workspace) + (plan.workspace_bytes - copies);
    Status const status = realign_operands(problem, plan.launch, programmatic, to, &launched_operands, stream);
    if (!status.ok()) return status;
  }
  gemm::GemmLaunchArguments arguments{};
  arguments.problem = &launched;
  arguments.operands = &launched_operands;
  arguments.launch = plan.launch;
  arguments.device = &device;
  arguments.workspace = workspace;
  arguments.workspace_bytes = workspace_bytes;
  arguments.programmatic_launch = programmatic_launch_enabled();
  arguments.early = early_loads(plan, launched, launched_operands, device);
  arguments.stream = stream;
  return reinterpret_cast<gemm::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
