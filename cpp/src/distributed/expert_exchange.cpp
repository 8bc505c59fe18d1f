// The layout of an expert exchange's buffer, and the entry points of a build without CUDA.
#include "minfer/expert_exchange.h"

#include "common/without_cuda.h"
#include "distributed/exchange.h"

namespace minfer {

ExpertExchangeLayout expert_exchange_layout(int32_t ranks, int64_t most, int64_t hidden, int64_t top_k) {
  using namespace distributed;
  size_t const places = size_t(ranks) * size_t(most);
  auto const after = [](size_t begin, size_t bytes) { return (begin + bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment; };
  ExpertExchangeLayout layout{};
  layout.ids = after(kFlagsBegin, size_t(kFlagSets) * size_t(ranks) * kMostBlocks * sizeof(uint64_t));
  layout.weights = after(layout.ids, places * size_t(top_k) * sizeof(int32_t));
  layout.rows = after(layout.weights, places * size_t(top_k) * sizeof(float));
  layout.sums = after(layout.rows, places * size_t(hidden) * 2);
  layout.bytes = after(layout.sums, places * size_t(hidden) * 2);
  return layout;
}

#if !MINFER_WITH_CUDA
Status send_tokens(ExpertExchange const&, void const*, int64_t, float const*, bool, Stream) { return without_cuda(); }
Status return_sums(ExpertExchange const&, void const*, int64_t, int32_t const*, int64_t, void*, bool, Stream) { return without_cuda(); }
#endif

}  // namespace minfer
