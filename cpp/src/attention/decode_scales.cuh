// Scales of a slice of codes on their way into shared memory by cp.async, by a warp: int8's and int4's, as decode_traits.cuh lays them out.
#pragma once

#include "attention/decode_boxes.cuh"
#include "attention/decode_traits.cuh"
#include "common/mma_sm80.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeScales : Traits {
  using Traits::kGroupBytes, Traits::kHeadDim, Traits::kInt4, Traits::kInt8, Traits::kMaxGroups, Traits::kSlice;
  using typename Traits::Pieces;

  /// Of keys (kWhich = 0) or values; `to` has kScaleBytes. Of channels and groups that the cache does not have, nothing is written.
  template <int kWhich>
  static CUTLASS_DEVICE void load(DecodeParams const& params, uint32_t to, int kv_head, DecodeBoxes<Pieces> const& boxes, int first_box,
                                  int lane) {
    uint32_t const in_box = uint32_t(params.box_rows) - 1, shift = uint32_t(31 - __clz(params.box_rows));
    auto const page_at = [&](int token) { return int64_t(boxes.page_of(first_box + (token >> shift))); };
    auto const row_at = [&](int token) { return boxes.row_of(first_box + (token >> shift)) + int(token & in_box); };
    if constexpr (kInt8) {
#pragma unroll
      for (int first = 0; first < kSlice; first += 32) {
        int const token = first + lane;
        int64_t const page = page_at(token % kSlice), row = row_at(token % kSlice);
        int64_t const from = page * params.k_scale_page + int64_t(kv_head) * params.page_size + row;
        if (token < kSlice) {
          auto const* const scale = static_cast<float const*>(kWhich == 0 ? params.k_scale : params.v_scale);
          copy_async<4>(to + (kWhich * kSlice + token) * 4, scale + from);
        }
      }
    } else if constexpr (kInt4 && kWhich == 0) {
      int const group_shift = params.group_tokens == 64 ? 6 : 5, chunks = params.head_dim / 8;  // of 16 bytes
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        int const token = g << group_shift;
        if (token >= kSlice) break;
        int64_t const page = page_at(token), group = int64_t(kv_head) * params.groups_of_page + (row_at(token) >> group_shift);
        auto const* const from = static_cast<__half const*>(params.k_scale) + page * params.k_scale_page + group * 2 * params.head_dim;
#pragma unroll
        for (int first = 0; first < kHeadDim / 4; first += 32) {
          int const i = first + lane;
          if (i < 2 * chunks) copy_async<16>(to + g * kGroupBytes + (i < chunks ? i : kHeadDim / 8 + i - chunks) * 16, from + i * 8);
        }
      }
    } else if constexpr (kInt4) {
      constexpr int kChunks = kSlice / 8, kAtOnce = 32 / kChunks;  // of 8 tokens; planes at a time
      int const token = lane % kChunks * 8;
      int64_t const page = page_at(token), row = row_at(token), plane = int64_t(kv_head) * 2 * params.groups_v + lane / kChunks;
      auto const* from = static_cast<__half const*>(params.v_scale) + page * params.v_scale_page + plane * params.page_size + row;
      for (int p = lane / kChunks; p < 2 * params.groups_v; p += kAtOnce) {
        copy_async<16>(to + kMaxGroups * kGroupBytes + (p * kChunks + lane % kChunks) * 16, from);
        from += kAtOnce * params.page_size;
      }
    }
  }

  /// Into L2: of slices from `slice` on, `slices` or fewer, each of one box.
  template <int kWhich>
  static CUTLASS_DEVICE void prefetch(DecodeParams const& params, int kv_head, DecodeBoxes<Pieces> const& boxes, int slice, int slices,
                                      int lane) {
    constexpr int kLines = kInt8 ? 1 : 8, kAtOnce = 32 / kLines;  // of 128 bytes, of a slice; slices
    int const mine = slice + lane / kLines, line = lane % kLines;
    // A guess of the lengths and pages, which may be anything.
    int64_t const page = min(max(boxes.page_of(mine), 0), params.pages - 1), row = min(max(boxes.row_of(mine), 0), params.page_size - 1);
    char const* from;
    bool wanted = lane / kLines < min(slices, kAtOnce) && mine / 32 == boxes.window;
    if constexpr (kInt8) {
      auto const* const scale = static_cast<float const*>(kWhich == 0 ? params.k_scale : params.v_scale);
      from = reinterpret_cast<char const*>(scale + page * params.k_scale_page + int64_t(kv_head) * params.page_size + row);
    } else if constexpr (kWhich == 0) {
      int64_t const group = int64_t(kv_head) * params.groups_of_page + row / params.group_tokens;
      int const bytes = 4 * params.head_dim * max(kSlice / params.group_tokens, 1);
      from = static_cast<char const*>(params.k_scale) + (page * params.k_scale_page + group * 2 * params.head_dim) * 2 + line * 128;
      wanted = wanted && line * 128 < bytes;
    } else {
      int64_t const plane = int64_t(kv_head) * 2 * params.groups_v + line;
      from = static_cast<char const*>(params.v_scale) + (page * params.v_scale_page + plane * params.page_size + row) * 2;
      wanted = wanted && line < 2 * params.groups_v;
    }
    if (wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
};

}  // namespace minfer::attention
