// Plans of a norm and the GEMM behind it: one launch or two.
#include <cstring>
#include <string>

#include "gemm_problems.h"
#include "minfer/norm_gemm.h"
#include "norm_gemm/norm_gemm_params.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

NormGemmProblem norm_problem(int64_t m, int64_t n, int64_t k, DataType type = DataType::kBF16) {
  NormGemmProblem p;
  p.type = type;
  p.m = m, p.n = n, p.k = k;
  return p;
}

/// Also of kernels that this build does not have.
NormGemmPlan plan_of(NormGemmProblem const& problem, NormGemmPlanOptions options = {}, DeviceProperties device = h200_properties()) {
  options.only_runnable = false;
  NormGemmPlan plan;
  Status const status = plan_norm_gemm(problem, device, options, &plan);
  if (!status.ok()) fail(__FILE__, __LINE__, status.message);
  return plan;
}

template <class Visit>
void for_each_kernel(Visit&& visit) {
  int64_t count = 0, found = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    if (std::strcmp(kernels[i].family, "norm_gemm") != 0) continue;
    Context const at(kernels[i].name);
    visit(kernels[i]);
    ++found;
  }
  CHECK(found >= 4);
}

std::string message_of(NormGemmProblem const& problem, NormGemmPlanOptions options) {
  options.only_runnable = false;
  NormGemmPlan plan;
  Status const status = plan_norm_gemm(problem, h200_properties(), options, &plan);
  CHECK(!status.ok());
  return status.message;
}

}  // namespace

TEST_CASE(norm_gemm_plans_are_runnable) {
  DeviceProperties const h200 = h200_properties();
  int one = 0, two = 0;
  for (DataType type : {DataType::kF16, DataType::kBF16}) {
    for (int64_t m : {1, 2, 7, 8, 9, 16, 17, 64, 4096}) {
      for (int64_t n : {1, 16, 4096, 28672, 128256}) {
        for (int64_t k : {8, 72, 77, 4096, 8192, 65536, 1 << 20}) {
          NormGemmProblem problem = norm_problem(m, n, k, type);
          problem.has_residual = m % 2 == 1;
          NormGemmPlan const plan = plan_of(problem);
          CHECK(plan.reason[0] != '\0' && plan.source == PlanSource::kAnalytic);
          (plan.kernel != nullptr ? one : two) += 1;
          if (plan.kernel == nullptr) {
            CHECK_EQUAL(plan.ctas, 0);
            continue;
          }
          CHECK(plan.kernel->ab_type == type && plan.kernel->tile_m >= m && plan.kernel->tile_m - m < 8);
          CHECK(plan.smem_bytes == plan.kernel->smem_bytes + norm_gemm::activation_bytes(m, k) && plan.smem_bytes <= h200.smem_per_block);
          CHECK(plan.ctas >= 1 && plan.ctas <= (n + 15) / 16 && plan.ctas <= h200.sm_count * plan.kernel->ctas_per_sm);
          CHECK_EQUAL(plan.workspace_bytes, problem.has_residual ? size_t(plan.ctas) * 8 : 0);
        }
      }
    }
  }
  CHECK(one > 10 && two > 10);
}

TEST_CASE(norm_gemm_decides_by_what_a_launch_is_worth) {
  CHECK(plan_of(norm_problem(1, 6144, 4096)).kernel != nullptr);
  CHECK(plan_of(norm_problem(2, 4096, 4096)).kernel == nullptr);    // tokens
  CHECK(plan_of(norm_problem(1, 2112, 73728)).kernel == nullptr);   // rows
  CHECK(plan_of(norm_problem(1, 1024, 4096)).kernel == nullptr);    // tiles
  CHECK(plan_of(norm_problem(1, 128256, 8192)).kernel == nullptr);  // bytes
  NormGemmProblem constant = norm_problem(1, 6144, 4096);
  constant.b_is_constant = true;
  CHECK(plan_of(constant).kernel == nullptr);
  DeviceProperties ampere = h200_properties();
  ampere.compute_major = 8;
  CHECK(plan_of(constant, {}, ampere).kernel != nullptr);  // where launches do not overlap
  DeviceProperties slow = h200_properties();
  slow.read_bandwidth /= 8;
  CHECK(plan_of(norm_problem(1, 6144, 4096)).kernel != nullptr && plan_of(norm_problem(1, 6144, 4096), {}, slow).kernel == nullptr);
}

TEST_CASE(norm_gemm_takes_what_it_can_read) {
  auto const two = [](auto&& change, char const* reason) {
    NormGemmProblem problem = norm_problem(1, 6144, 4096);
    CHECK(plan_of(problem).kernel != nullptr);
    change(problem);
    NormGemmPlan const plan = plan_of(problem);
    CHECK(plan.kernel == nullptr);
    CHECK(std::strstr(plan.reason, reason) != nullptr);
    NormGemmPlanOptions options;
    options.launches = Launches::kOne;
    CHECK(message_of(problem, options).find(reason) != std::string::npos);
  };
  two([](NormGemmProblem& p) { p.b_major = Major::kMN; }, "contiguous along k");
  two([](NormGemmProblem& p) { p.k = 4100; }, "k must be a multiple of 8");
  two([](NormGemmProblem& p) { p.vectors = false; }, "multiples of 16 bytes");
  two([](NormGemmProblem& p) { p.even_rows = false; }, "evenly spaced");
  two([](NormGemmProblem& p) { p.m = 0; }, "something to multiply");
}

TEST_CASE(norm_gemm_can_be_forced) {
  NormGemmPlanOptions one, two;
  one.launches = Launches::kOne;
  two.launches = Launches::kTwo;
  CHECK(plan_of(norm_problem(1, 6144, 4096), two).kernel == nullptr);
  CHECK(plan_of(norm_problem(1, 128256, 8192), one).kernel != nullptr);
  CHECK(plan_of(norm_problem(16, 16, 4096), one).kernel->tile_m == 16);
  CHECK(message_of(norm_problem(17, 4096, 4096), one).find("too many tokens") != std::string::npos);
  for_each_kernel([](KernelInfo const& kernel) {
    NormGemmPlanOptions options;
    options.kernel = kernel.name;
    NormGemmProblem problem = norm_problem(kernel.tile_m, 40, 264, kernel.ab_type);
    NormGemmPlan const plan = plan_of(problem, options);
    CHECK(plan.kernel == &kernel && plan.source == PlanSource::kOverride);
    problem.m += 1;
    CHECK(message_of(problem, options).find("it takes fewer tokens") != std::string::npos);
    problem = norm_problem(kernel.tile_m, 40, 64000, kernel.ab_type);
    CHECK(message_of(problem, options).find("do not fit into shared memory") != std::string::npos);
    problem = norm_problem(1, 40, 264, kernel.ab_type == DataType::kF16 ? DataType::kBF16 : DataType::kF16);
    CHECK(message_of(problem, options).find("of another type") != std::string::npos);
  });
  NormGemmPlanOptions unknown;
  unknown.kernel = "gemm_nothing";
  CHECK(message_of(norm_problem(1, 40, 264), unknown).find("not in the registry of norm_gemm") != std::string::npos);
}

TEST_CASE(norm_gemm_problems_that_cannot_be) {
  NormGemmProblem problem = norm_problem(1, 40, 264, DataType::kF32);
  CHECK(message_of(problem, {}).find("16 bits") != std::string::npos);
  problem = norm_problem(1, -1, 264);
  CHECK(message_of(problem, {}).find("n = -1") != std::string::npos);
  problem = norm_problem(1, 40, 264);
  problem.gated = true;
  CHECK(message_of(problem, {}).find("multiple of 16") != std::string::npos);
}

TEST_CASE(norm_gemm_pitches_keep_banks_apart) {
  for (int64_t k = 8; k < 9000; k += 8) {
    int64_t const pitch = norm_gemm::activation_pitch(k);
    CHECK(pitch >= (k + 31) / 32 * 32 && pitch < k + 128);
    CHECK_EQUAL(2 * pitch % 128, 64);
  }
}

TEST_CASE(norm_gemm_does_not_run_without_a_kernel) {
  NormGemmPlan plan;
  NormGemmProblem const problem = norm_problem(1, 40, 264);
  CHECK(run_norm_gemm(plan, problem, {}, h200_properties(), nullptr, 0, false, nullptr).code == StatusCode::kInvalidArgument);
  NormGemmProblem with_residual = norm_problem(1, 6144, 4096);
  with_residual.has_residual = true;
  plan = plan_of(with_residual);
  Status const status = run_norm_gemm(plan, with_residual, {}, h200_properties(), nullptr, 0, false, nullptr);
  CHECK(status.code == (plan.kernel->launch == nullptr ? StatusCode::kNotCompiled : StatusCode::kWorkspaceTooSmall));
}
