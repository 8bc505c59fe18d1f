#include <cmath>

#include "gemm/cost_model.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::gemm;

// What a calibration starts from on a device without a table: its rates must plan as the scaled model does.
TEST_CASE(scaled_rates_predict_what_the_scaled_model_does) {
  DeviceProperties device = h200_properties();
  device.name[0] = 'X';
  device.sm_count = 108;
  device.matrix_rate *= 0.35;
  device.read_bandwidth *= 0.4;
  ScaledModel const scaled = model_of({}, device);
  CHECK(std::abs(scaled.memory_scale - 0.4) < 1e-9);
  CHECK(scaled.sm_scale < 0.9);
  GemmModel const own{scaled_rates(scaled), scaled.model->factors};
  GemmProblem problem;
  problem.m = 300;
  problem.n = 4096;
  problem.k = 5000;
  problem.has_c = true;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  int64_t compared = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (std::string(kernels[i].family) != "gemm") continue;
    for (Decomposition decomposition : {Decomposition::kDataParallel, Decomposition::kStreamK, Decomposition::kSplitK}) {
      GemmLaunch launch;
      launch.decomposition = decomposition;
      launch.splits = decomposition == Decomposition::kSplitK ? 3 : 1;
      double const us = predict_us(kernels[i], problem, launch, device, scaled);
      CHECK(us > 0 && std::abs(predict_us(kernels[i], problem, launch, device, {&own}) / us - 1) < 1e-12);
      ++compared;
    }
  }
  CHECK(compared > 0);
}
