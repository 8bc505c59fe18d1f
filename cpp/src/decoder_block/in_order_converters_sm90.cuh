// The role of in_order_sm90.cuh that writes activations as consumers take them, normalised where a norm is in front: warps 4 to 11.
#pragma once

#include "common/packet.cuh"
#include "decoder_block/in_order_producer_sm90.cuh"
#include "fused/row_operation.cuh"

namespace minfer::decoder_block {

template <class Facts>
class InOrderConverter : Facts {
  using Facts::kConverters, Facts::kType, Facts::p_, Facts::storage_, Facts::units_of, Facts::weight_of, Facts::first_tag,
      Facts::activations, Facts::unpack;
  using typename Facts::T, typename Facts::EmptyBarrier, typename Facts::Normed;

 public:
  explicit __device__ __forceinline__ InOrderConverter(Facts const& facts) : Facts(facts) {}

  /// Into L2.
  __device__ __forceinline__ void prefetch_norms(int thread) const {
    for (int i = 1; i < kDecoderBlockProducts; i += 2) {
      for (int at = thread * 64; at < p_.products[i].k && units_of(0, i) > 0; at += kConverters * 64)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<T const*>(weight_of(0, i).norm) + at));
    }
  }
  /// thread: of kConverters.
  __device__ __forceinline__ void convert(int thread) {
    // Consumers do not wait for what they have no slabs of.
    if (own_slabs(p_, 0) > 0) convert<0>(thread);
#pragma unroll 1
    for (int i = 1; i < kDecoderBlockProducts; i += 2) {
      if (i > 1 && own_slabs(p_, 2) > 0) convert<2>(thread);
      if (own_slabs(p_, i) == 0) continue;
      if (i > 1) EmptyBarrier::wait(&storage_.consumed[1], 0);
      normalize(i, thread);
    }
  }

 private:
  /// Numbers 8 v to 8 v + 7, in four words.
  struct Vector {
    uint32_t words[4];
  };

  /// Of 32 numbers are stored, one after the other, for each lane % 4 of an MMA its four of the first 16 and its four of the others.
  __device__ __forceinline__ uint32_t* place_of(int i, int v) const {
    return reinterpret_cast<uint32_t*>(activations(i) + v / 4 * 64 + v / 2 % 2 * 8 + v % 2 * 4);
  }
  __device__ __forceinline__ void store(int i, int v, Vector const& x) const {
    uint32_t* const to = place_of(i, v);
#pragma unroll
    for (int q = 0; q < 4; ++q) to[4 * q] = x.words[q];
  }
  __device__ __forceinline__ Vector stored(int i, int v) const {
    uint32_t const* const from = place_of(i, v);
    return {{from[0], from[4], from[8], from[12]}};
  }
  static __device__ __forceinline__ Vector vector_of(uint64_t first, uint64_t second) {
    return {{uint32_t(first), uint32_t(first >> 32), uint32_t(second), uint32_t(second >> 32)}};
  }
  static __device__ __forceinline__ void unpack(Vector const& x, float (&y)[8]) {
    unpack(x.words[0] | uint64_t(x.words[1]) << 32, y);
    unpack(x.words[2] | uint64_t(x.words[3]) << 32, y + 4);
  }
  static __device__ __forceinline__ Vector load(void const* row, int v) {
    uint4 const x = load_operand(reinterpret_cast<uint4 const*>(row) + v);
    return {{x.x, x.y, x.z, x.w}};
  }

  /// Requests the second half of a vector of the product in front, by the warp's first lane.
  struct Request {
    Packet packet;
    uint64_t tag;
    __device__ __forceinline__ Request(Packet const* row, int v, uint64_t tag) : packet{0, ~tag}, tag(tag) {
      if (threadIdx.x % 32 == 0) poll_packet(packet, row + 2 * v + 1);
    }
    __device__ __forceinline__ bool is_there() const { return __shfl_sync(0xffffffffu, uint32_t(packet.tag == tag), 0) != 0; }
  };
  /// Of some vectors together a warp waits for one alone before, the last one: to poll for all of them would take so much of L2 that those
  /// who store them are in each other's way.
  __device__ __forceinline__ void wait_for(int i, int v) const {
    uint64_t const tag = first_tag();
    while (!Request(p_.products[i - 1].packets, v, tag).is_there()) {
    }
  }
  /// Vectors first, first + step, .. of the product in front, when they are there, but for those that it does not have.
  template <int kCount>
  __device__ __forceinline__ void receive(int i, int first, int step, Vector (&x)[kCount]) const {
    Packet const* const from = p_.products[i - 1].packets + 2 * first;
    int const vectors = p_.products[i].k / 8;
    uint64_t const tag = first_tag();
    Packet packets[kCount][2];
#pragma unroll
    for (int t = 0; t < kCount; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) packets[t][half] = {0, first + t * step < vectors ? ~tag : tag};
    }
    bool all;
    do {
      all = true;
#pragma unroll
      for (int t = 0; t < kCount; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) poll_packet(packets[t][half].tag != tag, packets[t][half], from + t * (2 * step) + half);
      }
#pragma unroll
      for (int t = 0; t < kCount; ++t) all = all && packets[t][0].tag == tag && packets[t][1].tag == tag;
    } while (!all);
#pragma unroll
    for (int t = 0; t < kCount; ++t) x[t] = vector_of(packets[t][0].numbers, packets[t][1].numbers);
    __syncwarp();
  }

  /// Of the products without a norm, some stages at a time. With those the last vector of all is asked for: where it is there, what is
  /// between will be.
  template <int i>
  __device__ __forceinline__ void convert(int thread) const {
    constexpr int kTogether = 3;
    Product const& product = p_.products[i];
    int const vectors = product.k / 8, lane = thread % 32, of_warp = thread | 31;
    bool all = i == 0;
    if constexpr (i > 0) EmptyBarrier::wait(&storage_.consumed[0], 0);
#pragma unroll 1
    for (int stage = 0; stage < product.converted; stage += kTogether) {
      int const first = thread + stage * kConverters;
      Vector x[kTogether];
      if constexpr (i == 0) {
#pragma unroll
        for (int t = 0; t < kTogether; ++t) x[t] = first + t * kConverters < vectors ? load(p_.a, first + t * kConverters) : Vector{};
      } else {
        if (!all) wait_for(i, min(of_warp + (stage + kTogether - 1) * kConverters, vectors - 1));
        Request const last(p_.products[i - 1].packets, min(of_warp + (product.converted - 1) * kConverters, vectors - 1), first_tag());
        receive(i, first, kConverters, x);
        all = all || last.is_there();
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (first + t * kConverters < vectors) store(i, first + t * kConverters, x[t]);
      }
      __syncwarp();
      if (lane < kTogether && stage + lane < product.converted) EmptyBarrier::arrive(&storage_.ready[0][stage + lane]);
    }
  }

  /// Of the products behind a norm. Vector v of the row is that of thread v % norm_threads of minfer.rms_norm, which adds up its own
  /// squares, from the lowest v on; a warp here stands for one of those, or for two. Where each has no more than two vectors, they stay in
  /// registers until the factor is known, else in their places.
  __device__ __forceinline__ void normalize(int i, int thread) const {
    Product const& product = p_.products[i];
    int const vectors = product.k / 8, lane = thread % 32, threads = p_.norm_threads;
    void const* const norm = weight_of(0, i).norm;
    auto const load_weights = [&](int first, Vector(&weights)[2]) {
#pragma unroll
      for (int t = 0; t < 2; ++t) weights[t] = first + t * threads < vectors ? load(norm, first + t * threads) : Vector{};
    };
    bool const held = threads <= kConverters && vectors <= 2 * threads;
    Vector x[2], weights[2];
    load_weights(thread, weights);
#pragma unroll 1
    for (int own = thread; own < threads; own += kConverters) {
      float squares = 0.0f;
#pragma unroll 1
      for (int first = own; first - lane < vectors; first += 2 * threads) {
        wait_for(i, min((first + threads - lane < vectors ? first + threads : first) | 31, vectors - 1));
        receive(i, first, threads, x);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (first + t * threads >= vectors) continue;
          if (!held) store(i, first + t * threads, x[t]);
          float numbers[8];
          unpack(x[t], numbers);
#pragma unroll
          for (int e = 0; e < 8; ++e) squares = fmaf(numbers[e], numbers[e], squares);
        }
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, offset);
      if (lane == 0) storage_.squares[i / 2][0][own / 32] = squares;
    }
    Normed::sync();
    float const factor = factor_of(storage_.squares[i / 2][0], threads / 32, product.k);
#pragma unroll 1
    for (int own = thread; own < threads; own += kConverters) {
#pragma unroll 1
      for (int first = own; first < vectors; first += 2 * threads) {
        if (first != thread) load_weights(first, weights);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int const v = first + t * threads;
          if (v >= vectors) continue;
          if (!held) x[t] = stored(i, v);
          store(i, v, normalized(x[t], weights[t], factor));
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      for (int k = 0; k < product.converted; ++k) EmptyBarrier::arrive(&storage_.ready[i % 2][k]);
    }
  }
  __device__ __forceinline__ Vector normalized(Vector const& numbers, Vector const& weights, float factor) const {
    float x[8], weight[8];
    unpack(numbers, x);
    unpack(weights, weight);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (p_.weight_offset != 0.0f) weight[e] += p_.weight_offset;
      x[e] = x[e] * weight[e] * factor;
    }
    Vector y;
#pragma unroll
    for (int q = 0; q < 4; ++q) y.words[q] = Float16<kType>::pack(x[2 * q], x[2 * q + 1]);
    return y;
  }
  /// Of what the warps of minfer.rms_norm have summed.
  __device__ __forceinline__ float factor_of(float const (&squares)[kNormWarps], int warps, int k) const {
    float sum = 0.0f;
#pragma unroll
    for (int first = 0; first < kNormWarps; first += 4) {
      float of[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) of[w] = first + w < warps ? squares[first + w] : 0.0f;
      if (first < warps) sum += (of[0] + of[1]) + (of[2] + of[3]);
    }
    return rsqrtf(__fdividef(sum, float(k)) + p_.eps);
  }
};

}  // namespace minfer::decoder_block
