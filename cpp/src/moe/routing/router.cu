// The router: a warp chooses the experts of a token from logits that it holds in registers (expert_choice.cuh). A CTA has four tokens: 4096
// tokens are 1024 CTAs, about eight to an SM.
#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"
#include "moe/routing/expert_choice.cuh"

namespace minfer {

namespace moe {
namespace {

constexpr int kWarps = 4;

template <class T, int kPerLane>
__global__ void __launch_bounds__(kWarps * 32)
    router_kernel(__grid_constant__ ChoiceParams const params, T const* logits, int64_t ld, int64_t tokens) {
  __shared__ float scores[kWarps][kPerLane * 32];
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  int const lane = int(threadIdx.x) % 32;
  int64_t const token = int64_t(blockIdx.x) * kWarps + int(threadIdx.x) / 32;
  if (token >= tokens) return;
  T const* row = logits + token * ld;
  float logit[kPerLane], bias[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    int const expert = i * 32 + lane;
    bool const inside = expert < params.rules.experts;
    logit[i] = inside ? to_float(row[expert]) : 0.0f;
    bias[i] = inside && params.rules.correction_bias != nullptr ? params.rules.correction_bias[expert] : 0.0f;
  }
  choose_experts(params, token, logit, [&](int i) { return bias[i]; }, scores[int(threadIdx.x) / 32], lane);
}

template <class T>
Status launch_router(ChoiceParams const& params, void const* logits, int64_t ld, int64_t tokens, LaunchShape const& shape) {
  int const per_lane = (params.rules.experts + 31) / 32;
  auto const run = [&](auto kernel) {
    return launch(shape, "launch of moe_router", kernel, params, static_cast<T const*>(logits), ld, tokens);
  };
  if (per_lane <= 1) return run(&router_kernel<T, 1>);
  if (per_lane <= 2) return run(&router_kernel<T, 2>);
  if (per_lane <= 4) return run(&router_kernel<T, 4>);
  if (per_lane <= 8) return run(&router_kernel<T, 8>);
  if (per_lane <= 16) return run(&router_kernel<T, 16>);
  return run(&router_kernel<T, 32>);
}

}  // namespace
}  // namespace moe

Status route_logits(void const* logits, DataType type, int64_t ld, int64_t tokens, RouterRules const& rules, Routes const& routes,
                    bool programmatic, Stream stream) {
  using namespace moe;
  if (tokens == 0) return Status::success();
  int64_t const ctas = (tokens + kWarps - 1) / kWarps;
  if (ctas > 0x7fffffff) return Status::failure(StatusCode::kNotSupported, "%lld tokens are more than a launch covers", (long long)tokens);
  ChoiceParams const params{rules, routes};
  LaunchShape shape;
  shape.grid = dim3(unsigned(ctas));
  shape.threads = kWarps * 32;
  shape.programmatic = programmatic;
  shape.stream = stream;
  switch (type) {
    case DataType::kF16: return launch_router<__half>(params, logits, ld, tokens, shape);
    case DataType::kBF16: return launch_router<__nv_bfloat16>(params, logits, ld, tokens, shape);
    case DataType::kF32: return launch_router<float>(params, logits, ld, tokens, shape);
    default: return Status::failure(StatusCode::kInvalidArgument, "logits of type %s", name_of(type));
  }
}

}  // namespace minfer
