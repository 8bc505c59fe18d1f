// The entry points of a build without CUDA.
#include "minfer/loaded_kernel.h"

#include "common/without_cuda.h"

namespace minfer {

#if !MINFER_WITH_CUDA
Status load_kernel(void const*, char const*, size_t, LoadedKernel const**) { return without_cuda(); }
Status encode_tensor_map_argument(TensorMapArgument const&, void*) { return without_cuda(); }
Status launch_loaded(LoadedKernel const&, LoadedLaunch const&, void**) { return without_cuda(); }
#endif

}  // namespace minfer
