#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "gemm_problems.h"
#include "minfer/gemm.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

// A legal kernel for the problem that the analytic model does not choose, so that a plan that takes it took the row.
KernelInfo const* another_kernel(GemmProblem const& problem, KernelInfo const* chosen) {
  int64_t count = 0;
  GemmPlanOptions options = analytic_options();
  CHECK(enumerate_gemm(problem, h200_properties(), options, nullptr, 0, &count).ok());
  std::vector<GemmPlan> plans(static_cast<size_t>(count));
  CHECK(enumerate_gemm(problem, h200_properties(), options, plans.data(), count, &count).ok());
  for (GemmPlan const& plan : plans)
    if (plan.kernel != chosen) return plan.kernel;
  fail(__FILE__, __LINE__, "only one kernel can compute the problem");
}

GemmTunedRow row_of(GemmProblem const& p, char const* kernel) {
  GemmTunedRow row;
  row.m = p.m, row.n = p.n, row.k = p.k, row.batch = p.batch;
  row.ab_type = p.ab_type;
  row.a_major = p.a_major, row.b_major = p.b_major;
  row.b_format = p.b_format, row.group_size = p.group_size, row.has_zeros = p.has_zeros;
  row.has_c = p.has_c, row.gated = p.gated;
  row.kernel = kernel;
  row.us = 12.5f;
  return row;
}

GemmProblem problem_of_row(GemmTunedRow const& row) {
  GemmProblem p = problem_of(row.m, row.n, row.k, row.ab_type, row.a_major, row.b_major, row.has_c, row.gated);
  p.batch = row.batch;
  p.b_format = row.b_format, p.group_size = row.group_size, p.has_zeros = row.has_zeros;
  return p;
}

GemmPlan plan_with(GemmProblem const& problem, std::vector<GemmTunedRow> const& rows, bool use_tuned = true) {
  GemmPlanOptions options = analytic_options();
  options.use_tuned = use_tuned;
  options.user_rows = rows.data();
  options.user_row_count = int64_t(rows.size());
  GemmPlan plan;
  CHECK(plan_gemm(problem, h200_properties(), options, &plan).ok());
  return plan;
}

// Sizes that no table of layers has.
GemmProblem const kProblem = problem_of(160, 1736, 1048);

GemmProblem quantised(int32_t group_size, bool zeros = false, int64_t k = 1048) {
  GemmProblem p = problem_of(24, 1736, k);
  p.b_format = WeightFormat::kInt4;
  p.group_size = group_size;
  p.has_zeros = zeros;
  return p;
}

}  // namespace

TEST_CASE(tuned_user_row_beats_the_model) {
  GemmPlan const analytic = plan_with(kProblem, {});
  CHECK(analytic.source == PlanSource::kAnalytic);
  GemmTunedRow row = row_of(kProblem, another_kernel(kProblem, analytic.kernel)->name);
  row.launch.max_swizzle_size = 2;
  row.launch.raster_order = RasterOrder::kAlongN;
  GemmPlan const plan = plan_with(kProblem, {row});
  CHECK(plan.source == PlanSource::kTuned);
  CHECK_EQUAL(std::string(plan.kernel->name), row.kernel);
  CHECK_EQUAL(plan.launch.max_swizzle_size, 2);
  CHECK(plan.launch.raster_order == RasterOrder::kAlongN);
  CHECK(plan.predicted_us == 12.5);
}

TEST_CASE(tuned_rows_copy_what_their_candidates_copied) {
  int count = 0;
  DeviceProperties const* portable = portable_devices(&count);
  DeviceProperties const devices[] = {h200_properties(), portable[0]};
  int64_t copied = 0;
  for (DeviceProperties const& device : devices) {
    for (auto [m, n, k] :
         {std::array<int64_t, 3>{160, 1736, 1048}, {161, 1736, 1047}, {160, 1735, 1048}, {1, 1733, 1047}, {160, 1, 1048}}) {
      for (int majors = 0; majors < 4; ++majors) {
        GemmProblem problem = problem_of(m, n, k, DataType::kF16, majors & 1 ? Major::kMN : Major::kK, majors & 2 ? Major::kMN : Major::kK);
        if (m == 1 && problem.a_major == Major::kK) problem.a_alignment = 16;  // the stride of a single row is not used
        if (n == 1 && problem.b_major == Major::kK) problem.b_alignment = 16;
        Context const at(std::string(device.name) + " " + text_of(problem));
        GemmPlanOptions options = analytic_options();
        int64_t candidates = 0;
        CHECK(enumerate_gemm(problem, device, options, nullptr, 0, &candidates).ok());
        std::vector<GemmPlan> plans(static_cast<size_t>(candidates));
        CHECK(enumerate_gemm(problem, device, options, plans.data(), candidates, &candidates).ok());
        options.use_tuned = true;
        options.user_row_count = 1;
        for (GemmPlan const& candidate : plans) {
          GemmTunedRow row = row_of(problem, candidate.kernel->name);
          row.launch = candidate.launch;
          row.launch.realign_a = row.launch.realign_b = false;  // no columns of a table
          options.user_rows = &row;
          GemmPlan plan;
          CHECK(plan_gemm(problem, device, options, &plan).ok());
          CHECK(plan.source == PlanSource::kTuned);
          CHECK(plan.kernel == candidate.kernel);
          CHECK(plan.launch == candidate.launch);
          CHECK_EQUAL(plan.workspace_bytes, candidate.workspace_bytes);
          copied += plan.launch.realign_a || plan.launch.realign_b;
        }
        // Operands that are not contiguous, as those that were measured are, and so must be copied: the row does not answer.
        GemmProblem shifted = problem;
        shifted.a_alignment = shifted.b_alignment = 2;
        for (GemmPlan const& candidate : plans) {
          if (candidate.kernel->alignment < 16 || (candidate.launch.realign_a && candidate.launch.realign_b)) continue;
          GemmTunedRow const row = row_of(problem, candidate.kernel->name);
          options.user_rows = &row;
          GemmPlan plan;
          CHECK(plan_gemm(shifted, device, options, &plan).ok());
          CHECK(plan.source == PlanSource::kAnalytic);
        }
      }
    }
  }
  CHECK(copied > 1000);
}

TEST_CASE(tuned_rows_can_be_turned_off) {
  GemmPlan const analytic = plan_with(kProblem, {});
  GemmTunedRow const row = row_of(kProblem, another_kernel(kProblem, analytic.kernel)->name);
  GemmPlan const plan = plan_with(kProblem, {row}, false);
  CHECK(plan.source == PlanSource::kAnalytic);
  CHECK(plan.kernel == analytic.kernel);
}

TEST_CASE(tuned_row_answers_only_for_its_own_key) {
  GemmPlan const analytic = plan_with(kProblem, {});
  GemmTunedRow const row = row_of(kProblem, another_kernel(kProblem, analytic.kernel)->name);
  std::vector<GemmProblem> others(6, kProblem);
  others[0].n += 8;
  others[1].k += 8;
  others[2].batch = 2;
  others[3].has_c = true;
  others[4].ab_type = others[4].d_type = DataType::kBF16;
  others[5].m += 1;  // a row speaks for smaller m of the same tiles, never for a larger one
  for (GemmProblem const& other : others) {
    Context const at(text_of(other));
    CHECK(plan_with(other, {row}).source == PlanSource::kAnalytic);
  }
}

TEST_CASE(tuned_row_answers_for_m_an_eighth_smaller) {
  GemmProblem const problem = problem_of(64, 28000, 4096, DataType::kBF16);  // no shipped row is of it
  GemmTunedRow const row = row_of(problem, "gemm_sm90_bf16_tn_64x64x64_1x4x1_pingpong");
  for (int64_t m : {64, 56, 55, 1}) {
    GemmProblem other = problem;
    other.m = m;
    Context const at(text_of(other));
    CHECK(plan_with(other, {row}).source == (m >= 56 ? PlanSource::kTuned : PlanSource::kAnalytic));
  }
}

TEST_CASE(tuned_row_answers_only_for_its_weight_format_and_groups) {
  GemmProblem const problem = quantised(128);
  GemmPlan const analytic = plan_with(problem, {});
  GemmTunedRow const row = row_of(problem, another_kernel(problem, analytic.kernel)->name);
  GemmPlan const taken = plan_with(problem, {row});
  CHECK(taken.source == PlanSource::kTuned);
  CHECK_EQUAL(std::string(taken.kernel->name), row.kernel);
  for (int32_t group : {0, 32, 64, 256, 2048}) CHECK(plan_with(quantised(group), {row}).source == PlanSource::kAnalytic);
  GemmProblem dense = problem;
  dense.b_format = WeightFormat::kDense;
  CHECK(plan_with(dense, {row}).source == PlanSource::kAnalytic);
  // A dense row for the same sizes says nothing about quantised weights, even one that names their kernel.
  GemmTunedRow mistaken = row;
  mistaken.b_format = WeightFormat::kDense;
  CHECK(plan_with(problem, {mistaken}).source == PlanSource::kAnalytic);
}

TEST_CASE(tuned_groups_that_cover_k_are_the_same) {
  for (int32_t row_group : {0, 512, 1024}) {
    GemmProblem const problem = quantised(row_group, false, 512);
    GemmTunedRow const row = row_of(problem, another_kernel(problem, plan_with(problem, {}).kernel)->name);
    for (int32_t group : {0, 512, 2048}) CHECK(plan_with(quantised(group, false, 512), {row}).source == PlanSource::kTuned);
    CHECK(plan_with(quantised(256, false, 512), {row}).source == PlanSource::kAnalytic);
  }
}

TEST_CASE(tuned_row_with_the_same_zero_points_comes_first) {
  GemmProblem const without = quantised(128), with = quantised(128, true);
  KernelInfo const* chosen = plan_with(without, {}).kernel;
  GemmTunedRow const symmetric = row_of(without, another_kernel(without, chosen)->name);
  GemmPlan const stand_in = plan_with(with, {symmetric});
  CHECK(stand_in.source == PlanSource::kTuned && std::strstr(stand_in.reason, "without zero points") != nullptr);
  GemmTunedRow own = row_of(with, chosen->name);
  own.m = 26;  // of a few more tokens in the same tiles, or in others: then it does not speak for this problem
  bool const speaks = (24 + chosen->tile_n - 1) / chosen->tile_n == (26 + chosen->tile_n - 1) / chosen->tile_n;
  for (bool first : {true, false}) {
    std::vector<GemmTunedRow> const rows = first ? std::vector{own, symmetric} : std::vector{symmetric, own};
    CHECK_EQUAL(std::string(plan_with(with, rows).kernel->name), speaks ? own.kernel : symmetric.kernel);
    CHECK_EQUAL(std::string(plan_with(without, rows).kernel->name), symmetric.kernel);
  }
}

TEST_CASE(tuned_row_that_cannot_run_is_passed_over) {
  GemmPlan const analytic = plan_with(kProblem, {});
  GemmProblem const other = problem_of(kProblem.m, kProblem.n, kProblem.k, DataType::kBF16);
  GemmPlan bf16;
  CHECK(plan_gemm(other, h200_properties(), analytic_options(), &bf16).ok());
  for (char const* kernel : {"gemm_sm90_f16_tn_no_such_kernel", bf16.kernel->name}) {
    Context const at(kernel);
    GemmPlan const plan = plan_with(kProblem, {row_of(kProblem, kernel)});
    CHECK(plan.source == PlanSource::kAnalytic);
    CHECK(plan.kernel == analytic.kernel);
  }
}

TEST_CASE(tuned_override_beats_the_row) {
  GemmPlan const analytic = plan_with(kProblem, {});
  GemmTunedRow const row = row_of(kProblem, another_kernel(kProblem, analytic.kernel)->name);
  GemmPlanOptions options;
  options.only_runnable = false;
  options.user_rows = &row;
  options.user_row_count = 1;
  options.kernel = analytic.kernel->name;
  GemmPlan plan;
  CHECK(plan_gemm(kProblem, h200_properties(), options, &plan).ok());
  CHECK(plan.source == PlanSource::kOverride);
  CHECK(plan.kernel == analytic.kernel);
}

TEST_CASE(tuned_force_arch_passes_over_rows_of_other_archs) {
  GemmPlan analytic;
  CHECK(plan_gemm(kProblem, h200_properties(), analytic_options(), &analytic).ok());
  CHECK_EQUAL(analytic.kernel->arch, 90);
  GemmTunedRow const row = row_of(kProblem, analytic.kernel->name);
  GemmPlanOptions options;
  options.only_runnable = false;
  options.user_rows = &row;
  options.user_row_count = 1;
  options.force_arch = 80;
  GemmPlan plan;
  CHECK(plan_gemm(kProblem, h200_properties(), options, &plan).ok());
  CHECK_EQUAL(plan.kernel->arch, 80);
}

TEST_CASE(tuned_shipped_rows_are_legal_and_taken) {
  int64_t count = 0;
  GemmTunedRow const* rows = shipped_gemm_rows("NVIDIA H200", &count);
  for (int64_t i = 0; i < count; ++i) {
    GemmProblem const problem = problem_of_row(rows[i]);
    Context const at(text_of(problem) + " " + rows[i].kernel);
    CHECK(find_kernel(rows[i].kernel) != nullptr);
    CHECK(rows[i].us > 0);
    GemmPlan const plan = plan_with(problem, {});
    CHECK(plan.source == PlanSource::kTuned);
    CHECK_EQUAL(std::string(plan.kernel->name), rows[i].kernel);
  }
}

TEST_CASE(tuned_user_row_beats_the_shipped_one) {
  int64_t count = 0;
  GemmTunedRow const* rows = shipped_gemm_rows("NVIDIA H200", &count);
  if (count == 0) return;
  GemmProblem const problem = problem_of_row(rows[0]);
  GemmTunedRow row = rows[0];
  row.kernel = another_kernel(problem, find_kernel(rows[0].kernel))->name;
  row.launch = GemmLaunch{};
  GemmPlan const plan = plan_with(problem, {row});
  CHECK(plan.source == PlanSource::kTuned);
  CHECK_EQUAL(std::string(plan.kernel->name), row.kernel);
  CHECK_EQUAL(std::string(plan_with(problem, {}).kernel->name), rows[0].kernel);
}

TEST_CASE(tuned_tables_are_found_by_device_name) {
  int64_t count = 0, same = 0, none = -1;
  GemmTunedRow const* rows = shipped_gemm_rows("NVIDIA H200", &count);
  CHECK(shipped_gemm_rows("nvidia-h200", &same) == rows);
  CHECK_EQUAL(same, count);
  shipped_gemm_rows("Some Other GPU", &none);
  CHECK_EQUAL(none, 0);
  none = -1;
  shipped_gemm_rows("NVIDIA H200 MIG 1g.18gb", &none);
  CHECK_EQUAL(none, 0);
}
