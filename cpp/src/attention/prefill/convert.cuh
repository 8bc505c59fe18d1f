// Codes of a KV cache in global memory -> key blocks of q's 16-bit type in shared memory, as TMA would have left them for WGMMA.
//
// Work. A warpgroup converts a block of kTileN keys or values, each warp a quarter of the rows. A lane has a vector of 16 bytes of codes of
// some rows, always of the same columns. All blocks take the same registers (BlockCodes): as soon as a block's codes are
// converted, the next block's are loaded to where they were, and have the time of a block to arrive.
// Shared memory. Rows of 64 elements with TMA's shared-memory swizzle, [head_dim / 64][row][64]: vector v of row r is at v ^ r % 8. Eight
// neighbouring lanes, which store together, have rows and columns that touch all banks.
// Pages. Each lane holds the page of one row, found a block ahead of its loads, and passes the row's address to the lanes that need it.
// Rows that no query of the tile sees are not read and become zeros: their pages may have been freed, and block tables and scales may hold
// anything.
// Numbers. They become f16, but int8 beside queries of bf16, which becomes bf16.
//   fp8   The code alone, which is exact: half an instruction an element. The scales belong to a head: K's becomes part of the scores'
//         scale and V's of the output, where they cost nothing and round nothing. The sign of K's is applied to queries that are converted
//         themselves (scale_queries.cuh), else to the codes, since the softmax requires a positive scale.
//   int8  code * scale of the token, which neither the scores' scale nor the output could apply. A code becomes a float32 as the mantissa
//         of a power of two: one byte permutation makes 2^15 + code, one multiply-add subtracts 2^15 and scales, and one conversion rounds:
//         2.75 instructions an element. The scale is rounded to 15 bits: then its product with 2^15 + 128 is exact, and a code of 0 is 0.
//   int4  code * scale + minimum, rounded once; those of K belong to channels. Both codes of a byte become 1024 + code and 1024 + 16 code
//         by a byte permutation and a bit operation, a multiply-add makes them codes, and another one numbers: 2 instructions an element.
//         The newest tokens, of no complete token group, are copied from the residual: all of a warp's rows are codes or none, since token
//         groups are multiples of 32 tokens, which a warp's rows divide.
#pragma once

#include <algorithm>

#include "attention/prefill/params.h"
#include "attention/shared/kv_dequant.cuh"
#include "attention/shared/launch.h"
#include "common/float16.cuh"
#include "common/opaque.cuh"
#include "cutlass/cutlass.h"
#include "minfer/types.h"

namespace minfer::attention {

CUTLASS_DEVICE float fp8_scale(PrefillCodesParams const& params, QuantizedRows const& side, int kv_head) {
  return load_operand(static_cast<float const*>(side.scale) + kv_head * params.scale_stride);
}

/// What a lane holds of a block of keys or values while it is loaded.
template <WeightFormat kFormat, int kLoads>
struct BlockCodes {
  static constexpr int kScales = kFormat == WeightFormat::kInt4 ? 8 : 1;
  uint4 codes[kLoads];
  uint32_t scales[kScales];  // int8: of the lane's row. int4, K: eight channels' scales, then minima; V: scale and minimum for each load
};

/// kQueryType: of q and of an int4 cache's residual. kType: of the keys and values in shared memory, which are padded to kHeadDim columns.
template <DataType kQueryType, DataType kType, WeightFormat kFormat, int kTileN, int kHeadDim>
struct BlockConverter {
  static constexpr bool kFp8 = kFormat == WeightFormat::kFp8E4M3, kInt8 = kFormat == WeightFormat::kInt8,
                        kInt4 = kFormat == WeightFormat::kInt4;
  static_assert((kFp8 || kInt8 || kInt4) && (kInt8 || kType == DataType::kF16));
  using Codes = KvCodes<kFormat>;
  static constexpr int kRows = kTileN / 4;                                               // of a warp
  static constexpr int kColumns = kHeadDim / 64, kCodeVectors = 64 / Codes::kPerVector;  // vectors of codes in a column of 64 elements
  static constexpr int kVectors = Codes::kPerVector / 8;                                 // of elements that a vector of codes becomes
  static constexpr int kNear = 8 / kCodeVectors, kRowsOfLoad = 32 / (kCodeVectors * kColumns);  // rows of eight lanes, of a warp
  static constexpr int kLoads = kRows / kRowsOfLoad;
  static_assert(kRows % kRowsOfLoad == 0 && kRowsOfLoad % kNear == 0 && kRows % 8 == 0 && kRows <= 32 && (!kInt4 || 32 % kRows == 0));
  using Block = BlockCodes<kFormat, kLoads>;
  template <bool kKeys>
  static constexpr bool kFlips = kFp8 && kKeys && kQueryType == kType;  // codes of K take the sign of its scale, which may be 0

  PrefillCodesParams const& params;
  int batch, kv_head, warp, lane;
  int first_key, last_key, in_codes;  // the tile sees keys [first_key, last_key); in_codes: keys of the sequence that are codes
  float key_scale;                    // where codes take its sign

  CUTLASS_DEVICE BlockConverter(PrefillCodesParams const& params, int batch, int kv_head, int first_key, int last_key, int seqlen_k,
                                int warp, int lane)
      : params(params),
        batch(batch),
        kv_head(kv_head),
        warp(warp),
        lane(lane),
        first_key(first_key),
        last_key(last_key),
        in_codes(kInt4 ? seqlen_k & -params.group_tokens : seqlen_k),
        key_scale(kFlips<true> ? fp8_scale(params, params.keys, kv_head) : 0.0f) {}

  // ---- which lane has what --------------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE int column() const { return column(lane); }
  static CUTLASS_DEVICE int column(int lane) { return lane / 8 % kColumns; }
  CUTLASS_DEVICE int code_vector() const { return column() * kCodeVectors + lane % kCodeVectors; }
  /// The lane's row among those of a load.
  CUTLASS_DEVICE int lane_row() const { return lane_row(lane); }
  static CUTLASS_DEVICE int lane_row(int lane) { return lane / (8 * kColumns) * kNear + lane / kCodeVectors % kNear; }
  CUTLASS_DEVICE int row_of(int load) const {
    int row = load * kRowsOfLoad + lane_row();
    if constexpr (kFp8) {  // computed each time: with 256 columns, there are no registers for the rows of all loads
      asm volatile("add.s32 %0, %1, %2;" : "=r"(row) : "r"(lane_row()), "r"(load * kRowsOfLoad));
    }
    return row;
  }
  template <bool kKeys>
  CUTLASS_DEVICE QuantizedRows const& side() const {
    return kKeys ? params.keys : params.values;
  }
  template <bool kKeys>
  CUTLASS_DEVICE bool active() const {
    return code_vector() * Codes::kPerVector < side<kKeys>().head_dim;
  }

  // ---- loads ------------------------------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE int codes_end() const { return kInt4 ? min(last_key, in_codes) : last_key; }
  CUTLASS_DEVICE int first_of(int block) const { return block * kTileN + warp * kRows; }
  /// The key whose page the lane finds for the warp: its row's, or the nearest one of codes that is seen, if any is.
  CUTLASS_DEVICE int key_of(int block) const { return min(max(first_of(block) + lane % kRows, first_key), codes_end() - 1); }

  /// The page of key_of(block). The block may lie outside of what is seen; -1 if nothing is.
  CUTLASS_DEVICE int page_of(int block) const { return codes_end() <= first_key ? -1 : params.find(batch, key_of(block)).page; }

  /// load_operand() of 16 bytes that are used once.
  static CUTLASS_DEVICE uint4 load_16_bytes(void const* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from));
    return x;
  }

  /// Where a warp's rows of a block of keys or values are; each lane holds one of them.
  template <bool kKeys>
  struct Source {
    int first;  // key of the warp's first row
    int page, row;
    bool seen;          // the lane's row is seen by a query of the tile, and its page is in the cache
    char const* codes;  // of the lane's row; null where it is not seen
  };
  /// page: page_of(block).
  template <bool kKeys>
  CUTLASS_DEVICE Source<kKeys> source(int block, int page) const {
    QuantizedRows const& from = side<kKeys>();
    int const key = key_of(block), lane_key = first_of(block) + lane % kRows;
    int const row = params.row_of(key);
    bool const seen = lane_key >= first_key && lane_key < codes_end() && params.has(page);
    return {first_of(block), page, row, seen, seen ? from.rows.at(page, row, kv_head) : nullptr};
  }

  /// Begins load number i of codes; rows that are not seen become zeros.
  template <bool kKeys>
  CUTLASS_DEVICE void load_codes(Block& to, int i, Source<kKeys> const& from) const {
    uint64_t const codes = __shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(from.codes), row_of(i));
    to.codes[i] = make_uint4(0, 0, 0, 0);
    if (codes != 0 && active<kKeys>()) to.codes[i] = load_16_bytes(reinterpret_cast<char const*>(codes) + code_vector() * 16);
  }

  /// Begins the loads of all scales; those of rows that are not seen become zeros.
  template <bool kKeys>
  CUTLASS_DEVICE void load_scales(Block& to, Source<kKeys> const& from) const {
    QuantizedRows const& of = side<kKeys>();
    if constexpr (kInt8) {
      to.scales[0] = 0;
      if (from.seen) {
        to.scales[0] = load_operand(static_cast<uint32_t const*>(of.scale) + from.page * of.scale_page +
                                    int64_t(kv_head) * params.page_size + from.row);
      }
    } else if constexpr (kInt4 && kKeys) {  // a warp has one token group: four pairs of lanes share the 32 channels of a vector
      int const page = __shfl_sync(0xffffffffu, from.page, 0), row = __shfl_sync(0xffffffffu, from.row, 0);
      int const shift = params.group_tokens == 64 ? 6 : 5;
      int64_t const group = int64_t(kv_head) * (params.page_size >> shift) + (row >> shift);
      uint4 scales = make_uint4(0, 0, 0, 0), minima = scales;
      if (from.first < codes_end() && from.first + kRows > first_key && params.has(page) && active<kKeys>()) {
        auto const* const scale =
            static_cast<__half const*>(of.scale) + page * of.scale_page + group * 2 * of.head_dim + code_vector() * 32 + lane / 2 % 4 * 8;
        scales = load_16_bytes(scale);
        minima = load_16_bytes(scale + of.head_dim);
      }
      to.scales[0] = scales.x, to.scales[1] = scales.y, to.scales[2] = scales.z, to.scales[3] = scales.w;
      to.scales[4] = minima.x, to.scales[5] = minima.y, to.scales[6] = minima.z, to.scales[7] = minima.w;
    } else if constexpr (kInt4) {
      int64_t const plane = int64_t(kv_head) * 2 * params.groups_v + code_vector() / params.vectors_of_group;
      auto const* const scale = static_cast<uint16_t const*>(of.scale) + plane * params.page_size;
      int64_t const lane_token = from.seen ? from.page * of.scale_page + from.row : -1;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        int64_t const token = __shfl_sync(0xffffffffu, lane_token, row_of(i));
        to.scales[2 * i] = to.scales[2 * i + 1] = 0;
        if (token >= 0 && active<kKeys>()) {
          to.scales[2 * i] = load_operand(scale + token);
          to.scales[2 * i + 1] = load_operand(scale + token + int64_t(params.groups_v) * params.page_size);
        }
      }
    }
  }

  template <bool kKeys>
  CUTLASS_DEVICE void load(Block& to, Source<kKeys> const& from) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_codes(to, i, from);
    load_scales(to, from);
  }

  // ---- conversion -------------------------------------------------------------------------------------------------------------------

  static CUTLASS_DEVICE uint32_t pack(float low, float high) { return Float16<kType>::pack(low, high); }
  static CUTLASS_DEVICE uint32_t as_type(uint32_t pair) {
    float2 const x = Float16<kQueryType>::unpack(pair);
    return pack(x.x, x.y);
  }
  static CUTLASS_DEVICE void store_16_bytes(uint32_t to, uint4 const& x) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
  }

  /// 2^15 + (code + 128) of int8 code kIndex of four, which are biased by 128; kInt8Offset is what a multiply-add subtracts. base: the bits
  /// of 2^15, not as a constant: that would be the instruction's only immediate operand, and each selector would take a register and an
  /// instruction of its own.
  static constexpr float kInt8Offset = 32768.0f + 128.0f;
  template <int kIndex>
  static CUTLASS_DEVICE float float_of_int8(uint32_t biased, uint32_t base) {
    return __uint_as_float(__byte_perm(biased, base, 0x7404 | kIndex << 4));
  }
  /// x * y + z of pairs of f16.
  static CUTLASS_DEVICE uint32_t multiply_add(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
  }
  /// Constants that stay in registers. An instruction holds one constant; the compiler would take one more for each second one.
  struct Int4Constants {
    uint32_t bias, factors;  // pairs of f16: 1024 twice; 1 and 1 / 16
    CUTLASS_DEVICE Int4Constants(int kv_head) {
      uint32_t const zero = uint32_t(kv_head >> 31);  // which the compiler does not know
      bias = 0x64006400u | zero;
      factors = 0x2c003c00u | zero;
    }
  };
  /// The two codes of int4 in byte kIndex as a pair of f16: 1024 + low and 1024 + 16 * high, less 1024 and a sixteenth of that less 64.
  template <int kIndex>
  static CUTLASS_DEVICE uint32_t pair_of_int4(uint32_t codes, Int4Constants const& constants) {
    uint32_t const biased = (__byte_perm(codes, 0, 0x4040 | kIndex << 8 | kIndex) & 0x00f0000fu) | constants.bias;
    return multiply_add(biased, constants.factors, 0xd400e400u);
  }

  /// Converts four codes of fp8 or int8.
  static CUTLASS_DEVICE void convert(uint32_t codes, float scale, float offset, uint32_t base, uint32_t& low, uint32_t& high) {
    if constexpr (kInt8) {
      uint32_t const biased = codes ^ 0x80808080u;
      low = pack(fmaf(float_of_int8<0>(biased, base), scale, offset), fmaf(float_of_int8<1>(biased, base), scale, offset));
      high = pack(fmaf(float_of_int8<2>(biased, base), scale, offset), fmaf(float_of_int8<3>(biased, base), scale, offset));
    } else {
      low = Codes::from_e4m3(codes);
      high = Codes::from_e4m3(codes >> 16);
    }
  }

  /// Converts eight codes of int4; scale, minimum: pairs of f16.
  static CUTLASS_DEVICE uint4 convert(uint32_t codes, uint32_t const (&scale)[4], uint32_t const (&minimum)[4], Int4Constants const& c) {
    return make_uint4(
        multiply_add(pair_of_int4<0>(codes, c), scale[0], minimum[0]), multiply_add(pair_of_int4<1>(codes, c), scale[1], minimum[1]),
        multiply_add(pair_of_int4<2>(codes, c), scale[2], minimum[2]), multiply_add(pair_of_int4<3>(codes, c), scale[3], minimum[3]));
  }

  /// Converts and stores the warp's rows of block `block`, which `codes` holds, to the stage at shared address `stage`. Each register that
  /// is free again receives what `next` has for it, a block of keys or of values, which has the time of a block to arrive. look_up() finds
  /// the next pages. It runs once, when codes of the block have been used: a page that was requested ahead of them would be waited for
  /// together with them, and no longer have the time of a block (fp8 and int8 prefill of a chunk then took 6 % longer on an H100). It is
  /// one function for all formats: loads of the next block are interleaved with the conversion of this one, register by register.
  template <bool kKeys, class NextSource, class LookUp>
  CUTLASS_DEVICE void store(Block& codes, int block, uint32_t stage, NextSource const& next, LookUp const& look_up) const {
    // Bits 4 to 6 of an address select the vector. Those of `to` are of the lane's row and first vector; each load and vector flips some of
    // them.
    int own = lane;
    if constexpr (kFp8 && kHeadDim == 256) make_opaque(own);  // an address that is kept would be spilled
    uint32_t const swizzled = uint32_t(own % kCodeVectors * kVectors ^ lane_row(own));
    uint32_t const to = stage + uint32_t(column(own) * kTileN + warp * kRows + lane_row(own)) * 128 + swizzled * 16;
    auto const put = [&](int load, int vector, uint4 const& x) CUTLASS_LAMBDA_FUNC_INLINE {
      // One asm statement for address and store: eight addresses kept for all loads would occupy eight registers.
      asm volatile("{ .reg .b32 a; xor.b32 a, %0, %1; add.u32 a, a, %2; st.shared.v4.u32 [a], {%3, %4, %5, %6}; }" ::"r"(to),
                   "r"((vector ^ load * kRowsOfLoad % 8) * 16), "r"(load * kRowsOfLoad * 128), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                   : "memory");
    };
    bool const columns = active<kKeys>();
    if constexpr (kInt4) {
      if (first_of(block) >= in_codes) {
        copy_residual<kKeys>(first_of(block), stage);
        load(codes, next);
        look_up();
        return;
      }
      Int4Constants const constants(kv_head);
      uint32_t token_scale[kLoads], token_minimum[kLoads];
      if constexpr (!kKeys) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          token_scale[i] = Codes::select(codes.scales[2 * i], 0, 0x1010);
          token_minimum[i] = Codes::select(codes.scales[2 * i + 1], 0, 0x1010);
        }
        load_scales(codes, next);
      }
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        uint32_t scale[4], minimum[4];
        if constexpr (kKeys) {
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            int const source_lane = (lane & ~6) | vector << 1;
            scale[pair] = __shfl_sync(0xffffffffu, codes.scales[pair], source_lane);
            minimum[pair] = __shfl_sync(0xffffffffu, codes.scales[4 + pair], source_lane);
          }
          if (vector == kVectors - 1) load_scales(codes, next);
        }
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if constexpr (!kKeys) {
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
              scale[pair] = token_scale[i];
              minimum[pair] = token_minimum[i];
            }
          }
          uint4 const& of = codes.codes[i];
          uint4 const x = convert(vector == 0 ? of.x : vector == 1 ? of.y : vector == 2 ? of.z : of.w, scale, minimum, constants);
          if (columns) put(i, vector, x);
          if (vector == kVectors - 1) load_codes(codes, i, next);
          if (vector == kVectors - 1 && i == 0) look_up();
        }
      }
    } else {
      float lane_scale = 0.0f;
      uint32_t keep = 0xffffffffu, flip = 0;
      uint32_t const base = 0x47000000u | uint32_t(kv_head >> 31);  // a constant that the compiler does not know: kv_head >= 0
      if constexpr (kInt8) {                                        // rounds the scale to 15 bits (Veltkamp)
        float const s = __uint_as_float(codes.scales[0]), wide = __fmul_rn(s, 513.0f);
        lane_scale = __fsub_rn(wide, __fsub_rn(wide, s));
        load_scales(codes, next);
      } else if constexpr (kFlips<kKeys>) {
        keep = key_scale == 0.0f ? 0 : keep;
        flip = key_scale < 0.0f ? 0x80808080u : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float scale = 0.0f, offset = 0.0f;
        if constexpr (kInt8) {
          scale = __shfl_sync(0xffffffffu, lane_scale, row_of(i));
          offset = scale * -kInt8Offset;
        }
        uint32_t of[4] = {codes.codes[i].x, codes.codes[i].y, codes.codes[i].z, codes.codes[i].w};
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          uint4 x;
          if constexpr (kFlips<kKeys>) {
            of[2 * vector] = (of[2 * vector] & keep) ^ flip;
            of[2 * vector + 1] = (of[2 * vector + 1] & keep) ^ flip;
          }
          convert(of[2 * vector], scale, offset, base, x.x, x.y);
          convert(of[2 * vector + 1], scale, offset, base, x.z, x.w);
          if (columns) put(i, vector, x);
        }
        load_codes(codes, i, next);
        if (i == 0) look_up();
      }
    }
  }

  /// int4: copies the warp's rows from key `first` >= in_codes on from the residual; rows without a token become zeros.
  template <bool kKeys>
  CUTLASS_DEVICE void copy_residual(int first, uint32_t stage) const {
    constexpr int kRowVectors = kHeadDim / 8;
    QuantizedRows const& from = side<kKeys>();
    auto const* const base = static_cast<char const*>(from.residual);
    int lane_index = lane;
    make_opaque(lane_index);  // what is computed from it stays here: it would cost registers in every block
#pragma unroll 2
    for (int i = lane_index; i < kRows * kRowVectors; i += 32) {
      int const r = i / kRowVectors, vector = i % kRowVectors, key = first + r;
      if (vector * 8 >= from.head_dim) continue;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (key >= first_key && key < last_key) {
        int64_t const token = int64_t(batch) * params.group_tokens + (key - in_codes);
        x = load_16_bytes(base + ((token * params.heads_kv + kv_head) * from.head_dim + vector * 8) * 2);
        if constexpr (kQueryType != kType) x = make_uint4(as_type(x.x), as_type(x.y), as_type(x.z), as_type(x.w));
      }
      int const row = warp * kRows + r;
      store_16_bytes(stage + uint32_t(vector / 8 * kTileN + row) * 128 + uint32_t(vector % 8 ^ row % 8) * 16, x);
    }
  }
};

/// What scores are multiplied by in addition to the softmax's scale: the magnitude of fp8's scale of K. Its sign is the codes' or queries'.
CUTLASS_DEVICE float scale_of_scores(PrefillCodesParams const& params, int kv_head) {
  if (params.format != WeightFormat::kFp8E4M3) return 1.0f;
  float const scale = fabsf(fp8_scale(params, params.keys, kv_head));
  return scale == 0.0f ? 1.0f : scale;
}

/// What queries are multiplied by that are converted themselves: the sign of fp8's scale of K, or zero where that is.
CUTLASS_DEVICE float sign_of_keys(PrefillCodesParams const& params, int kv_head) {
  if (params.format != WeightFormat::kFp8E4M3) return 1.0f;
  float const scale = fp8_scale(params, params.keys, kv_head);
  return scale == 0.0f ? 0.0f : scale < 0.0f ? -1.0f : 1.0f;
}

/// What scores are multiplied by before the softmax.
template <class Params>
CUTLASS_DEVICE float softmax_scale(Params const& params, int kv_head) {
  if constexpr (requires { params.format; }) {
    return params.softmax.scale * scale_of_scores(params, kv_head);
  } else {
    return params.softmax.scale;
  }
}

/// What the output is multiplied by: fp8's scale of V.
CUTLASS_DEVICE float scale_of_output(PrefillCodesParams const& params, int kv_head) {
  if (params.format != WeightFormat::kFp8E4M3) return 1.0f;
  return fp8_scale(params, params.values, kv_head);
}

/// Sets what no load fills, columns behind head_dim, to zero: `bytes` from shared address `from` on. Called by all threads before the first
/// block.
CUTLASS_DEVICE void clear_padding(uint32_t from, int bytes, int thread, int threads) {
  for (int i = thread * 16; i < bytes; i += threads * 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(from + i), "r"(0) : "memory");
  }
}

/// Fills in the parameters of a cache of codes.
inline void describe_codes(PrefillCodesParams* params, AttentionProblem const& p, AttentionOperands const& o) {
  auto const describe = [&](QuantizedRows* side, void const* codes, int64_t const(&strides)[3], void const* scale, void const* residual,
                            int64_t head_dim) {
    *side = {PagedRows::of(codes, strides, head_dim, bits_of(p.kv_format)), scale, p.heads_kv * p.page_size, residual, int32_t(head_dim)};
  };
  describe(&params->keys, o.k, o.k_strides, o.k_scale, o.k_residual, p.head_dim);
  describe(&params->values, o.v, o.v_strides, o.v_scale, o.v_residual, p.head_dim_v);
  params->format = p.kv_format;
  params->scale_stride = int32_t(p.scale_per_head);
  if (p.kv_format == WeightFormat::kInt4) {
    params->keys.scale_page = p.heads_kv * (p.page_size / std::max<int64_t>(p.group_tokens, 1)) * 2 * p.head_dim;
    params->values.scale_page = p.heads_kv * p.page_size * 2 * p.groups_v;
    params->group_tokens = int32_t(p.group_tokens);
    params->groups_v = int32_t(p.groups_v);
    params->vectors_of_group = int32_t(p.head_dim_v / (32 * p.groups_v));
  }
}

}  // namespace minfer::attention
