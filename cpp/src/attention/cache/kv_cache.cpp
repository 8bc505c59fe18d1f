// The answer of a build without CUDA.
#include "minfer/kv_cache.h"

namespace minfer {

#if !MINFER_WITH_CUDA
Status append_to_kv_cache(KvAppend const&, NormRope const*, DeviceProperties const&, bool, Stream) {
  return Status::failure(StatusCode::kNotCompiled, "this build has no CUDA code");
}
#endif

}  // namespace minfer
