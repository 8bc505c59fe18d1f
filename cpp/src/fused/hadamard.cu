// Hadamard transform of blocks of a row (minfer/fused.h).
//
// A block has kOuter * N elements, N a power of two. A CTA has a tile, one block or several that follow each other, as fp32 in shared
// memory. Element k N + i of a block has the bits of i lowest, and the transform of N is one butterfly for each of them:
//   load     8 consecutive elements of a thread: the butterflies of the lowest three bits, in registers
//   passes   up to five of the other bits at a time: a thread takes the elements that differ in them into registers and puts them back, of
//            one, two or four neighbours at once, which are 32 registers, in accesses of as many words
//   outer    kOuter > 1: the kOuter elements of an i, times the matrix of that order, a row of which is a bit mask
//   store    8 consecutive elements of a thread, rounded once
// Elements lie kPad further apart after each 2^(3 + bits of the first pass), so that the threads of a warp are on 32 banks in that pass.
// Rows that follow each other in memory are one row of all blocks: their elements are found without divisions.
// Matrices of order 12 and 20 are Paley's first construction, of order 28 his second (Paley, 1933).
#include <array>
#include <cmath>

#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_group.cuh"
#include "fused/row_vector.cuh"

namespace minfer {

namespace fused {
namespace {

constexpr unsigned kMostThreads = 512;
constexpr uint32_t kTile = 4096;  // elements of a tile of blocks that have fewer
constexpr int kPad = 8, kMostBits = 5, kMostOuter = 28;
constexpr int kTogether = 2;  // vectors of a thread that are requested before the first is used

struct HadamardParams {
  RowTensor x, y;
  uint32_t inner;   // rows
  uint32_t blocks;  // of all rows
  uint32_t blocks_of_row;
  uint32_t block;             // elements
  bool x_follows, y_follows;  // each row begins where the one before it ends
  uint32_t blocks_of_tile;
  int bits;        // of N
  int first_bits;  // of the first pass
  int outer;
  bool aligned;
  float scale;
  uint32_t signs[kMostOuter];  // bit k of row j: whether its element is -1
};

class Tile {
 public:
  __device__ __forceinline__ Tile(HadamardParams const& params, float* shared)
      : p_(params), shared_(shared), first_block_(blockIdx.x * params.blocks_of_tile) {
    elements_ = min(params.blocks_of_tile, params.blocks - first_block_) * params.block;
  }

  template <class T>
  __device__ __forceinline__ void load() {
    for (uint32_t first = threadIdx.x * kVectorElements; first < elements_; first += kTogether * blockDim.x * kVectorElements) {
      RowVector<T> x[kTogether];
      uint32_t at = first;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        x[j] = load_elements<T>(at);
        at += blockDim.x * kVectorElements;
      }
      at = first;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        float v[kVectorElements];
        unpack(x[j], v);
#pragma unroll
        for (int b = 0; b < 3; ++b) {
          if (b < p_.bits) butterflies(v, b);
        }
        if (at < elements_) {
          float4* const to = reinterpret_cast<float4*>(place(at));
          to[0] = make_float4(v[0], v[1], v[2], v[3]);
          to[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
        at += blockDim.x * kVectorElements;
      }
    }
  }

  /// The butterflies of the bits `first` to first + kBits - 1, `first` being 3 or more.
  template <int kBits>
  __device__ __forceinline__ void pass(int first) {
    constexpr int kCount = 1 << kBits, kWideBits = kBits == kMostBits ? 0 : kBits == kMostBits - 1 ? 1 : 2, kWide = 1 << kWideBits;
    struct alignas(4 * kWide) Wide {
      float of[kWide];
    };
    uint32_t const tasks = elements_ >> (kBits + kWideBits), step = uint32_t(first - kWideBits);
    int const padded = 3 + p_.first_bits,
              apart = (1 << first) + (first >= padded ? kPad << (first - padded) : 0);  // of a thread's elements
    for (uint32_t task = threadIdx.x; task < tasks; task += blockDim.x) {
      uint32_t const low = (task & ((1u << step) - 1)) << kWideBits, at = (task >> step << (first + kBits)) | low;
      float* const base = place(at);
      float v[kWide][kCount];
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Wide const wide = *reinterpret_cast<Wide const*>(base + i * apart);
#pragma unroll
        for (int w = 0; w < kWide; ++w) v[w][i] = wide.of[w];
      }
#pragma unroll
      for (int b = 0; b < kBits; ++b) {
#pragma unroll
        for (int w = 0; w < kWide; ++w) butterflies(v[w], b);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        Wide wide;
#pragma unroll
        for (int w = 0; w < kWide; ++w) wide.of[w] = v[w][i];
        *reinterpret_cast<Wide*>(base + i * apart) = wide;
      }
    }
  }

  template <int kOuter>
  __device__ __forceinline__ void multiply_outer() {
    uint32_t const n = 1u << p_.bits, tasks = elements_ / kOuter;
    for (uint32_t task = threadIdx.x; task < tasks; task += blockDim.x) {
      uint32_t const block = task >> p_.bits, at = block * p_.block + (task & (n - 1));
      float v[kOuter];
#pragma unroll
      for (int k = 0; k < kOuter; ++k) v[k] = *place(at + k * n);
#pragma unroll 1
      for (int j = 0; j < kOuter; ++j) {
        uint32_t const signs = p_.signs[j];
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < kOuter; ++k) sum += __uint_as_float(__float_as_uint(v[k]) ^ (signs >> k << 31));
        *place(at + j * n) = sum;
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store() {
    for (uint32_t at = threadIdx.x * kVectorElements; at < elements_; at += blockDim.x * kVectorElements) {
      float const* const from = place(at);
      float v[kVectorElements];
#pragma unroll
      for (int i = 0; i < kVectorElements; i += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(from + i);
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
      }
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] *= p_.scale;
      if (p_.aligned) {
        store_vector(pack<T>(v), element<T>(p_.y, p_.y_follows, at), 0, kVectorElements, true);
      } else {
#pragma unroll
        for (int i = 0; i < kVectorElements; ++i) {
          if (at + i < elements_) *element<T>(p_.y, p_.y_follows, at + i) = from_float<T>(v[i]);
        }
      }
    }
  }

 private:
  __device__ __forceinline__ float* place(uint32_t at) const { return shared_ + at + (at >> (3 + p_.first_bits)) * kPad; }
  /// Element number `at` of the tile.
  template <class T>
  __device__ __forceinline__ T* element(RowTensor const& x, bool follows, uint32_t at) const {
    if (follows) return static_cast<T*>(x.data) + int64_t(first_block_) * p_.block + at;
    uint32_t const block_of_tile = at / p_.block, block = first_block_ + block_of_tile, row = block / p_.blocks_of_row;
    uint32_t const column = (block - row * p_.blocks_of_row) * p_.block + (at - block_of_tile * p_.block);
    return row_in<T>({x.data, x.outer_stride, x.inner_stride}, p_.inner, row) + column;
  }
  /// Eight of them; those behind the tile's end are zeros.
  template <class T>
  __device__ __forceinline__ RowVector<T> load_elements(uint32_t at) const {
    if (p_.aligned) {
      if (at >= elements_) return {};
      return load_vector(element<T const>(p_.x, p_.x_follows, at), 0, kVectorElements, true);
    }
    T v[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      v[i] = at + i < elements_ ? load_operand(element<T const>(p_.x, p_.x_follows, at + i)) : from_float<T>(0.0f);
    }
    RowVector<T> x;
    memcpy(&x, v, sizeof(x));
    return x;
  }
  /// Of elements whose numbers differ in one bit.
  template <int kCount>
  static __device__ __forceinline__ void butterflies(float (&v)[kCount], int bit) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      int const other = i | 1 << bit;
      if (i == other) continue;
      float const sum = v[i] + v[other];
      v[other] = v[i] - v[other];
      v[i] = sum;
    }
  }

  HadamardParams const& p_;
  float* shared_;
  uint32_t first_block_, elements_;
};

template <class T>
__global__ void __launch_bounds__(kMostThreads) hadamard_kernel(__grid_constant__ HadamardParams const params) {
  extern __shared__ uint4 shared[];
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  Tile tile(params, reinterpret_cast<float*>(shared));
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  tile.template load<T>();
  __syncthreads();
  int first = 3;
  for (int bits = params.first_bits; first < params.bits; first += bits, bits = min(bits, params.bits - first)) {
    switch (bits) {
      case 1: tile.template pass<1>(first); break;
      case 2: tile.template pass<2>(first); break;
      case 3: tile.template pass<3>(first); break;
      case 4: tile.template pass<4>(first); break;
      default: tile.template pass<kMostBits>(first); break;
    }
    __syncthreads();
  }
  if (params.outer > 1) {
    if (params.outer == 12) tile.template multiply_outer<12>();
    if (params.outer == 20) tile.template multiply_outer<20>();
    if (params.outer == 28) tile.template multiply_outer<28>();
    __syncthreads();
  }
  tile.template store<T>();
}

/// Whether i is a square modulo the prime q: 1 or -1, of 0 0.
int quadratic_character(int i, int q) {
  i = (i % q + q) % q;
  if (i == 0) return 0;
  for (int j = 1; j < q; ++j) {
    if (j * j % q == i) return 1;
  }
  return -1;
}

/// Element (j, k) of the matrix of order 12, 20 or 28.
int outer_element(int order, int j, int k) {
  // Row and column 0 of the smaller matrix border one that depends on the difference of row and column.
  auto const bordered = [](int q, int j, int k, int of_column) {
    if (j == 0 || k == 0) return j == k ? 0 : k == 0 ? of_column : -of_column * (q % 4 == 3 ? 1 : -1);
    return quadratic_character(j - k, q);
  };
  if (order != 28) return j == k ? 1 : bordered(order - 1, j, k, 1);  // I + a skew matrix
  int const q = 13, half = 14, a = j % half, b = k % half, c = bordered(q, a, b, 1), diagonal = a == b ? 1 : 0;
  if (j < half && k < half) return c + diagonal;
  if (j >= half && k >= half) return -c - diagonal;
  return c - diagonal;
}

template <class T>
Status launch_hadamard(Hadamard const& h, HadamardShape const& of, DeviceProperties const& device, bool programmatic, Stream stream) {
  HadamardParams params{};
  params.x = h.x;
  params.y = h.y;
  params.inner = uint32_t(h.inner);
  params.block = uint32_t(h.block);
  params.blocks_of_row = uint32_t(h.width / h.block);
  int64_t const blocks = h.rows * (h.width / h.block);
  if (blocks > 0x7fffffff) {
    return Status::failure(StatusCode::kNotSupported, "%lld blocks of %lld are more than a launch covers", (long long)blocks,
                           (long long)h.block);
  }
  params.blocks = uint32_t(blocks);
  params.blocks_of_tile = h.block >= kTile ? 1 : uint32_t(kTile / h.block);
  params.bits = of.bits;
  int const rest = of.bits - 3, passes = (rest + kMostBits - 1) / kMostBits;
  params.first_bits = rest > 0 ? (rest + passes - 1) / passes : kMostBits;
  params.outer = of.outer;
  for (int j = 0; j < of.outer && of.outer > 1; ++j) {
    for (int k = 0; k < of.outer; ++k) {
      int const element = h.transpose ? outer_element(of.outer, k, j) : outer_element(of.outer, j, k);
      params.signs[j] |= uint32_t(element < 0) << k;
    }
  }
  auto const begins = [&](RowTensor const& t) { return begin_vectors(t.data, sizeof(T), {t.outer_stride, t.inner_stride}); };
  auto const follows = [&](RowTensor const& t) {
    int64_t const outer = (h.rows + params.inner - 1) / params.inner;
    return (params.inner == 1 || t.inner_stride == h.width) && (outer <= 1 || t.outer_stride == int64_t(params.inner) * h.width);
  };
  params.x_follows = follows(h.x);
  params.y_follows = follows(h.y);
  params.aligned = h.block % kVectorElements == 0 && begins(h.x) && begins(h.y);
  params.scale = float(1.0 / std::sqrt(double(h.block)));
  uint32_t const elements = params.blocks_of_tile * params.block, padded = (elements + 7) / 8 * 8;
  LaunchShape shape;
  shape.grid = dim3((params.blocks + params.blocks_of_tile - 1) / params.blocks_of_tile);
  // As many CTAs as fit hold the bytes in flight, of few blocks as many threads as there are tasks of a pass.
  shape.threads = elements <= kTile ? 128 : elements <= 4 * kTile ? 256 : kMostThreads;
  shape.smem_bytes = (padded + (padded >> (3 + params.first_bits)) * kPad + kPad) * sizeof(float);
  shape.programmatic = programmatic;
  shape.stream = stream;
  if (shape.smem_bytes > size_t(device.smem_per_block)) {
    return Status::failure(StatusCode::kNotSupported, "a block of %lld takes %lld bytes of shared memory, the device has %d",
                           (long long)h.block, (long long)shape.smem_bytes, device.smem_per_block);
  }
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(&hadamard_kernel<T>), device.smem_per_block, allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  return launch(shape, "launch of hadamard", &hadamard_kernel<T>, params);
}

}  // namespace
}  // namespace fused

Status transform(Hadamard const& hadamard, DeviceProperties const& device, bool programmatic, Stream stream) {
  HadamardShape shape;
  if (!find_hadamard_shape(hadamard.block, &shape) || hadamard.width % hadamard.block != 0) {
    return Status::failure(StatusCode::kInvalidArgument, "blocks of %lld of rows of %lld", (long long)hadamard.block,
                           (long long)hadamard.width);
  }
  if (hadamard.width >= int64_t(1) << 31) {
    return Status::failure(StatusCode::kNotSupported, "rows of %lld are more than 2^31 - 1", (long long)hadamard.width);
  }
  if (hadamard.rows == 0 || hadamard.width == 0) return Status::success();
  switch (hadamard.type) {
    case DataType::kF16: return fused::launch_hadamard<__half>(hadamard, shape, device, programmatic, stream);
    case DataType::kBF16: return fused::launch_hadamard<__nv_bfloat16>(hadamard, shape, device, programmatic, stream);
    case DataType::kF32: return fused::launch_hadamard<float>(hadamard, shape, device, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "rows of type %s", name_of(hadamard.type));
  }
}

}  // namespace minfer
