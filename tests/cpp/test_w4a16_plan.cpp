// Plans for quantised weights.
#include <cmath>
#include <cstring>
#include <vector>

#include "gemm_problems.h"
#include "minfer/gemm.h"
#include "minfer/w4a16.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

GemmProblem quantized(int64_t m, int64_t n, int64_t k, int32_t group_size = 128, DataType type = DataType::kF16) {
  GemmProblem p = problem_of(m, n, k, type);
  p.b_format = WeightFormat::kInt4;
  p.group_size = group_size;
  return p;
}

}  // namespace

TEST_CASE(w4a16_plans_are_of_w4a16_kernels) {
  DeviceProperties const h200 = h200_properties();
  for (int64_t m : {1, 2, 8, 16, 17, 64, 100, 1000, 8192}) {
    for (int64_t n : {8, 256, 4096, 57344}) {
      for (int64_t k : {8, 72, 4096, 28672}) {
        for (int32_t group : {0, 32, 64, 128, 1024}) {
          GemmProblem const problem = quantized(m, n, k, group, m % 2 ? DataType::kF16 : DataType::kBF16);
          Context const at(text_of(problem));
          GemmPlan plan;
          Status const status = plan_gemm(problem, h200, analytic_options(), &plan);
          if (!status.ok()) fail(__FILE__, __LINE__, status.message);
          CHECK(std::strcmp(plan.kernel->family, "w4a16") == 0);
          CHECK(plan.kernel->b_format == WeightFormat::kInt4 && plan.kernel->ab_type == problem.ab_type);
          CHECK(group == 0 || group >= k || group % plan.kernel->group_multiple == 0);
          CHECK(std::isfinite(plan.predicted_us) && plan.predicted_us >= plan.floor_us);
          CHECK(plan.workspace_bytes < (size_t(1) << 33));
        }
      }
    }
  }
}

TEST_CASE(dense_plans_are_not_of_w4a16_kernels) {
  GemmPlan plan;
  for (int64_t m : {1, 64, 4096}) {
    CHECK(plan_gemm(problem_of(m, 4096, 4096), h200_properties(), analytic_options(), &plan).ok());
    CHECK(plan.kernel->b_format == WeightFormat::kDense);
  }
}

TEST_CASE(w4a16_floor_counts_four_bits_and_scales) {
  DeviceProperties const h200 = h200_properties();
  GemmProblem problem = quantized(1, 28672, 4096);
  double const bytes = 28672.0 * 4096 / 2 + 28672.0 * 32 * 2 + 2.0 * (4096 + 28672);
  CHECK(std::abs(gemm_floor_us(problem, h200) - bytes / h200.read_bandwidth) < 1e-6);
  CHECK_EQUAL(gemm_bytes(problem), bytes);
  problem.has_zeros = true;
  CHECK(std::abs(gemm_floor_us(problem, h200) - (bytes + 28672.0 * 32 * 2) / h200.read_bandwidth) < 1e-6);
}

TEST_CASE(w4a16_refuses_other_groups_and_extents) {
  DeviceProperties const h200 = h200_properties();
  GemmPlan plan;
  CHECK(plan_gemm(quantized(1, 256, 256, 48), h200, analytic_options(), &plan).code == StatusCode::kInvalidArgument);
  CHECK(plan_gemm(quantized(1, 256, 256, 16), h200, analytic_options(), &plan).code == StatusCode::kInvalidArgument);
  CHECK(plan_gemm(quantized(1, 252, 256), h200, analytic_options(), &plan).code == StatusCode::kInvalidArgument);
  CHECK(plan_gemm(quantized(1, 256, 252), h200, analytic_options(), &plan).code == StatusCode::kInvalidArgument);
}

TEST_CASE(a_kernel_for_whole_groups_refuses_small_ones) {
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  int tried = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (kernels[i].group_multiple != 128) continue;
    GemmPlanOptions options = analytic_options();
    options.kernel = kernels[i].name;
    GemmPlan plan;
    Status const status = plan_gemm(quantized(8, 512, 512, 32, kernels[i].ab_type), h200_properties(), options, &plan);
    CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "larger groups") != nullptr);
    CHECK(plan_gemm(quantized(8, 512, 512, 0, kernels[i].ab_type), h200_properties(), options, &plan).ok());
    ++tried;
  }
  CHECK(tried > 0);
}

TEST_CASE(packed_weights_are_rounded_up) {
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kInt4, 64, 64), int64_t(2048));
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kInt4, 65, 8), int64_t(4096));
}
