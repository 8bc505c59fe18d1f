// The entry point of a build without CUDA.
#include "gemm/realign.h"

#include "common/without_cuda.h"

#if !MINFER_WITH_CUDA
namespace minfer::gemm {

Status realign(RealignedOperand const&, RealignedOperand const&, int64_t, int64_t, bool, Stream) { return without_cuda(); }

}  // namespace minfer::gemm
#endif
