#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/fast_division.h"
#include "gemm/tile_scheduler.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::gemm;

// 3 x 2^20 tiles walked 4096 side by side: along * swizzle is 2^32. The walk is that of all 3 side by side.
TEST_CASE(schedule_of_a_wide_swizzle_fits_32_bits) {
  for (RasterOrder raster : {RasterOrder::kAlongM, RasterOrder::kAlongN}) {
    bool const along_n = raster == RasterOrder::kAlongN;
    int64_t const tiles_m = along_n ? 3 : 1 << 20, tiles_n = along_n ? 1 << 20 : 3;
    auto const schedule = [&](int32_t swizzle) {
      return make_schedule(tiles_m, tiles_n, 1, 8, 132, Decomposition::kDataParallel, 1, swizzle, raster);
    };
    TileSchedulerParams const wide = schedule(4096), all = schedule(3);
    CHECK(int64_t(wide.swizzle) * (1 << 20) <= INT32_MAX);
    for (int32_t tile : {0, 1, 2, 3, 1000000, 3145727}) {
      TileCoord const a = TileScheduler::coordinate(wide, tile), b = TileScheduler::coordinate(all, tile);
      CHECK_EQUAL(a.m, b.m);
      CHECK_EQUAL(a.n, b.n);
      CHECK(a.m >= 0 && a.m < tiles_m && a.n >= 0 && a.n < tiles_n);
    }
    CHECK_EQUAL(schedule(8).swizzle, 8);  // where the products fit, as asked
  }
}

// Against the machine's division: divisors at and beside powers of two, dividends at and beside multiples and at the end of the range.
TEST_CASE(fast_division_is_exact) {
  auto const check = [](int64_t divisor) {
    if (divisor < 1 || divisor > INT32_MAX) return;
    FastDivisor const by(divisor);
    CHECK_EQUAL(int64_t(by.divisor()), divisor);
    int64_t const most = INT32_MAX / divisor;
    for (int64_t quotient : {int64_t(0), int64_t(1), int64_t(2), int64_t(7), most / 3, most / 2, most - 1, most}) {
      for (int64_t beside = -2; beside <= 2; ++beside) {
        int64_t const x = quotient * divisor + beside;
        if (x >= 0 && x <= INT32_MAX) CHECK_EQUAL(int64_t(by.quotient(int32_t(x))), x / divisor);
      }
    }
    CHECK_EQUAL(int64_t(by.quotient(INT32_MAX)), INT32_MAX / divisor);
  };
  for (int64_t divisor = 1; divisor <= 4096; ++divisor) check(divisor);
  for (int bit = 12; bit < 31; ++bit) {
    for (int64_t beside = -3; beside <= 3; ++beside) {
      check((int64_t(1) << bit) + beside);
      check(3 * (int64_t(1) << (bit - 1)) + beside);
    }
  }
  check(INT32_MAX);
  CHECK_EQUAL(FastDivisor().quotient(5), 5);   // divides by 1
  CHECK_EQUAL(FastDivisor(0).quotient(5), 5);  // as of an empty problem
}

// Every tile has coordinates of its own, in a whole last band and in one that is not, with a batch and without.
TEST_CASE(schedule_visits_every_tile_once) {
  for (int64_t batch : {1, 3}) {
    for (int32_t swizzle : {1, 2, 3, 4, 8, 100}) {
      for (RasterOrder raster : {RasterOrder::kAlongM, RasterOrder::kAlongN}) {
        for (int64_t tiles_m : {1, 2, 7, 12}) {
          for (int64_t tiles_n : {1, 3, 8, 13}) {
            TileSchedulerParams const p = make_schedule(tiles_m, tiles_n, batch, 8, 132, Decomposition::kDataParallel, 1, swizzle, raster);
            std::vector<int> seen(size_t(p.tiles()), 0);
            for (int32_t tile = 0; tile < p.tiles(); ++tile) {
              TileCoord const at = TileScheduler::coordinate(p, tile);
              CHECK(at.m >= 0 && at.m < tiles_m && at.n >= 0 && at.n < tiles_n && at.l >= 0 && at.l < batch);
              ++seen[size_t((at.l * tiles_m + at.m) * tiles_n + at.n)];
            }
            for (int count : seen) CHECK_EQUAL(count, 1);
          }
        }
      }
    }
  }
}

// The order in which a tile's owner adds up split-K's sums: its own, which is the last range's, then those of the others, ascending.
TEST_CASE(ranges_in_place_are_those_of_split_k) {
  for (int32_t k_tiles : {1, 2, 7, 32, 112}) {
    for (int32_t splits : {1, 2, 3, 4, 8, 100}) {
      for (int32_t tiles : {1, 5, 300}) {
        auto const items_of = [&](Decomposition decomposition, bool in_place) {
          TileSchedulerParams const p = make_schedule(tiles, 1, 1, k_tiles, 132, decomposition, splits, 1, RasterOrder::kAlongM);
          std::vector<WorkItem> items;
          for (int32_t worker = 0; worker < p.workers; ++worker) {
            TileScheduler scheduler(p, worker);
            auto const next = [&] { return in_place ? scheduler.next<true>() : scheduler.next(); };
            for (WorkItem item = next(); item.valid; item = next()) {
              if (p.in_place) CHECK(item.in_place && item.first_partial == worker && (item.owner() || item.slot == worker));
              items.push_back(item);
            }
          }
          return items;
        };
        std::vector<WorkItem> split = items_of(Decomposition::kSplitK, false), ranges = items_of(Decomposition::kRanges, true);
        std::sort(split.begin(), split.end(), [](WorkItem const& a, WorkItem const& b) {
          return std::tuple(a.tile, !a.owner(), a.slot) < std::tuple(b.tile, !b.owner(), b.slot);
        });
        std::stable_sort(ranges.begin(), ranges.end(), [](WorkItem const& a, WorkItem const& b) { return a.tile < b.tile; });
        CHECK_EQUAL(split.size(), ranges.size());
        for (size_t i = 0; i < split.size() && i < ranges.size(); ++i) {
          bool const first = i == 0 || ranges[i - 1].tile != ranges[i].tile;
          bool const last = i + 1 == ranges.size() || ranges[i + 1].tile != ranges[i].tile;
          CHECK_EQUAL(ranges[i].tile, split[i].tile);
          CHECK_EQUAL(ranges[i].k_begin, split[i].k_begin);
          CHECK_EQUAL(ranges[i].k_count, split[i].k_count);
          CHECK_EQUAL(ranges[i].owner(), last);
          CHECK_EQUAL(ranges[i].partials, first ? 0 : 1);
        }
      }
    }
  }
}
