#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>

#include "common/kernel_launch.h"
#include "minfer/registry.h"

namespace minfer {

namespace {

// Represents every sm_90 kernel of the library in the occupancy query: a CTA that fills an SM.
__global__ void __launch_bounds__(384, 1) fill_one_sm() {}

int32_t resident_clusters(int32_t cluster_size, int32_t smem_bytes) {
  LaunchShape shape;
  shape.grid = dim3(unsigned(cluster_size) * 512);
  shape.threads = 384;
  shape.smem_bytes = size_t(smem_bytes);
  shape.cluster = dim3(unsigned(cluster_size));
  LaunchConfig const launch_config(shape);
  int clusters = 0;
  return cudaOccupancyMaxActiveClusters(&clusters, fill_one_sm, &launch_config.config) == cudaSuccess ? clusters : 0;
}

/// Makes the device current on the calling thread.
void set_resident_clusters(int32_t device_index, DeviceProperties* properties) {
  int32_t const smem = properties->smem_per_block - 1024;
  if (cudaSetDevice(device_index) != cudaSuccess ||
      cudaFuncSetAttribute(fill_one_sm, cudaFuncAttributeMaxDynamicSharedMemorySize, smem) != cudaSuccess) {
    return;
  }
  for (int i = 1; i < 4; ++i) properties->max_clusters[i] = resident_clusters(1 << i, smem);
}

}  // namespace

Status query_device(int32_t device_index, DeviceProperties* properties) {
  cudaDeviceProp p;
  Status status = cuda_status(cudaGetDeviceProperties(&p, device_index), "cudaGetDeviceProperties");
  if (!status.ok()) return status;
  DeviceProperties out;
  std::memcpy(out.name, p.name, std::min(sizeof(out.name) - 1, std::strlen(p.name)));
  out.index = device_index;
  out.compute_major = p.major;
  out.compute_minor = p.minor;
  out.sm_count = p.multiProcessorCount;
  out.smem_per_block = int32_t(p.sharedMemPerBlockOptin);
  out.l2_bytes = p.l2CacheSize;
  out.memory_bytes = int64_t(p.totalGlobalMem);
  out.max_clusters[0] = p.multiProcessorCount;
  if (p.major >= 9) {
    int current = -1;
    if (cudaGetDevice(&current) == cudaSuccess && current == device_index) {
      set_resident_clusters(device_index, &out);
    } else {  // on another thread: switching this one back to its device would create a context there, 500 MB that may never be used
      try {
        std::thread(set_resident_clusters, device_index, &out).join();
      } catch (std::system_error const&) {
        return Status::failure(StatusCode::kInternal, "device %d cannot be queried: no thread could be started", device_index);
      }
    }
  }
  int memory_khz = 0, clock_khz = 0;
  cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device_index);
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device_index);
  // Sustained rates as fractions of the data sheet's: 93 % of the bus (4.45 of 4.8 TB/s on an H200), 76 % of the matrix units' peak
  // (750 of 989 TFLOP/s, power-limited). Dense 16-bit multiply-adds per SM and clock: 2048 on 9.0, 1024 on 8.0, 512 on 8.6 / 8.9 / 12.0.
  double const fma_per_clock = p.major == 9 || p.major == 10 ? 2048 : (p.major == 8 && p.minor == 0 ? 1024 : 512);
  out.read_bandwidth = memory_khz > 0 ? 0.93 * 2.0 * memory_khz * 1e3 * (p.memoryBusWidth / 8) * 1e-6 : 1e6;
  out.matrix_rate = clock_khz > 0 ? 0.76 * 2.0 * fma_per_clock * p.multiProcessorCount * clock_khz * 1e3 * 0.924 * 1e-6 : 1e8;
  if (std::strstr(out.name, "H200") != nullptr) {  // measured
    DeviceProperties const h200 = h200_properties();
    out.read_bandwidth = h200.read_bandwidth;
    out.matrix_rate = h200.matrix_rate;
  }
  *properties = out;
  return Status::success();
}

Status query_memory(int32_t device_index, int64_t* free, int64_t* total) {
  size_t free_bytes = 0, total_bytes = 0;
  cudaError_t error = cudaSetDevice(device_index);
  if (error == cudaSuccess) error = cudaMemGetInfo(&free_bytes, &total_bytes);
  *free = int64_t(free_bytes);
  *total = int64_t(total_bytes);
  return cuda_status(error, "cudaMemGetInfo");
}

Status query_event(void* event, bool* done) {
  // Global capture mode is torch's default: a query by any thread whose own mode is not relaxed then invalidates the capture.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return cuda_status(error, "cudaThreadExchangeStreamCaptureMode");
  error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  cudaThreadExchangeStreamCaptureMode(&mode);
  *done = error == cudaSuccess;
  if (error != cudaErrorNotReady) return cuda_status(error, "cudaEventQuery");
  cudaGetLastError();  // clears cudaErrorNotReady, which the runtime stores like an error
  return Status::success();
}

}  // namespace minfer
