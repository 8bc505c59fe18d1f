// Launches of in_order_sm90.cuh's kernels, which are compiled by themselves.
#pragma once

#include "minfer/decoder_block.h"

namespace minfer::decoder_block {

/// A plan of one launch in the batch-invariant mode; run_decoder_block has checked the rest.
Status run_in_order(DecoderBlockPlan const& plan, DecoderBlockProblem const& problem, DecoderBlockOperands const* layers,
                    DeviceProperties const& device, void* workspace, bool programmatic, Stream stream);

}  // namespace minfer::decoder_block
