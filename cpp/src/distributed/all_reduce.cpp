// The bytes of an exchange buffer, and the entry points of a build without CUDA.
#include "minfer/all_reduce.h"

#include "common/without_cuda.h"
#include "distributed/exchange.h"

namespace minfer {

size_t all_reduce_bytes(int64_t most, int32_t ranks) {
  using namespace distributed;
  int64_t const vectors = (most + kVectorElements - 1) / kVectorElements;
  return sizeof(ExchangeHeader) + size_t(vectors) * size_t(ranks) * (kEpochs * kHalves * kPacketBytes);
}

#if !MINFER_WITH_CUDA
Status all_reduce(AllReduce const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
Status all_reduce_rms_norm(AllReduceRmsNorm const&, DeviceProperties const&, bool, Stream) { return without_cuda(); }
Status allocate_peer_memory(size_t, void**, PeerHandle*) { return without_cuda(); }
Status free_peer_memory(void*) { return without_cuda(); }
Status open_peer_memory(PeerHandle const&, void**) { return without_cuda(); }
Status close_peer_memory(void*) { return without_cuda(); }
#endif

}  // namespace minfer
