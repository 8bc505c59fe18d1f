// Packing, dequantisation and column gather: memory-bound helpers of the W4A16 GEMM. One CTA of 128 threads handles one 64 x 64 block.
#include "common/cuda_check.h"
#include "common/dependent_launch.cuh"
#include "gemm/epilogue.cuh"
#include "minfer/w4a16.h"
#include "w4a16/dequantize.cuh"
#include "w4a16/w4_layout.h"

namespace minfer {

namespace w4a16 {
namespace {

constexpr int kThreads = 128;

// Codes go through shared memory: rows are read coalesced, words written coalesced. A row of 64 codes takes 68 bytes there, so that the eight
// rows of a warp's nibbles are in different banks.
__global__ void __launch_bounds__(kThreads) pack_kernel(uint8_t const* codes, int64_t n, int64_t k, int64_t ld, uint4* packed) {
  __shared__ uint8_t tile[kBlockN][kBlockK + 4];
  int64_t const n0 = int64_t(blockIdx.y) * kBlockN, k0 = int64_t(blockIdx.x) * kBlockK;
  for (int i = threadIdx.x; i < kBlockN * kBlockK; i += kThreads) {
    int64_t const row = n0 + i / kBlockK, column = k0 + i % kBlockK;
    tile[i / kBlockK][i % kBlockK] = row < n && column < k ? codes[row * ld + column] & 15 : 0;
  }
  __syncthreads();
  int const thread = threadIdx.x, lane = thread % 32;
  uint32_t words[4];
#pragma unroll
  for (int slab = 0; slab < 4; ++slab) {
    words[slab] = 0;
#pragma unroll
    for (int nibble = 0; nibble < 8; ++nibble) {
      int const row = thread / 32 * 16 + 8 * (nibble % 2) + lane / 4;
      int const column = 16 * slab + 8 * (nibble / 2 % 2) + 2 * (lane % 4) + nibble / 4;
      words[slab] |= uint32_t(tile[row][column]) << (4 * nibble);
    }
  }
  packed[(int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + thread] = make_uint4(words[0], words[1], words[2], words[3]);
}

// In float32 and rounded once: for fractional zero points the GEMM's fragments, which round code - zero as well, may be off by one bit.
template <DataType kType>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(uint4 const* packed, uint16_t const* scales, int64_t ld_scales, uint16_t const* zeros, int64_t ld_zeros,
                      int group_shift, int64_t n, int64_t k, uint32_t* out) {
  using Element = gemm::ElementOf<kType>;
  using Codes = Int4<kType>;
  __shared__ uint32_t tile[kBlockN][kBlockK / 2 + 4];  // pairs along k; the pad keeps a warp's stores out of each other's banks
  int64_t const n0 = int64_t(blockIdx.y) * kBlockN, k0 = int64_t(blockIdx.x) * kBlockK;
  int const thread = threadIdx.x, lane = thread % 32;
  uint4 const codes = packed[(int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + thread];
  uint32_t const words[4] = {codes.x, codes.y, codes.z, codes.w};
  int const row = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int slab = 0; slab < 4; ++slab) {
    int64_t const group = (k0 + 16 * slab) >> group_shift;
    float scale[2], zero[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int64_t const at = n0 + row + 8 * r;
      bool const inside = at < n && k0 + 16 * slab < k;
      scale[r] = inside ? Codes::to_float(scales[group * ld_scales + at]) : 0.0f;
      zero[r] = inside && zeros != nullptr ? Codes::to_float(zeros[group * ld_zeros + at]) : 8.0f;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const low = float(words[slab] >> (4 * i) & 15), high = float(words[slab] >> (4 * i + 16) & 15);
      float const z = zero[i % 2], s = scale[i % 2];
      tile[row + 8 * (i % 2)][8 * slab + 4 * (i / 2) + lane % 4] = Element::pack((low - z) * s, (high - z) * s);
    }
  }
  __syncthreads();
  for (int i = thread; i < kBlockN * kBlockK / 2; i += kThreads) {
    int64_t const r = n0 + i / 32, pair = k0 / 2 + i % 32;
    if (r < n && 2 * pair < k) out[r * (k / 2) + pair] = tile[i / 32][i % 32];
  }
}

__global__ void __launch_bounds__(256)
    gather_kernel(uint16_t const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, uint16_t* out) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  int64_t const total = m * k;
  for (int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x; i < total; i += int64_t(gridDim.x) * 256) {
    int64_t const row = i / k;
    out[i] = a[row * lda + perm[i - row * k]];
  }
}

}  // namespace
}  // namespace w4a16

Status pack_w4(uint8_t const* codes, int64_t n, int64_t k, int64_t ld, void* packed, Stream stream) {
  using namespace w4a16;
  dim3 const grid(unsigned((k + kBlockK - 1) / kBlockK), unsigned((n + kBlockN - 1) / kBlockN));
  if (grid.x == 0 || grid.y == 0) return Status::success();
  if (grid.y > 65535) return Status::failure(StatusCode::kNotSupported, "n = %lld is more than a launch covers", (long long)n);
  pack_kernel<<<grid, kThreads, 0, stream>>>(codes, n, k, ld, static_cast<uint4*>(packed));
  return cuda_status(cudaGetLastError(), "launch of pack_w4");
}

Status dequantize_w4(void const* packed, void const* scales, int64_t ld_scales, void const* zeros, int64_t ld_zeros, int64_t group_size,
                     int64_t n, int64_t k, DataType type, void* out, Stream stream) {
  using namespace w4a16;
  dim3 const grid(unsigned((k + kBlockK - 1) / kBlockK), unsigned((n + kBlockN - 1) / kBlockN));
  if (grid.x == 0 || grid.y == 0) return Status::success();
  if (grid.y > 65535) return Status::failure(StatusCode::kNotSupported, "n = %lld is more than a launch covers", (long long)n);
  auto* kernel = type == DataType::kF16 ? &dequantize_kernel<DataType::kF16> : &dequantize_kernel<DataType::kBF16>;
  kernel<<<grid, kThreads, 0, stream>>>(static_cast<uint4 const*>(packed), static_cast<uint16_t const*>(scales), ld_scales,
                                        static_cast<uint16_t const*>(zeros), ld_zeros, group_shift(group_size, k), n, k,
                                        static_cast<uint32_t*>(out));
  return cuda_status(cudaGetLastError(), "launch of dequantize_w4");
}

Status gather_columns(void const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, void* out, bool programmatic, Stream stream) {
  if (m == 0 || k == 0) return Status::success();
  int64_t const blocks = (m * k + 255) / 256;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks < 4096 ? blocks : 4096));
  config.blockDim = dim3(256);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  return cuda_status(
      cudaLaunchKernelEx(&config, &w4a16::gather_kernel, static_cast<uint16_t const*>(a), lda, perm, m, k, static_cast<uint16_t*>(out)),
      "launch of gather_columns");
}

}  // namespace minfer
