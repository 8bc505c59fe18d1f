// The products between two attentions for one or two tokens in one launch, for sm_90a: a dataflow over CTAs that stay.
//
// A token's products wait for memory or for each other. Here nothing but activations waits: each CTA has the same rows of every weight from
// the start on (units of 16 rows, every gridDim-th), its ring of weights runs on over the ends of products, and activations travel between
// CTAs as packets (common/packet.cuh), which those who need them poll. There is no barrier over all CTAs: the first 2048 columns of a
// product's activations are multiplied while the last ones are still computed elsewhere.
//
// Warp roles.
//   0       one thread fills the ring by TMA: a stage is 2048 k of a unit, 16 KB of codes, and its scales. No more than `ahead` stages are
//           under way at a time, landed ones not counted: packets of activations pass through the same queues to memory as the weights
//   1-3     finish units in turns: add the consumers' sums, norm's factor, bias, activation, residual; publish packets, or store
//   4-11    convert activations as they come: 8 numbers a thread of every stage
//   12-27   consumers: 128 k of each stage each, and their sums of a unit go to the finishers through shared memory
// Arithmetic. A token is one column of an MMA, of which eight come at the price of one. So activations, times a power of two for each
//   group of 128, are cut in three digits of 8 bits, a column each, and the MMAs are those of int8: codes need no conversion to 16 bits,
//   but a mask (the upper four bits of a byte are the codes times 16, which goes into the sum), and half as many MMAs. Sums of 128 products
//   are exact. An accumulator begins with the bits of 1.5 2^23, so that its bits are the float of the sum plus that. Of a norm, converters
//   apply the weight alone: its factor is that of the whole token, and finishers apply it.
// Order of k in an MMA: lane l has of a word of packed codes columns 2 (l % 4) + {0, 8, 1, 9} of 16 (w4_layout.h), so digits are stored in
//   that order. A converter's 8 numbers are 4 of one half of 16 columns and the 4 beside them.
// Progress. CTAs wait for each other in any order, so all are resident together: the launch is cooperative.
// Limits: plan.cpp.
#pragma once

#include <cuda.h>

#include "common/activation.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/named_barrier.cuh"
#include "common/packet.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "decoder_block/layout.h"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

struct Product {
  CUtensorMap weight;            // [blocks of 64 x 64, 4, 64] of 8 bytes
  CUtensorMap scales;            // [groups, n]
  int32_t k, k_blocks, columns;  // k_blocks: of 64; columns: of the output
  int32_t units, stages, scale_rows;
  void const *norm, *bias;
  Packet* packets;  // of the output, for the products behind; null: it is d
  bool gated, bias_f32;
};

struct Params {
  Product products[kDecoderBlockProducts];
  void const* a;
  void *residual, *d;
  int32_t m, stages, ahead, group_shift;
  int32_t pitch[2], digits[2], groups[2], fixed;  // layout.h
  float eps, weight_offset;
  ActivationParams activation;
  bool early;  // weights may be read before the predecessor has finished
  uint64_t nonce;
};

/// Launches of the kernels so far, which makes the tags of packets new in every replay of a graph, whatever has become of the workspace.
__device__ unsigned long long launches;

constexpr float kMagic = 12582912.0f;  // 1.5 2^23: integers of up to 22 bits are the low bits of their sum with it
constexpr uint32_t kMagicBits = 0x4b400000u;

template <DataType kType, int kTokens>
class DecoderBlock {
 public:
  static constexpr int kConverters = 32 * kConverterWarps, kFinishers = 3, kConsumers = 32 * kWarps;
  static constexpr int kThreads = 128 + kConverters + kConsumers;
  static constexpr int kFinisherRegisters = 56, kConverterRegisters = 64, kConsumerRegisters = 80;
  static_assert(128 * kFinisherRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <= 72 * kThreads);
  static_assert(kDigits * kTokens <= 8 && kStageK == 8 * kConverters && kMostKStages <= 32);
  using T = fused::RowType<kType>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct Group {  // of 128 activations, by columns of the MMA
    float sums[8], factors[8];
  };
  static_assert(sizeof(Group) == kGroupBytes);
  struct Storage {
    alignas(16) float partials[kPartials][kWarps][kTokens][kUnit];
    alignas(16) float squares[2][kTokens][kConverterWarps];
    alignas(16) uint64_t tag;
    alignas(8) uint64_t full[kMostStages], empty[kMostStages], ready[2][kMostKStages], consumed[2], partial_full[kPartials],
        partial_empty[kPartials];
  };
  static_assert(sizeof(Storage) <= fixed_bytes(kTokens) + 8);

  __device__ __forceinline__ DecoderBlock(Params const& params, char* smem)
      : p_(params), smem_(smem), storage_(*reinterpret_cast<Storage*>(smem + params.fixed)) {}

  __device__ __forceinline__ void run() {
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread == 0) init_barriers();
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kFinisherRegisters>();
      if (warp == 0) {
        if (thread == 0) produce();
      } else {
        finish(warp - 1, read_tag(thread), thread % 32);
      }
    } else if (warp < 4 + kConverterWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      prefetch_norms(thread - 128);
      convert(thread - 128, read_tag(thread));
      // CTA 0 has had packets of all CTAs: they have read the number.
      if (blockIdx.x == 0 && thread == 128) atomicAdd(&launches, 1ull);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      consume(warp - 4 - kConverterWarps, thread % 32);
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < p_.stages; ++i) {
      FullBarrier::init(&storage_.full[i], 1);
      EmptyBarrier::init(&storage_.empty[i], kWarps);
    }
    for (int i = 0; i < 2 * kMostKStages; ++i) EmptyBarrier::init(&storage_.ready[i / kMostKStages][i % kMostKStages], kConverterWarps);
    for (int i = 0; i < 2; ++i) EmptyBarrier::init(&storage_.consumed[i], kWarps);
    for (int i = 0; i < kPartials; ++i) {
      EmptyBarrier::init(&storage_.partial_full[i], kWarps);
      EmptyBarrier::init(&storage_.partial_empty[i], 1);
    }
    cutlass::arch::fence_barrier_init();
  }

  /// The tag of the launch's packets; by finishers and converters.
  __device__ __forceinline__ uint64_t read_tag(int thread) {
    wait_for_predecessor();
    if (thread == 32) {
      uint64_t count;
      asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(count) : "l"(&launches) : "memory");
      uint64_t x = p_.nonce + count * 0x9e3779b97f4a7c15u;  // SplitMix64
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      storage_.tag = (x ^ (x >> 31)) | 1;
    }
    ConstantNamedBarrier<1, 32 * kFinishers + kConverters>::sync();
    return *static_cast<uint64_t volatile*>(&storage_.tag);
  }

  /// Into L2: a product's first stage waits for its norm's weight.
  __device__ __forceinline__ void prefetch_norms(int thread) const {
    for (int i = 1; i < kDecoderBlockProducts; i += 2) {
      for (int at = thread * 64; at < p_.products[i].k; at += kConverters * 64) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<T const*>(p_.products[i].norm) + at));
      }
    }
  }

  __device__ __forceinline__ char* digits(int product) const { return smem_ + p_.digits[product % 2]; }
  __device__ __forceinline__ Group* groups(int product) const { return reinterpret_cast<Group*>(smem_ + p_.groups[product % 2]); }

  // ---- weights: a thread of warp 0 ----

  __device__ __forceinline__ void produce() {
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p_.products[i].weight));
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p_.products[i].scales));
    }
    if (!p_.early) wait_for_predecessor();
    int stage = 0, landed_stage = 0, under_way = 0;
    uint32_t phase = 1, landed_phase = 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
#pragma unroll 1
      for (int unit = int(blockIdx.x); unit < product.units; unit += int(gridDim.x)) {
#pragma unroll 1
        for (int k = 0; k < product.stages; ++k) {
          if (under_way == p_.ahead) {
            FullBarrier::wait(&storage_.full[landed_stage], landed_phase);
            advance(landed_stage, landed_phase);
            --under_way;
          }
          EmptyBarrier::wait(&storage_.empty[stage], phase);
          uint64_t* const barrier = &storage_.full[stage];
          char* const to = smem_ + stage * kStageBytes;
          FullBarrier::arrive_and_expect_tx(barrier, uint32_t(kCodeBytes + product.scale_rows * kUnit * 2));
          // Behind k come codes of other rows, which meet digits that are zeros.
          cute::SM90_TMA_LOAD_3D::copy(&product.weight, barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), to, 0, unit % 4,
                                       unit / 4 * product.k_blocks + k * (kStageK / 64));
          cute::SM90_TMA_LOAD_2D::copy(&product.scales, barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_NORMAL), to + kCodeBytes,
                                       unit * kUnit, (k * kStageK) >> p_.group_shift);
          advance(stage, phase);
          ++under_way;
        }
      }
    }
  }
  __device__ __forceinline__ void advance(int& stage, uint32_t& phase) const {
    if (++stage == p_.stages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // ---- activations: warps 4 to 11 ----

  static __device__ __forceinline__ void unpack(uint64_t numbers, float* x) {
    if constexpr (kType == DataType::kBF16) {
      x[0] = __uint_as_float(uint32_t(numbers) << 16);
      x[1] = __uint_as_float(uint32_t(numbers) & 0xffff0000u);
      x[2] = __uint_as_float(uint32_t(numbers >> 32) << 16);
      x[3] = __uint_as_float(uint32_t(numbers >> 32) & 0xffff0000u);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __half2float(__ushort_as_half(uint16_t(numbers >> 16 * i)));
    }
  }
  /// The first of a converter's numbers: columns 4 v to 4 v + 3 of a half of 16, and 8 further on.
  static __device__ __forceinline__ int column_of(int v) { return v / 2 * 16 + v % 2 * 4; }
  static __device__ __forceinline__ void load(void const* row, int v, bool inside, uint64_t (&numbers)[2]) {
    auto const* const from = reinterpret_cast<uint64_t const*>(static_cast<T const*>(row) + column_of(v));
    numbers[0] = inside ? load_operand(from) : 0;
    numbers[1] = inside ? load_operand(from + 2) : 0;
  }

  /// thread: of kConverters. A thread has 8 numbers of each stage; two stages are requested together, for a trip to L2 takes as long as two
  /// are converted.
  __device__ __forceinline__ void convert(int thread, uint64_t tag) {
    int const lane = thread % 32;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      int const parity = i % 2, vectors = product.k / 8;
      if (i >= 2) EmptyBarrier::wait(&storage_.consumed[parity], uint32_t(i / 2 - 1) & 1);
      float squares[kTokens] = {};
#pragma unroll 1
      for (int first = 0; first < product.stages; first += 2) {
        uint64_t weights[2][2] = {};
        if (product.norm != nullptr) {
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            int const v = thread + (first + t) * kConverters;
            load(product.norm, v, v < vectors, weights[t]);
          }
        }
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (token >= p_.m) break;
          uint64_t numbers[2][2];
          if (i == 0) {
#pragma unroll
            for (int t = 0; t < 2; ++t) {
              int const v = thread + (first + t) * kConverters;
              load(static_cast<T const*>(p_.a) + int64_t(token) * product.k, v, v < vectors, numbers[t]);
            }
          } else {
            receive(p_.products[i - 1].packets + int64_t(token) * (product.k / 4), thread + first * kConverters, vectors, tag, numbers);
          }
          __syncwarp();
#pragma unroll
          for (int t = 0; t < 2; ++t) {
            if (first + t >= product.stages) break;
            int const v = thread + (first + t) * kConverters;
            float const sum = store_digits(i, token, v, numbers[t], product.norm != nullptr, weights[t], lane);
            squares[token] += sum;
          }
        }
        if (first + 2 >= product.stages && product.norm != nullptr) {
#pragma unroll
          for (int token = 0; token < kTokens; ++token) {
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) squares[token] += __shfl_xor_sync(0xffffffffu, squares[token], offset);
            if (lane == 0) storage_.squares[parity][token][thread / 32] = squares[token];
          }
        }
        __syncwarp();
        if (lane == 0) {
          EmptyBarrier::arrive(&storage_.ready[parity][first]);
          if (first + 1 < product.stages) EmptyBarrier::arrive(&storage_.ready[parity][first + 1]);
        }
      }
    }
  }

  /// A thread's numbers of two stages, when they are there.
  __device__ __forceinline__ void receive(Packet const* row, int v, int vectors, uint64_t tag, uint64_t (&numbers)[2][2]) const {
    Packet packets[2][2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) packets[t][half] = {0, v + t * kConverters < vectors ? ~tag : tag};
    }
    while (true) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        Packet const* const from = row + column_of(v + t * kConverters) / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) poll_packet(packets[t][half].tag != tag, packets[t][half], from + 2 * half);
      }
      if (packets[0][0].tag == tag && packets[0][1].tag == tag && packets[1][0].tag == tag && packets[1][1].tag == tag) break;
      __nanosleep(64);  // polls take the way of the weights
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) numbers[t][half] = packets[t][half].numbers;
    }
  }

  /// The digits of a thread's 8 numbers, times the norm's weight, and what is known of their group, which are 16 threads'. Returns the sum
  /// of the numbers' squares.
  __device__ __forceinline__ float store_digits(int product, int token, int v, uint64_t const (&numbers)[2], bool norm,
                                                uint64_t const (&weights)[2], int lane) const {
    float x[8], squares = 0.0f;
    unpack(numbers[0], x);
    unpack(numbers[1], x + 4);
    if (norm) {
      float weight[8];
      unpack(weights[0], weight);
      unpack(weights[1], weight + 4);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        squares = fmaf(x[e], x[e], squares);
        x[e] *= weight[e] + p_.weight_offset;
      }
    }
    uint32_t most = 0;  // as bits, of which those of NaN and infinity are the largest
#pragma unroll
    for (int e = 0; e < 8; ++e) most = max(most, __float_as_uint(x[e]) & 0x7fffffffu);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
    // Times the power of two that takes the largest to 2^21 or above, below 2^22.
    int const exponent = min(max(int(most >> 23), 22), 254);
    float const factor = __uint_as_float(uint32_t(275 - exponent) << 23);
    uint32_t biased[8];  // a digit is a byte of this less 128
#pragma unroll
    for (int e = 0; e < 8; ++e) biased[e] = __float_as_uint(fmaf(x[e], factor, kMagic)) - kMagicBits + 0x00808080u;
    uint32_t words[kDigits][2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t const low01 = __byte_perm(biased[2 * q], biased[2 * q + 4], 0x5140);
      uint32_t const low23 = __byte_perm(biased[2 * q + 1], biased[2 * q + 5], 0x5140);
      uint32_t const high01 = __byte_perm(biased[2 * q], biased[2 * q + 4], 0x0062);
      uint32_t const high23 = __byte_perm(biased[2 * q + 1], biased[2 * q + 5], 0x0062);
      words[0][q] = __byte_perm(high01, high23, 0x5410) ^ 0x80808080u;
      words[1][q] = __byte_perm(low01, low23, 0x7632) ^ 0x80808080u;
      words[2][q] = __byte_perm(low01, low23, 0x5410) ^ 0x80808080u;
    }
    int sums[kDigits];
#pragma unroll
    for (int d = 0; d < kDigits; ++d) sums[d] = __dp4a(int(words[d][0]), 0x01010101, __dp4a(int(words[d][1]), 0x01010101, 0));
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
#pragma unroll
      for (int d = 0; d < kDigits; ++d) sums[d] += __shfl_xor_sync(0xffffffffu, sums[d], offset);
    }
    int const pitch = p_.pitch[product % 2];
    char* const to = digits(product) + token * kDigits * pitch + v * 8;
#pragma unroll
    for (int d = 0; d < kDigits; ++d) *reinterpret_cast<uint2*>(to + d * pitch) = make_uint2(words[d][0], words[d][1]);
    if (lane % 16 < kDigits) {
      int const d = lane % 16;
      Group& group = groups(product)[v / 16];
      group.sums[token * kDigits + d] = float(d == 0 ? sums[0] : d == 1 ? sums[1] : sums[2]);
      float const place = __uint_as_float(uint32_t(exponent - 21 + 16 - 8 * d) << 23);
      group.factors[token * kDigits + d] = most >= 0x7f800000u ? __uint_as_float(0x7fffffffu) : place;
    }
    return squares;
  }

  // ---- products: warps 12 to 27 ----

  __device__ __forceinline__ void consume(int warp, int lane) {
    int stage = 0, part = 0;
    uint32_t phase = 0, even = 0, odd = 0;  // even, odd: bit k is the parity of stage k's activations
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      int const parity = i % 2;
      uint32_t const at = shared_address(digits(i)) + min(lane % 8, kDigits * p_.m - 1) * p_.pitch[parity] + lane / 8 * 16 + warp * 128;
      uint32_t const scales_at = kCodeBytes + ((warp * 128) >> p_.group_shift) * (kUnit * 2) + lane / 4 * 2;
#pragma unroll 1
      for (int unit = int(blockIdx.x); unit < product.units; unit += int(gridDim.x)) {
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        uint32_t x = at;
        Group const* group = groups(i) + warp;
#pragma unroll 1
        for (int k = 0; k < product.stages; ++k) {
          if (unit == int(blockIdx.x)) EmptyBarrier::wait(&storage_.ready[parity][k], (parity == 0 ? even : odd) >> k & 1);
          uint32_t b[2][4];
          load_matrices(x, b[0]);
          load_matrices(x + 64, b[1]);
          float2 const digit_sums = *reinterpret_cast<float2 const*>(&group->sums[lane % 4 * 2]);
          float2 const factors = *reinterpret_cast<float2 const*>(&group->factors[lane % 4 * 2]);
          x += kStageK;
          group += kWarps;
          FullBarrier::wait(&storage_.full[stage], phase);
          char const* const slot = smem_ + stage * kStageBytes;
          multiply(slot + warp * 1024 + lane * 16, slot + scales_at, b, digit_sums, factors, sums);
          // Released when the sums are complete, and with them all reads of the stage (quantized_gemm/mainloop_sync_sm90.cuh).
          constexpr uint32_t kNever = 0x7fedcba9u;
          bool const read = __float_as_uint(sums[0]) != kNever && __float_as_uint(sums[2]) != kNever;
          __syncwarp();
          if (lane == 0 && read) EmptyBarrier::arrive(&storage_.empty[stage]);
          advance(stage, phase);
        }
        leave(part++, warp, lane, sums);
      }
      uint32_t const stages = (1u << product.stages) - 1;
      if (parity == 0) {
        even ^= stages;
      } else {
        odd ^= stages;
      }
      __syncwarp();
      if (lane == 0) EmptyBarrier::arrive(&storage_.consumed[parity]);
    }
  }

  /// sums[v] += 128 products of a stage, of row lane / 4 + 8 (v / 2) and the digits of column 2 (lane % 4) + v % 2; those of rows 8 to 15
  /// are 16 times as large.
  static __device__ __forceinline__ void multiply(char const* codes_at, char const* scales_at, uint32_t const (&b)[2][4],
                                                  float2 const& digit_sums, float2 const& factors, float (&sums)[4]) {
    constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
    uint4 const chunks[2] = {*reinterpret_cast<uint4 const*>(codes_at), *reinterpret_cast<uint4 const*>(codes_at + 512)};
    T const* const scales = reinterpret_cast<T const*>(scales_at);
    float const scale[2] = {minfer::to_float(scales[0]), minfer::to_float(scales[8])};
    int32_t d[2][4];
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      d[0][v] = int32_t(kMagicBits);
      d[1][v] = 0;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint4 const& chunk = chunks[i / 2];
      uint32_t const first = i % 2 == 0 ? chunk.x : chunk.z, second = i % 2 == 0 ? chunk.y : chunk.w;
      uint32_t const a[4] = {first & kLow, first & kHigh, second & kLow, second & kHigh};
      asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+r"(d[i % 2][0]), "+r"(d[i % 2][1]), "+r"(d[i % 2][2]), "+r"(d[i % 2][3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[i / 2][i % 2 * 2]), "r"(b[i / 2][i % 2 * 2 + 1]));
    }
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      constexpr float kZero = 8.0f;  // the zero point of symmetric weights
      float const of_codes = __int_as_float(d[0][v] + d[1][v]) - kMagic;
      float const whole = fmaf(v % 2 == 0 ? digit_sums.x : digit_sums.y, v < 2 ? -kZero : -16.0f * kZero, of_codes);
      sums[v] = fmaf(scale[v / 2] * (v % 2 == 0 ? factors.x : factors.y), whole, sums[v]);
    }
  }

  /// The sums of the digits of each token go to the finishers.
  __device__ __forceinline__ void leave(int part, int warp, int lane, float const (&sums)[4]) const {
    int const slot = part % kPartials;
    EmptyBarrier::wait(&storage_.partial_empty[slot], (uint32_t(part / kPartials) & 1) ^ 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        float sum = 0.0f;  // in one order, whichever columns the token has
#pragma unroll
        for (int column = token * kDigits; column < (token + 1) * kDigits; ++column) {
          sum += __shfl_sync(0xffffffffu, sums[half * 2 + column % 2], (lane & 28) | column / 2);
        }
        if (lane % 4 == 0) storage_.partials[slot][warp][token][lane / 4 + half * 8] = half == 0 ? sum : sum * 0.0625f;
      }
    }
    __syncwarp();
    if (lane == 0) EmptyBarrier::arrive(&storage_.partial_full[slot]);
  }

  // ---- outputs: warps 1 to 3 ----

  static __device__ __forceinline__ float element(uint64_t numbers, int i) {
    float x[4];
    unpack(numbers, x);
    return i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
  }

  /// A lane's output is row lane % 16 of the unit; both halves of the warp have the same after the sums.
  __device__ __forceinline__ void finish(int own, uint64_t tag, int lane) {
    int const row = lane % 16;
    int part = 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      int const outputs = product.gated ? 8 : 16;
#pragma unroll 1
      for (int unit = int(blockIdx.x); unit < product.units; unit += int(gridDim.x), ++part) {
        if (part % kFinishers != own) continue;
        int const slot = part % kPartials, column = unit * outputs + row % outputs;
        float addend[kTokens];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          addend[token] = 0.0f;
          if (token >= p_.m || column >= product.columns) continue;
          if (i == 0) {
            addend[token] = minfer::to_float(load_operand(static_cast<T const*>(p_.residual) + int64_t(token) * product.columns + column));
          } else if (i == 2) {  // x, which the CTA has published itself
            Packet packet{0, ~tag};
            Packet const* const from = p_.products[0].packets + (int64_t(token) * product.columns + column) / 4;
            while (packet.tag != tag) poll_packet(packet, from);
            addend[token] = element(packet.numbers, column % 4);
          }
          if (product.bias != nullptr) {
            addend[token] += product.bias_f32 ? load_operand(static_cast<float const*>(product.bias) + column)
                                              : minfer::to_float(load_operand(static_cast<T const*>(product.bias) + column));
          }
        }
        EmptyBarrier::wait(&storage_.partial_full[slot], uint32_t(part / kPartials) & 1);
        float y[kTokens];
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          y[token] = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps / 2; ++w) y[token] += storage_.partials[slot][lane / 16 * (kWarps / 2) + w][token][row];
          y[token] += __shfl_xor_sync(0xffffffffu, y[token], 16);
        }
        __syncwarp();
        if (lane == 0) EmptyBarrier::arrive(&storage_.partial_empty[slot]);
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
          if (token < p_.m) store(i, token, column, y[token] * norm_factor(i, token), addend[token], tag, lane);
        }
      }
    }
  }
  __device__ __forceinline__ float norm_factor(int i, int token) const {
    if (p_.products[i].norm == nullptr) return 1.0f;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kConverterWarps; ++w) sum += storage_.squares[i % 2][token][w];
    return rsqrtf(__fdividef(sum, float(p_.products[i].k)) + p_.eps);
  }
  __device__ __forceinline__ void store(int i, int token, int column, float y, float addend, uint64_t tag, int lane) const {
    Product const& product = p_.products[i];
    if (product.gated) {  // rows 0 to 7 are gates, the others their ups
      float const up = __shfl_xor_sync(0xffffffffu, y, 8);
      y = activate(p_.activation, y) * up;
    }
    y += addend;
    uint32_t bits;
    if constexpr (kType == DataType::kBF16) {
      bits = __bfloat16_as_ushort(__float2bfloat16(y));
    } else {
      bits = __half_as_ushort(__float2half(y));
    }
    bits |= __shfl_down_sync(0xffffffffu, bits, 1) << 16;
    uint32_t const next = __shfl_down_sync(0xffffffffu, bits, 2);
    if (lane % 4 != 0 || lane >= (product.gated ? 8 : 16) || column >= product.columns) return;  // columns are a multiple of 8
    uint64_t const numbers = bits | uint64_t(next) << 32;
    int64_t const at = int64_t(token) * product.columns + column;
    if (product.packets != nullptr) store_packet(product.packets + at / 4, numbers, tag);
    if (i >= 2) *reinterpret_cast<uint64_t*>(static_cast<T*>(i == 2 ? p_.residual : p_.d) + at) = numbers;
  }

  Params const& p_;
  char* smem_;
  Storage& storage_;
};

template <DataType kType, int kTokens>
__global__ void __launch_bounds__(DecoderBlock<kType, kTokens>::kThreads, 1)
    decoder_block_sm90_kernel(__grid_constant__ Params const params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  DecoderBlock<kType, kTokens>(params, smem).run();
#endif
}

}  // namespace minfer::decoder_block
