#include "decoder_block/in_order.h"

#include "decoder_block/launch_sm90.cuh"

namespace minfer::decoder_block {

Status run_in_order(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers,
                    DeviceProperties const& device, void* workspace, bool programmatic, Stream stream) {
  auto const run = [&](auto type) {
    constexpr DataType kType = decltype(type)::value;
    return fill_and_launch<InOrderInt4Weights<kType>, kType, 1, false>(plan, problem, layers, device, workspace, programmatic, stream);
  };
  return problem.type == DataType::kBF16 ? run(std::integral_constant<DataType, DataType::kBF16>{})
                                         : run(std::integral_constant<DataType, DataType::kF16>{});
}

}  // namespace minfer::decoder_block
