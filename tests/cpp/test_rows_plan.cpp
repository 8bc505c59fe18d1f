// Plans of operators on rows: which kernels hold wide rows in a ring, and launches that cover their rows.
#include <cstring>
#include <string>

#include "minfer/fused.h"
#include "testing.h"

using namespace minfer;

namespace {

RowProblem problem_of(RowOperation operation, int64_t rows, int64_t width, bool adds = false, DataType type = DataType::kBF16) {
  RowProblem p;
  p.operation = operation;
  p.type = type;
  p.rows = rows;
  p.width = width;
  p.adds = adds;
  return p;
}

RowPlan plan_of(RowProblem const& problem, DeviceProperties const& device = h200_properties()) {
  RowPlan plan;
  Status const status = plan_rows(problem, device, nullptr, &plan);
  CHECK(status.ok() && plan.kernel != nullptr);
  return plan;
}

bool in_ring(RowPlan const& plan) { return std::strstr(plan.kernel->name, "_ring_") != nullptr; }

/// Of a launch that a caller asks for.
Status forced(RowProblem const& problem, std::string const& kernel, RowLaunch const& launch, RowPlan* plan) {
  RowOverride asked;
  asked.kernel = find_kernel(kernel.c_str());
  asked.launch = launch;
  CHECK(asked.kernel != nullptr);
  return plan_rows(problem, h200_properties(), &asked, plan);
}

}  // namespace

TEST_CASE(many_wide_rows_are_held_in_rings) {
  DeviceProperties const device = h200_properties();
  RowPlan const wide = plan_of(problem_of(RowOperation::kRmsNorm, 1024, 65536));
  CHECK(in_ring(wide) && wide.launch.cluster == 1 && wide.launch.threads == 512 && wide.launch.groups == device.max_clusters[0]);
  RowPlan const wider = plan_of(problem_of(RowOperation::kSoftmax, 256, 262144));
  CHECK(in_ring(wider) && wider.launch.cluster == 4 && wider.launch.groups == device.max_clusters[2]);
  // A residual, and numbers of four bytes, take twice the room.
  CHECK(plan_of(problem_of(RowOperation::kRmsNorm, 512, 65536, true)).launch.cluster == 2);
  CHECK(plan_of(problem_of(RowOperation::kSoftmax, 512, 65536, false, DataType::kF32)).launch.cluster == 2);
  // Rows that fit into registers, too few rows, rows of codes, and other GPUs.
  CHECK(!in_ring(plan_of(problem_of(RowOperation::kRmsNorm, 4096, 16384))));
  CHECK(!in_ring(plan_of(problem_of(RowOperation::kRmsNorm, 64, 65536))));
  RowProblem codes = problem_of(RowOperation::kRmsNorm, 1024, 65536);
  codes.quant = RowQuant::kFp8Token;
  CHECK(!in_ring(plan_of(codes)));
  DeviceProperties ampere = device;
  ampere.compute_major = 8;
  CHECK(!in_ring(plan_of(problem_of(RowOperation::kRmsNorm, 1024, 65536), ampere)));
  // A row that no cluster's rings hold.
  CHECK(!in_ring(plan_of(problem_of(RowOperation::kLayerNorm, 256, 1 << 20))));
}

TEST_CASE(a_residual_that_the_plan_does_not_know_of_is_refused) {
  RowProblem const problem = problem_of(RowOperation::kRmsNorm, 512, 65536);
  RowPlan const plan = plan_of(problem);
  float memory = 0.0f;
  RowOperands operands;
  operands.residual.data = &memory;
  Status const status = run_rows(plan, problem, operands, false, nullptr);
  CHECK(!status.ok() && std::strcmp(status.message, "the problem lacks a residual, the operands do") == 0);
}

TEST_CASE(each_thread_of_a_ring_has_no_more_than_its_vectors) {
  for (int64_t width = 16392; width <= 2 * 262144; width += 8 * 1231) {
    RowPlan const plan = plan_of(problem_of(RowOperation::kLayerNorm, 1000, width));
    CHECK(in_ring(plan));
    int64_t const threads = int64_t(plan.launch.threads) * plan.launch.cluster;
    CHECK((width / 8 + threads - 1) / threads <= plan.kernel->tile_n / 8);
  }
}

TEST_CASE(forced_launches_of_parts_cover_the_row) {
  RowProblem const problem = problem_of(RowOperation::kActivation, 127, 1536);
  RowPlan plan;
  for (int threads : {1, 8, 32, 64, 512}) {
    RowLaunch launch{0, 0, 0, 0};
    launch.threads = threads;
    CHECK(forced(problem, "fused_sm80_bf16_activation_x8", launch, &plan).ok());
    CHECK(int64_t(plan.launch.threads) * plan.launch.parts * 8 >= problem.width);
  }
  RowLaunch launch{64, 0, 0, 1};
  Status const status = forced(problem, "fused_sm80_bf16_activation_x8", launch, &plan);
  CHECK(!status.ok() && std::strstr(status.message, "the parts must cover the row") != nullptr);
}

TEST_CASE(elements_take_ctas_of_a_size_that_suits_their_number) {
  struct Case {
    int64_t rows, width;
    int32_t threads, rows_per_cta, parts;
  };
  // 1.2 ns a CTA: many rows of few elements share CTAs.
  for (Case const& c : {Case{1, 4096, 128, 1, 4}, Case{64, 2048, 32, 1, 8}, Case{64, 4096, 64, 1, 8}, Case{64, 8192, 128, 1, 8},
                        Case{4096, 4096, 256, 1, 2}, Case{100000, 256, 32, 8, 1}, Case{100000, 768, 128, 2, 1}, Case{100000, 8, 1, 128, 1},
                        Case{100000, 1000, 128, 2, 1}, Case{100000, 1536, 192, 1, 1}}) {
    RowPlan const plan = plan_of(problem_of(RowOperation::kActivation, c.rows, c.width));
    CHECK(plan.launch.threads == c.threads && plan.launch.rows_per_cta == c.rows_per_cta && plan.launch.parts == c.parts);
  }
  RowProblem block = problem_of(RowOperation::kGatedActivation, 100000, 64);
  block.quant = RowQuant::kFp8Block128;
  CHECK(plan_of(block).launch.threads == 16 && plan_of(block).launch.rows_per_cta == 16);
}
