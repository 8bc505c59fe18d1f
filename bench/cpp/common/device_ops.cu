#include <cuda_fp16.h>

#include <cmath>

#include "common/check.h"
#include "common/device_ops.h"
#include "common/element.cuh"

namespace minfer::bench {
namespace {

// splitmix64: counter based, so that any element can be drawn without its predecessors.
__device__ uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

__global__ void fill_normal_kernel(void* data, DataType type, int64_t count, float deviation, uint64_t seed) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint64_t const bits = mix(mix(seed) ^ uint64_t(i));
    float const u = (float(bits >> 40) + 0.5f) * 0x1p-24f;  // (0, 1)
    float const v = float(bits & 0xffffff) * 0x1p-24f;
    store(data, type, i, deviation * sqrtf(-2.0f * __logf(u)) * __cosf(6.2831853f * v));
  }
}

__global__ void fill_uniform_kernel(void* data, DataType type, int64_t count, float low, float high, uint64_t seed) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    store(data, type, i, low + (high - low) * (float(mix(mix(seed) ^ uint64_t(i)) >> 40) * 0x1p-24f));
  }
}

__global__ void fill_codes_kernel(uint8_t* codes, int64_t count, uint64_t seed) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    codes[i] = uint8_t(mix(mix(seed) ^ uint64_t(i)) >> 60);
  }
}

__global__ void fill_bytes_kernel(uint8_t* data, int64_t count, uint8_t mask, uint8_t set, uint64_t seed) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    data[i] = uint8_t((uint8_t(mix(mix(seed) ^ uint64_t(i)) >> 56) & mask) | set);
  }
}

__global__ void fill_scales_and_minima_kernel(__half* data, int64_t count, int64_t run, uint64_t seed) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    float const u = float(mix(mix(seed) ^ uint64_t(i)) >> 40) * 0x1p-24f;
    data[i] = __float2half(i / run % 2 == 0 ? 0.06f + 0.13f * u : -1.9f + 1.8f * u);
  }
}

__global__ void dequantise_codes_kernel(uint8_t const* codes, void const* scales, void const* zeros, int64_t group_size, int64_t n,
                                        int64_t k, DataType type, DataType out_type, void* out) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n * k; i += stride) {
    int64_t const group = (group_size > 0 ? i % k / group_size : 0) * n + i / k;
    double const zero = zeros != nullptr ? load(zeros, type, group) : 8.0;
    store(out, out_type, i, float((double(codes[i]) - zero) * load(scales, type, group)));
  }
}

__global__ void dequantise_lines_kernel(ScaledLines x, int64_t lines, int64_t k, float* out) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  OperandScales const& s = x.scales;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < lines * k; i += stride) {
    int64_t const j = i % k, line = x.index != nullptr ? x.index[i / k] : i / k;
    int64_t const own = s.halves ? line / 16 * 8 + line % 8 : line;  // among the gates, or among the ups
    int64_t at = s.blocks ? own / x.block_lines * s.row_stride + j / x.group * s.k_stride : own * s.row_stride;
    if (s.halves && line / 8 % 2 == 1) at += s.up_offset;
    out[i] = float(load(x.codes, x.type, line * x.ld + j) * double(static_cast<float const*>(s.data)[at]));
  }
}

__device__ double activate(double x, Activation activation) {
  switch (activation) {
    case Activation::kRelu: return x > 0 ? x : 0;
    case Activation::kGelu: return 0.5 * x * (1 + erf(x * 0.70710678118654752));
    case Activation::kGeluTanh: return 0.5 * x * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    case Activation::kSilu: return x / (1 + exp(-x));
    default: return x;
  }
}

struct View {  // an operand as [rows, k] whatever its major
  void const* data;
  int64_t row_stride, k_stride, batch_stride;
};

constexpr int kTile = 64, kTileK = 16, kPerThread = 4;

// 16 x 16 threads, each 4 x 4 outputs with a stride of 16 between them; operands staged in shared memory as float64.
__global__ void reference_kernel(GemmProblem problem, GemmOperands operands, View a, View b, float* out, int64_t tiles_n) {
  __shared__ double s_a[kTileK][kTile + 1], s_b[kTileK][kTile + 1];
  int64_t const m0 = int64_t(blockIdx.x) / tiles_n * kTile, n0 = int64_t(blockIdx.x) % tiles_n * kTile, l = blockIdx.y;
  int const tid = threadIdx.x, ty = tid / 16, tx = tid % 16;
  double sums[kPerThread][kPerThread] = {};
  bool const product = operands.alpha != 0;
  for (int64_t k0 = 0; product && k0 < problem.k; k0 += kTileK) {
    for (int i = tid; i < kTile * kTileK; i += 256) {
      // Neighbouring threads walk the contiguous mode.
      int const ra = a.k_stride == 1 ? i / kTileK : i % kTile, ka = a.k_stride == 1 ? i % kTileK : i / kTile;
      int const rb = b.k_stride == 1 ? i / kTileK : i % kTile, kb = b.k_stride == 1 ? i % kTileK : i / kTile;
      bool const in_a = m0 + ra < problem.m && k0 + ka < problem.k, in_b = n0 + rb < problem.n && k0 + kb < problem.k;
      s_a[ka][ra] = in_a ? load(a.data, problem.ab_type, l * a.batch_stride + (m0 + ra) * a.row_stride + (k0 + ka) * a.k_stride) : 0;
      s_b[kb][rb] = in_b ? load(b.data, problem.ab_type, l * b.batch_stride + (n0 + rb) * b.row_stride + (k0 + kb) * b.k_stride) : 0;
    }
    __syncthreads();
    for (int kk = 0; kk < kTileK; ++kk) {
      double fa[kPerThread], fb[kPerThread];
      for (int i = 0; i < kPerThread; ++i) fa[i] = s_a[kk][ty + 16 * i];
      for (int j = 0; j < kPerThread; ++j) fb[j] = s_b[kk][tx + 16 * j];
      for (int i = 0; i < kPerThread; ++i)
        for (int j = 0; j < kPerThread; ++j) sums[i][j] += fa[i] * fb[j];
    }
    __syncthreads();
  }
  for (int i = 0; i < kPerThread; ++i) {
    for (int j = 0; j < kPerThread; ++j) {
      int64_t const m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
      if (m >= problem.m || n >= problem.n) continue;
      double value = double(operands.alpha) * sums[i][j];
      if (problem.has_c)
        value += double(operands.beta) *
                 load(operands.c, operands.c_type, l * operands.c_batch_stride + m * operands.c_stride_m + n * operands.c_stride_n);
      if (operands.bias != nullptr) value += load(operands.bias, operands.bias_type, n);
      if (!problem.gated) value = activate(value, operands.activation);
      out[(l * problem.m + m) * problem.n + n] = float(value);
    }
  }
}

// Blocks of 8 gate columns and 8 up columns alternate (pack_gate_up).
__global__ void gate_kernel(float const* z, float* out, int64_t rows, int64_t n, Activation activation) {
  int64_t const half = n / 2, count = rows * half, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    int64_t const row = i / half, j = i % half;
    float const* pair = z + row * n + j / 8 * 16 + j % 8;
    out[i] = float(activate(double(pair[0]), activation) * double(pair[8]));
  }
}

__global__ void gather_rows_kernel(uint16_t const* a, int32_t const* index, int64_t rows, int64_t k, uint16_t* out) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * k; i += stride) out[i] = a[index[i / k] * k + i % k];
}

__global__ void grouped_epilogue_kernel(float const* z, int64_t rows, int64_t n, bool gated, Activation activation, float const* scale,
                                        DataType type, void* out) {
  int64_t const columns = gated ? n / 2 : n, stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * columns; i += stride) {
    float const* row = z + i / columns * n;
    int64_t const j = i % columns;
    double const value = activate(double(row[j]), activation) * (gated ? double(row[columns + j]) : 1.0);
    store(out, type, i, float(scale != nullptr ? double(scale[i / columns]) * value : value));
  }
}

__global__ void sum_rows_kernel(void const* y, DataType type, int32_t const* index, int64_t tokens, int64_t top_k, int64_t n, float* out) {
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < tokens * n; i += stride) {
    double sum = 0;
    for (int64_t j = 0; j < top_k; ++j) sum += load(y, type, index[i / n * top_k + j] * n + i % n);
    out[i] = float(sum);
  }
}

__global__ void error_kernel(void const* d, DataType type, int64_t ldd, int64_t d_batch_stride, float const* reference, int64_t rows,
                             int64_t columns, int64_t count, double* sums) {
  double difference = 0, norm = 0;
  int64_t const stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    int64_t const row = i / columns, column = i % columns;
    double const r = double(reference[i]);
    double const e = load(d, type, row / rows * d_batch_stride + row % rows * ldd + column) - r;
    difference += e * e;
    norm += r * r;
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    difference += __shfl_down_sync(0xffffffffu, difference, offset);
    norm += __shfl_down_sync(0xffffffffu, norm, offset);
  }
  if (threadIdx.x % 32 == 0) {
    atomicAdd(&sums[0], difference);
    atomicAdd(&sums[1], norm);
  }
}

__global__ void spin_kernel(uint64_t nanoseconds) {
  uint64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

constexpr int kGridBlocks = 1056, kGridThreads = 256;

}  // namespace

void fill_normal(void* data, DataType type, int64_t count, float deviation, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return;
  fill_normal_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(data, type, count, deviation, seed);
  check(cudaGetLastError(), "fill_normal");
}

void fill_uniform(void* data, DataType type, int64_t count, float low, float high, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return;
  fill_uniform_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(data, type, count, low, high, seed);
  check(cudaGetLastError(), "fill_uniform");
}

void fill_codes(uint8_t* codes, int64_t count, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return;
  fill_codes_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(codes, count, seed);
  check(cudaGetLastError(), "fill_codes");
}

void fill_bytes(void* data, int64_t count, uint8_t mask, uint8_t set, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return;
  fill_bytes_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(static_cast<uint8_t*>(data), count, mask, set, seed);
  check(cudaGetLastError(), "fill_bytes");
}

void fill_scales_and_minima(void* data, int64_t count, int64_t run, uint64_t seed, cudaStream_t stream) {
  if (count == 0) return;
  fill_scales_and_minima_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(static_cast<__half*>(data), count, run, seed);
  check(cudaGetLastError(), "fill_scales_and_minima");
}

void dequantise_codes(uint8_t const* codes, void const* scales, void const* zeros, int64_t group_size, int64_t n, int64_t k, DataType type,
                      DataType out_type, void* out, cudaStream_t stream) {
  if (n * k == 0) return;
  dequantise_codes_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(codes, scales, zeros, group_size, n, k, type, out_type, out);
  check(cudaGetLastError(), "dequantise_codes");
}

void dequantise_lines(ScaledLines const& x, int64_t lines, int64_t k, float* out, cudaStream_t stream) {
  if (lines * k == 0) return;
  dequantise_lines_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(x, lines, k, out);
  check(cudaGetLastError(), "dequantise_lines");
}

void poison(void* data, int64_t bytes, cudaStream_t stream) {
  if (bytes > 0) check(cudaMemsetAsync(data, 0xff, size_t(bytes), stream), "poison");
}

void gemm_reference(GemmProblem const& problem, GemmOperands const& operands, float* scratch, float* reference, cudaStream_t stream) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return;
  bool const a_k = problem.a_major == Major::kK, b_k = problem.b_major == Major::kK;
  View const a{operands.a, a_k ? operands.lda : 1, a_k ? 1 : operands.lda, operands.a_batch_stride};
  View const b{operands.b, b_k ? operands.ldb : 1, b_k ? 1 : operands.ldb, operands.b_batch_stride};
  int64_t const tiles_m = (problem.m + kTile - 1) / kTile, tiles_n = (problem.n + kTile - 1) / kTile;
  float* z = problem.gated ? scratch : reference;
  reference_kernel<<<dim3(unsigned(tiles_m * tiles_n), unsigned(problem.batch)), 256, 0, stream>>>(problem, operands, a, b, z, tiles_n);
  check(cudaGetLastError(), "gemm_reference");
  if (!problem.gated) return;
  gate_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(z, reference, problem.batch * problem.m, problem.n, operands.activation);
  check(cudaGetLastError(), "gemm_reference");
}

void gather_rows(void const* a, int32_t const* index, int64_t rows, int64_t k, void* out, cudaStream_t stream) {
  gather_rows_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(static_cast<uint16_t const*>(a), index, rows, k,
                                                               static_cast<uint16_t*>(out));
  check(cudaGetLastError(), "gather_rows");
}

void grouped_epilogue(float const* z, int64_t rows, int64_t n, bool gated, Activation activation, float const* scale, DataType type,
                      void* out, cudaStream_t stream) {
  grouped_epilogue_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(z, rows, n, gated, activation, scale, type, out);
  check(cudaGetLastError(), "grouped_epilogue");
}

void sum_rows(void const* y, DataType type, int32_t const* index, int64_t tokens, int64_t top_k, int64_t n, float* out,
              cudaStream_t stream) {
  sum_rows_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(y, type, index, tokens, top_k, n, out);
  check(cudaGetLastError(), "sum_rows");
}

double relative_error(void const* d, DataType type, int64_t ldd, int64_t d_batch_stride, float const* reference, int64_t batch,
                      int64_t rows, int64_t columns, cudaStream_t stream) {
  int64_t const count = batch * rows * columns;
  if (count == 0) return 0;
  double* sums = nullptr;
  double host[2] = {0, 0};
  check(cudaMalloc(&sums, sizeof(host)), "relative_error");
  check(cudaMemsetAsync(sums, 0, sizeof(host), stream), "relative_error");
  error_kernel<<<kGridBlocks, kGridThreads, 0, stream>>>(d, type, ldd, d_batch_stride, reference, rows, columns, count, sums);
  check(cudaGetLastError(), "relative_error");
  check(cudaMemcpyAsync(host, sums, sizeof(host), cudaMemcpyDeviceToHost, stream), "relative_error");
  check(cudaStreamSynchronize(stream), "relative_error");
  check(cudaFree(sums), "relative_error");
  return host[1] > 0 ? std::sqrt(host[0] / host[1]) : std::sqrt(host[0]);
}

void spin(double us, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(uint64_t(us * 1000));
  check(cudaGetLastError(), "spin");
}

}  // namespace minfer::bench
