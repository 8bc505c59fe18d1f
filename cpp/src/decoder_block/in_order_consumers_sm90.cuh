// The role of in_order_sm90.cuh that multiplies, finishes rows and publishes them: warps 12 to 27.
#pragma once

#include "common/activation.cuh"
#include "common/float16.cuh"
#include "common/mma_sm80.cuh"
#include "common/packet.cuh"
#include "decoder_block/in_order_producer_sm90.cuh"

namespace minfer::decoder_block {

template <class Facts>
class InOrderConsumer : Facts {
  using Facts::kType, Facts::p_, Facts::storage_, Facts::weight_of, Facts::first_tag, Facts::activations, Facts::codes_of, Facts::scales_of,
      Facts::unpack;
  using typename Facts::T, typename Facts::Weights, typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::Gathered;

 public:
  explicit __device__ __forceinline__ InOrderConsumer(Facts const& facts) : Facts(facts) {}

  __device__ __forceinline__ void consume(int warp, int lane) {
    Ring ring;
    // Bit k is the parity of stage k's activations, of even and of odd products: what the CTA does not multiply is not converted, either.
    uint32_t const even = own_slabs(p_, 0) > 0 ? (1u << p_.products[0].converted) - 1 : 0, odd = own_slabs(p_, 1) > 0 ? ~0u : 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      consume(i, i < 2 ? 0 : i == 2 ? even : odd, ring, warp, lane);
      // Warps without a unit would run ahead by more than the ring has stages, and take an older phase of a barrier for theirs.
      Gathered::sync();
      if (i < 2 && lane == 0) EmptyBarrier::arrive(&storage_.consumed[i]);
    }
  }

 private:
  struct Ring {
    int stage = 0;
    uint32_t phase = 0, gathered = 0;  // gathered: of the warp's own barrier of ranges
  };
  /// By up to kQuads stages, or back. A quad's next stage is no more than kQuads behind its last, so that what the ring had there before
  /// has landed: plans have no more stages under way than there are beside those.
  __device__ __forceinline__ void advance(Ring& ring, int stages) const {
    ring.stage += stages;
    if (ring.stage >= p_.stages) {
      ring.stage -= p_.stages;
      ring.phase ^= 1;
    } else if (ring.stage < 0) {
      ring.stage += p_.stages;
      ring.phase ^= 1;
    }
  }
  __device__ __forceinline__ void skip(Ring& ring, int stages) const {
    stages += ring.stage;
    int const laps = stages / p_.stages;
    ring.stage = stages - laps * p_.stages;
    ring.phase ^= uint32_t(laps) & 1;
  }

  __device__ __forceinline__ void consume(int i, uint32_t phases, Ring& ring, int warp, int lane) {
    InOrder const& in_order = p_.in_order[i];
    int const count = own_slabs(p_, i), ranges = 1 << in_order.range_shift;
    int const quad = warp / kStrips, strip = warp % kStrips, range = strip & (ranges - 1), unit_of_slab = strip >> in_order.range_shift;
    bool const owns = range == ranges - 1;
#pragma unroll 1
    for (int first = 0; first < count; first += kQuads) {
      int const quads = min(kQuads, count - first);
      if (quad < quads) {
        int const slab = int(blockIdx.x) + (first + quad) * int(gridDim.x);
        int const unit = (slab * kStrips >> in_order.range_shift) + unit_of_slab;  // there may be none, of which rows are zeros
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f}, addends[2] = {0.0f, 0.0f};
        if (owns && i % 2 == 0) load_addends(i, unit * kUnit + lane / 4, addends);
        advance(ring, quad);
        multiply(i, phases, first == 0, quads, ring, strip, lane, sums);
        advance(ring, -quad);
#pragma unroll
        for (int v = 0; v < 4; v += 2) sums[v] = __fmul_rn(sums[v], Weights::rest());
        if (ranges > 1) gather(owns, warp - range + ranges - 1, range, ranges, lane, ring.gathered, sums);
        if (owns) finish(i, unit, lane, sums[0], sums[2], addends);
      } else {
        skip(ring, quads * in_order.strips);
      }
      // Until then the ranges' sums of the round before may not have been read.
      if (ranges > 1 && first + kQuads < count) Gathered::sync();
    }
  }

  /// The strips of a unit's range, each in a quad's next stage. Activations are waited for in the product's first round.
  __device__ __forceinline__ void multiply(int i, uint32_t phases, bool first_round, int quads, Ring& ring, int strip, int lane,
                                           float (&sums)[4]) {
    InOrder const& in_order = p_.in_order[i];
    int const range = strip & ((1 << in_order.range_shift) - 1), first_block = range * in_order.range_blocks;
    typename Weights::Block two[2];
#pragma unroll 1
    for (int from = 0; from < in_order.range_blocks; from += kStripBlocks) {
      int const blocks = min(kStripBlocks, in_order.range_blocks - from), block = first_block + from;
      FullBarrier::wait(&storage_.full[ring.stage], ring.phase);
      if (first_round) {
        int const last = (block + blocks - 1) * kBlockK / kStageK;
        EmptyBarrier::wait(&storage_.ready[i % 2][last], phases >> last & 1);
      }
      Reader const at = reader_of(i, block, ring.stage, strip, lane);
      typename Weights::Factors factors;
      if (blocks == kStripBlocks) {
        at.load(0, two[0]);
#pragma unroll
        for (int b = 0; b < kStripBlocks; ++b) {
          if (b + 1 < kStripBlocks) at.load(b + 1, two[(b + 1) % 2]);
          if (b % 2 == 0) factors = Weights::factors_of(two[0].scales);
          Weights::multiply(two[b % 2], factors, sums);
        }
      } else {
#pragma unroll 1
        for (int b = 0; b < blocks; b += 2) {
          at.load(b, two[0]);
          at.load(b + 1, two[1]);
          factors = Weights::factors_of(two[0].scales);
          Weights::multiply(two[0], factors, sums);
          Weights::multiply(two[1], factors, sums);
        }
      }
      release(ring.stage, lane, sums);
      advance(ring, quads);
    }
  }
  /// Where a warp finds a strip, an even number of blocks. A block is requested before the one in front is multiplied; the compiler would
  /// do so no sooner than it has to.
  struct Reader {
    uint32_t codes, x, scales, step;  // step: from a block's codes to the next one's
    __device__ __forceinline__ void load(int b, typename Weights::Block& to) const {
      to.codes = load_shared(codes + b * step);
      if (b % 2 == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
          asm volatile("ld.shared.b16 %0, [%1];" : "=h"(to.scales[r]) : "r"(scales + b * kUnit + r * 16) : "memory");
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) to.x[half] = load_shared(x + b * (kBlockK * 2) + half * 64);
    }
    static __device__ __forceinline__ uint4 load_shared(uint32_t from) {
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
      return v;
    }
  };
  /// block: of k. Codes of a stage are [ranges][kStripBlocks][units of the slab].
  __device__ __forceinline__ Reader reader_of(int i, int block, int stage, int strip, int lane) const {
    int const shift = p_.in_order[i].range_shift, range = strip & ((1 << shift) - 1), unit = strip >> shift;
    Reader at;
    at.step = (kStrips >> shift) * kBlockBytes;
    at.codes = shared_address(codes_of(stage)) + range * (kStripBlocks * at.step) + unit * kBlockBytes + lane * 16;
    at.x = shared_address(activations(i)) + block * (kBlockK * 2) + lane % 4 * 16;
    at.scales = shared_address(scales_of(stage)) + strip * kStripScaleBytes + lane / 4 * 2;
    return at;
  }
  /// When the sums are complete, and with them all reads of the stage (quantized_gemm/mainloop_sync_sm90.cuh).
  __device__ __forceinline__ void release(int stage, int lane, float const (&sums)[4]) {
    constexpr uint32_t kNever = 0x7fedcba9u;
    bool const read = __float_as_uint(sums[0]) != kNever && __float_as_uint(sums[2]) != kNever;
    __syncwarp();
    if (lane == 0 && read) EmptyBarrier::arrive(&storage_.empty[stage]);
  }
  /// As tile_scheduler.h adds ranges: to the last one's sums the others', from the first on. All columns of the MMA are the same token's,
  /// so that each lane has sums of rows lane / 4 and 8 further on. owner: the warp of the last range. All others count for as many as there
  /// can be.
  __device__ __forceinline__ void gather(bool owns, int owner, int range, int ranges, int lane, uint32_t& phase, float (&sums)[4]) const {
    auto& parts = storage_.partials[owner];
    if (!owns) {
      if (lane % 4 == 0) {
        parts[range][0][lane / 4] = sums[0];
        parts[range][0][lane / 4 + 8] = sums[2];
      }
      __syncwarp();
      if (lane < (kStrips - 1) / (ranges - 1)) EmptyBarrier::arrive(&storage_.partial_full[owner]);
      return;
    }
    EmptyBarrier::wait(&storage_.partial_full[owner], phase);
    phase ^= 1;
    for (int other = 0; other + 1 < ranges; ++other) {
      sums[0] += parts[other][0][lane / 4];
      sums[2] += parts[other][0][lane / 4 + 8];
    }
  }

  /// What a column of product 0 or 2 and the one 8 further on are added to, before the product is computed, for it comes from L2 or memory.
  /// Of product 2 that is what product 0 has published of the same rows.
  __device__ __forceinline__ void load_addends(int i, int column, float (&addends)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half, column += 8) {
      if (column >= p_.products[i].columns) continue;
      if (i == 0) {
        addends[half] = minfer::to_float(load_operand(static_cast<T const*>(p_.residual) + column));
      } else {
        uint64_t const tag = first_tag();
        Packet packet{0, ~tag};
        while (packet.tag != tag) poll_packet(packet, p_.products[0].packets + column / 4);
        float x[4];
        unpack(packet.numbers, x);
        addends[half] = column % 4 == 0 ? x[0] : column % 4 == 1 ? x[1] : column % 4 == 2 ? x[2] : x[3];
      }
    }
  }
  /// Rows lane / 4 and 8 further on of a unit, in all lanes of the row: added to the residual, or activated, and published. Every sum is
  /// rounded as the operators' epilogue rounds it, and there are no zeros to add, of which -0 would become another number.
  __device__ __forceinline__ void finish(int i, int unit, int lane, float low, float high, float const (&addends)[2]) const {
    if (p_.products[i].gated) {
      publish(i, unit * 8, lane, activate(p_.activation, low) * high);
      return;
    }
    if (i % 2 == 0) {
      low = __fadd_rn(low, addends[0]);
      high = __fadd_rn(high, addends[1]);
    }
    publish(i, unit * kUnit, lane, with_bias(i, unit * kUnit + lane / 4, low));
    publish(i, unit * kUnit + 8, lane, with_bias(i, unit * kUnit + 8 + lane / 4, high));
  }
  __device__ __forceinline__ float with_bias(int i, int column, float y) const {
    Weight const& weight = weight_of(0, i);
    if (weight.bias == nullptr || column >= p_.products[i].columns) return y;
    return __fadd_rn(y, weight.bias_f32 ? load_operand(static_cast<float const*>(weight.bias) + column)
                                        : minfer::to_float(load_operand(static_cast<T const*>(weight.bias) + column)));
  }
  /// Eight columns from `first` on, of which the lane has first + lane / 4.
  __device__ __forceinline__ void publish(int i, int first, int lane, float y) const {
    Product const& product = p_.products[i];
    uint32_t const pair = Float16<kType>::pack(y, __shfl_down_sync(0xffffffffu, y, 4));
    uint32_t const next = __shfl_down_sync(0xffffffffu, pair, 8);
    int const column = first + lane / 4;
    if (lane % 16 != 0 || column >= product.columns) return;  // columns are a multiple of 8
    uint64_t const numbers = pair | uint64_t(next) << 32;
    if (product.packets != nullptr) store_packet(product.packets + column / 4, numbers, first_tag());
    if (i >= 2) *reinterpret_cast<uint64_t*>(static_cast<T*>(i == 2 ? p_.residual : p_.d) + column) = numbers;
  }
};

}  // namespace minfer::decoder_block
