// RMS norm and GEMM of few tokens in one launch, for sm_80 onward: D = activation(rms_norm(x) . B + bias), B K-major.
//
// The weights are read once and are nearly all of the bytes. They go from memory into registers and from there into mma.sync, whose first
// operand they are: 16 columns of B as its rows, 8 tokens as its columns. The order of k within a sum is free, so a lane takes the eight
// consecutive k of a 16-byte load as the positions that it holds of two MMAs, and no element changes its lane: of unit u (32 of k), lane l
// has k = 32 u + 8 (l % 4) .. + 7 of the columns l / 4 and l / 4 + 8 of the tile, and reads the same k of token l / 4 from shared memory.
//
//   warps        all alike. They take turns at the units of a tile; each adds up the whole tile over its own units. There are no other
//                roles: a CTA's warps meet at a barrier once a tile
//   tile walk    a tile is 16 columns. CTAs stay, one or a few an SM, and take every gridDim-th tile, so that norms are computed once in a
//                CTA. All CTAs normalise all rows
//   start        after the wait for the preceding kernel: the first kAhead units of weights are requested, into registers, then all of x,
//                into shared memory, and the residual. Squares are summed up, and another walk normalises the rows where they are. Before
//                the wait the first tile is prefetched into L2
//   ring         kAhead units of a warp are in flight at all times, also over the end of a tile: a unit that has been multiplied makes room
//                for the unit kAhead turns further on, which may be of the next tile
//   end of tile  each warp's 16 x kTokens sums go through shared memory (two buffers by turns, hence one barrier) to threads that have one
//                output each and add in the order of the warps: the same bits in every run. Bias, activation, gate in registers
//   residual     each CTA computes residual + x, rounded, for itself from the old residual. The last CTA, which never has more tiles than
//                another one, stores the sum after its tiles, when all have said by the launch's nonce that they have read. It waits for
//                CTAs that wait for nobody, so they need not be resident together
//   shared       [2][kWarps] sums of a tile, statistics, then [m] rows of activation_pitch(k) 16-bit numbers. Tokens that are not there
//                read the last row: their outputs are not stored
//
// Limits: m <= kTokens, k a multiple of 8, all rows of 16-byte vectors, m rows within shared memory.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "common/mma_sm80.cuh"
#include "fused/row_operation.cuh"
#include "norm_gemm/norm_gemm_params.h"

namespace minfer::norm_gemm {

/// 16 bytes of weights, or zeros without a load: read once, and their whole line will be wanted.
__device__ __forceinline__ uint4 load_weights(void const* from, bool inside) {
  uint4 v;
  asm volatile(
      "{\n.reg .pred inside;\nsetp.ne.u32 inside, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@inside ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(uint32_t(inside)));
  return v;
}

template <class Config>
class NormGemm {
 public:
  static constexpr int kTokens = Config::kTokens, kWarps = Config::kWarps, kAhead = Config::kAhead, kThreads = 32 * kWarps;
  static constexpr int kBlocks = kTokens / 8;  // of an MMA's columns
  static constexpr int kSumPitch = 20;         // floats from a token's 16 sums to the next one's: stores of a warp meet all banks
  static constexpr int kOutputs = kTileColumns * kTokens;
  static constexpr int kRowsTogether = 8;  // of the residual, whose loads are in flight together
  static_assert(kTokens % 8 == 0 && kOutputs <= kThreads && kTokens <= kThreads);
  using T = fused::RowType<Config::kType>;
  using Vector = fused::RowVector<T>;
  static constexpr int kVector = fused::kVectorElements;

  struct Storage {
    alignas(16) float sums[2][kWarps][kTokens * kSumPitch];
    float squares[kTokens][kWarps];
    float scales[kTokens];
  };
  static constexpr int kStorageBytes = (int(sizeof(Storage)) + 15) / 16 * 16;
  static_assert(kStorageBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");

  __device__ __forceinline__ NormGemm(NormGemmParams const& params, char* smem)
      : p_(params),
        storage_(*reinterpret_cast<Storage*>(smem)),
        rows_(reinterpret_cast<T*>(smem + Config::kSmemBytes)),
        thread_(threadIdx.x),
        warp_(threadIdx.x / 32),
        lane_(threadIdx.x % 32) {}

  /// Before the preceding kernel has ended.
  __device__ __forceinline__ void prefetch() const {
    constexpr uint32_t kLine = 64, kMost = 4096;  // elements; of a row
    for (uint32_t row = warp_; row < uint32_t(kTileColumns); row += kWarps) {
      T const* const from = static_cast<T const*>(p_.b) + column_of(blockIdx.x, row) * p_.ldb;
      for (uint32_t at = lane_ * kLine; at < min(p_.k, kMost); at += 32 * kLine) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
      }
    }
  }

  __device__ __forceinline__ void run() {
    uint4 ring[kAhead][2];
    WeightStream stream(*this);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) stream.load(ring[i], i);
    stream.advance();
    normalize();
    int buffer = 0;
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < p_.tiles; tile += gridDim.x) {
      float sums[kBlocks][4] = {};
#pragma unroll 1
      for (uint32_t group = 0; group < p_.groups; ++group) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          multiply(ring[i], first_k(group, i), sums);
          stream.load(ring[i], i);
        }
        stream.advance();
      }
      finish(tile, buffer, sums);
      buffer ^= 1;
    }
    if (adds() && blockIdx.x == gridDim.x - 1) store_residual();
  }

 private:
  __device__ __forceinline__ bool adds() const { return p_.residual != nullptr; }
  /// The k with which the warp's unit number i of a group begins.
  __device__ __forceinline__ uint32_t first_k(uint32_t group, int i) const { return ((group * kAhead + i) * kWarps + warp_) * kUnit; }
  /// A tile's column, or the last one of B.
  __device__ __forceinline__ int64_t column_of(uint32_t tile, uint32_t row) const {
    return min(tile * uint32_t(kTileColumns) + row, p_.n - 1);
  }

  // ---- weights ----

  /// A lane's weights, group by group and tile by tile; behind the last tile there are zeros.
  class WeightStream {
   public:
    __device__ __forceinline__ WeightStream(NormGemm const& kernel) : kernel_(kernel), tile_(blockIdx.x) { seek(); }

    __device__ __forceinline__ void load(uint4 (&to)[2], int i) const {
      uint32_t const at = kernel_.first_k(group_, i);
      bool const inside = tile_ < kernel_.p_.tiles && at + kernel_.lane_ % 4 * kVector < kernel_.p_.k;
      to[0] = load_weights(low_ + at, inside);
      to[1] = load_weights(high_ + at, inside);
    }
    __device__ __forceinline__ void advance() {
      if (++group_ < kernel_.p_.groups) return;
      group_ = 0;
      tile_ += gridDim.x;
      seek();
    }

   private:
    __device__ __forceinline__ void seek() {
      T const* const b = static_cast<T const*>(kernel_.p_.b) + kernel_.lane_ % 4 * kVector;
      low_ = b + kernel_.column_of(tile_, kernel_.lane_ / 4) * kernel_.p_.ldb;
      high_ = b + kernel_.column_of(tile_, kernel_.lane_ / 4 + 8) * kernel_.p_.ldb;
    }

    NormGemm const& kernel_;
    uint32_t tile_, group_ = 0;
    T const *low_, *high_;  // of the tile's columns l / 4 and l / 4 + 8
  };

  // ---- activations ----

  /// From memory into normalised rows in shared memory, with zeros up to a whole unit. A thread has the same vectors of all rows, and of
  /// each walk.
  __device__ __forceinline__ void normalize() {
    uint32_t const vectors = p_.k / kVector;
    Vector factors = load_factors(thread_);
#pragma unroll 4
    for (uint32_t row = 0; row < p_.m; ++row) {
      T const* const from = static_cast<T const*>(p_.x) + row * p_.ldx;
      for (uint32_t v = thread_; v < vectors; v += kThreads) copy_async_16(row_vector(row, v * kVector), from + v * kVector, true);
    }
    commit_copies();
#pragma unroll 1
    for (uint32_t first = 0; first < p_.m; first += kRowsTogether) sum_squares(first, vectors);
    for (uint32_t row = warp_; row < p_.m; row += kWarps) {
      uint32_t const at = p_.k + lane_ * kVector;
      if (at < (p_.k + kUnit - 1) / kUnit * kUnit) *row_vector(row, at) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    if (adds() && thread_ == 0) {  // the CTA's loads have arrived, for their sums are here
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p_.read + blockIdx.x), "l"(p_.nonce) : "memory");
    }
    if (thread_ < p_.m) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += storage_.squares[thread_][w];
      storage_.scales[thread_] = rsqrtf(__fdividef(sum, float(p_.k)) + p_.eps);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t v = thread_; v < vectors; v += kThreads) {
      float weight[kVector];
      fused::unpack(factors, weight);
      factors = load_factors(v + kThreads);
#pragma unroll 2
      for (uint32_t row = 0; row < p_.m; ++row) {
        uint4* const at = row_vector(row, v * kVector);
        float const scale = storage_.scales[row];
        float y[kVector];
        fused::unpack(Vector{{*at}}, y);
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = y[i] * (weight[i] + p_.weight_offset) * scale;
        *at = fused::pack<T>(y).words[0];
      }
    }
    __syncthreads();
  }

  /// Adds the residual to rows `first` to `first` + kRowsTogether - 1 in shared memory and stores, of each warp, the sums of squares.
  __device__ __forceinline__ void sum_squares(uint32_t first, uint32_t vectors) {
    float squares[kRowsTogether] = {};
#pragma unroll 1
    for (uint32_t v = thread_; v < vectors; v += kThreads) {
      Vector residual[kRowsTogether];
      if (adds()) {
#pragma unroll
        for (int i = 0; i < kRowsTogether; ++i) residual[i] = load_residual(first + i, v);
      }
      wait_for_copies<0>();  // of x, by this thread
#pragma unroll
      for (int i = 0; i < kRowsTogether; ++i) {
        if (first + i >= p_.m) break;
        uint4* const at = row_vector(first + i, v * kVector);
        Vector x{{*at}};
        if (adds()) {
          x = sum_of(residual[i], x);
          *at = x.words[0];
        }
        float y[kVector];
        fused::unpack(x, y);
#pragma unroll
        for (int e = 0; e < kVector; ++e) squares[i] = fmaf(y[e], y[e], squares[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsTogether; ++i) {
      if (first + i >= p_.m) break;
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], offset);
      if (lane_ == 0) storage_.squares[first + i][warp_] = squares[i];
    }
  }

  __device__ __forceinline__ uint4* row_vector(uint32_t row, uint32_t at) const {
    return reinterpret_cast<uint4*>(rows_ + row * p_.pitch + at);
  }
  /// Zeros where there is no such row.
  __device__ __forceinline__ Vector load_x(uint32_t row, uint32_t v) const {
    return fused::load_vector(static_cast<T const*>(p_.x) + row * p_.ldx, v * kVector, row < p_.m ? kVector : 0, true);
  }
  __device__ __forceinline__ Vector load_residual(uint32_t row, uint32_t v) const {
    return fused::load_vector(static_cast<T const*>(p_.residual) + row * p_.ld_residual, v * kVector, row < p_.m ? kVector : 0, true);
  }
  __device__ __forceinline__ Vector load_factors(uint32_t v) const {
    Vector factors = fused::constant_vector<T>(1.0f);
    fused::load_factors<true>(p_.norm_weight, v * kVector, v < p_.k / kVector ? kVector : 0, &factors);
    return factors;
  }
  /// Rounded, as the residual has it.
  static __device__ __forceinline__ Vector sum_of(Vector const& residual, Vector const& x) {
    float a[kVector], b[kVector];
    fused::unpack(residual, a);
    fused::unpack(x, b);
#pragma unroll
    for (int i = 0; i < kVector; ++i) a[i] += b[i];
    return fused::pack<T>(a);
  }

  /// By one CTA, when all have read the old one.
  __device__ __forceinline__ void store_residual() const {
    for (uint32_t cta = thread_; cta < gridDim.x; cta += kThreads) {
      uint64_t seen;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(p_.read + cta) : "memory");
      } while (seen != p_.nonce);
      p_.read[cta] = 0;  // a replay of the launch in a CUDA graph has the same nonce
    }
    __syncthreads();
    constexpr int kTogether = 4;  // rows
#pragma unroll 1
    for (uint32_t first = 0; first < p_.m; first += kTogether) {
#pragma unroll 1
      for (uint32_t v = thread_; v < p_.k / kVector; v += kThreads) {
        Vector x[kTogether], residual[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          x[i] = load_x(first + i, v);
          residual[i] = load_residual(first + i, v);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          T* const to = static_cast<T*>(p_.residual) + (first + i) * p_.ld_residual;
          if (first + i < p_.m) fused::store_vector(sum_of(residual[i], x[i]), to, v * kVector, kVector, true);
        }
      }
    }
  }

  // ---- products ----

  /// Of the unit that begins with k.
  __device__ __forceinline__ void multiply(uint4 const (&weights)[2], uint32_t k, float (&sums)[kBlocks][4]) const {
    if (k >= p_.k) return;
    uint4 const low = weights[0], high = weights[1];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t const token = min(block * 8 + lane_ / 4, p_.m - 1);
      uint4 const x = *row_vector(token, k + lane_ % 4 * kVector);
      multiply_16x8x16<Config::kType>(sums[block], {low.x, high.x, low.y, high.y}, x.x, x.y);
      multiply_16x8x16<Config::kType>(sums[block], {low.z, high.z, low.w, high.w}, x.z, x.w);
    }
  }

  /// Adds up the warps' sums and stores the tile.
  __device__ __forceinline__ void finish(uint32_t tile, int buffer, float const (&sums)[kBlocks][4]) const {
    float* const own = storage_.sums[buffer][warp_];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        own[(block * 8 + lane_ % 4 * 2 + i % 2) * kSumPitch + lane_ / 4 + i / 2 * 8] = sums[block][i];
      }
    }
    __syncthreads();
    if (thread_ >= uint32_t(kOutputs)) return;  // whole warps
    uint32_t const token = thread_ / kTileColumns, row = thread_ % kTileColumns, column = tile * kTileColumns + row;
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += storage_.sums[buffer][w][token * kSumPitch + row];
    bool inside = token < p_.m && column < p_.n;
    if (p_.bias != nullptr && inside) value += bias_of(column);
    float const up = __shfl_down_sync(0xffffffffu, value, kTileColumns / 2);  // gated: of the gate in this thread
    uint32_t to = column;
    if (p_.gated) {
      inside = inside && row < kTileColumns / 2;
      to = tile * (kTileColumns / 2) + row;
    }
    value = activate(p_.activation, value);
    if (p_.gated) value *= up;
    if (inside) static_cast<T*>(p_.d)[token * p_.ldd + to] = from_float<T>(value);
  }

  __device__ __forceinline__ float bias_of(uint32_t column) const {
    if (p_.bias_f32) return load_operand(static_cast<float const*>(p_.bias) + column);
    return to_float(load_operand(static_cast<T const*>(p_.bias) + column));
  }

  NormGemmParams const& p_;
  Storage& storage_;
  T* const rows_;
  uint32_t const thread_, warp_, lane_;
};

template <class Config>
__global__ void __launch_bounds__(32 * Config::kWarps, Config::kCtasPerSm)
    norm_gemm_sm80_kernel(__grid_constant__ NormGemmParams const params) {
  extern __shared__ __align__(16) char smem[];
  NormGemm<Config> kernel(params, smem);
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  kernel.prefetch();
  wait_for_predecessor();
#endif
  kernel.run();
}

template <class Config>
Status launch_norm_gemm_sm80(NormGemmLaunchArguments const& arguments) {
  static std::atomic<uint64_t> allowed{0};
  auto* const kernel = &norm_gemm_sm80_kernel<Config>;
  // Launches differ in their shared memory, and are allowed all of it once.
  if (cudaError_t const error = allow_shared_memory(reinterpret_cast<void const*>(kernel), arguments.smem_limit, allowed);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute(dynamic shared memory)");
  }
  LaunchShape shape;
  shape.grid = dim3(unsigned(arguments.ctas));
  shape.threads = unsigned(32 * Config::kWarps);
  shape.smem_bytes = size_t(arguments.smem_bytes);
  shape.programmatic = arguments.programmatic;
  shape.stream = arguments.stream;
  return launch(shape, "launch", kernel, arguments.params);
}

}  // namespace minfer::norm_gemm
