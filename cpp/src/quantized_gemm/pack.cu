// Packing, dequantisation and column gather: memory-bound helpers of the GEMMs with quantised weights. 128 threads to a 64 x 64 block.
#include <algorithm>
#include <iterator>
#include <utility>

#include "common/dependent_launch.cuh"
#include "common/float16.cuh"
#include "common/kernel_launch.h"
#include "common/opaque.cuh"
#include "minfer/w4a16.h"
#include "quantized_gemm/dequantize.cuh"
#include "quantized_gemm/w4_layout.h"

namespace minfer {

namespace w4a16 {
namespace {

constexpr int kThreads = 128;

// Codes pass through shared memory, so that rows are read and words are written by coalesced accesses. A row of 64 codes takes 68 bytes
// there, which puts the eight rows of a warp's codes into different banks.
template <WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads) pack_kernel(uint8_t const* codes, int64_t n, int64_t k, int64_t ld, uint4* packed) {
  constexpr int kBits = bits_of(kFormat), kWords = kBits / 4;  // words of a thread, for 16 columns
  constexpr int kRegisters = 4 / kWords;                       // of a fragment, in a word
  __shared__ uint8_t tile[kBlockN][kBlockK + 4];
  int64_t const n0 = int64_t(blockIdx.y) * kBlockN, k0 = int64_t(blockIdx.x) * kBlockK;
  for (int i = threadIdx.x; i < kBlockN * kBlockK; i += kThreads) {
    int64_t const row = n0 + i / kBlockK, column = k0 + i % kBlockK;
    tile[i / kBlockK][i % kBlockK] = row < n && column < k ? codes[row * ld + column] & ((1 << kBits) - 1) : 0;
  }
  __syncthreads();
  int const thread = threadIdx.x, lane = thread % 32;
  uint32_t words[4 * kWords];
#pragma unroll
  for (int w = 0; w < 4 * kWords; ++w) {
    words[w] = 0;
#pragma unroll
    for (int p = 0; p < 2 * kRegisters; ++p) {  // w4_layout.h
      int const r = p % kRegisters, odd = p / kRegisters, of_fragment = w % kWords * kRegisters + r;
      int const row = thread / 32 * 16 + 8 * (of_fragment % 2) + lane / 4;
      int const column = 16 * (w / kWords) + 8 * (of_fragment / 2) + 2 * (lane % 4) + odd;
      words[w] |= placed(kFormat, tile[row][column], r, odd);
    }
  }
  int64_t const block = int64_t(blockIdx.y) * gridDim.x + blockIdx.x;
#pragma unroll
  for (int c = 0; c < kWords; ++c) {
    packed[(block * kWords + c) * kThreads + thread] = make_uint4(words[4 * c], words[4 * c + 1], words[4 * c + 2], words[4 * c + 3]);
  }
}

constexpr int kSpan = 4;  // weight blocks of a CTA, along k: their codes are in flight together

template <DataType kType, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(QuantizedWeight const weight, int group_shift, uint4* out) {
  using Element = Float16<kType>;
  using Stored = typename Scale<kType, kFormat>::Stored;
  constexpr int kBits = bits_of(kFormat), kWords = kBits / 4;
  constexpr bool kHasZeros = has_zero_points(kFormat);
  __shared__ alignas(16)
      uint32_t tile[2][kBlockN][kBlockK / 2 + 4];  // pairs along k; padded so that the stores of a warp go to different banks
  __shared__ float book[16];
  int64_t const n = weight.n, k = weight.k, blocks_k = (k + kBlockK - 1) / kBlockK;
  int64_t const n0 = int64_t(blockIdx.y) * kBlockN, first = int64_t(blockIdx.x) * kSpan;
  int const thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
  uint4 const* packed = static_cast<uint4 const*>(weight.packed) + (int64_t(blockIdx.y) * blocks_k + first) * kWords * kThreads + thread;
  uint4 codes[kSpan][kWords];
#pragma unroll
  for (int b = 0; b < kSpan; ++b) {
#pragma unroll
    for (int w = 0; w < kWords; ++w)
      codes[b][w] = first + b < blocks_k ? __ldcs(packed + (b * kWords + w) * kThreads) : make_uint4(0, 0, 0, 0);
  }
  if constexpr (has_code_book(kFormat)) {
    if (thread < 16) book[thread] = kBookValues.values[code_book_of(kFormat)][thread];
    __syncthreads();
  }
#pragma unroll
  for (int b = 0; b < kSpan; ++b) {
    if (first + b >= blocks_k) break;
    int64_t const k0 = (first + b) * kBlockK;
    float scale[2], zero[2];
#pragma unroll
    for (int k_block = 0; k_block < 4; ++k_block) {
      int64_t const group = (k0 + 16 * k_block) >> group_shift;
      if (k_block == 0 || group_shift < 6) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          int64_t const at = n0 + row + 8 * r;
          bool const inside = at < n && k0 + 16 * k_block < k;
          scale[r] = inside ? exact_scale<kType, kFormat>(static_cast<Stored const*>(weight.scales)[group * weight.ld_scales + at]) : 0.0f;
          scale[r] *= weight.alpha;
          zero[r] = symmetric_zero_of(kFormat);
          if (kHasZeros && weight.zeros != nullptr && inside) {
            zero[r] = Int4<kType>::to_float(static_cast<uint16_t const*>(weight.zeros)[group * weight.ld_zeros + at]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // fragment registers
        int const w = kWords == 1 ? k_block : k_block * 2 + i / 2, r = kWords == 1 ? i : i % 2;
        uint4 const& chunk = codes[b][w / 4];
        uint32_t const word = w % 4 == 0 ? chunk.x : w % 4 == 1 ? chunk.y : w % 4 == 2 ? chunk.z : chunk.w;
        float low = value_of<kFormat>(code_at(kFormat, word, r, 0), book), high = value_of<kFormat>(code_at(kFormat, word, r, 1), book);
        if constexpr (kHasZeros) {
          low -= zero[i % 2];
          high -= zero[i % 2];
        }
        tile[b % 2][row + 8 * (i % 2)][8 * k_block + 4 * (i / 2) + lane % 4] = Element::pack(low * scale[i % 2], high * scale[i % 2]);
      }
    }
    __syncthreads();  // one for each weight block: the next one fills the other tile, and a barrier precedes the one after it
#pragma unroll
    for (int i = thread; i < kBlockN * kBlockK / 8; i += kThreads) {
      int64_t const r = n0 + i / 8, column = k0 + i % 8 * 8;
      if (r < n && column < k) out[(r * k + column) / 8] = *reinterpret_cast<uint4 const*>(&tile[b % 2][i / 8][i % 8 * 4]);
    }
  }
}

template <DataType kType, WeightFormat kFormat>
void launch_if_stored_as(QuantizedWeight const& weight, dim3 grid, void* out, Stream stream) {
  if (weight.format != kFormat) return;
  int const shift = group_shift(weight.group_size, weight.k);
  dequantize_kernel<kType, kFormat><<<grid, kThreads, 0, stream>>>(weight, shift, static_cast<uint4*>(out));
}

template <DataType kType, size_t... kIndex>
void launch_dequantize(QuantizedWeight const& weight, dim3 grid, void* out, Stream stream, std::index_sequence<kIndex...>) {
  (launch_if_stored_as<kType, kWeightFormats[kIndex]>(weight, grid, out, stream), ...);
}

constexpr int kGatherThreads = 512;
constexpr int kMaxStagedBytes = 48 * 1024;  // of rows in shared memory
[[maybe_unused]] constexpr int64_t kEarlyColumns = 8192;

// A CTA reads `rows` whole rows into shared memory, where an access to two bytes costs no more than its bytes, and writes 4096 of their
// columns in the new order. There are few CTAs, because the GEMM starts while they run, and its clusters do not fit on an SM that is partly
// occupied. The permutation is prefetched into L2 while the predecessor ends, and is read before the GEMM may start, as it would queue
// behind the GEMM's weights. With long rows the GEMM starts when the gather is done (1 x 4096 x 14336: 14 us for both, 17 us with the early
// start). A column number outside of the row gives a zero.
template <bool kStaged>
__global__ void __launch_bounds__(kGatherThreads, 2)
    gather_kernel(uint16_t const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, uint16_t* out, int rows) {
  extern __shared__ uint4 staged[];
  int const thread = int(threadIdx.x), vectors = int(k / 8), vector = int(blockIdx.y) * kGatherThreads + thread;
  int32_t from[8] = {};
  uint32_t keep[4] = {};  // masks of pairs of columns
#if __CUDA_ARCH__ >= 900
  if (vector < vectors) asm volatile("prefetch.global.L2 [%0];" ::"l"(perm + 8 * vector));
  wait_for_predecessor();
#endif
  if (vector < vectors) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int32_t const column = load_operand(perm + 8 * vector + i);
      bool const inside = uint64_t(int64_t(column)) < uint64_t(k);
      from[i] = inside ? column : 0;
      keep[i / 2] |= inside ? 0xffffu << 16 * (i % 2) : 0;
    }
  }
#if __CUDA_ARCH__ >= 900
  bool const early = k <= kEarlyColumns;
  wait_for_load(from[0]);
  wait_for_load(from[7]);
  if (early) allow_dependent_launch();
#endif
  bool const aligned = lda % 8 == 0 && reinterpret_cast<uintptr_t>(a) % 16 == 0;
  for (int64_t row0 = int64_t(blockIdx.x) * rows; row0 < m; row0 += int64_t(gridDim.x) * rows) {
    int const count = int(m - row0 < rows ? m - row0 : rows);
    if constexpr (kStaged) {
      if (aligned) {
        for (int r = 0; r < count; ++r) {
          uint4 const* source = reinterpret_cast<uint4 const*>(a + (row0 + r) * lda);
          for (int i = thread; i < vectors; i += kGatherThreads) staged[r * vectors + i] = source[i];
        }
      } else {
        for (int r = 0; r < count; ++r) {
          uint16_t* const row = reinterpret_cast<uint16_t*>(staged) + r * k;
#pragma unroll 1
          for (int i = thread; i < k; i += kGatherThreads) row[i] = a[(row0 + r) * lda + i];
        }
      }
      __syncthreads();
    }
    for (int r = 0; r < count && vector < vectors; ++r) {
      uint16_t const* const source = kStaged ? reinterpret_cast<uint16_t const*>(staged) + r * k : a + (row0 + r) * lda;
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = (uint32_t(source[from[2 * i]]) | uint32_t(source[from[2 * i + 1]]) << 16) & keep[i];
      *reinterpret_cast<uint4*>(out + (row0 + r) * k + vector * 8) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    if constexpr (kStaged) __syncthreads();  // all threads have read the rows
  }
#if __CUDA_ARCH__ >= 900
  if (!early) allow_dependent_launch();
#endif
}

}  // namespace
}  // namespace w4a16

Status pack_weight(WeightFormat format, uint8_t const* codes, int64_t n, int64_t k, int64_t ld, void* packed, Stream stream) {
  using namespace w4a16;
  dim3 const grid(unsigned((k + kBlockK - 1) / kBlockK), unsigned((n + kBlockN - 1) / kBlockN));
  if (grid.x == 0 || grid.y == 0) return Status::success();
  if (grid.y > 65535) return Status::failure(StatusCode::kNotSupported, "n = %lld is more than a launch covers", (long long)n);
  auto* kernel = bits_of(format) == 8    ? &pack_kernel<WeightFormat::kInt8>
                 : is_e2m1(format)       ? &pack_kernel<WeightFormat::kMxFp4>
                 : has_code_book(format) ? &pack_kernel<WeightFormat::kNf4>
                                         : &pack_kernel<WeightFormat::kInt4>;
  kernel<<<grid, kThreads, 0, stream>>>(codes, n, k, ld, static_cast<uint4*>(packed));
  return cuda_status(cudaGetLastError(), "launch of pack_weight");
}

Status dequantize_weight(QuantizedWeight const& weight, DataType type, void* out, Stream stream) {
  using namespace w4a16;
  int64_t const blocks_k = (weight.k + kBlockK - 1) / kBlockK;
  dim3 const grid(unsigned((blocks_k + kSpan - 1) / kSpan), unsigned((weight.n + kBlockN - 1) / kBlockN));
  if (grid.x == 0 || grid.y == 0) return Status::success();
  if (grid.y > 65535) return Status::failure(StatusCode::kNotSupported, "n = %lld is more than a launch covers", (long long)weight.n);
  constexpr auto kEach = std::make_index_sequence<std::size(kWeightFormats)>();
  if (type == DataType::kF16) {
    launch_dequantize<DataType::kF16>(weight, grid, out, stream, kEach);
  } else {
    launch_dequantize<DataType::kBF16>(weight, grid, out, stream, kEach);
  }
  return cuda_status(cudaGetLastError(), "launch of dequantize_weight");
}

Status gather_columns(void const* a, int64_t lda, int32_t const* perm, int64_t m, int64_t k, void* out, bool programmatic, Stream stream) {
  if (m == 0 || k == 0) return Status::success();
  bool const staged = k * 2 <= w4a16::kMaxStagedBytes;
  int64_t const fit = staged ? w4a16::kMaxStagedBytes / (k * 2) : 1, rows = std::min<int64_t>(std::min<int64_t>(fit, 2), m);
  LaunchShape shape;
  shape.grid =
      dim3(unsigned(std::min<int64_t>((m + rows - 1) / rows, 1024)), unsigned((k / 8 + w4a16::kGatherThreads - 1) / w4a16::kGatherThreads));
  shape.threads = w4a16::kGatherThreads;
  shape.smem_bytes = staged ? size_t(rows * k) * 2 : 0;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of gather_columns", staged ? &w4a16::gather_kernel<true> : &w4a16::gather_kernel<false>,
                static_cast<uint16_t const*>(a), lda, perm, m, k, static_cast<uint16_t*>(out), int(rows));
}

}  // namespace minfer
