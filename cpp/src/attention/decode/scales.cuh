// Copies the scales of a key block (int8, int4) to shared memory by cp.async, by a warp, in the layout of traits.cuh.
#pragma once

#include "attention/decode/boxes.cuh"
#include "attention/decode/traits.cuh"
#include "common/mma_sm80.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeScales : Traits {
  using Traits::kGroupBytes, Traits::kHeadDim, Traits::kInt4, Traits::kInt8, Traits::kMaxGroups, Traits::kTileN;
  using typename Traits::TileScheduler;

  /// Where the scales of a token of keys (kWhich = 0) or of values begin; int4: those of its group, in the first plane. The page must be in
  /// the cache.
  template <int kWhich>
  static CUTLASS_DEVICE char const* source_of(DecodeParams const& params, int kv_head, int64_t page, int64_t row) {
    if constexpr (kInt8) {
      auto const* const scale = static_cast<float const*>(kWhich == 0 ? params.k_scale : params.v_scale);
      return reinterpret_cast<char const*>(scale + page * params.k_scale_page + int64_t(kv_head) * params.page_size + row);
    } else if constexpr (kWhich == 0) {
      int64_t const group = int64_t(kv_head) * params.token_groups_of_page + (row >> group_shift(params));
      return static_cast<char const*>(params.k_scale) + (page * params.k_scale_page + group * 2 * params.head_dim) * 2;
    } else {
      int64_t const plane = int64_t(kv_head) * 2 * params.groups_v;
      return static_cast<char const*>(params.v_scale) + (page * params.v_scale_page + plane * params.page_size + row) * 2;
    }
  }

  /// Begins the copies for a block's keys or values, by the whole warp; `to` has kScaleBytes. Nothing is written for channels and groups
  /// that the cache does not have. kAll: all pages are in the cache; otherwise the scales of pages that are not are zeros.
  template <int kWhich, bool kAll>
  static CUTLASS_DEVICE void load(DecodeParams const& params, uint32_t to, int kv_head, DecodeBoxes<TileScheduler> const& boxes,
                                  int first_box, int lane) {
    uint32_t const in_box = uint32_t(params.box_rows) - 1, shift = uint32_t(31 - __clz(params.box_rows));
    auto const source = [&](int token) -> char const* {
      int const box = first_box + (token >> shift), page = boxes.page_of(box), row = boxes.row_of(box) + int(token & in_box);
      return kAll || params.has(page) ? source_of<kWhich>(params, kv_head, page, row) : nullptr;
    };
    load_from<kWhich, kAll>(params, to, source, lane);
  }
  /// The same for a key block that is one box, whose scales begin at `from`.
  template <int kWhich>
  static CUTLASS_DEVICE void load_box(DecodeParams const& params, uint32_t to, char const* from, int lane) {
    auto const source = [&](int token) {
      return from + (kInt8 ? token * 4 : kWhich == 1 ? token * 2 : (token >> group_shift(params)) * (4 * params.head_dim));
    };
    load_from<kWhich, true>(params, to, source, lane);
  }

  /// Prefetches the scales of up to `blocks` key blocks from `block` on into L2; each block is one box.
  template <int kWhich>
  static CUTLASS_DEVICE void prefetch(DecodeParams const& params, int kv_head, DecodeBoxes<TileScheduler> const& boxes, int block,
                                      int blocks, int lane) {
    constexpr int kLines = kInt8 ? 1 : 8, kAtOnce = 32 / kLines;  // lines of 128 bytes in a key block; key blocks at a time
    int const lane_block = block + lane / kLines, line = lane % kLines;
    int const page = boxes.page_of(lane_block);
    char const* from = source_of<kWhich>(params, kv_head, page, boxes.row_of(lane_block));
    bool wanted = params.has(page) && lane / kLines < min(blocks, kAtOnce) && lane_block / 32 == boxes.batch;
    if constexpr (kInt4 && kWhich == 0) {
      from += line * 128;
      wanted = wanted && line * 128 < 4 * params.head_dim * max(kTileN / params.group_tokens, 1);
    } else if constexpr (kInt4) {
      from += int64_t(line) * params.page_size * 2;
      wanted = wanted && line < 2 * params.groups_v;
    }
    if (wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }

 private:
  static CUTLASS_DEVICE int group_shift(DecodeParams const& params) { return params.group_tokens == 64 ? 6 : 5; }

  /// Copies 16 bytes; without kAll, zeros where the page is not in the cache.
  template <bool kAll>
  static CUTLASS_DEVICE void copy_scales(uint32_t to, char const* from, bool is_there) {
    if constexpr (kAll) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    } else {
      copy_async_16(to, from, is_there ? 16 : 0);
    }
  }

  /// source(token): source_of() a token of the block, or without kAll null where its page is not in the cache; called by the whole warp.
  template <int kWhich, bool kAll, class Source>
  static CUTLASS_DEVICE void load_from(DecodeParams const& params, uint32_t to, Source const& source, int lane) {
    if constexpr (kInt8) {
      constexpr int kLanes = kTileN / 4;  // each copies 4 tokens
      char const* const from = source(lane % kLanes * 4);
      if (lane < kLanes) copy_scales<kAll>(to + kWhich * kTileN * 4 + lane * 16, from, from != nullptr);
    } else if constexpr (kWhich == 0) {
      int const vectors = params.head_dim / 8;
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        int const token = g << group_shift(params);
        if (token >= kTileN) break;
        char const* const from = source(token);
#pragma unroll
        for (int first = 0; first < kHeadDim / 4; first += 32) {
          int const i = first + lane;
          if (i < 2 * vectors) {
            int const at = i < vectors ? i : kHeadDim / 8 + i - vectors;
            copy_scales<kAll>(to + g * kGroupBytes + at * 16, from + i * 16, from != nullptr);
          }
        }
      }
    } else {
      constexpr int kLanes = kTileN / 8, kAtOnce = 32 / kLanes;  // each copies 8 tokens of a plane; planes at a time
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
