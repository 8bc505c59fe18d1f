// Scales of a slice of codes on their way into shared memory by cp.async, by a warp: int8's and int4's, as decode_traits.cuh lays them out.
#pragma once

#include "attention/decode/boxes.cuh"
#include "attention/decode/traits.cuh"
#include "common/mma_sm80.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeScales : Traits {
  using Traits::kGroupBytes, Traits::kHeadDim, Traits::kInt4, Traits::kInt8, Traits::kMaxGroups, Traits::kSlice;
  using typename Traits::Pieces;

  /// Where the scales of a token of keys (kWhich = 0) or values begin; int4: of its group, the first plane. Of a page that there is.
  template <int kWhich>
  static CUTLASS_DEVICE char const* source_of(DecodeParams const& params, int kv_head, int64_t page, int64_t row) {
    if constexpr (kInt8) {
      auto const* const scale = static_cast<float const*>(kWhich == 0 ? params.k_scale : params.v_scale);
      return reinterpret_cast<char const*>(scale + page * params.k_scale_page + int64_t(kv_head) * params.page_size + row);
    } else if constexpr (kWhich == 0) {
      int64_t const group = int64_t(kv_head) * params.groups_of_page + (row >> group_shift(params));
      return static_cast<char const*>(params.k_scale) + (page * params.k_scale_page + group * 2 * params.head_dim) * 2;
    } else {
      int64_t const plane = int64_t(kv_head) * 2 * params.groups_v;
      return static_cast<char const*>(params.v_scale) + (page * params.v_scale_page + plane * params.page_size + row) * 2;
    }
  }

  /// Of a slice's keys or values; `to` has kScaleBytes. Of channels and groups that the cache does not have, nothing is written. kAll: all pages
  /// are there; else zeros are the scales of those that are not. By the whole warp.
  template <int kWhich, bool kAll>
  static CUTLASS_DEVICE void load(DecodeParams const& params, uint32_t to, int kv_head, DecodeBoxes<Pieces> const& boxes, int first_box,
                                  int lane) {
    uint32_t const in_box = uint32_t(params.box_rows) - 1, shift = uint32_t(31 - __clz(params.box_rows));
    auto const source = [&](int token) -> char const* {
      int const box = first_box + (token >> shift), page = boxes.page_of(box), row = boxes.row_of(box) + int(token & in_box);
      return kAll || params.has(page) ? source_of<kWhich>(params, kv_head, page, row) : nullptr;
    };
    load_from<kWhich, kAll>(params, to, source, lane);
  }
  /// The same where the slice is of one box, whose scales are at `from`.
  template <int kWhich>
  static CUTLASS_DEVICE void load_box(DecodeParams const& params, uint32_t to, char const* from, int lane) {
    auto const source = [&](int token) {
      return from + (kInt8 ? token * 4 : kWhich == 1 ? token * 2 : (token >> group_shift(params)) * (4 * params.head_dim));
    };
    load_from<kWhich, true>(params, to, source, lane);
  }

  /// Into L2: of slices from `slice` on, `slices` or fewer, each of one box.
  template <int kWhich>
  static CUTLASS_DEVICE void prefetch(DecodeParams const& params, int kv_head, DecodeBoxes<Pieces> const& boxes, int slice, int slices,
                                      int lane) {
    constexpr int kLines = kInt8 ? 1 : 8, kAtOnce = 32 / kLines;  // of 128 bytes, of a slice; slices
    int const mine = slice + lane / kLines, line = lane % kLines;
    int const page = boxes.page_of(mine);
    char const* from = source_of<kWhich>(params, kv_head, page, boxes.row_of(mine));
    bool wanted = params.has(page) && lane / kLines < min(slices, kAtOnce) && mine / 32 == boxes.window;
    if constexpr (kInt4 && kWhich == 0) {
      from += line * 128;
      wanted = wanted && line * 128 < 4 * params.head_dim * max(kSlice / params.group_tokens, 1);
    } else if constexpr (kInt4) {
      from += int64_t(line) * params.page_size * 2;
      wanted = wanted && line < 2 * params.groups_v;
    }
    if (wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }

 private:
  static CUTLASS_DEVICE int group_shift(DecodeParams const& params) { return params.group_tokens == 64 ? 6 : 5; }

  /// 16 bytes; zeros, not kAll, where `from` is null.
  template <bool kAll>
  static CUTLASS_DEVICE void copy_scales(uint32_t to, char const* from, bool is_there) {
    if constexpr (kAll) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
      copy_async_16(to, from, is_there ? 16 : 0);
    }
  }

  /// source(token): source_of a token of the slice, not kAll: null where there is no page; called by the whole warp.
  template <int kWhich, bool kAll, class Source>
  static CUTLASS_DEVICE void load_from(DecodeParams const& params, uint32_t to, Source const& source, int lane) {
    if constexpr (kInt8) {
      constexpr int kLanes = kSlice / 4;  // with 4 tokens each
      char const* const from = source(lane % kLanes * 4);
      if (lane < kLanes) copy_scales<kAll>(to + kWhich * kSlice * 4 + lane * 16, from, from != nullptr);
    } else if constexpr (kWhich == 0) {
      int const chunks = params.head_dim / 8;  // of 16 bytes
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        int const token = g << group_shift(params);
        if (token >= kSlice) break;
        char const* const from = source(token);
#pragma unroll
        for (int first = 0; first < kHeadDim / 4; first += 32) {
          int const i = first + lane;
          if (i < 2 * chunks) {
            int const at = i < chunks ? i : kHeadDim / 8 + i - chunks;
            copy_scales<kAll>(to + g * kGroupBytes + at * 16, from + i * 16, from != nullptr);
          }
        }
      }
    } else {
      constexpr int kLanes = kSlice / 8, kAtOnce = 32 / kLanes;  // with 8 tokens of a plane each; planes at a time
      char const* from = source(lane % kLanes * 8);
      bool const is_there = from != nullptr;
      from += int64_t(lane / kLanes) * params.page_size * 2;
      to += kMaxGroups * kGroupBytes + lane * 16;
      for (int plane = lane / kLanes; plane < 2 * params.groups_v; plane += kAtOnce) {
        copy_scales<kAll>(to, from, is_there);
        from += int64_t(kAtOnce) * params.page_size * 2;
        to += 32 * 16;
      }
    }
  }
};

}  // namespace minfer::attention
