#include <cstdint>

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
