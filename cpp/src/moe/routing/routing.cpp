// The workspace of route_tokens, and the entry points of a build without CUDA.
#include "common/without_cuda.h"
#include "minfer/moe_routing.h"
#include "moe/routing/router_gemm_plan.h"

namespace minfer {

size_t route_tokens_workspace(int64_t tokens, int64_t hidden, int64_t experts, DeviceProperties const& device) {
  if (tokens == 0) return 0;
  return moe::plan_router_gemm(tokens, hidden, experts, device.sm_count).workspace_bytes(tokens, experts);
}

#if !MINFER_WITH_CUDA
Status route_logits(void const*, DataType, int64_t, int64_t, RouterRules const&, Routes const&, bool, Stream) { return without_cuda(); }
Status route_tokens(RouterGemm const&, RouterRules const&, Routes const&, DeviceProperties const&, void*, size_t, bool, Stream) {
  return without_cuda();
}
Status sort_by_expert(ExpertSort const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
Status sum_experts(ExpertSum const&, bool, Stream) { return without_cuda(); }
#endif

}  // namespace minfer
