// Batch-invariant plans: for one weight, every number of rows is computed by kernels that add up k alike, in the same ranges of it.
#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gemm_problems.h"
#include "minfer/fused.h"
#include "minfer/moe.h"
#include "minfer/norm_gemm.h"
#include "minfer/w4a16.h"
#include "testing.h"

using namespace minfer;
using minfer::testing::Context;
using minfer::testing::problem_of;
using minfer::testing::text_of;

namespace {

/// From 1 to 4096: all up to 17, then numbers on either side of tiles' edges and between them.
std::vector<int64_t> rows_to_sweep() {
  std::vector<int64_t> rows;
  for (int64_t m = 1; m <= 17; ++m) rows.push_back(m);
  for (int64_t edge = 24; edge <= 4096; edge += edge / 4 / 8 * 8 + 8) rows.insert(rows.end(), {edge - 1, edge, edge + 1});
  rows.push_back(4096);
  return rows;
}

constexpr int64_t kWeights[][2] = {{4096, 4096}, {6144, 4096},  {28672, 4096}, {4096, 14336},  {1024, 8192},  {512, 7168},
                                   {128, 4096},  {3584, 18944}, {64, 2048},    {128256, 4096}, {2048, 28672}, {1000, 1000}};

/// How a plan adds up k: what must be one and the same for all numbers of rows.
std::string order_of(GemmPlan const& plan, int64_t k) {
  CHECK(plan.kernel != nullptr && plan.kernel->sums[0] != 0);
  CHECK(plan.launch.decomposition != Decomposition::kStreamK || std::strstr(plan.kernel->name, "_continued") != nullptr);
  bool const split = plan.launch.decomposition == Decomposition::kSplitK || plan.launch.decomposition == Decomposition::kRanges;
  std::string order = plan.kernel->sums;
  int64_t const splits = split ? plan.launch.splits : 1, k_tiles = (k + plan.kernel->tile_k - 1) / plan.kernel->tile_k;
  for (int64_t i = 0; i < splits; ++i) {
    order += ' ';
    order += std::to_string((k_tiles / splits * i + std::min(i, k_tiles % splits)) * plan.kernel->tile_k);
  }
  return order;
}

GemmPlan plan_of(GemmProblem problem, DeviceProperties const& device, GemmPlanOptions options = testing::analytic_options()) {
  problem.batch_invariant = true;
  Context const context(text_of(problem));
  GemmPlan plan;
  Status const status = plan_gemm(problem, device, options, &plan);
  if (!status.ok()) testing::fail(__FILE__, __LINE__, status.message);
  return plan;
}

/// The orders of all numbers of rows of a problem, whose other members `vary` may set.
template <class Vary>
std::set<std::string> orders(GemmProblem problem, DeviceProperties const& device, Vary const& vary) {
  std::set<std::string> found;
  for (int64_t m : rows_to_sweep()) {
    problem.m = m;
    GemmProblem one = problem;
    vary(one);
    found.insert(order_of(plan_of(one, device), one.k));
  }
  return found;
}

DeviceProperties h100_properties() {
  DeviceProperties device = h200_properties();
  std::strcpy(device.name, "NVIDIA H100 80GB HBM3");
  device.read_bandwidth *= 0.7;
  return device;
}

/// The same GPU with fewer SMs, as of a partition.
DeviceProperties part_of_h200() {
  DeviceProperties device = h200_properties();
  device.sm_count = 60;
  for (int32_t& clusters : device.max_clusters) clusters = clusters * 60 / 132;
  return device;
}

}  // namespace

TEST_CASE(dense_plans_of_a_weight_add_up_k_alike) {
  for (auto const& [n, k] : kWeights) {
    for (DataType type : {DataType::kBF16, DataType::kF16}) {
      GemmProblem const problem = problem_of(1, n, k, type);
      std::string const first = order_of(plan_of(problem, h200_properties()), k);
      CHECK(first.rfind("wgmma16", 0) == 0);
      auto const same = [&](DeviceProperties const& device, auto const& vary) {
        std::set<std::string> const found = orders(problem, device, vary);
        CHECK_EQUAL(found.size(), size_t(1));
        CHECK_EQUAL(*found.begin(), first);
      };
      same(h200_properties(), [](GemmProblem&) {});
      if (type == DataType::kF16) continue;
      same(h100_properties(), [](GemmProblem&) {});
      same(part_of_h200(), [](GemmProblem&) {});
      same(h200_properties(), [](GemmProblem& p) { p.has_c = true, p.c_alignment = p.m % 2 == 0 ? 16 : 0; });
      same(h200_properties(), [](GemmProblem& p) { p.d_type = DataType::kF32; });
      same(h200_properties(), [](GemmProblem& p) { p.a_alignment = p.m % 2 == 0 ? 2 : 16; });
      same(h200_properties(), [](GemmProblem& p) { p.a_major = p.m % 2 == 0 ? Major::kMN : Major::kK; });
      same(h200_properties(), [](GemmProblem& p) { p.batch = 1 + p.m % 3; });
      if (n % 16 == 0) same(h200_properties(), [](GemmProblem& p) { p.gated = true; });
    }
  }
}

TEST_CASE(dense_plans_of_other_devices_add_up_k_alike) {
  int count = 0;
  DeviceProperties const* devices = testing::portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    for (auto const& [n, k] : {std::pair<int64_t, int64_t>{4096, 4096}, {1024, 8192}, {1000, 1000}, {512, 1001}}) {
      CHECK_EQUAL(orders(problem_of(1, n, k), devices[i], [](GemmProblem&) {}).size(), size_t(1));
    }
  }
}

TEST_CASE(plans_of_unaligned_weights_add_up_k_alike) {
  for (auto const& [n, k] : {std::pair<int64_t, int64_t>{4096, 1001}, {1001, 4096}, {13, 4099}, {1, 4096}}) {
    for (Major major : {Major::kK, Major::kMN}) {
      GemmProblem problem = problem_of(1, n, k, DataType::kBF16, Major::kK, major);
      std::set<std::string> const found = orders(problem, h200_properties(), [](GemmProblem&) {});
      Context const context(text_of(problem));
      CHECK_EQUAL(found.size(), size_t(1));
    }
  }
}

TEST_CASE(plans_of_quantised_weights_add_up_k_alike) {
  struct {
    WeightFormat format;
    int32_t group_size;
  } const forms[] = {{WeightFormat::kInt4, 128}, {WeightFormat::kInt4, 32},     {WeightFormat::kInt4, 0},
                     {WeightFormat::kNf4, 64},   {WeightFormat::kMxFp4, 32},    {WeightFormat::kNvFp4, 16},
                     {WeightFormat::kInt8, 0},   {WeightFormat::kFp8E4M3, 128}, {WeightFormat::kInt8, 64}};
  for (auto const& form : forms) {
    for (auto const& [n, k] : kWeights) {
      GemmProblem problem = problem_of(1, n, k, DataType::kBF16);
      problem.b_format = form.format;
      problem.group_size = form.group_size;
      std::set<std::string> const found = orders(problem, h200_properties(), [](GemmProblem& p) {
        bool first = false;
        p.batch_invariant = true;
        CHECK(dequantize_first(p, h200_properties(), testing::analytic_options(), &first).ok() && !first);
      });
      Context const context(text_of(problem));
      CHECK_EQUAL(found.size(), size_t(1));
      CHECK(found.begin()->rfind("wgmma16", 0) == 0);
    }
  }
}

TEST_CASE(plans_of_8_bit_operands_add_up_k_alike) {
  for (DataType type : {DataType::kE4M3, DataType::kS8}) {
    for (auto const& [n, k] : kWeights) {
      for (int mode = 0; mode < 4; ++mode) {
        if (type == DataType::kS8 && mode > 0) continue;
        GemmProblem problem = problem_of(1, n, k, type);
        problem.a_alignment = problem.b_alignment = 16;
        problem.block_scaled = mode == 1, problem.fast_accum = mode == 2;
        if (mode == 3) problem.d_type = DataType::kF32;
        std::set<std::string> const found = orders(problem, h200_properties(), [](GemmProblem&) {});
        Context const context(text_of(problem));
        CHECK_EQUAL(found.size(), size_t(1));
        CHECK(found.begin()->rfind("wgmma8", 0) == 0);
      }
      GemmProblem codes = problem_of(1, n, k / 16 * 16, type);
      codes.b_format = WeightFormat::kInt4;
      codes.group_size = 128;
      CHECK_EQUAL(orders(codes, h200_properties(), [](GemmProblem&) {}).size(), size_t(1));
    }
  }
}

TEST_CASE(tuned_rows_have_no_say_in_batch_invariant_plans) {
  GemmProblem problem = problem_of(16, 4096, 4096, DataType::kBF16);
  GemmPlan const plan = plan_of(problem, h200_properties());
  GemmTunedRow row{};
  row.m = 16, row.n = 4096, row.k = 4096, row.batch = 1;
  row.ab_type = DataType::kBF16;
  row.kernel = "gemm_sm90_bf16_tn_128x16x128_1x1x1_pingpong_swap";
  row.launch.decomposition = Decomposition::kStreamK;
  row.us = 1.0f;
  GemmPlanOptions options = testing::analytic_options();
  options.use_tuned = true;
  options.user_rows = &row;
  options.user_row_count = 1;
  GemmPlan tuned;
  CHECK(plan_gemm(problem, h200_properties(), options, &tuned).ok() && tuned.source == PlanSource::kTuned);
  GemmPlan const still = plan_of(problem, h200_properties(), options);
  CHECK(still.source == PlanSource::kAnalytic && still.kernel == plan.kernel && still.launch == plan.launch);
}

TEST_CASE(launches_that_are_not_batch_invariant_are_refused) {
  GemmProblem problem = problem_of(16, 4096, 4096, DataType::kBF16);
  problem.batch_invariant = true;
  auto const message = [&](char const* kernel, GemmLaunch const* launch) {
    GemmPlanOptions options = testing::analytic_options();
    options.kernel = kernel;
    options.launch = launch;
    GemmPlan plan;
    Status const status = plan_gemm(problem, h200_properties(), options, &plan);
    return status.ok() ? std::string() : std::string(status.message);
  };
  char const* const few = "gemm_sm90_bf16_tn_64x16x128_1x1x1_pingpong_swap";
  GemmLaunch launch;
  CHECK(message(few, nullptr).empty() && message(few, &launch).empty());
  launch.decomposition = Decomposition::kStreamK;
  CHECK(message(few, &launch).find("it cuts k in other ranges") != std::string::npos);
  char const* const continued = "gemm_sm90_bf16_tn_64x16x128_1x1x1_pingpong_swap_continued";
  CHECK(message(continued, nullptr).empty() && message(continued, &launch).empty());
  launch.decomposition = Decomposition::kSplitK;
  launch.splits = 3;
  CHECK(message(continued, &launch).find("it cuts k in other ranges") != std::string::npos);
  problem.batch_invariant = false;
  CHECK(message(continued, &launch).find("continue sums") != std::string::npos);
  problem.batch_invariant = true;
  problem.n = 512, problem.k = 7168;
  CHECK(message(continued, nullptr).find("of several ranges of k") != std::string::npos);
  problem.n = problem.k = 4096;
  CHECK(message(few, &launch).find("it cuts k in other ranges") != std::string::npos);
  CHECK(message("gemm_sm80_bf16_tn_128x128x32_1x1x1_multistage", nullptr).find("adds up k in another order") != std::string::npos);
  problem.m = 1;
  CHECK(message("gemm_sm80_bf16_tn_1x16x1024_1x1x1_multistage_vector", nullptr).find("adds up k in another order") != std::string::npos);
}

// Few rows share out the ranges of k among CTAs, many have them in place: nothing passes through the workspace.
TEST_CASE(many_rows_have_ranges_in_place) {
  for (int64_t m : {1, 16, 1024, 4096}) {
    GemmProblem problem = problem_of(m, 4096, 4096, DataType::kBF16);
    problem.b_format = WeightFormat::kInt4;
    problem.group_size = 128;
    problem.batch_invariant = true;
    GemmPlan plan;
    CHECK(plan_gemm(problem, h200_properties(), testing::analytic_options(), &plan).ok());
    CHECK(plan.launch.splits > 1 && plan.launch.decomposition == (m >= 1024 ? Decomposition::kRanges : Decomposition::kSplitK));
    CHECK_EQUAL(plan.workspace_bytes == 0, m >= 1024);
  }
}

// Tiles that are not as many as SMs are divided, where that is worth it, without another order of k.
TEST_CASE(few_rows_are_divided_among_all_sms) {
  for (auto const& [n, k] : {std::pair<int64_t, int64_t>{6144, 4096}, {10240, 8192}, {28672, 4096}}) {
    GemmPlan const plan = plan_of(problem_of(16, n, k, DataType::kBF16), h200_properties());
    CHECK(std::strstr(plan.kernel->name, "_continued") != nullptr && plan.launch.decomposition == Decomposition::kStreamK);
  }
  for (int64_t tiles : {32, 64, 132}) {
    GemmPlan const whole = plan_of(problem_of(16, tiles * 64, 4096, DataType::kBF16), h200_properties());
    CHECK(std::strstr(whole.kernel->name, "_continued") == nullptr && whole.launch.decomposition != Decomposition::kStreamK);
  }
}

TEST_CASE(kernels_of_batch_invariant_plans_are_no_others) {
  int64_t count = 0, only = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) only += kernels[i].invariant_only;
  CHECK(only > 0);
  for (int64_t m : rows_to_sweep()) {
    for (WeightFormat format : {WeightFormat::kInt4, WeightFormat::kNvFp4}) {
      GemmProblem problem = problem_of(m, 4096, 4096, DataType::kBF16);
      problem.b_format = format;
      problem.group_size = format == WeightFormat::kInt4 ? 128 : 16;
      GemmPlan plan;
      CHECK(plan_gemm(problem, h200_properties(), testing::analytic_options(), &plan).ok() && !plan.kernel->invariant_only);
    }
  }
}

TEST_CASE(plans_of_experts_add_up_k_alike) {
  struct {
    DataType type;
    WeightFormat format;
    int64_t group_size;
    int32_t a_group;
    bool d_groups;
  } const forms[] = {
      {DataType::kBF16, WeightFormat::kDense, 0, 0, false},   {DataType::kBF16, WeightFormat::kInt4, 128, 0, false},
      {DataType::kF16, WeightFormat::kInt4, 32, 0, false},    {DataType::kBF16, WeightFormat::kMxFp4, 32, 0, false},
      {DataType::kBF16, WeightFormat::kNvFp4, 16, 0, false},  {DataType::kE4M3, WeightFormat::kDense, 0, 0, false},
      {DataType::kE4M3, WeightFormat::kDense, 0, 128, false}, {DataType::kE4M3, WeightFormat::kDense, 0, 32, false},
      {DataType::kS8, WeightFormat::kDense, 0, 0, false},     {DataType::kE4M3, WeightFormat::kDense, 0, 128, true},
      {DataType::kS8, WeightFormat::kDense, 0, 0, true},
  };
  for (auto const& form : forms) {
    for (int64_t experts : {1, 8, 128}) {
      std::set<std::string> found;
      std::set<int32_t> groups;
      for (int64_t rows : rows_to_sweep()) {
        for (bool gathered : {false, true}) {
          GroupedProblem p;
          p.rows = rows * 4, p.experts = experts, p.n = 1536, p.k = 2048;
          p.type = form.type;
          p.b_format = form.format;
          p.group_size = form.group_size;
          p.a_group = form.a_group;
          p.b_blocks = form.type == DataType::kE4M3 && form.a_group > 0;
          p.gathered = gathered;
          p.gated = p.d_groups = form.d_groups;
          p.batch_invariant = true;
          GroupedPlanOptions options;
          options.only_runnable = false;
          GroupedPlan plan;
          CHECK(plan_grouped(p, h200_properties(), options, &plan).ok());
          found.insert(plan.kernel->sums);
          groups.insert(d_group_of(*plan.kernel));
        }
      }
      CHECK_EQUAL(found.size(), size_t(1));
      CHECK(found.begin()->rfind("wgmma", 0) == 0);
      CHECK(!form.d_groups || groups.size() == 1);
    }
  }
}

TEST_CASE(experts_kernels_of_another_order_are_refused) {
  GroupedProblem p;
  p.rows = 64, p.experts = 8, p.n = 1536, p.k = 2048;
  p.type = DataType::kBF16;
  p.b_format = WeightFormat::kInt4;
  p.group_size = 128;
  p.batch_invariant = true;
  GroupedPlanOptions options;
  options.only_runnable = false;
  options.kernel = "moe_w4a16_sm90_bf16_int4_64x8x256_1x1x1_w2k2x2_acc";
  GroupedPlan plan;
  Status const status = plan_grouped(p, h200_properties(), options, &plan);
  CHECK(!status.ok() && std::strstr(status.message, "not batch invariant") != nullptr);
}

TEST_CASE(rows_are_divided_among_threads_by_their_width) {
  for (RowOperation operation : {RowOperation::kRmsNorm, RowOperation::kLayerNorm, RowOperation::kSoftmax}) {
    for (RowQuant quant : {RowQuant::kNone, RowQuant::kFp8Token, RowQuant::kInt8Token}) {
      if (quant != RowQuant::kNone && operation != RowOperation::kRmsNorm) continue;
      for (int64_t width : {8, 100, 128, 256, 512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 128256, 262144, 300000}) {
        std::set<std::string> found;
        for (int64_t rows : {1, 2, 8, 16, 17, 33, 64, 132, 264, 265, 512, 1024, 4096, 100000}) {
          for (bool adds : {false, true}) {
            for (DeviceProperties const& device : {h200_properties(), part_of_h200()}) {
              RowProblem p;
              p.operation = operation;
              p.quant = quant;
              p.rows = rows, p.width = width;
              p.adds = adds && operation == RowOperation::kRmsNorm;
              p.batch_invariant = true;
              RowPlan plan;
              CHECK(plan_rows(p, device, nullptr, &plan).ok());
              found.insert(plan.kernel->name + std::string("@") + std::to_string(plan.launch.threads) + "," +
                           std::to_string(plan.launch.cluster));
            }
          }
        }
        Context const context(std::string(name_of(operation)) + " of " + std::to_string(width));
        CHECK_EQUAL(found.size(), size_t(1));
      }
    }
  }
}

TEST_CASE(other_launches_of_rows_are_refused) {
  RowProblem p;
  p.rows = 4, p.width = 4096;
  p.batch_invariant = true;
  RowPlan own, plan;
  CHECK(plan_rows(p, h200_properties(), nullptr, &own).ok());
  RowOverride asked;
  asked.kernel = own.kernel;
  CHECK(plan_rows(p, h200_properties(), &asked, &plan).ok());
  asked.launch.threads = 2 * own.launch.threads;
  Status const status = plan_rows(p, h200_properties(), &asked, &plan);
  CHECK(!status.ok() && std::strstr(status.message, "not batch invariant") != nullptr);
}

TEST_CASE(a_norm_and_its_product_are_two_launches) {
  NormGemmProblem p;
  p.m = 1, p.n = 6144, p.k = 4096;
  NormGemmPlanOptions options;
  options.only_runnable = false;
  NormGemmPlan plan;
  CHECK(plan_norm_gemm(p, h200_properties(), options, &plan).ok() && plan.kernel != nullptr);
  p.batch_invariant = true;
  CHECK(plan_norm_gemm(p, h200_properties(), options, &plan).ok() && plan.kernel == nullptr);
  options.launches = Launches::kOne;
  CHECK(!plan_norm_gemm(p, h200_properties(), options, &plan).ok());
}
