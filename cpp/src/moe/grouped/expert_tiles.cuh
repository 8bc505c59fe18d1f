// The tile scheduler of grouped GEMM. How many rows each expert has is known on the device only, so every CTA computes the table of tiles
// when it starts.
//
// An expert's rows are divided into as few equal tiles of tokens as the kernel's tile size allows, so that a ragged end does not cost a
// tile of the full size. The output tiles of an expert are its token tiles times the tiles of its weight. Tiles are numbered expert by
// expert; inside an expert, panels of kPanel token tiles walk along the weight, the panel's tiles side by side: CTAs that run together read
// few weight rows and few tokens.
#pragma once

#include <cstdint>

#include "common/block_scan.cuh"
#include "common/dependent_launch.cuh"
#include "minfer/moe.h"

namespace minfer::moe {

/// The rows of A in expert order. offsets[e] is where expert e's rows end and those of the next begin; masked: how many of the expert's
/// max_rows rows are used.
struct ExpertRows {
  int32_t const* offsets;  // [experts]
  int32_t experts;
  int32_t rows;  // of a; masked: max_rows
  bool masked;
};

struct ExpertTile {
  int32_t expert = 0;
  int32_t weight_tile = 0;
  int32_t row = 0;     // the first, of A and D
  int32_t tokens = 0;  // 1 to kTileN
  bool alone = true;   // no other tile reads these weights
};

/// Token tiles of a panel. With these, 132 CTAs cover about as many weight rows as tokens, which makes the fewest bytes pass through L2
/// (Mixtral's w2 with 16384 tokens in 128 x 256 tiles: 6320 us in panels of 12, 6100 us in panels of 8).
constexpr int panel_of(int tile_m, int tile_n) { return tile_m >= 2 * tile_n ? 16 : tile_m >= tile_n ? 12 : tile_n < 2 * tile_m ? 10 : 8; }

template <int kTileN, int kStep, int kPanel>
struct ExpertTiles {
  struct Storage {
    int32_t first_tile[kMaxGroupedExperts + 1];
    int32_t first_row[kMaxGroupedExperts];
    int32_t count[kMaxGroupedExperts];
    int32_t warp_total[32];
  };

  /// Saturates: tile numbers stay within 32 bits where offsets do not ascend and the experts' rows overlap, and one grid behind the last
  /// tile.
  static __device__ __forceinline__ int32_t add(int32_t x, int32_t y) {
    constexpr uint32_t kMaxTiles = 0x7fffffffu - 0xffffu;
    return int32_t(min(uint32_t(x) + uint32_t(y), kMaxTiles));
  }

  /// Called by all `threads` of the CTA after the wait for the predecessor; ends with a barrier. `weight_tiles`: of an expert.
  static __device__ void build(Storage& storage, ExpertRows const& rows, int weight_tiles, int thread, int threads) {
    int const lane = thread % 32, warp = thread / 32;
    int32_t carry = 0;
    if (thread == 0) storage.first_tile[0] = 0;
#pragma unroll 1
    for (int base = 0; base < rows.experts; base += threads) {
      int const e = base + thread;
      int32_t tiles = 0;
      if (e < rows.experts) {
        int32_t const limit = rows.rows, value = load_operand(rows.offsets + e);
        int32_t const before = rows.masked || e == 0 ? 0 : min(max(load_operand(rows.offsets + e - 1), 0), limit);
        int32_t const count = min(max(value, before), limit) - before;
        storage.first_row[e] = rows.masked ? e * limit : before;
        storage.count[e] = count;
        tiles = (count + kTileN - 1) / kTileN * weight_tiles;
      }
      int32_t all_tiles;
      int32_t const sum = block_inclusive_scan(tiles, storage.warp_total, lane, warp, threads / 32, &all_tiles, add);
      if (e < rows.experts) storage.first_tile[e + 1] = add(carry, sum);
      carry = add(carry, all_tiles);
      __syncthreads();
    }
  }

  static __device__ int32_t count(Storage const& storage, ExpertRows const& rows) { return storage.first_tile[rows.experts]; }

  /// expert: that of an earlier tile, from which the search begins; then this one's.
  static __device__ ExpertTile at(Storage const& storage, ExpertRows const& rows, int weight_tiles, int32_t tile, int& expert) {
    int low = expert,
        high = storage.first_tile[expert + 1] > tile ? expert + 1 : rows.experts;  // first_tile[low] <= tile < first_tile[high]
    while (high - low > 1) {
      int const middle = (low + high) / 2;
      if (storage.first_tile[middle] <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    ExpertTile found;
    found.expert = expert = low;
    int32_t const rows_of = storage.count[low], token_tiles = (rows_of + kTileN - 1) / kTileN;
    int32_t const in_expert = tile - storage.first_tile[low], panel = in_expert / (kPanel * weight_tiles);
    int32_t const in_panel = in_expert - panel * (kPanel * weight_tiles);
    int32_t const width = token_tiles - panel * kPanel < kPanel ? token_tiles - panel * kPanel : kPanel;
    found.weight_tile = in_panel / width;
    int32_t const token_tile = panel * kPanel + in_panel - found.weight_tile * width;
    int32_t const step = ((rows_of + token_tiles - 1) / token_tiles + kStep - 1) / kStep * kStep;
    int32_t const begin = token_tile * step;
    found.row = storage.first_row[low] + begin;
    found.tokens = rows_of - begin < step ? rows_of - begin : step;
    found.alone = token_tiles == 1;
    return found;
  }
};

}  // namespace minfer::moe
