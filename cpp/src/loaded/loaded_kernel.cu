#include "minfer/loaded_kernel.h"

#include <atomic>
#include <new>

#include "common/kernel_launch.h"

namespace minfer {

struct LoadedKernel {
  cudaKernel_t function = nullptr;
  size_t shared_bytes = 0;
  mutable std::atomic<uint64_t> shared_memory_allowed{0};
};

Status load_kernel(void const* cubin, char const* name, size_t shared_bytes, LoadedKernel const** kernel) {
  cudaLibrary_t library = nullptr;
  if (cudaError_t const error = cudaLibraryLoadData(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0); error != cudaSuccess) {
    return cuda_status(error, "cudaLibraryLoadData");
  }
  cudaKernel_t function = nullptr;
  if (cudaError_t const error = cudaLibraryGetKernel(&function, library, name); error != cudaSuccess) {
    cudaLibraryUnload(library);
    return cuda_status(error, "cudaLibraryGetKernel");
  }
  auto* const loaded = new (std::nothrow) LoadedKernel;
  if (loaded == nullptr) return Status::failure(StatusCode::kInternal, "no memory for a loaded kernel");
  loaded->function = function;
  loaded->shared_bytes = shared_bytes;
  *kernel = loaded;
  return Status::success();
}

Status launch_loaded(LoadedKernel const& kernel, LoadedLaunch const& launch, void** parameters) {
  auto const* const function = reinterpret_cast<void const*>(kernel.function);
  if (kernel.shared_bytes > 48 * 1024) {
    if (cudaError_t const error = allow_shared_memory(function, int(kernel.shared_bytes), kernel.shared_memory_allowed);
        error != cudaSuccess) {
      return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
    }
  }
  LaunchShape shape;
  shape.grid = dim3(unsigned(launch.grid[0]), unsigned(launch.grid[1]), unsigned(launch.grid[2]));
  shape.threads = unsigned(launch.threads);
  shape.smem_bytes = kernel.shared_bytes;
  shape.cluster = dim3(unsigned(launch.cluster));
  shape.programmatic = launch.programmatic;
  shape.stream = launch.stream;
  LaunchConfig const config(shape);
  return cuda_status(cudaLaunchKernelExC(&config.config, function, parameters), "launch of a loaded kernel");
}

}  // namespace minfer
