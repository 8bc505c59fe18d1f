// What the launches of grouped kernels of 8-bit operands share: their scales, in the mainloop and in the epilogue.
#pragma once

#include "moe/grouped/expert_scales.cuh"
#include "moe/grouped/grouped_launch.cuh"

namespace minfer::moe {

/// Whether sums are added up in fp32, times scales where there are any of groups or blocks, instead of by the tensor core alone.
inline bool adds_scaled(GroupedProblem const& problem, GroupedOperands const& operands) {
  return operands.a_scale.blocks || operands.b_scale.blocks || (problem.type == DataType::kE4M3 && !problem.fast_accum);
}

/// Scales that the mainloop multiplies by.
inline Status describe_scales(GroupedLaunchArguments const& arguments, GroupedProblem const& problem, GroupedOperands const& operands,
                              ExpertScales* described) {
  OperandScales const &of_a = operands.a_scale, &of_b = operands.b_scale;
  ExpertScales& scales = *described;
  scales = {};
  if (of_a.blocks) {
    scales.tokens = {of_a.data, of_a.row_stride, of_a.k_stride, of_a.exponents};
    scales.expert_offset = problem.max_rows > 0 ? operands.a_scale_expert_stride - problem.max_rows * of_a.row_stride : 0;
  }
  scales.parts = problem.a_group > 0 ? int32_t(gemm::kScaleBlock / problem.a_group) : 1;
  scales.groups = problem.a_group > 0 ? int32_t((problem.k + problem.a_group - 1) / problem.a_group) : 0;
  scales.blocks = int32_t((problem.k + gemm::kScaleBlock - 1) / gemm::kScaleBlock);
  if (of_b.blocks) {
    scales.weight = {of_b.data, of_b.row_stride, of_b.k_stride, of_b.exponents};
    scales.expert_stride = operands.b_scale_expert_stride;
    scales.up_offset = of_b.up_offset;
  }
  scales.n = int32_t(problem.gated ? problem.n / 2 : problem.n);
  if (of_a.blocks || of_b.blocks) {  // they are numbered in 32 bits
    auto const size = [](int64_t count, int64_t stride) { return double(count) * double(stride < 0 ? -stride : stride); };
    double const experts = double(problem.experts);
    double const rows = problem.max_rows > 0 ? size(problem.max_rows, of_a.row_stride) : size(arguments.scale_rows, of_a.row_stride);
    double const of_rows =
        rows + size(scales.groups, of_a.k_stride) + (problem.max_rows > 0 ? size(problem.experts, operands.a_scale_expert_stride) : 0);
    double const of_weight = experts * size(1, operands.b_scale_expert_stride) + size(scales.n / gemm::kScaleBlock + 1, of_b.row_stride) +
                             size(scales.blocks, of_b.k_stride) + size(1, of_b.up_offset);
    if ((of_a.blocks && of_rows >= 2147483648.0) || (of_b.blocks && of_weight >= 2147483648.0)) {
      return Status::failure(StatusCode::kNotSupported, "scales of groups and blocks reach over less than 2^31 elements");
    }
  }
  scales.gather = arguments.scale_gather;
  scales.rows = int32_t(arguments.scale_rows);
  return Status::success();
}

/// The epilogue's part, with the scales of whole rows and channels.
inline ScaledGroupedEpilogueParams describe_scaled_epilogue(GroupedLaunchArguments const& arguments, GroupedProblem const& problem,
                                                            GroupedOperands const& operands) {
  OperandScales const &of_a = operands.a_scale, &of_b = operands.b_scale;
  auto epilogue = describe_epilogue<ScaledGroupedEpilogueParams>(problem, operands);
  if (!of_a.blocks) {
    epilogue.token_scales = static_cast<float const*>(of_a.data);
    epilogue.token_stride = of_a.row_stride;
    epilogue.token_expert_offset = problem.max_rows > 0 ? operands.a_scale_expert_stride - problem.max_rows * of_a.row_stride : 0;
  }
  if (!of_b.blocks) {
    epilogue.channel_scales = static_cast<float const*>(of_b.data);
    epilogue.channel_stride = of_b.row_stride;
    epilogue.channel_expert_stride = operands.b_scale_expert_stride;
  }
  epilogue.gather = arguments.scale_gather;
  epilogue.a_rows = int32_t(arguments.scale_rows);
  epilogue.group_scales = problem.d_groups ? operands.d_scales : nullptr;
  epilogue.group_stride = operands.d_scales_stride;
  epilogue.int8 = problem.type == DataType::kS8;
  epilogue.bf16 = problem.d_type == DataType::kBF16;
  epilogue.bias_f32 = operands.bias_f32;
  epilogue.plain = epilogue.vectors && !epilogue.codes && problem.n % 8 == 0 && !problem.gated && epilogue.row_scale == nullptr &&
                   epilogue.bias == nullptr && epilogue.activation.kind == ActivationParams::Kind::kNone;
  return epilogue;
}

}  // namespace minfer::moe
