#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "gemm/cost_model.h"
#include "gemm/realign.h"
#include "gemm_problems.h"
#include "minfer/gemm.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

constexpr DataType kTypes[] = {DataType::kF16, DataType::kBF16};
constexpr Major kMajors[] = {Major::kK, Major::kMN};

void check_plan(GemmProblem const& problem, GemmPlan const& plan, DeviceProperties const& device) {
  KernelInfo const* kernel = plan.kernel;
  CHECK(kernel != nullptr);
  Context const at(kernel->name);
  CHECK(kernel->ab_type == problem.ab_type);
  bool const realign_a = plan.launch.realign_a, realign_b = plan.launch.realign_b;
  CHECK(kernel->a_major == (realign_a ? Major::kK : problem.a_major) && kernel->b_major == (realign_b ? Major::kK : problem.b_major));
  CHECK(kernel->arch_exact ? kernel->arch == device.compute_capability() : kernel->arch <= device.compute_capability());
  CHECK(kernel->smem_bytes <= device.smem_per_block);
  if (problem.k > 0) {
    CHECK(realign_a || kernel->alignment <= problem.a_alignment);
    CHECK(realign_b || kernel->alignment <= problem.b_alignment);
  }
  if (realign_a || realign_b) CHECK_EQUAL(kernel->alignment, 16);
  CHECK(plan.launch.splits >= 1);
  CHECK(plan.launch.max_swizzle_size >= 1 && plan.launch.max_swizzle_size <= 16);
  CHECK(plan.launch.decomposition == Decomposition::kSplitK || plan.launch.splits == 1);
  CHECK(plan.workspace_bytes < (size_t(1) << 33));
  if (plan.launch.decomposition == Decomposition::kDataParallel)
    CHECK_EQUAL(plan.workspace_bytes, gemm::copies_bytes(problem, plan.launch));
  CHECK(plan.workspace_bytes >= gemm::copies_bytes(problem, plan.launch));
  CHECK(std::isfinite(plan.predicted_us) && std::isfinite(plan.floor_us));
  CHECK(plan.floor_us >= 0);
  CHECK(plan.predicted_us >= plan.floor_us);
  CHECK(plan.reason[0] != '\0');
}

void check_answers(GemmProblem const& problem, DeviceProperties const& device) {
  Context const at(text_of(problem));
  GemmPlan plan;
  Status const status = plan_gemm(problem, device, analytic_options(), &plan);
  if (!status.ok()) fail(__FILE__, __LINE__, status.message);
  CHECK(plan.source == PlanSource::kAnalytic);
  check_plan(problem, plan, device);
}

void check_grid(DeviceProperties const& device) {
  for (int64_t m : {0, 1, 3, 16, 17, 64, 128, 1000, 4096, 8192}) {
    for (int64_t n : {0, 1, 8, 100, 4095, 4096, 57344}) {
      for (int64_t k : {0, 1, 8, 72, 127, 4096, 28672}) {
        for (DataType type : kTypes)
          for (Major a : kMajors)
            for (Major b : kMajors) check_answers(problem_of(m, n, k, type, a, b, (m + n) % 2 == 0, n % 16 == 0 && k % 16 == 0), device);
      }
    }
  }
}

}  // namespace

TEST_CASE(plan_always_answers_on_h200) { check_grid(h200_properties()); }

TEST_CASE(plan_always_answers_on_portable_devices) {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    Context const at(devices[i].name);
    check_grid(devices[i]);
  }
}

TEST_CASE(plan_always_answers_for_batches_and_f32_output) {
  for (int64_t batch : {0, 1, 2, 7, 4096}) {
    for (DataType d : {DataType::kF16, DataType::kF32}) {
      GemmProblem problem = problem_of(33, 520, 264);
      problem.batch = batch;
      problem.d_type = d;
      check_answers(problem, h200_properties());
    }
  }
}

TEST_CASE(plan_always_answers_for_codes) {
  for (int64_t m : {1, 33, 4096}) {
    for (int32_t alignment : {1, 2, 16}) {
      for (bool has_c : {false, true}) {
        GemmProblem problem = problem_of(m, 520, 264, DataType::kBF16, Major::kK, Major::kK, has_c);
        problem.d_fp8 = true;
        problem.d_alignment = alignment;
        problem.c_alignment = 0;
        check_answers(problem, h200_properties());
      }
    }
  }
}

TEST_CASE(plans_of_codes_know_that_threads_store_them) {
  // The tile's epilogue is what codes change: as D that TMA cannot store, with half of its bytes.
  DeviceProperties const h200 = h200_properties();
  GemmPlanOptions options = analytic_options();
  GemmPlan numbers, codes, unaligned;
  GemmProblem problem = problem_of(4096, 4096, 256);
  CHECK(plan_gemm(problem, h200, options, &numbers).ok());
  options.kernel = numbers.kernel->name;
  options.launch = &numbers.launch;
  problem.d_fp8 = true;
  CHECK(plan_gemm(problem, h200, options, &codes).ok());
  problem.d_fp8 = false;
  problem.d_alignment = 2;
  CHECK(plan_gemm(problem, h200, options, &unaligned).ok());
  CHECK(codes.predicted_us > numbers.predicted_us);
  CHECK(codes.predicted_us < unaligned.predicted_us);
}

TEST_CASE(plan_always_answers_for_strided_operands) {
  for (int32_t a : {2, 4, 8, 16}) {
    for (int32_t b : {2, 4, 8, 16}) {
      for (int32_t d : {2, 4, 8, 16}) {
        GemmProblem problem = problem_of(256, 512, 1024);
        problem.a_alignment = a, problem.b_alignment = b, problem.d_alignment = d;
        check_answers(problem, h200_properties());
      }
    }
  }
}

TEST_CASE(plan_copies_unaligned_operands_of_large_problems) {
  size_t const bytes = size_t(4096) * 4096 * 2;
  for (int unaligned = 1; unaligned < 4; ++unaligned) {
    GemmProblem problem = problem_of(4096, 4096, 4096);
    if (unaligned & 1) problem.a_alignment = 2;
    if (unaligned & 2) problem.b_alignment = 8;
    Context const at(text_of(problem));
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
    CHECK_EQUAL(plan.kernel->arch, 90);
    CHECK_EQUAL(plan.launch.realign_a, (unaligned & 1) != 0);
    CHECK_EQUAL(plan.launch.realign_b, (unaligned & 2) != 0);
    CHECK(plan.workspace_bytes >= bytes * (unaligned == 3 ? 2 : 1));
    CHECK_EQUAL(gemm::copies_bytes(problem, plan.launch), bytes * (unaligned == 3 ? 2 : 1));
    check_plan(problem, plan, h200_properties());
  }
}

TEST_CASE(plan_copies_nothing_that_kernels_read_as_it_is) {
  for (int64_t m : {1, 64, 512, 4096}) {
    GemmPlan plan;
    CHECK(plan_gemm(problem_of(m, 4096, 4096), h200_properties(), analytic_options(), &plan).ok());
    CHECK(!plan.launch.realign_a && !plan.launch.realign_b);
    CHECK_EQUAL(gemm::copies_bytes(problem_of(m, 4096, 4096), plan.launch), size_t(0));
  }
}

TEST_CASE(plan_copies_for_portable_kernels_too) {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    Context const at(devices[i].name);
    for (int64_t k : {4096, 4095}) {  // vectors have no tail: both operands are copied, and k is rounded up over their zeros
      GemmProblem problem = problem_of(4096, 4096, k);
      problem.a_alignment = 2;
      GemmPlan plan;
      CHECK(plan_gemm(problem, devices[i], analytic_options(), &plan).ok());
      check_plan(problem, plan, devices[i]);
      CHECK(plan.launch.realign_a);
      CHECK_EQUAL(plan.launch.realign_b, k % 8 != 0);
      CHECK_EQUAL(gemm::realigned(problem, plan.launch).k, int64_t(4096));
    }
  }
}

TEST_CASE(plan_without_products_copies_nothing) {
  GemmLaunch launch;
  launch.realign_a = launch.realign_b = true;
  for (GemmProblem problem : {problem_of(0, 512, 511), problem_of(512, 0, 511), problem_of(512, 512, 0)}) {
    problem.a_alignment = problem.b_alignment = 2;
    Context const at(text_of(problem));
    CHECK_EQUAL(gemm::copies_bytes(problem, launch), size_t(0));
    CHECK_EQUAL(gemm::predict_copies_us(problem, launch, h200_properties(), gemm::model_of({}, h200_properties())), 0.0);
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
    CHECK(!plan.launch.realign_a && !plan.launch.realign_b);
    CHECK_EQUAL(plan.workspace_bytes, size_t(0));
  }
}

TEST_CASE(plan_override_realigns) {
  DeviceProperties const h200 = h200_properties();
  GemmPlan chosen;
  CHECK(plan_gemm(problem_of(512, 512, 512), h200, analytic_options(), &chosen).ok());
  CHECK_EQUAL(chosen.kernel->alignment, 16);
  for (Major a_major : kMajors) {
    for (Major b_major : kMajors) {
      for (int flags = 0; flags < 4; ++flags) {
        GemmProblem problem = problem_of(500, 510, 515, DataType::kF16, a_major, b_major);
        problem.batch = 3;
        Context const at(text_of(problem));
        GemmLaunch launch;
        launch.realign_a = (flags & 1) != 0;
        launch.realign_b = (flags & 2) != 0;
        GemmPlanOptions options = analytic_options();
        options.kernel = chosen.kernel->name;
        options.launch = &launch;
        GemmPlan plan;
        Status const status = plan_gemm(problem, h200, options, &plan);
        // No mode is a multiple of 8, so that no operand can stay as it is.
        CHECK(status.code == (flags == 3 ? StatusCode::kSuccess : StatusCode::kInvalidArgument));
        if (flags < 3) {
          CHECK(std::strstr(status.message, "cannot compute this problem") != nullptr);
          continue;
        }
        CHECK(plan.launch == launch);
        check_plan(problem, plan, h200);
        // Rows of 515 elements begin on multiples of 128 bytes; copies are multiples of 256.
        CHECK_EQUAL(plan.workspace_bytes, size_t((3 * 500 * 576 * 2 + 255) / 256 * 256 + 3 * 510 * 576 * 2));
        GemmOperands const operands;
        CHECK(!run_gemm(plan, problem, operands, h200, nullptr, 0, nullptr).ok());
      }
    }
  }
}

TEST_CASE(plan_override_realigns_no_quantised_weight) {
  GemmProblem problem = problem_of(16, 512, 512);
  problem.b_format = WeightFormat::kInt4;
  problem.group_size = 128;
  GemmPlan chosen;
  CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &chosen).ok());
  CHECK(!chosen.launch.realign_a && !chosen.launch.realign_b);
  GemmLaunch launch = chosen.launch;
  launch.realign_a = true;
  GemmPlanOptions options = analytic_options();
  options.kernel = chosen.kernel->name;
  options.launch = &launch;
  GemmPlan plan;
  Status const status = plan_gemm(problem, h200_properties(), options, &plan);
  CHECK(status.code == StatusCode::kInvalidArgument);
  CHECK(std::strstr(status.message, "realign_a=1,realign_b=0: operands of a quantised GEMM are not realigned") != nullptr);
}

TEST_CASE(plan_of_the_workspace_aligns_the_copies) {
  GemmProblem const problem = problem_of(77, 999, 1001);
  GemmPlan chosen;
  CHECK(plan_gemm(problem_of(512, 512, 512), h200_properties(), analytic_options(), &chosen).ok());
  GemmLaunch launch;
  launch.decomposition = Decomposition::kSplitK;
  launch.splits = 3;
  launch.realign_a = launch.realign_b = true;
  GemmPlanOptions options = analytic_options();
  options.kernel = chosen.kernel->name;
  options.launch = &launch;
  GemmPlan plan;
  CHECK(plan_gemm(problem, h200_properties(), options, &plan).ok());
  size_t const copies = gemm::copies_bytes(problem, launch);
  CHECK(copies > 0 && plan.workspace_bytes > copies);
  CHECK_EQUAL((plan.workspace_bytes - copies) % 256, size_t(0));
  CHECK_EQUAL(copies % 256, size_t(0));
}

TEST_CASE(copies_have_ctas_for_every_element) {
  for (Major major : kMajors) {
    for (int64_t rows : {1, 7, 8, 63, 65, 1000}) {
      for (int64_t k : {1, 8, 9, 100, 255, 257, 1023, 5000, 100003}) {
        gemm::RealignShape const shape(major, rows, k);
        int64_t const vectors = (k + 7) / 8, of_row = int64_t(1) << (shape.lanes + shape.along);
        if (major == Major::kMN) {
          CHECK(shape.blocks_x * shape.kTileRows >= rows && (shape.blocks_x - 1) * shape.kTileRows < rows);
          CHECK(shape.blocks_y * shape.kTileLines >= k && (shape.blocks_y - 1) * shape.kTileLines < k);
          continue;
        }
        int64_t const rows_of_block = int64_t(shape.kThreads) * shape.kVectors / of_row;
        CHECK(shape.lanes >= 0 && shape.lanes <= 5 && shape.along >= 0 && (1 << shape.along) <= shape.kVectors);
        CHECK(shape.along == 0 || shape.lanes == 5);  // vectors of a thread are at least 256 elements apart
        CHECK(shape.blocks_x * of_row >= vectors && (shape.blocks_x - 1) * of_row < vectors);
        CHECK(shape.blocks_y * rows_of_block >= rows && (shape.blocks_y - 1) * rows_of_block < rows);
        CHECK(gemm::realigned_stride(k) >= vectors * 8 && gemm::realigned_stride(k) % 8 == 0);
      }
    }
  }
}

TEST_CASE(plan_uses_wgmma_where_it_can) {
  for (int64_t m : {128, 1024, 8192}) {  // below that the HBM stream decides, which cp.async fills as well
    for (DataType type : kTypes) {
      for (Major a : kMajors) {
        for (Major b : kMajors) {
          GemmProblem const problem = problem_of(m, 4096, 4096, type, a, b);
          Context const at(text_of(problem));
          GemmPlan plan;
          CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
          CHECK_EQUAL(plan.kernel->arch, 90);
        }
      }
    }
  }
}

TEST_CASE(plan_prediction_is_sane) {
  // Within a factor of four of the floor plus a launch: a model further off than that chooses by noise.
  for (int64_t m : {1, 16, 64, 256, 1024, 8192}) {
    GemmProblem const problem = problem_of(m, 4096, 4096, DataType::kBF16);
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
    CHECK(plan.predicted_us <= 4 * (plan.floor_us + 3));
  }
}

TEST_CASE(plan_force_arch_keeps_to_portable_kernels) {
  GemmPlanOptions options = analytic_options();
  options.force_arch = 80;
  for (int64_t m : {1, 512, 4096}) {
    GemmPlan plan;
    CHECK(plan_gemm(problem_of(m, 4096, 4096), h200_properties(), options, &plan).ok());
    CHECK_EQUAL(plan.kernel->arch, 80);
  }
}

TEST_CASE(plan_always_answers_for_operands_of_8_bits) {
  for (DataType type : {DataType::kE4M3, DataType::kS8}) {
    for (int64_t m : {1, 3, 16, 64, 100, 128, 500, 4096}) {
      for (int64_t n : {8, 64, 576, 4096, 24576}) {
        for (int64_t k : {16, 128, 7168}) {
          GemmProblem problem = problem_of(m, n, k, type);
          check_answers(problem, h200_properties());
          if (type == DataType::kE4M3) {
            problem.block_scaled = true;
          } else {
            problem.d_int32 = true;
          }
          check_answers(problem, h200_properties());
        }
      }
    }
  }
}

/// Operands of 8 bits have kernels everywhere: int8 in whole vectors of 16 bytes on GPUs that read without TMA, e4m3 of any length.
TEST_CASE(eight_bits_have_portable_kernels) {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    Context const at(devices[i].name);
    for (int64_t m : {1, 16, 100, 4096}) {
      GemmPlan plan;
      GemmProblem problem = problem_of(m, 4096, 4096, DataType::kS8);
      check_answers(problem, devices[i]);
      CHECK(plan_gemm(problem, devices[i], analytic_options(), &plan).ok());
      CHECK_EQUAL(plan.kernel->arch, 80);
      if (m == 1) CHECK(plan.kernel->tile_m < 64 || plan.launch.decomposition != Decomposition::kDataParallel);
      problem.k = 4088;  // rows that a copy has spaced at multiples of 16 bytes
      CHECK(!plan_gemm(problem, devices[i], analytic_options(), &plan).ok());
      CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
      for (int64_t k : {4096, 4088, 77}) {
        problem = problem_of(m, 4096, 4096, DataType::kE4M3);
        problem.k = k;
        problem.block_scaled = k != 77;
        check_answers(problem, devices[i]);
        CHECK(plan_gemm(problem, devices[i], analytic_options(), &plan).ok());
        CHECK_EQUAL(plan.kernel->arch, 80);
      }
    }
  }
  GemmPlan plan;
  for (int64_t m : {1, 64, 4096}) {
    for (DataType type : {DataType::kS8, DataType::kE4M3}) {
      CHECK(plan_gemm(problem_of(m, 4096, 4096, type), h200_properties(), analytic_options(), &plan).ok());
      CHECK_EQUAL(plan.kernel->arch, 90);
    }
  }
}

TEST_CASE(sums_of_int32_are_not_split) {
  GemmProblem problem = problem_of(16, 4096, 16384, DataType::kS8);
  GemmPlan plan;
  CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
  CHECK(plan.launch.decomposition != Decomposition::kDataParallel);  // there is something to split
  problem.d_int32 = true;
  CHECK(plan_gemm(problem, h200_properties(), analytic_options(), &plan).ok());
  CHECK(plan.launch.decomposition == Decomposition::kDataParallel);
  GemmPlanOptions options = analytic_options();
  GemmLaunch launch;
  launch.decomposition = Decomposition::kSplitK;
  launch.splits = 2;
  options.kernel = plan.kernel->name;
  options.launch = &launch;
  Status const status = plan_gemm(problem, h200_properties(), options, &plan);
  CHECK(!status.ok() && std::strstr(status.message, "sums of int32 are not split") != nullptr);
}

TEST_CASE(what_operands_of_8_bits_alone_have_is_refused_of_others) {
  GemmPlan plan;
  auto const refuses = [&](DataType type, bool GemmProblem::*member) {
    GemmProblem problem = problem_of(64, 512, 512, type);
    problem.*member = true;
    return plan_gemm(problem, h200_properties(), analytic_options(), &plan).code == StatusCode::kInvalidArgument;
  };
  CHECK(refuses(DataType::kBF16, &GemmProblem::block_scaled) && refuses(DataType::kS8, &GemmProblem::block_scaled));
  CHECK(refuses(DataType::kBF16, &GemmProblem::fast_accum) && refuses(DataType::kS8, &GemmProblem::fast_accum));
  CHECK(refuses(DataType::kBF16, &GemmProblem::d_int32) && refuses(DataType::kE4M3, &GemmProblem::d_int32));
}

TEST_CASE(operands_of_8_bits_have_half_the_floor) {
  DeviceProperties const h200 = h200_properties();
  for (int64_t m : {1, 8192}) {
    double const wide = gemm_floor_us(problem_of(m, 8192, 8192), h200),
                 narrow = gemm_floor_us(problem_of(m, 8192, 8192, DataType::kE4M3), h200);
    CHECK(narrow < 0.51 * wide && narrow > 0.49 * wide);
  }
}

TEST_CASE(plan_override_takes_every_kernel) {
  DeviceProperties const h200 = h200_properties();
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    if (std::strcmp(kernels[i].family, "gemm") != 0 && std::strcmp(kernels[i].family, "scaled_gemm") != 0) continue;
    Context const at(kernels[i].name);
    GemmPlanOptions options = analytic_options();
    options.kernel = kernels[i].name;
    GemmProblem const problem = problem_of(384, 640, 512, kernels[i].ab_type, kernels[i].a_major, kernels[i].b_major);
    GemmPlan plan;
    Status const status = plan_gemm(problem, h200, options, &plan);
    if (!status.ok()) fail(__FILE__, __LINE__, status.message);
    CHECK(plan.kernel == &kernels[i]);
    CHECK(plan.source == PlanSource::kOverride);
    check_plan(problem, plan, h200);
  }
}

// 5 columns of tiles in bands of 4 would leave a band of one, whose neighbours read a row each.
TEST_CASE(plan_order_leaves_no_narrow_band) {
  GemmPlanOptions options = analytic_options();
  options.kernel = "gemm_sm90_bf16_tn_64x128x64_1x1x1_pingpong_swap";
  GemmPlan plan;
  CHECK(plan_gemm(problem_of(600, 1664, 5440, DataType::kBF16), h200_properties(), options, &plan).ok());
  CHECK(plan.launch.raster_order == RasterOrder::kAlongM);
  CHECK(plan.launch.max_swizzle_size > 1);
  CHECK(5 % plan.launch.max_swizzle_size != 1);
}

// Where all that run together read more than L2 holds, CTAs with a line of B in common, along n, keep pace. Of operands that L2 holds,
// groups of neighbours count, which are to be square.
TEST_CASE(plan_order_reads_memory_few_times) {
  GemmPlanOptions options = analytic_options();
  options.kernel = "gemm_sm90_bf16_tn_128x128x64_1x1x1_cooperative";
  auto const order = [&](int64_t m, int64_t n, int64_t k) {
    GemmPlan plan;
    Status const status = plan_gemm(problem_of(m, n, k, DataType::kBF16), h200_properties(), options, &plan);
    if (!status.ok()) fail(__FILE__, __LINE__, status.message);
    return plan.launch;
  };
  for (GemmLaunch const& large : {order(3369, 57344, 8192), order(9226, 8192, 8192), order(8622, 4096, 14336)}) {
    CHECK(large.raster_order == RasterOrder::kAlongN);
    CHECK(large.max_swizzle_size >= 4 && large.max_swizzle_size <= 12);
  }
  int32_t const small = order(2048, 2048, 1024).max_swizzle_size;
  CHECK(small >= 2 && small <= 8);
}

TEST_CASE(plan_override_takes_the_launch_too) {
  DeviceProperties const h200 = h200_properties();
  GemmProblem const problem = problem_of(64, 4096, 8192);
  GemmPlan chosen;
  CHECK(plan_gemm(problem, h200, analytic_options(), &chosen).ok());
  GemmLaunch launch;
  launch.max_swizzle_size = 4;
  launch.raster_order = RasterOrder::kAlongN;
  for (Decomposition decomposition : {Decomposition::kDataParallel, Decomposition::kStreamK, Decomposition::kSplitK}) {
    launch.decomposition = decomposition;
    launch.splits = decomposition == Decomposition::kSplitK ? 4 : 1;
    GemmPlanOptions options = analytic_options();
    options.kernel = chosen.kernel->name;
    options.launch = &launch;
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200, options, &plan).ok());
    CHECK(plan.kernel == chosen.kernel);
    CHECK(plan.launch.decomposition == decomposition);
    CHECK_EQUAL(plan.launch.splits, launch.splits);
    CHECK_EQUAL(plan.launch.max_swizzle_size, 4);
    CHECK(plan.launch.raster_order == RasterOrder::kAlongN);
    // Ordered reduction needs room for partial tiles.
    if (decomposition == Decomposition::kSplitK) CHECK(plan.workspace_bytes > 0);
    check_plan(problem, plan, h200);
  }
}

TEST_CASE(plan_override_refuses_what_the_kernel_cannot_read) {
  DeviceProperties const h200 = h200_properties();
  GemmPlan chosen;
  CHECK(plan_gemm(problem_of(512, 512, 512), h200, analytic_options(), &chosen).ok());
  CHECK_EQUAL(chosen.kernel->alignment, 16);
  GemmPlanOptions options = analytic_options();
  options.kernel = chosen.kernel->name;
  GemmProblem misaligned = problem_of(512, 512, 512);
  misaligned.a_alignment = 2;
  GemmProblem const problems[] = {problem_of(512, 512, 512, DataType::kBF16), misaligned,
                                  problem_of(512, 512, 512, DataType::kF16, Major::kMN, Major::kMN)};
  for (GemmProblem const& problem : problems) {
    Context const at(text_of(problem));
    GemmPlan plan;
    Status const status = plan_gemm(problem, h200, options, &plan);
    CHECK(status.code == StatusCode::kInvalidArgument);
    CHECK(std::strstr(status.message, chosen.kernel->name) != nullptr);
  }
}

TEST_CASE(plan_unknown_kernel_names_the_nearest) {
  GemmPlan chosen;
  CHECK(plan_gemm(problem_of(512, 512, 512), h200_properties(), analytic_options(), &chosen).ok());
  std::string misspelt = chosen.kernel->name;
  misspelt[misspelt.size() / 2] = '?';
  GemmPlanOptions options = analytic_options();
  options.kernel = misspelt.c_str();
  GemmPlan plan;
  Status const status = plan_gemm(problem_of(512, 512, 512), h200_properties(), options, &plan);
  CHECK(status.code == StatusCode::kUnknownKernel);
  CHECK(std::strstr(status.message, misspelt.c_str()) != nullptr);
  CHECK(std::strstr(status.message, chosen.kernel->name) != nullptr);
}

TEST_CASE(plan_refuses_a_kernel_that_is_not_compiled) {
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    if (kernels[i].launch != nullptr || std::strcmp(kernels[i].family, "gemm") != 0) continue;
    Context const at(kernels[i].name);
    GemmPlanOptions options = analytic_options();
    options.only_runnable = true;
    options.kernel = kernels[i].name;
    GemmPlan plan;
    GemmProblem const problem = problem_of(512, 512, 512, kernels[i].ab_type, kernels[i].a_major, kernels[i].b_major);
    CHECK(plan_gemm(problem, h200_properties(), options, &plan).code == StatusCode::kNotCompiled);
  }
}

TEST_CASE(plan_refuses_what_is_not_a_gemm) {
  GemmProblem negative = problem_of(16, 16, 16), f32 = problem_of(16, 16, 16), mixed = problem_of(16, 16, 16);
  negative.m = -1;
  f32.ab_type = DataType::kF32;
  mixed.d_type = DataType::kBF16;
  GemmProblem const gated = problem_of(16, 24, 16, DataType::kF16, Major::kK, Major::kK, false, true);
  for (GemmProblem const& problem : {negative, f32, mixed, gated}) {
    Context const at(text_of(problem));
    GemmPlan plan;
    Status const status = plan_gemm(problem, h200_properties(), analytic_options(), &plan);
    CHECK(status.code == StatusCode::kInvalidArgument);
    CHECK(plan.kernel == nullptr);
    int64_t count = -1;
    CHECK(!enumerate_gemm(problem, h200_properties(), analytic_options(), nullptr, 0, &count).ok());
    CHECK_EQUAL(count, 0);
  }
}

TEST_CASE(plan_is_right_or_refuses_beyond_2_31) {
  check_answers(problem_of(65536, 65536, 128), h200_properties());    // 2^32 outputs
  check_answers(problem_of(8, 1 << 20, 1 << 13), h200_properties());  // 2^33 elements of B
  for (int64_t m : {int64_t(1) << 31, int64_t(1) << 40}) {
    GemmPlan plan;
    Status const status = plan_gemm(problem_of(m, 8, 8), h200_properties(), analytic_options(), &plan);
    CHECK(status.ok() || status.code == StatusCode::kNotSupported || status.code == StatusCode::kInvalidArgument);
    CHECK(status.ok() == (plan.kernel != nullptr));
  }
}

TEST_CASE(plan_says_when_nothing_of_the_build_can_run) {
  GemmPlanOptions options;
  GemmPlan plan;
  Status const status = plan_gemm(problem_of(512, 512, 512), h200_properties(), options, &plan);
#if !MINFER_WITH_CUDA
  CHECK(status.code == StatusCode::kNotSupported);
#endif
  CHECK(status.ok() == (plan.kernel != nullptr));
  if (plan.kernel != nullptr) CHECK(plan.kernel->launch != nullptr);
}

TEST_CASE(plan_is_pure_and_thread_safe) {
  std::vector<GemmProblem> problems;
  for (int64_t m : {1, 16, 100, 512, 4096})
    for (int64_t k : {512, 4096, 14336}) problems.push_back(problem_of(m, 4096, k));
  std::vector<GemmPlan> expected(problems.size());
  for (size_t i = 0; i < problems.size(); ++i) CHECK(plan_gemm(problems[i], h200_properties(), analytic_options(), &expected[i]).ok());
  std::vector<int> differences(4, 0);
  std::vector<std::thread> threads;
  for (size_t t = 0; t < differences.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < problems.size(); ++i) {
        GemmPlan plan;
        bool const ok = plan_gemm(problems[i], h200_properties(), analytic_options(), &plan).ok();
        differences[t] += !ok || plan.launch != expected[i].launch || plan.kernel != expected[i].kernel ||
                          plan.workspace_bytes != expected[i].workspace_bytes;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int d : differences) CHECK_EQUAL(d, 0);
}

TEST_CASE(floor_is_bytes_or_flops) {
  DeviceProperties const h200 = h200_properties();
  auto const near = [](double a, double b) { return std::abs(a - b) <= 1e-9 * b; };
  // 4096 cubed: 2 * 4096^3 flops at 750 TFLOP/s.
  CHECK(near(gemm_floor_us(problem_of(4096, 4096, 4096), h200), 2.0 * 4096 * 4096 * 4096 / 750e6));
  // One token: the weight's bytes at 4.45 TB/s, beside 8 kB of A and of D.
  CHECK(near(gemm_floor_us(problem_of(1, 4096, 4096), h200), 2.0 * (4096.0 * 4096 + 4096 + 4096) / 4.45e6));
  CHECK_EQUAL(gemm_bytes(problem_of(1, 4096, 4096)), 2.0 * (4096.0 * 4096 + 4096 + 4096));
  CHECK_EQUAL(gemm_bytes(problem_of(0, 4096, 4096)), 0.0);
  // C doubles the output's bytes, gating halves them, float32 doubles them.
  CHECK(near(gemm_floor_us(problem_of(64, 4096, 0, DataType::kF16, Major::kK, Major::kK, true), h200), 2.0 * 2 * 64 * 4096 / 4.45e6));
  CHECK(near(gemm_floor_us(problem_of(64, 4096, 0, DataType::kF16, Major::kK, Major::kK, false, true), h200), 2.0 * 64 * 2048 / 4.45e6));
  GemmProblem wide = problem_of(64, 4096, 0);
  wide.d_type = DataType::kF32;
  CHECK(near(gemm_floor_us(wide, h200), 4.0 * 64 * 4096 / 4.45e6));
  // Codes halve D's bytes, not C's.
  GemmProblem codes = problem_of(64, 4096, 0, DataType::kF16, Major::kK, Major::kK, true);
  codes.d_fp8 = true;
  CHECK_EQUAL(gemm_bytes(codes), 3.0 * 64 * 4096);
  // A batch is that many problems.
  GemmProblem batched = problem_of(16, 1024, 1024);
  double const one = gemm_floor_us(batched, h200);
  batched.batch = 8;
  CHECK(near(gemm_floor_us(batched, h200), 8 * one));
  CHECK_EQUAL(gemm_floor_us(problem_of(0, 4096, 0), h200), 0.0);
}

TEST_CASE(enumerate_is_sorted_and_starts_with_the_plan) {
  DeviceProperties const h200 = h200_properties();
  for (GemmProblem const& problem : {problem_of(1, 4096, 4096), problem_of(1024, 1024, 1024), problem_of(100, 333, 77)}) {
    Context const at(text_of(problem));
    int64_t count = 0;
    CHECK(enumerate_gemm(problem, h200, analytic_options(), nullptr, 0, &count).ok());
    CHECK(count > 0);
    std::vector<GemmPlan> plans(static_cast<size_t>(count));
    int64_t again = 0;
    CHECK(enumerate_gemm(problem, h200, analytic_options(), plans.data(), count, &again).ok());
    CHECK_EQUAL(again, count);
    for (size_t i = 0; i < plans.size(); ++i) {
      CHECK(plans[i].kernel != nullptr);
      CHECK(plans[i].workspace_bytes < (size_t(1) << 33));
      if (i > 0) CHECK(plans[i].predicted_us >= plans[i - 1].predicted_us);
    }
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200, analytic_options(), &plan).ok());
    CHECK(plan.predicted_us == plans[0].predicted_us);
    // A short buffer gets the best ones and the full count.
    GemmPlan best;
    CHECK(enumerate_gemm(problem, h200, analytic_options(), &best, 1, &again).ok());
    CHECK_EQUAL(again, count);
    CHECK(best.kernel == plans[0].kernel);
  }
}

TEST_CASE(run_refuses_before_it_launches) {
  DeviceProperties const h200 = h200_properties();
  GemmProblem const problem = problem_of(64, 4096, 4096);
  GemmOperands const operands;
  GemmPlan plan;
  CHECK(run_gemm(plan, problem, operands, h200, nullptr, 0, nullptr).code == StatusCode::kInvalidArgument);
  CHECK(plan_gemm(problem, h200, analytic_options(), &plan).ok());
  if (plan.kernel->launch == nullptr) {
    CHECK(run_gemm(plan, problem, operands, h200, nullptr, 0, nullptr).code == StatusCode::kNotCompiled);
  } else {
    CHECK(run_gemm(plan, problem, operands, h200, nullptr, 0, nullptr).code == StatusCode::kInvalidArgument);  // null operands
  }
}
