// The role of decoder_block_sm90.cuh that makes of activations, as they come, what consumers multiply: warps 4 to 11.
#pragma once

#include "common/packet.cuh"
#include "decoder_block/attention_sm90.cuh"
#include "decoder_block/block_facts_sm90.cuh"

namespace minfer::decoder_block {

template <class Facts>
class ActivationConverter : Facts {
  using Facts::kTokens, Facts::kAttention, Facts::kConverters, Facts::p_, Facts::storage_, Facts::layers, Facts::units_of, Facts::weight_of,
      Facts::tag_of, Facts::first_tag, Facts::activations, Facts::groups, Facts::attention_of, Facts::unpack;
  using typename Facts::Weights, typename Facts::T, typename Facts::EmptyBarrier, typename Facts::QueriesReady;

 public:
  explicit __device__ __forceinline__ ActivationConverter(Facts const& facts) : Facts(facts) {}

  /// Into L2: a product's first stage waits for its norm's weight.
  __device__ __forceinline__ void prefetch_norms(int layer, int thread) const {
    for (int i = 1; i < kDecoderBlockProducts; i += 2) {
      if (units_of(layer, i) == 0) continue;
      for (int at = thread * 64; at < p_.products[i].k; at += kConverters * 64) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<T const*>(weight_of(layer, i).norm) + at));
      }
    }
  }
  /// thread: of the converters. tag: of the first layer's packets. That layer has its q, k and v in memory.
  __device__ __forceinline__ void prepare_queries(int layer, int thread, uint64_t tag) const {
    Packet const* const packets = layer == 0 ? nullptr : p_.products[kDecoderBlockProducts - 1].packets;
    attention_of(layer, thread / 32, thread % 32).prepare(packets, tag_of(tag, layer - 1));
    QueriesReady::arrive();
  }

  /// thread: of kConverters. A thread has 8 numbers of each stage; two stages are requested together, for a trip to L2 takes as long as two
  /// are converted.
  __device__ __forceinline__ void convert(int thread) {
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
      if (layer + 1 < layers()) prefetch_norms(layer + 1, thread);
      if constexpr (kAttention) {
        if (layer > 0) {
          EmptyBarrier::wait(&storage_.consumed[0], 1);  // where queries come were product 2's activations
          prepare_queries(layer, opaque(thread), first_tag());
        }
      }
#pragma unroll 1
      for (int i = 0; i < kDecoderBlockProducts; ++i) {
        // Consumers without units of the last product do not wait for it: their second count-down would look like none to a late converter.
        if (int(blockIdx.x) < units_of(layer, i)) convert(opaque(layer), i, opaque(thread));
      }
    }
  }

 private:
  /// The first of a converter's numbers: columns 4 v to 4 v + 3 of a half of 16, and 8 further on.
  static __device__ __forceinline__ int column_of(int v) { return v / 2 * 16 + v % 2 * 4; }
  static __device__ __forceinline__ void load(void const* row, int v, bool inside, uint64_t (&numbers)[2]) {
    auto const* const from = reinterpret_cast<uint64_t const*>(static_cast<T const*>(row) + column_of(v));
    numbers[0] = inside ? load_operand(from) : 0;
    numbers[1] = inside ? load_operand(from + 2) : 0;
  }

  /// Waits until consumers have done with what was there. They count down consumed[0] for products 0 and 2, and consumed[1] for attention,
  /// product 1 and product 3; attention itself uses the place of product 1's activations. Product 0 waits for attention, too: to poll for
  /// its output would slow it down.
  __device__ __forceinline__ void wait_for_place(int layer, int i) {
    if constexpr (kAttention) {
      if (i == 2) EmptyBarrier::wait(&storage_.consumed[0], 0);
      if (i == 1 || (i == 0 && layer > 0)) EmptyBarrier::wait(&storage_.consumed[1], uint32_t(layer) & 1);
      if (i == 3) EmptyBarrier::wait(&storage_.consumed[1], uint32_t(layer + 1) & 1);
    } else if (i >= 2) {
      EmptyBarrier::wait(&storage_.consumed[i % 2], 0);
    }
  }
  __device__ __forceinline__ void convert(int layer, int i, int thread) {
    uint64_t const tag = tag_of(first_tag(), layer);
    int const lane = thread % 32;
    Product const& product = p_.products[i];
    void const* const norm = weight_of(layer, i).norm;
    int const parity = i % 2, vectors = product.k / 8;
    wait_for_place(layer, i);
    float squares[kTokens] = {};
#pragma unroll 1
    for (int first = 0; first < product.converted; first += 2) {
      uint64_t weights[2][2] = {};
      if (norm != nullptr) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int const v = thread + (first + t) * kConverters;
          load(norm, v, v < vectors, weights[t]);
        }
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token >= p_.m) break;
        uint64_t numbers[2][2];
        if (kAttention && i == 0) {
          receive(p_.attention.out, thread + first * kConverters, vectors, tag, numbers);
        } else if (i == 0) {
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
          if (first + t >= product.converted) break;
          int const v = thread + (first + t) * kConverters;
          float const sum = store_numbers(i, token, v, numbers[t], norm != nullptr, weights[t], lane);
          squares[token] += sum;
        }
      }
      if (first + 2 >= product.converted && norm != nullptr) {
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
        if (first + 1 < product.converted) EmptyBarrier::arrive(&storage_.ready[parity][first + 1]);
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
    // One packet alone before all of them, the warp's last, which the CTAs' last units make: they get about as far at a time. To poll for
    // all would take so much of L2 that those who store them are in each other's way.
    {
      int const last = min((v | 31) + kConverters, vectors - 1);
      Packet packet{0, ~tag};
      do {
        if (threadIdx.x % 32 == 0) poll_packet(packet, row + column_of(last) / 4 + 2);
      } while (__shfl_sync(0xffffffffu, uint32_t(packet.tag == tag), 0) == 0);
    }
    while (true) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        Packet const* const from = row + column_of(v + t * kConverters) / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) poll_packet(packets[t][half].tag != tag, packets[t][half], from + 2 * half);
      }
      if (packets[0][0].tag == tag && packets[0][1].tag == tag && packets[1][0].tag == tag && packets[1][1].tag == tag) break;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) numbers[t][half] = packets[t][half].numbers;
    }
  }

  /// A thread's 8 numbers, times the norm's weight. Returns the sum of the numbers' squares.
  __device__ __forceinline__ float store_numbers(int product, int token, int v, uint64_t const (&numbers)[2], bool norm,
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
    typename Weights::Made const made = Weights::make(x);
    Weights::store(made, activations(product), p_.pitch[product % 2], groups(product), token, v, lane);
    return squares;
  }
};

}  // namespace minfer::decoder_block
