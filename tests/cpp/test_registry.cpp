#include <cstring>
#include <set>
#include <string>

#include "minfer/gemm.h"
#include "testing.h"

using namespace minfer;
using testing::Context;

namespace {

template <typename Visit>
void for_each_kernel(Visit&& visit) {
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) {
    Context const at(kernels[i].name);
    visit(kernels[i]);
  }
}

}  // namespace

TEST_CASE(registry_is_not_empty) {
  int64_t count = 0;
  CHECK(registry(&count) != nullptr);
  CHECK(count > 0);
  CHECK(build_archs() != nullptr);
  CHECK(build_cutlass_version() != nullptr);
}

TEST_CASE(registry_names_are_unique_and_found) {
  std::set<std::string> names;
  for_each_kernel([&](KernelInfo const& kernel) {
    CHECK(names.insert(kernel.name).second);
    CHECK(find_kernel(kernel.name) == &kernel);
  });
  CHECK(find_kernel("gemm_sm90_f16_tn_1x1x1_1x1x1_none") == nullptr);
  CHECK(find_kernel("") == nullptr);
}

/// A row or a column of outputs: a vector by a matrix.
bool is_vector(KernelInfo const& kernel) { return kernel.tile_m == 1 || kernel.tile_n == 1; }

TEST_CASE(registry_names_say_what_the_fields_say) {
  for_each_kernel([](KernelInfo const& kernel) {
    if (std::strcmp(kernel.family, "gemm") != 0) return;
    char expected[160];
    std::snprintf(expected, sizeof(expected), "gemm_sm%d_%s_%c%c_%dx%dx%d_%dx%dx1_%s%s%s%s%s", kernel.arch, name_of(kernel.ab_type),
                  kernel.a_major == Major::kK ? 't' : 'n', kernel.b_major == Major::kK ? 'n' : 't', kernel.tile_m, kernel.tile_n,
                  kernel.tile_k, kernel.cluster_m, kernel.cluster_n, name_of(kernel.schedule), kernel.swap ? "_swap" : "",
                  kernel.alignment == 16 ? ""
                  : is_vector(kernel)    ? "_vector"
                                         : "_unaligned",
                  kernel.column_step > 0 ? ("_columns" + std::to_string(kernel.column_step)).c_str() : "",
                  kernel.invariant_only ? "_continued" : "");
    CHECK_EQUAL(std::string(kernel.name), expected);
  });
}

TEST_CASE(registry_fields_are_legal) {
  for_each_kernel([](KernelInfo const& kernel) {
    CHECK(kernel.arch == 80 || kernel.arch == 90);
    CHECK_EQUAL(kernel.arch_exact, kernel.arch == 90);
    // Only operators on rows read float32.
    CHECK(kernel.ab_type != DataType::kF32 || std::strcmp(kernel.family, "fused") == 0);
    CHECK(kernel.tile_m > 0 && kernel.tile_n > 0 && kernel.tile_k > 0);
    CHECK(kernel.tile_n % 8 == 0 || is_vector(kernel));
    CHECK(kernel.cluster_m >= 1 && kernel.cluster_n >= 1);
    CHECK(kernel.stages >= (is_vector(kernel) ? 1 : 2));
    CHECK(kernel.threads % 32 == 0 && kernel.threads <= 1024);
    // What a block of sm_90, and of the smallest portable GPU (8.6, 8.9, 12.0), may ask for.
    CHECK(kernel.smem_bytes <= (kernel.arch == 90 ? 232448 : 101376));
    CHECK(kernel.alignment == 16 || kernel.alignment == 2);
    CHECK(kernel.note != nullptr);
  });
}

// "Any shape, one answer": something must run whatever the type, layout, alignment and device.
TEST_CASE(registry_has_a_kernel_for_anything) {
  for (DataType type : {DataType::kF16, DataType::kBF16}) {
    for (Major a : {Major::kK, Major::kMN}) {
      for (Major b : {Major::kK, Major::kMN}) {
        int generic = 0;
        for_each_kernel([&](KernelInfo const& kernel) {
          generic += kernel.arch == 80 && kernel.alignment <= 2 && kernel.ab_type == type && kernel.a_major == a && kernel.b_major == b;
        });
        CHECK(generic > 0);
      }
    }
  }
}

TEST_CASE(registry_treats_f16_and_bf16_alike) {
  int f16 = 0, bf16 = 0;
  for_each_kernel([&](KernelInfo const& kernel) {
    f16 += kernel.ab_type == DataType::kF16;
    // Prefill over int8, which has kernels of its own beside bf16 queries, is part of the kernels over codes beside f16 ones; tiles of 8
    // rows have both.
    bool const prefill = std::string(kernel.family) == "attention" && kernel.schedule != Schedule::kSplitKv && kernel.tile_m > 8;
    bf16 += kernel.ab_type == DataType::kBF16 && !(prefill && kernel.b_format == WeightFormat::kInt8);
  });
  CHECK_EQUAL(f16, bf16);
}

TEST_CASE(registry_compiles_nothing_without_cuda) {
#if !MINFER_WITH_CUDA
  for_each_kernel([](KernelInfo const& kernel) { CHECK(kernel.launch == nullptr); });
  CHECK_EQUAL(std::string(build_archs()), "");
  DeviceProperties properties;
  CHECK(query_device(0, &properties).code == StatusCode::kNotSupported);
#else
  CHECK(build_archs()[0] != '\0');
#endif
}

TEST_CASE(h200_properties_are_the_measured_ones) {
  DeviceProperties const h200 = h200_properties();
  CHECK_EQUAL(std::string(h200.name), "NVIDIA H200");
  CHECK_EQUAL(h200.compute_capability(), 90);
  CHECK_EQUAL(h200.sm_count, 132);
  CHECK_EQUAL(h200.smem_per_block, 232448);
  CHECK(h200.read_bandwidth == 4.45e6 && h200.matrix_rate == 750e6);
}
