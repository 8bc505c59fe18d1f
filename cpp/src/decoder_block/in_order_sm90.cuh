// The roles of decoder_block_sm90.cuh in the batch-invariant mode, of int4 weights: the bits of the mode's operators one by one.
//
// What the mode fixes of a product is the order in which a row of the weight is summed: in ranges of k (gemm/invariant_splits.h), of each
// one MMA behind the other from its first k on, and then the ranges' sums in tile_scheduler.h's order. mma.sync of 16 rows has the bits of
// WGMMA, in whose order the mode's kernels for few tokens sum, too (quantized_gemm/mainloop_sync_sm90.cuh). So a consumer warp has a unit
// and a range of its k, a quad of them a slab (layout.h), and four quads work at a time, on a round of slabs:
//   the ring      has the first strips of all slabs of a round, then the next ones, until the ranges end: each stage is one copy by TMA
//   a round       ends with all its slabs, and what is behind a product waits for its last one. Meanwhile the ring fills
// Warp roles.
//   0             copies codes
//   1             copies scales
//   4-11          write activations as MMAs take them. They are 16-bit numbers as the operators leave them in memory. A norm's are rounded,
//                 so that the factor of the whole token comes first; its sum of squares has minfer.rms_norm's order (fused/row_group.cuh)
//   12-27         consumers. Of a unit, the warp of the last range adds up the ranges, finishes rows and publishes packets, or stores
#pragma once

#include "common/activation.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "common/packet.cuh"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "decoder_block/block_facts_sm90.cuh"
#include "quantized_gemm/dequantize.cuh"

namespace minfer::decoder_block {

/// Weights of int4 as fragments of a 16-bit type, with the bits of w4a16_gemm's. Activations lie as ScaledActivations has them.
template <DataType kType>
struct InOrderInt4Weights {
  static constexpr WeightFormat kFormat = WeightFormat::kInt4;
  static constexpr bool kInOrder = true;
  struct Group {};
  using Codes = w4a16::Codes<kType, kFormat, true>;
  using H = w4a16::Half2<kType>;

  /// Of rows lane / 4 and 8 further on, in a group: what fragments are made with.
  struct Factors {
    uint32_t scale[2], zero[2];
  };
  /// scales: of row lane / 4.
  static __device__ __forceinline__ Factors factors_of(char const* scales) {
    Factors f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t const twice = w4a16::both_halves(*reinterpret_cast<uint16_t const*>(scales + r * 16));
      if constexpr (Codes::kFolds) {
        f.scale[r] = H::mul(twice, Codes::folded_factor(r));
        f.zero[r] = H::mul(twice, Codes::kFoldedZero);
      } else {
        f.scale[r] = H::mul(twice, Codes::inverse(r));
        f.zero[r] = H::mul(Codes::kSymmetricZero, Codes::factor(r) ^ 0x80008000u);
      }
    }
    return f;
  }
  /// What sums still lack.
  static constexpr float rest() {
    if constexpr (Codes::kFolds) {
      return Codes::kFoldedRest;
    } else {
      return w4a16::Scale<kType, kFormat>::kRest;
    }
  }

  /// A lane's codes of a block of 64 k, and its activations.
  struct Block {
    uint4 codes, x[2];
  };
  /// sums += 64 products of rows lane / 4 and 8 further on.
  static __device__ __forceinline__ void multiply(Block const& block, Factors const& f, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const word[1] = {i == 0 ? block.codes.x : i == 1 ? block.codes.y : i == 2 ? block.codes.z : block.codes.w};
      uint32_t a[4];
      if constexpr (Codes::kFolds) {
        Codes::folded(word, f.scale, f.zero, a);
      } else {
        Codes::fragment(word, f.zero, {}, a);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[r] = H::mul(a[r], f.scale[r % 2]);
      }
      uint4 const& b = block.x[i / 2];
      multiply_16x8x16<kType>(sums, a, i % 2 == 0 ? b.x : b.z, i % 2 == 0 ? b.y : b.w);
    }
  }
};

using InOrder = InOrderParams::InOrder;

/// The slabs that a CTA has of a product: every gridDim-th.
__device__ __forceinline__ int own_slabs(InOrderParams const& p, int i) {
  int const units = i == kDecoderBlockProducts - 1 ? p.last_units : p.products[i].units;
  return units == 0 ? 0 : (p.in_order[i].slabs - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
}

/// Warps 0 and 1. Stages come in the order of consumers.
template <class Facts>
class InOrderProducer : Facts {
  using Facts::p_, Facts::storage_, Facts::units_of, Facts::params_of, Facts::codes_of, Facts::scales_of, Facts::advance, Facts::kStage;
  using typename Facts::T, typename Facts::FullBarrier, typename Facts::EmptyBarrier;

 public:
  explicit __device__ __forceinline__ InOrderProducer(Facts const& facts) : Facts(facts) {}

  /// By a thread. A stage has few instructions: one warp beside those that multiply has few turns.
  __device__ __forceinline__ void copy_codes() {
    LayerParams const& layer = params_of(0);
    for (int i = 0; i < kDecoderBlockProducts && units_of(0, i) > 0; ++i)
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&layer.maps[i]));
    if (!p_.early) wait_for_predecessor();
    int stage = 0, landed_stage = 0, under_way = 0;
    uint32_t phase = 1, landed_phase = 0;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      InOrder const& in_order = p_.in_order[i];
      int const in_tile = (1 << in_order.range_shift) - 1, units = kStrips >> in_order.range_shift;
      for_each_stage(i, [&](int slab, int strip) {
        if (under_way == p_.ahead) {
          FullBarrier::wait(&storage_.full[landed_stage], landed_phase);
          advance(landed_stage, landed_phase);
          --under_way;
        }
        EmptyBarrier::wait(&storage_.empty[stage], phase);
        uint64_t* const barrier = &storage_.full[stage];
        FullBarrier::arrive_and_expect_tx(barrier, kStage.code_bytes);
        cute::SM90_TMA_LOAD_4D::copy(&layer.maps[i], barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST), codes_of(stage), 0,
                                     (slab & in_tile) * units, strip * kStripBlocks, slab & ~in_tile);
        advance(stage, phase);
        ++under_way;
      });
    }
  }
  /// Eight lanes have a strip's, a group each.
  __device__ __forceinline__ void copy_scales(int lane) {
    if (!p_.early) wait_for_predecessor();
    int stage = 0;
    uint32_t phase = 1;
    int const strip_of_stage = lane / kStripGroups, group = lane % kStripGroups;
    uint32_t const to = shared_address(scales_of(0)) + strip_of_stage * kStripScaleBytes + group * (kUnit * 2);
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      Product const& product = p_.products[i];
      InOrder const& in_order = p_.in_order[i];
      int const rows = product.gated ? 2 * product.columns : product.columns;
      int const range = strip_of_stage & ((1 << in_order.range_shift) - 1), unit = strip_of_stage >> in_order.range_shift;
      int const units = kStrips >> in_order.range_shift, first_k = range * in_order.range_blocks * kBlockK;
      for_each_stage(i, [&](int slab, int strip) {
        EmptyBarrier::wait(&storage_.empty[stage], phase);
        if (group < product.scale_rows) {
          int const row = (slab * units + unit) * kUnit;
          int const at = min(((first_k + strip * (kStripBlocks * kBlockK)) >> p_.group_shift) + group, in_order.groups - 1);
          T const* const from = static_cast<T const*>(in_order.scales) + at * in_order.ld_scales;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            bool const inside = row + 8 * half < rows;
            copy_async_16(to + stage * kStage.pitch + 16 * half, inside ? from + row + 8 * half : from, inside ? 16 : 0);
          }
        }
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(&storage_.full[stage])) : "memory");
        advance(stage, phase);
      });
    }
  }

 private:
  /// body(slab, strip of its ranges)
  template <class Body>
  __device__ __forceinline__ void for_each_stage(int i, Body const& body) const {
    int const count = own_slabs(p_, i), strips = p_.in_order[i].strips;
#pragma unroll 1
    for (int first = 0; first < count; first += kQuads) {
      int const from = int(blockIdx.x) + first * int(gridDim.x), quads = min(kQuads, count - first);
#pragma unroll 1
      for (int strip = 0; strip < strips; ++strip) {
        int slab = from;
#pragma unroll 1
        for (int quad = 0; quad < quads; ++quad, slab += int(gridDim.x)) body(slab, strip);
      }
    }
  }
};

/// The last 16 warps.
template <class Facts>
class InOrderConsumer : Facts {
  using Facts::kType, Facts::p_, Facts::storage_, Facts::units_of, Facts::weight_of, Facts::first_tag, Facts::activations, Facts::codes_of,
      Facts::scales_of, Facts::unpack;
  using typename Facts::T, typename Facts::Weights, typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::Gathered;

 public:
  explicit __device__ __forceinline__ InOrderConsumer(Facts const& facts) : Facts(facts) {}

  __device__ __forceinline__ void consume(int warp, int lane) {
    Ring ring;
    // Bit k is the parity of stage k's activations, of even and of odd products.
    uint32_t const of_first = (1u << p_.products[0].converted) - 1;
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      consume(i, i < 2 ? 0 : i == 2 ? of_first : ~0u, ring, warp, lane);
      // Warps without a unit would run ahead by more than the ring has stages, and take an older phase of a barrier for theirs.
      Gathered::sync();
      if (lane == 0) EmptyBarrier::arrive(&storage_.consumed[i % 2]);
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
#pragma unroll 1
        for (int j = 0; j < in_order.strips; ++j) {
          FullBarrier::wait(&storage_.full[ring.stage], ring.phase);
          int const in_range = j * kStripBlocks, blocks = min(kStripBlocks, in_order.range_blocks - in_range);
          int const block = range * in_order.range_blocks + in_range;
          if (first == 0) {
            int const last = (block + blocks - 1) * kBlockK / kStageK;
            EmptyBarrier::wait(&storage_.ready[i % 2][last], phases >> last & 1);
          }
          multiply(i, block, blocks, ring.stage, range, unit_of_slab, strip, lane, sums);
          release(ring.stage, lane, sums);
          advance(ring, quads);
        }
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

  static constexpr int kScaleStep = kUnit * 2;

  /// A strip, an even number of blocks. block: of k. Codes of a stage are [ranges][kStripBlocks][units of the slab].
  __device__ __forceinline__ void multiply(int i, int block, int blocks, int stage, int range, int unit, int strip, int lane,
                                           float (&sums)[4]) const {
    int const step = (kStrips >> p_.in_order[i].range_shift) * kBlockBytes;
    Reader at;
    at.step = step;
    at.codes = shared_address(codes_of(stage)) + range * (kStripBlocks * step) + unit * kBlockBytes + lane * 16;
    at.scales = scales_of(stage) + strip * kStripScaleBytes + lane / 4 * 2;
    at.x = shared_address(activations(i)) + block * (kBlockK * 2) + lane % 4 * 16;
    int const k = block * kBlockK, first_group = k >> p_.group_shift;
    auto const factors_of = [&](int b) {
      return Weights::factors_of(at.scales + (((k + b * kBlockK) >> p_.group_shift) - first_group) * kScaleStep);
    };
    if (blocks == kStripBlocks) {
      typename Weights::Block next = at.load(0);
      typename Weights::Factors factors;
#pragma unroll
      for (int b = 0; b < kStripBlocks; ++b) {
        typename Weights::Block const own = next;
        if (b + 1 < kStripBlocks) next = at.load(b + 1);
        if (b % 2 == 0) factors = factors_of(b);
        Weights::multiply(own, factors, sums);
      }
    } else {
#pragma unroll 1
      for (int b = 0; b < blocks; b += 2) {
        typename Weights::Block const two[2] = {at.load(b), at.load(b + 1)};
        typename Weights::Factors const factors = factors_of(b);
        Weights::multiply(two[0], factors, sums);
        Weights::multiply(two[1], factors, sums);
      }
    }
  }
  /// A block is requested before the one in front is multiplied; the compiler would do so no sooner than it has to.
  struct Reader {
    uint32_t codes, x, step;  // step: from a block's codes to the next one's
    char const* scales;
    static __device__ __forceinline__ uint4 load_shared(uint32_t from) {
      uint4 v;
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
      return v;
    }
    __device__ __forceinline__ typename Weights::Block load(int b) const {
      uint32_t const numbers = x + b * (kBlockK * 2);
      return {load_shared(codes + b * step), {load_shared(numbers), load_shared(numbers + 64)}};
    }
  };
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
    uint32_t bits;
    if constexpr (kType == DataType::kBF16) {
      bits = __bfloat16_as_ushort(__float2bfloat16(y));
    } else {
      bits = __half_as_ushort(__float2half(y));
    }
    bits |= __shfl_down_sync(0xffffffffu, bits, 4) << 16;
    uint32_t const next = __shfl_down_sync(0xffffffffu, bits, 8);
    int const column = first + lane / 4;
    if (lane % 16 != 0 || column >= product.columns) return;  // columns are a multiple of 8
    uint64_t const numbers = bits | uint64_t(next) << 32;
    if (product.packets != nullptr) store_packet(product.packets + column / 4, numbers, first_tag());
    if (i >= 2) *reinterpret_cast<uint64_t*>(static_cast<T*>(i == 2 ? p_.residual : p_.d) + column) = numbers;
  }
};

/// Eight warps.
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
#pragma unroll 1
    for (int i = 0; i < kDecoderBlockProducts; ++i) {
      // Of what consumers do not multiply they count down without waiting, twice in front of a converter that comes late.
      if (own_slabs(p_, i) == 0) continue;
      if (i >= 2) EmptyBarrier::wait(&storage_.consumed[i % 2], 0);
      if (i % 2 == 0) {
        convert(i, thread);
      } else {
        normalize(i, thread);
      }
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

  /// Whether a vector of the product in front is there, or its second half.
  __device__ __forceinline__ bool is_there(Packet const* row, int v) const {
    uint64_t const tag = first_tag();
    Packet packet{0, ~tag};
    if (threadIdx.x % 32 == 0) poll_packet(packet, row + 2 * v + 1);
    return __shfl_sync(0xffffffffu, uint32_t(packet.tag == tag), 0) != 0;
  }
  /// Vectors first, first + step, .. of the product in front, when they are there, but for those that it does not have. Of all together the
  /// warp waits for one alone before, the last one (converters_sm90.cuh says why).
  template <int kCount>
  __device__ __forceinline__ void receive(Packet const* row, int first, int step, int vectors, Vector (&x)[kCount]) const {
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
        for (int half = 0; half < 2; ++half)
          poll_packet(packets[t][half].tag != tag, packets[t][half], row + 2 * (first + t * step) + half);
      }
#pragma unroll
      for (int t = 0; t < kCount; ++t) all = all && packets[t][0].tag == tag && packets[t][1].tag == tag;
    } while (!all);
#pragma unroll
    for (int t = 0; t < kCount; ++t) x[t] = vector_of(packets[t][0].numbers, packets[t][1].numbers);
    __syncwarp();
  }

  /// Of the products without a norm, some stages at a time.
  __device__ __forceinline__ void convert(int i, int thread) const {
    constexpr int kTogether = 3;
    Product const& product = p_.products[i];
    int const vectors = product.k / 8, of_warp = thread | 31;
    Packet const* const row = i == 0 ? nullptr : p_.products[i - 1].packets;
    bool all = i == 0;
#pragma unroll 1
    for (int stage = 0; stage < product.converted; stage += kTogether) {
      int const first = thread + stage * kConverters;
      Vector x[kTogether];
      if (i == 0) {
#pragma unroll
        for (int t = 0; t < kTogether; ++t) x[t] = first + t * kConverters < vectors ? load(p_.a, first + t * kConverters) : Vector{};
      } else {
        int const last = min(of_warp + (stage + kTogether - 1) * kConverters, vectors - 1);
        while (!all && !is_there(row, last)) {
        }
        if (!all) all = is_there(row, min(of_warp + (product.converted - 1) * kConverters, vectors - 1));
        receive(row, first, kConverters, vectors, x);
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        if (first + t * kConverters < vectors) store(i, first + t * kConverters, x[t]);
      }
      __syncwarp();
      if (thread % 32 < kTogether && stage + thread % 32 < product.converted)
        EmptyBarrier::arrive(&storage_.ready[i % 2][stage + thread % 32]);
    }
  }

  /// Of the products behind a norm. Vector v of the row is that of thread v % norm_threads of minfer.rms_norm, which adds up its own
  /// squares, from the lowest v on; a warp here stands for every kConverterWarps-th of those. Its numbers wait in their places for the
  /// factor.
  __device__ __forceinline__ void normalize(int i, int thread) const {
    Product const& product = p_.products[i];
    void const* const norm = weight_of(0, i).norm;
    int const vectors = product.k / 8, lane = thread % 32, threads = p_.norm_threads;
    Vector weights[2];  // of the first two
    auto const load_weights = [&](int first) {
#pragma unroll
      for (int t = 0; t < 2; ++t) weights[t] = first + t * threads < vectors ? load(norm, first + t * threads) : Vector{};
    };
    load_weights(thread);
#pragma unroll 1
    for (int own = thread; own < threads; own += kConverters) {
      float squares = 0.0f;
#pragma unroll 1
      for (int first = own; first - lane < vectors; first += 2 * threads) {
        Packet const* const row = p_.products[i - 1].packets;
        int const last = min((first + threads - lane < vectors ? first + threads : first) | 31, vectors - 1);
        while (!is_there(row, last)) {
        }
        Vector x[2];
        receive(row, first, threads, vectors, x);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          if (first + t * threads >= vectors) continue;
          store(i, first + t * threads, x[t]);
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
        if (first != thread) load_weights(first);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          int const v = first + t * threads;
          if (v >= vectors) continue;
          float x[8], weight[8];
          unpack(stored(i, v), x);
          unpack(weights[t], weight);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            if (p_.weight_offset != 0.0f) weight[e] += p_.weight_offset;
            x[e] = x[e] * weight[e] * factor;
          }
          Vector y;
#pragma unroll
          for (int q = 0; q < 4; ++q) y.words[q] = Float16<kType>::pack(x[2 * q], x[2 * q + 1]);
          store(i, v, y);
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      for (int k = 0; k < product.converted; ++k) EmptyBarrier::arrive(&storage_.ready[i % 2][k]);
    }
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

/// Warps 2 and 3 fill the first warpgroup, whose registers the consumers take.
template <class Weights, DataType kType>
class InOrderBlock : BlockFacts<Weights, kType, 1, false> {
  using Facts = BlockFacts<Weights, kType, 1, false>;
  using Facts::p_, Facts::storage_, Facts::make_tag, Facts::kConverters, Facts::kConsumers;
  using typename Facts::FullBarrier, typename Facts::EmptyBarrier, typename Facts::Tagged;
  static constexpr int kProducerRegisters = 56, kConverterRegisters = 64, kConsumerRegisters = 80;
  static_assert(128 * kProducerRegisters + kConverters * kConverterRegisters + kConsumers * kConsumerRegisters <= 72 * Facts::kThreads);

 public:
  using Facts::kThreads;
  using typename Facts::Params;

  __device__ __forceinline__ InOrderBlock(Params const& params, char* smem) : Facts(params, smem) {}

  __device__ __forceinline__ void run() {
    Facts const& facts = *this;
    int const thread = int(threadIdx.x), warp = cutlass::canonical_warp_idx_sync();
    allow_dependent_launch();
    if (thread == 0) init_barriers();
    __syncthreads();
    if (warp < 4) {
      cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
      if (thread == 0) InOrderProducer(facts).copy_codes();
      if (warp == 1) InOrderProducer(facts).copy_scales(thread - 32);
    } else if (warp < 4 + kConverterWarps) {
      cutlass::arch::warpgroup_reg_dealloc<kConverterRegisters>();
      InOrderConverter converter(facts);
      converter.prefetch_norms(thread - 128);
      wait_for_predecessor();
      if (thread == 128) make_tag();
      Tagged::sync();
      converter.convert(thread - 128);
      // CTA 0 has had packets of all CTAs: they have read the number.
      if (blockIdx.x == 0 && thread == 128) atomicAdd(&launches, 1ull);
    } else {
      cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      wait_for_predecessor();
      Tagged::sync();
      InOrderConsumer(facts).consume(warp - 4 - kConverterWarps, thread % 32);
    }
  }

 private:
  __device__ __forceinline__ void init_barriers() {
    for (int i = 0; i < p_.stages; ++i) {
      FullBarrier::init(&storage_.full[i], 1 + 32);  // the codes' thread, the scales' lanes
      EmptyBarrier::init(&storage_.empty[i], kStrips);
    }
    for (int i = 0; i < 2 * kMostKStages; ++i) EmptyBarrier::init(&storage_.ready[i / kMostKStages][i % kMostKStages], kConverterWarps);
    for (int i = 0; i < 2; ++i) EmptyBarrier::init(&storage_.consumed[i], kWarps);
    for (int i = 0; i < kWarps; ++i) EmptyBarrier::init(&storage_.partial_full[i], kStrips - 1);
    cutlass::arch::fence_barrier_init();
  }
};

}  // namespace minfer::decoder_block
