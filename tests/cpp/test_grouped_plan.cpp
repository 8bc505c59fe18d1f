// Plans for the experts' grouped GEMM.
#include <cstring>

#include "minfer/moe.h"
#include "testing.h"

using namespace minfer;

namespace {

GroupedProblem experts(int64_t rows, WeightFormat format = WeightFormat::kDense, int64_t group_size = 0, int64_t n = 1536,
                       int64_t k = 2048) {
  GroupedProblem p;
  p.rows = rows, p.experts = 128, p.n = n, p.k = k;
  p.type = DataType::kBF16;
  p.b_format = format;
  p.group_size = group_size;
  return p;
}

Status plan(GroupedProblem const& problem, GroupedPlan* plan, char const* kernel = nullptr) {
  GroupedPlanOptions options;
  options.only_runnable = false;
  options.kernel = kernel;
  return plan_grouped(problem, h200_properties(), options, plan);
}

}  // namespace

TEST_CASE(grouped_plans_read_the_weights_format) {
  struct {
    WeightFormat format;
    int64_t group_size;
  } const forms[] = {{WeightFormat::kDense, 0}, {WeightFormat::kInt4, 32},  {WeightFormat::kInt4, 128},
                     {WeightFormat::kInt4, 0},  {WeightFormat::kMxFp4, 32}, {WeightFormat::kNvFp4, 16}};
  for (auto const& form : forms) {
    for (int64_t rows : {1, 8, 64, 512, 8192, 131072}) {
      for (bool gathered : {false, true}) {
        GroupedProblem problem = experts(rows, form.format, form.group_size);
        problem.gathered = gathered;
        GroupedPlan found;
        CHECK(plan(problem, &found).ok());
        CHECK(found.kernel->b_format == form.format && found.kernel->ab_type == problem.type && found.kernel->arch == 90);
        CHECK(std::strcmp(found.kernel->family, form.format == WeightFormat::kDense ? "moe" : "moe_w4a16") == 0);
        CHECK(form.group_size == 0 || form.group_size % found.kernel->group_multiple == 0);
        CHECK(found.predicted_us >= found.floor_us && found.floor_us > 0);
        CHECK(gathered || !found.gather_first);
        CHECK(found.workspace_bytes == (found.gather_first ? size_t(rows) * 2048 * 2 : 0));
      }
    }
  }
}

TEST_CASE(grouped_plans_take_larger_tiles_for_more_rows) {
  for (WeightFormat format : {WeightFormat::kDense, WeightFormat::kInt4}) {
    GroupedPlan few, many;
    CHECK(plan(experts(128, format, 128), &few).ok() && plan(experts(65536, format, 128), &many).ok());
    CHECK(few.kernel->tile_m * few.kernel->tile_n < many.kernel->tile_m * many.kernel->tile_n);
  }
}

TEST_CASE(grouped_plans_refuse_what_no_kernel_reads) {
  GroupedPlan found;
  for (WeightFormat format : {WeightFormat::kInt8, WeightFormat::kFp8E4M3}) {
    CHECK(plan(experts(64, format, 128), &found).code == StatusCode::kNotSupported);
  }
  CHECK(plan(experts(64, WeightFormat::kNf4, 64), &found).code == StatusCode::kNotSupported);
  CHECK(plan(experts(64, WeightFormat::kMxFp4, 32, 1540), &found).code == StatusCode::kNotSupported);  // n is no multiple of 8
  CHECK(plan(experts(64, WeightFormat::kMxFp4, 32, 1544), &found).ok());
  CHECK(plan(experts(64, WeightFormat::kInt4, 128, 1544), &found).ok());
  CHECK(plan(experts(64, WeightFormat::kInt4, 96), &found).code == StatusCode::kInvalidArgument);
  GroupedProblem masked = experts(128 * 16, WeightFormat::kInt4, 128);
  masked.max_rows = 16;
  CHECK(plan(masked, &found).code == StatusCode::kNotSupported);
  char const* const dense = "moe_sm90_bf16_tn_128x128x64_1x1x1_pingpong_swap";
  CHECK(plan(experts(64), &found, dense).ok());
  CHECK(plan(experts(64, WeightFormat::kInt4, 128), &found, dense).code == StatusCode::kInvalidArgument);
}
