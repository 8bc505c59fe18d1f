// run_gemm: checks what a launch needs and calls the kernel's generated launch function.
#include "common/context.h"
#include "common/programmatic_launch.h"
#include "gemm/launch.h"
#include "minfer/gemm.h"

namespace minfer {

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
  if (problem.has_c && operands.c == nullptr)
    return Status::failure(StatusCode::kInvalidArgument, "the problem has a C, the operands do not");
  if (workspace_bytes < plan.workspace_bytes || (plan.workspace_bytes > 0 && workspace == nullptr)) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", workspace_bytes,
                           plan.workspace_bytes);
  }
  if (Status status = bind_context(device); !status.ok()) return status;
  gemm::GemmLaunchArguments arguments{};
  arguments.problem = &problem;
  arguments.operands = &operands;
  arguments.launch = plan.launch;
  arguments.device = &device;
  arguments.workspace = workspace;
  arguments.workspace_bytes = workspace_bytes;
  arguments.programmatic_launch = programmatic_launch_enabled();
  arguments.stream = stream;
  return reinterpret_cast<gemm::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
