// int4 in the kernels for few rows: codes as TMA leaves them in shared memory, or numbers of the residual in global memory -> operands of
// mma.sync m16n8k16, with the numbers that BlockConverter writes to shared memory.
//
// Rows of codes have 64 bytes, four vectors of 32 channels; vector v of row r is at v ^ r / 2 % 4. An MMA adds up 16 neighbouring channels,
// or 16 neighbouring tokens. In which order it takes those 16 changes no bit of its sum, so lane 4 g + c of keys has channels 4 c to
// 4 c + 3 of 16, two neighbouring bytes of token g, and row g or g + 8 of values is channel 4 g or 4 g + 1 of 32 in the first of two row
// tiles, 4 g + 2 or 4 g + 3 in the second (KvCodes::row_of), two codes to a half of what ldmatrix leaves.
// Scales. 32 tokens have a unit of 512 bytes: of keys, which share them, [scale, minimum][128 channels]; of values [plane][32 tokens],
// where planes are the channel groups' scales and then their minima.
// Tokens are a multiple of 32 where the residual begins, so that a unit is codes or residual.
#pragma once

#include <cstdint>

#include "attention/prefill/convert.cuh"
#include "attention/shared/prefetch_rows.cuh"
#include "common/mma_sm80.cuh"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"

namespace minfer::attention {

template <DataType kQueryType>
struct FewRowsInt4 {
  static constexpr int kUnit = 32, kUnitBytes = 512, kPlanes = 8, kRowBytes = 64;  // kPlanes: of values, at most
  using Converter = BlockConverter<kQueryType, DataType::kF16, WeightFormat::kInt4, 128, 128>;

  /// Constants that stay in registers, and which bytes of eight a lane takes.
  struct Constants : Converter::Int4Constants {
    uint32_t selector;  // four times byte 2 c
    /// any: a number that is not negative, and that the compiler does not know.
    CUTLASS_DEVICE Constants(int any, int lane) : Converter::Int4Constants(any), selector(uint32_t(lane % 4) * 0x2222u) {}
  };

  /// How many of a sequence's tokens are codes.
  static CUTLASS_DEVICE int in_codes(PrefillCodesParams const& params, int seqlen_k) { return seqlen_k & -params.group_tokens; }

  static CUTLASS_DEVICE uint2 load_8_bytes(uint32_t from) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
  }
  static CUTLASS_DEVICE uint32_t load_4_bytes(uint32_t from) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
  }
  static CUTLASS_DEVICE uint32_t address_of(uint32_t base, int row, int vector) {
    return base + row * kRowBytes + (vector ^ row / 2) % 4 * 16;
  }

  // ---- codes ----------------------------------------------------------------------------------------------------------------------

  /// Of the lane's four channels of 16: two pairs of f16 each.
  struct KeyScales {
    uint2 scale, minimum;
    KeyScales() = default;
    /// unit: the unit's address; step: of 16 channels.
    CUTLASS_DEVICE KeyScales(uint32_t unit, int step, int lane) {
      uint32_t const at = unit + 32 * step + lane % 4 * 8;
      scale = load_8_bytes(at);
      minimum = load_8_bytes(at + kUnitBytes / 2);
    }
  };
  /// The address of lane 4 g + c's vector of codes of row g of eight, from row `row`, a multiple of 8, on; a row has kRowBytes.
  static CUTLASS_DEVICE uint32_t address_of_keys(uint32_t base, int row, int vector, int lane) {
    return base + row * kRowBytes + uint32_t(lane) / 4 * kRowBytes + (uint32_t(vector) ^ uint32_t(lane) / 8) % 4 * 16;
  }
  static CUTLASS_DEVICE uint4 load_keys(uint32_t from) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
  }
  /// The lane's four channels of 16 whose codes are low and high.
  static CUTLASS_DEVICE void convert_keys(uint32_t low, uint32_t high, KeyScales const& s, Constants const& c, uint32_t& a0, uint32_t& a2) {
    auto const pair_of = [&](uint32_t selector) {  // as Converter::pair_of_int4
      uint32_t const biased = (__byte_perm(low, high, selector) & 0x00f0000fu) | c.bias;
      return Converter::multiply_add(biased, c.factors, 0xd400e400u);
    };
    a0 = Converter::multiply_add(pair_of(c.selector), s.scale.x, s.minimum.x);
    a2 = Converter::multiply_add(pair_of(c.selector + 0x1111u), s.scale.y, s.minimum.y);
  }

  /// Of tokens 2 c, 2 c + 1 of 16, and of those 8 behind them.
  struct ValueScales {
    uint32_t scale[2], minimum[2];
    ValueScales() = default;
    /// unit: the unit's address; half: of its tokens; plane: of the channels' scales; planes: scales of a token.
    CUTLASS_DEVICE ValueScales(uint32_t unit, int half, int plane, int planes, int lane) {
      uint32_t const at = unit + plane * (2 * kUnit) + half * 32 + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scale[i] = load_4_bytes(at + 16 * i);
        minimum[i] = load_4_bytes(at + 16 * i + planes * (2 * kUnit));
      }
    }
  };
  /// Rows g and g + 8 of a row tile of values, from two codes each of two tokens, which are the lower ones of both halves of x.
  static CUTLASS_DEVICE void convert_values(uint32_t x, uint32_t scale, uint32_t minimum, Constants const& c, uint32_t& low,
                                            uint32_t& high) {
    uint32_t const code = Converter::multiply_add((x & 0x000f000fu) | c.bias, 0x3c003c00u, 0xe400e400u);
    uint32_t const second = Converter::multiply_add((x & 0x00f000f0u) | c.bias, 0x2c002c00u, 0xd400d400u);
    low = Converter::multiply_add(code, scale, minimum);
    high = Converter::multiply_add(second, scale, minimum);
  }

  // ---- the residual ---------------------------------------------------------------------------------------------------------------

  /// The residual's numbers of a KV head; tokens outside of [begin, end) are zeros and are not read.
  struct Residual {
    char const* first;  // of token in_codes
    int64_t token_bytes;
    int in_codes, begin, end, head_dim;

    CUTLASS_DEVICE Residual(PrefillCodesParams const& params, QuantizedRows const& side, int batch, int kv_head, int in_codes, int begin,
                            int end)
        : first(static_cast<char const*>(side.residual) +
                (int64_t(batch) * params.group_tokens * params.heads_kv + kv_head) * side.head_dim * 2),
          token_bytes(int64_t(params.heads_kv) * side.head_dim * 2),
          in_codes(in_codes),
          begin(max(begin, in_codes)),
          end(end),
          head_dim(side.head_dim) {}

    /// Four channels of a token as two pairs of f16.
    CUTLASS_DEVICE uint2 load(int token, int channel) const {
      uint2 x = make_uint2(0, 0);
      if (token >= begin && token < end && channel < head_dim) {
        auto const* const from = first + (token - in_codes) * token_bytes + channel * 2;
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(from));
      }
      if constexpr (kQueryType != DataType::kF16) x = make_uint2(Converter::as_type(x.x), Converter::as_type(x.y));
      return x;
    }
    /// The A operand of keys `token` to token + 15, channels 16 step to 16 step + 15.
    CUTLASS_DEVICE void load_keys(int token, int step, int lane, uint32_t (&a)[4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint2 const x = load(token + lane / 4 + 8 * i, 16 * step + lane % 4 * 4);
        a[i] = x.x, a[2 + i] = x.y;
      }
    }
    /// The A operands of both row tiles of values `token` to token + 15, channels 32 vector to 32 vector + 31.
    CUTLASS_DEVICE void load_values(int token, int vector, int lane, uint32_t (&a)[2][4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const at = token + 2 * (lane % 4) + 8 * i, channel = 32 * vector + lane / 4 * 4;
        uint2 const x = load(at, channel), y = load(at + 1, channel);
        a[0][2 * i] = __byte_perm(x.x, y.x, 0x5410), a[0][2 * i + 1] = __byte_perm(x.x, y.x, 0x7632);
        a[1][2 * i] = __byte_perm(x.y, y.y, 0x5410), a[1][2 * i + 1] = __byte_perm(x.y, y.y, 0x7632);
      }
    }
    /// That of one of them.
    CUTLASS_DEVICE void load_values(int token, int vector, int row_tile, int lane, uint32_t (&a)[4]) const {
      uint2 x[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) x[i][j] = load(token + 2 * (lane % 4) + 8 * i + j, 32 * vector + lane / 4 * 4);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t const first = row_tile == 0 ? x[i][0].x : x[i][0].y, second = row_tile == 0 ? x[i][1].x : x[i][1].y;
        a[2 * i] = __byte_perm(first, second, 0x5410), a[2 * i + 1] = __byte_perm(first, second, 0x7632);
      }
    }
  };

  /// Prefetches the residual's keys and values of a KV head; called by a whole warp, before others read them.
  static CUTLASS_DEVICE void prefetch_residual(PrefillCodesParams const& params, int batch, int kv_head, int seqlen_k, int lane) {
    int const tokens = seqlen_k - in_codes(params, seqlen_k);
    if (tokens == 0) return;
    for (auto const* side : {&params.keys, &params.values}) {
      int const row_bytes = side->head_dim * 2;
      int64_t const stride = int64_t(params.heads_kv) * row_bytes;
      prefetch_rows(static_cast<char const*>(side->residual) + batch * params.group_tokens * stride + int64_t(kv_head) * row_bytes, stride,
                    row_bytes, tokens, lane);
    }
  }

  // ---- scales into shared memory --------------------------------------------------------------------------------------------------

  /// What a lane copies of a unit's scales: plane `plane`, if the cache has it, of keys or values whose codes are at `location`. Planes of
  /// pages that are not in the cache become zeros at once.
  struct PlaneCopy {
    void const* from = nullptr;  // of what a bulk copy takes; null: nothing
    uint32_t to, bytes;

    /// unit: the unit's address.
    CUTLASS_DEVICE PlaneCopy(PrefillCodesParams const& params, bool keys, int kv_head, PageTable::Location location, uint32_t unit,
                             int plane) {
      QuantizedRows const& side = keys ? params.keys : params.values;
      int const planes = keys ? 2 : 2 * params.groups_v, plane_bytes = keys ? kUnitBytes / 2 : 2 * kUnit;
      bytes = keys ? 2 * side.head_dim : 2 * kUnit;
      to = unit + plane * plane_bytes;
      if (plane >= planes) return;
      bool const has = params.has(location.page) && location.row < params.page_size;
      for (int i = has ? int(bytes) : 0; i < plane_bytes; i += 16) {  // channels behind head_dim, too: 0 * NaN is NaN
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
      }
      if (!has || plane_bytes > int(bytes)) cutlass::arch::fence_view_async_shared();  // before bulk copies to the same place
      if (!has) return;
      int const shift = params.group_tokens == 64 ? 6 : 5;
      int64_t const group = int64_t(kv_head) * (params.page_size >> shift) + (location.row >> shift);
      int64_t const in_page =
          keys ? (2 * group + plane) * side.head_dim : (int64_t(kv_head) * planes + plane) * params.page_size + location.row;
      auto const* const scales = static_cast<uint16_t const*>(side.scale) + location.page * side.scale_page + in_page;
      if (reinterpret_cast<uint64_t>(scales) % 16 == 0) {
        from = scales;
      } else {
        for (uint32_t i = 0; i < bytes / 2; ++i) {
          asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * i), "h"(load_operand(scales + i)) : "memory");
        }
        cutlass::arch::fence_view_async_shared();
      }
    }
  };
};

}  // namespace minfer::attention
