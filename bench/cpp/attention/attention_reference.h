// Attention by the plainest code, for some queries: kernels are checked against it. It shares only the public header with the library.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "minfer/attention.h"

namespace minfer::bench {

/// out [heads_q, head_dim_v] and lse [heads_q] of query `query` of sequence `sequence`, in float64, rounded once to float32. Operands have
/// no window, cap or sink, and gaps only where K's and V's strides say so; all lengths are seqlen_k.
/// @param rounds_keys keys are rounded to q's type first, as int8 and int4 ones are on their way to WGMMA
/// @param scores [heads_q, seqlen_k] float64 of any content
void attention_reference(AttentionProblem const& problem, AttentionOperands const& operands, bool rounds_keys, int64_t sequence,
                         int64_t query, double* scores, float* out, float* lse, cudaStream_t stream);

}  // namespace minfer::bench
