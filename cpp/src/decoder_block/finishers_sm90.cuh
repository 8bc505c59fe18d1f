// The role of decoder_block_sm90.cuh that makes outputs of the consumers' sums, and publishes or stores them: warps 1 to 3, in turns.
#pragma once

#include "common/activation.cuh"
#include "common/packet.cuh"
#include "decoder_block/block_facts_sm90.cuh"
#include "distributed/epoch.cuh"
#include "distributed/peer_packets.cuh"

namespace minfer::decoder_block {

template <class Facts>
class OutputFinisher : Facts {
  using Facts::kTokens, Facts::kType, Facts::kFinishers, Facts::kE4M3, Facts::p_, Facts::storage_, Facts::layers, Facts::units_of,
      Facts::weight_of, Facts::tag_of, Facts::epoch_of, Facts::is_divided, Facts::unpack;
  using typename Facts::T, typename Facts::EmptyBarrier;

 public:
  explicit __device__ __forceinline__ OutputFinisher(Facts const& facts) : Facts(facts) {}

  /// A lane's output is row lane % 16 of the unit; both halves of the warp have the same after the sums.
  __device__ __forceinline__ void finish(int own, uint64_t tag, int lane) {
    int part = 0;
#pragma unroll 1
    for (int layer = 0; layer < layers(); ++layer) {
#pragma unroll 1
      for (int i = 0; i < kDecoderBlockProducts; ++i) finish(layer, i, part, own, tag, lane);
    }
  }

 private:
  static __device__ __forceinline__ float element(uint64_t numbers, int i) {
    float x[4];
    unpack(numbers, x);
    return i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
  }

  /// tag: of the first layer.
  __device__ __forceinline__ void finish(int layer, int i, int& part, int own, uint64_t tag, int lane) {
    int const row = lane % 16, units = units_of(layer, i);
    Product const& product = p_.products[i];
    Weight const& weight = weight_of(layer, i);
    int const outputs = product.gated ? 8 : 16;
    bool const divided = is_divided() && i % 2 == 0;
    int sent = -1;  // the unit whose part the other ranks have been sent, and which is still to be summed
    float factor[kTokens];
#pragma unroll
    for (int token = 0; token < kTokens; ++token) factor[token] = 1.0f;
    if (weight.norm != nullptr && int(blockIdx.x) < units) {
      // Products 1 and 3 have as many stages of k: those of the first are the barriers' phases of one parity.
      EmptyBarrier::wait(&storage_.ready[1][product.converted - 1], i / 2);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p_.m) factor[token] = norm_factor(i, token);
      }
    }
#pragma unroll 1
    for (int unit = int(blockIdx.x); unit < units; unit += int(gridDim.x), ++part) {
      if (part % kFinishers != own) continue;
      int const slot = part % kPartials, column = unit * outputs + row % outputs;
      float addend[kTokens], scale = 1.0f;
      if (kE4M3 && !p_.block_scales && unit * kUnit + row < (product.gated ? 2 : 1) * product.columns) {
        scale = load_operand(weight.weight_scales + (unit * kUnit + row) * weight.row_scale_stride);
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        addend[token] = 0.0f;
        if (token >= p_.m || column >= product.columns) continue;
        if (i % 2 == 0 && !divided) addend[token] = residual_of(layer, i, token, column, tag);
        if (weight.bias != nullptr) {
          addend[token] += weight.bias_f32 ? load_operand(static_cast<float const*>(weight.bias) + column)
                                           : minfer::to_float(load_operand(static_cast<T const*>(weight.bias) + column));
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
      if (divided) {  // of one token; the last unit's sum is waited for while this one's travels
        send_part(layer, i, column, y[0] * scale + addend[0], lane);
        if (sent >= 0) sum_parts(layer, i, sent * outputs + row, tag, lane);
        sent = unit;
        continue;
      }
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        if (token < p_.m) store(layer, i, token, column, y[token] * (factor[token] * scale), addend[token], tag, lane);
      }
    }
    if (sent >= 0) sum_parts(layer, i, sent * outputs + row, tag, lane);
  }
  /// What products 0 and 2 are added to: the residual, of layers behind the first what the CTA has published itself; and x, likewise.
  __device__ __forceinline__ float residual_of(int layer, int i, int token, int column, uint64_t first_tag) const {
    int64_t const at = int64_t(token) * p_.products[i].columns + column;
    if (i == 0 && layer == 0) return minfer::to_float(load_operand(static_cast<T const*>(p_.residual) + at));
    uint64_t const tag = tag_of(first_tag, i == 0 ? layer - 1 : layer);
    Packet packet{0, ~tag};
    while (packet.tag != tag) poll_packet(packet, p_.products[2 - i].packets + at / 4);
    return element(packet.numbers, column % 4);
  }

  // Of a layer that is divided among GPUs: the ranks' parts of products 0 and 2. Every rank sends its own to all, itself among them, and
  // adds up all of them in the order of the ranks, so that all have the same bits.
  __device__ __forceinline__ distributed::PeerPacket* part_of(int buffer, int layer, int i, int rank, int column) const {
    int64_t const row = (int64_t(epoch_of(layer) % distributed::kEpochs) * kExchanges + i / 2) * p_.ranks + rank;
    return reinterpret_cast<distributed::PeerPacket*>(p_.exchange[buffer] + sizeof(distributed::ExchangeHeader)) +
           row * (p_.products[i].columns / 2) + column / 2;
  }
  __device__ __forceinline__ void send_part(int layer, int i, int column, float part, int lane) const {
    float const next = __shfl_down_sync(0xffffffffu, part, 1);
    if (lane % 2 == 1 || column >= p_.products[i].columns) return;
    uint32_t const flag = distributed::flag_of(epoch_of(layer));
    for (int rank = lane / 16; rank < p_.ranks; rank += 2)
      distributed::send(part_of(rank, layer, i, p_.rank, column), __float_as_uint(part), __float_as_uint(next), flag);
  }
  __device__ __forceinline__ void sum_parts(int layer, int i, int column, uint64_t tag, int lane) const {
    bool const inside = column < p_.products[i].columns;
    uint32_t const flag = distributed::flag_of(epoch_of(layer));
    float sum = 0.0f;
#pragma unroll 1
    for (int first = 0; first < p_.ranks; first += 2) {  // a rank for each half of the warp
      int const rank = first + lane / 16;
      distributed::PeerPacket found{};
      if (inside && rank < p_.ranks) {
        distributed::PeerPacket const* const from = part_of(p_.rank, layer, i, rank, column);
        for (distributed::Patience patience; found = distributed::poll(from), !distributed::has_come(found, flag);) patience.poll();
      }
      __syncwarp();
      float const own = __uint_as_float(uint32_t(column % 2 == 0 ? found.first : found.second));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float const part = __shfl_sync(0xffffffffu, own, lane % 16 + 16 * half);
        if (first + half < p_.ranks) sum += part;
      }
    }
    float const addend = inside ? residual_of(layer, i, 0, column, tag) : 0.0f;
    store(layer, i, 0, column, sum, addend, tag, lane);
  }
  __device__ __forceinline__ float norm_factor(int i, int token) const {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kConverterWarps; ++w) sum += storage_.squares[i % 2][token][w];
    return rsqrtf(__fdividef(sum, float(p_.products[i].k)) + p_.eps);
  }
  /// tag: of the first layer.
  __device__ __forceinline__ void store(int layer, int i, int token, int column, float y, float addend, uint64_t tag, int lane) const {
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
    bool const last = layer + 1 == layers();
    if (product.packets != nullptr) store_packet(product.packets + at / 4, numbers, tag_of(tag, layer));
    if (last && i >= 2) *reinterpret_cast<uint64_t*>(static_cast<T*>(i == 2 ? p_.residual : p_.d) + at) = numbers;
  }
};

}  // namespace minfer::decoder_block
