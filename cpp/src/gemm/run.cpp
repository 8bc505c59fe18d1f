// run_gemm: checks what a launch needs and calls the kernel's generated launch function.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "common/context.h"
#include "gemm/launch.h"
#include "gemm/schedule.h"
#include "minfer/gemm.h"

namespace minfer {

namespace gemm {

namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace

bool programmatic_launch_enabled() {
  static bool const enabled = [] {
    char const* value = std::getenv("MINFER_PDL");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

uint64_t next_nonce() {
  static std::atomic<uint64_t> counter{0};
  static uint64_t const seed =
      mix(uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()) ^ uint64_t(reinterpret_cast<uintptr_t>(&counter)));
  uint64_t const nonce = mix(seed + counter.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b97f4a7c15ull);
  return nonce != 0 ? nonce : 1;  // 0 is a lowered flag
}

}  // namespace gemm

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
  arguments.programmatic_launch = gemm::programmatic_launch_enabled();
  arguments.stream = stream;
  return reinterpret_cast<gemm::LaunchFunction>(const_cast<void*>(plan.kernel->launch))(arguments);
}

}  // namespace minfer
