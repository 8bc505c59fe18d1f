// Plans for quantised weights.
#include <cmath>
#include <cstring>
#include <string>
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

/// GPUs without sm_90 kernels, more of them than portable_devices().
std::vector<DeviceProperties> devices_without_sm90() {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  std::vector<DeviceProperties> all(devices, devices + count);
  all.push_back(device_of("NVIDIA GeForce RTX 4090", 8, 9, 128, 101376, 72 << 20, 0.95e6, 165e6));
  return all;
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
    if (kernels[i].group_multiple != 128 || std::strcmp(kernels[i].family, "w4a16") != 0) continue;
    GemmPlanOptions options = analytic_options();
    options.kernel = kernels[i].name;
    GemmPlan plan;
    GemmProblem small = quantized(8, 512, 512, 32, kernels[i].ab_type), whole = quantized(8, 512, 512, 0, kernels[i].ab_type);
    small.b_format = whole.b_format = kernels[i].b_format;
    Status const status = plan_gemm(small, h200_properties(), options, &plan);
    CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "larger groups") != nullptr);
    CHECK(plan_gemm(whole, h200_properties(), options, &plan).ok());
    ++tried;
  }
  CHECK(tried > 0);
}

TEST_CASE(w4a16_plans_on_hopper_are_of_hopper_kernels) {
  DeviceProperties const devices[] = {h200_properties(), device_of("NVIDIA H100 PCIe", 9, 0, 114, 232448, 50 << 20, 1.9e6, 500e6),
                                      device_of("NVIDIA H20", 9, 0, 78, 232448, 60 << 20, 3.6e6, 135e6)};
  for (DeviceProperties const& device : devices) {
    for (int64_t m : {1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 250, 512, 1000, 4096, 16384}) {
      for (int64_t n : {16, 128, 272, 1024, 4096, 6144, 28672, 128256}) {
        for (int64_t k : {8, 64, 136, 512, 2048, 4096, 14336, 28672}) {
          // Half of an sm_90 k-tile: on slow tensor cores it may count as done sooner by a portable kernel, whose k-tile it fills.
          if (k <= 64 && device.matrix_rate < 200e6) continue;
          for (int32_t group : {0, 32, 128}) {
            GemmProblem problem = quantized(m, n, k, group, m % 2 ? DataType::kF16 : DataType::kBF16);
            problem.gated = m % 3 == 0;
            problem.has_zeros = problem.gated != (group == 0);
            Context const at(std::string(device.name) + " " + text_of(problem));
            GemmPlan plan;
            CHECK(plan_gemm(problem, device, analytic_options(), &plan).ok());
            CHECK_EQUAL(plan.kernel->arch, 90);
          }
        }
      }
    }
  }
}

TEST_CASE(w4a16_plans_always_answer_without_hopper_kernels) {
  std::vector<DeviceProperties> devices = devices_without_sm90();
  devices.push_back(h200_properties());
  for (DeviceProperties const& device : devices) {
    GemmPlanOptions options = analytic_options();
    options.force_arch = 80;
    for (int64_t m : {0, 1, 7, 17, 64, 1000, 8192}) {
      for (int64_t n : {8, 72, 4096, 57344}) {
        for (int64_t k : {0, 8, 72, 4096, 28672}) {
          for (int32_t group : {0, 32, 64, 128, 1024}) {
            GemmProblem const problem = quantized(m, n, k, group, m % 2 ? DataType::kF16 : DataType::kBF16);
            Context const at(std::string(device.name) + " " + text_of(problem));
            GemmPlan plan;
            Status const status = plan_gemm(problem, device, options, &plan);
            if (!status.ok()) fail(__FILE__, __LINE__, status.message);
            CHECK(std::strcmp(plan.kernel->family, "w4a16") == 0 && plan.kernel->arch == 80 && !plan.kernel->arch_exact);
            CHECK(std::isfinite(plan.predicted_us) && plan.predicted_us >= plan.floor_us);
            CHECK(plan.workspace_bytes < (size_t(1) << 33));
          }
        }
      }
    }
  }
}

TEST_CASE(w4a16_portable_tiles_follow_the_tokens) {
  int64_t const layers[][2] = {{4096, 4096}, {6144, 4096}, {28672, 4096}, {4096, 14336}};
  for (DeviceProperties const& device : devices_without_sm90()) {
    for (int64_t const(&layer)[2] : layers) {
      auto const plan_of = [&](int64_t m) {
        GemmPlan plan;
        CHECK(plan_gemm(quantized(m, layer[0], layer[1]), device, analytic_options(), &plan).ok());
        return plan;
      };
      for (int64_t m : {1, 5, 8, 12, 16, 24, 32, 64, 128, 512, 1024}) {
        Context const at(std::string(device.name) + " " + text_of(quantized(m, layer[0], layer[1])));
        GemmPlan const plan = plan_of(m);
        int64_t const tile = plan.kernel->tile_n;
        if (m <= 8) CHECK_EQUAL(tile, int64_t(8));
        if (m <= 32) CHECK(tile < 2 * m || tile == 8);  // no tile with an empty half
        if (m >= 512) CHECK(tile >= 64);                // weights are dequantised for many tokens at once
        // A few tokens cost what the weights cost: a start of less than 4 us and the stream.
        if (m <= 8) CHECK(plan.predicted_us < 8.0 + 1.2 * plan.floor_us);
        if (m <= 8) CHECK(plan.predicted_us <= 1.05 * plan_of(16).predicted_us);
      }
    }
  }
}

TEST_CASE(packed_weights_are_rounded_up) {
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kInt4, 64, 64), int64_t(2048));
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kInt4, 65, 8), int64_t(4096));
}

TEST_CASE(packed_weights_of_8_bits_take_twice_as_much) {
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kInt8, 65, 8), int64_t(8192));
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kFp8E4M3, 64, 64), int64_t(4096));
  CHECK_EQUAL(packed_weight_bytes(WeightFormat::kNvFp4, 64, 64), int64_t(2048));
}

TEST_CASE(weights_are_dequantised_first_for_many_tokens_only) {
  // With a code book the fused mainloop is the slower one: 4124 x 23936 x 2816 on the H200 takes 851 us, and 780 after dequantisation.
  GemmProblem few = quantized(16, 23936, 2816, 64), many = quantized(4124, 23936, 2816, 64);
  few.b_format = many.b_format = WeightFormat::kNf4;
  bool first = true;
  CHECK(dequantize_first(few, h200_properties(), analytic_options(), &first).ok());
  CHECK(!first);
  CHECK(dequantize_first(many, h200_properties(), analytic_options(), &first).ok());
  CHECK(first);
  CHECK(dequantized(many).b_format == WeightFormat::kDense);
}

TEST_CASE(weights_that_no_kernel_of_the_device_reads_are_dequantised_first) {
  for (DeviceProperties const& device : devices_without_sm90()) {
    for (WeightFormat format : kWeightFormats) {
      GemmProblem problem = quantized(16, 4096, 4096, fixed_group_of(format) != 0 ? fixed_group_of(format) : 128);
      problem.b_format = format;
      bool first = false;
      CHECK(dequantize_first(problem, device, analytic_options(), &first).ok());
      CHECK_EQUAL(first, format != WeightFormat::kInt4);
    }
  }
}
