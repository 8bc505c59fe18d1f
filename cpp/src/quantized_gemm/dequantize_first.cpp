// Many tokens: when writing the weight out in 16 bits and running a dense GEMM beats dequantising in the mainloop.
#include "minfer/w4a16.h"
#include "quantized_gemm/cost_model.h"

namespace minfer {

namespace {

constexpr double kStartUs = 2.0;          // of one more launch
constexpr double kStreamFraction = 0.72;  // of the read bandwidth, read and write together
// Of the fused prediction: on 122 random problems of 192 tokens and more the choice costs .1 % on average.
constexpr double kFusedFactor = 1.0;
constexpr int64_t kMinTokens = 1024;  // below, writing and reading the weight never pays

}  // namespace

GemmProblem dequantized(GemmProblem const& problem) {
  GemmProblem dense = problem;
  dense.b_format = WeightFormat::kDense;
  dense.group_size = 0;
  dense.has_zeros = false;
  dense.b_major = Major::kK;
  dense.b_alignment = 16;  // k is a multiple of 8
  return dense;
}

double dequantize_us(GemmProblem const& problem, DeviceProperties const& device) {
  double const bytes = w4a16::weight_bytes(problem) + 2.0 * problem.n * problem.k;
  return kStartUs + bytes / (kStreamFraction * device.read_bandwidth);
}

Status dequantize_first(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, bool* first) {
  *first = false;
  if (problem.b_format == WeightFormat::kDense || has_8_bits(problem) || problem.k == 0) return Status::success();
  GemmPlan fused, dense;
  Status const fused_status = plan_gemm(problem, device, options, &fused);
  if (fused_status.ok() && problem.m < kMinTokens) return fused_status;
  if (!fused_status.ok() && fused_status.code == StatusCode::kInvalidArgument) return fused_status;
  if (fused_status.ok() && problem.batch_invariant) return fused_status;  // the choice would follow from m
  Status const dense_status = plan_gemm(dequantized(problem), device, options, &dense);
  if (!dense_status.ok()) return fused_status.ok() ? fused_status : dense_status;
  *first = !fused_status.ok() || dequantize_us(problem, device) + dense.predicted_us < kFusedFactor * fused.predicted_us;
  return Status::success();
}

}  // namespace minfer
