// Launches the kernels of decoder_block_sm90.cuh.
#include "decoder_block/in_order.h"
#include "decoder_block/launch_sm90.cuh"

namespace minfer {

using namespace decoder_block;

Status run_decoder_block(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers,
                         DeviceProperties const& device, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream) {
  if (!plan.one_launch) return Status::failure(StatusCode::kInvalidArgument, "the plan is not of one launch");
  if (problem.layers < 1 || problem.layers > plan.most_layers)
    return Status::failure(StatusCode::kInvalidArgument, "%lld layers of at most %d", (long long)problem.layers, plan.most_layers);
  if (workspace_bytes < plan.workspace_bytes || workspace == nullptr) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "the workspace must have %zu bytes, got %zu", plan.workspace_bytes,
                           workspace_bytes);
  }
  if (Status status = bind_context(device); !status.ok()) return status;
  if (problem.batch_invariant) return run_in_order(plan, problem, layers, device, workspace, programmatic, stream);
  auto const run = [&](auto format, auto type) {
    constexpr WeightFormat kFormat = decltype(format)::value;
    constexpr DataType kType = decltype(type)::value;
    auto const of = [&](auto tokens, auto attention) {
      constexpr int kTokens = decltype(tokens)::value;
      using Weights = typename WeightsOf<kFormat, kType, kTokens>::Type;
      return fill_and_launch<Weights, kType, kTokens, decltype(attention)::value>(plan, problem, layers, device, workspace, programmatic,
                                                                                  stream);
    };
    std::integral_constant<int, 1> const one{};
    if (problem.heads > 0) return of(one, std::true_type{});
    return problem.m == 1 ? of(one, std::false_type{}) : of(std::integral_constant<int, 2>{}, std::false_type{});
  };
  auto const with_format = [&](auto format) {
    return problem.type == DataType::kBF16 ? run(format, std::integral_constant<DataType, DataType::kBF16>{})
                                           : run(format, std::integral_constant<DataType, DataType::kF16>{});
  };
  switch (problem.weights) {
    case WeightFormat::kInt4: return with_format(std::integral_constant<WeightFormat, WeightFormat::kInt4>{});
    case WeightFormat::kFp8E4M3: return with_format(std::integral_constant<WeightFormat, WeightFormat::kFp8E4M3>{});
    default: return with_format(std::integral_constant<WeightFormat, WeightFormat::kDense>{});
  }
}

}  // namespace minfer
