#include "gemm/tile_order.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace minfer::gemm {

namespace {

/// CTAs with neighbouring numbers that mostly run in one GPC, where what several of them read of L2 is sent once (tile_scheduler.h).
constexpr double kNeighbours = 16;

/// Workers of `cluster` CTAs that are neighbours.
int64_t neighbours_of(double cluster) { return std::max<int64_t>(1, int64_t(kNeighbours / cluster + 0.5)); }

/// What is read again while no more bytes than these came through L2 is mostly still there: less than its half, since each of its halves
/// has its own copy of what SMs of both read.
double shared_l2_bytes(DeviceProperties const& device) { return 0.4 * double(device.l2_bytes); }

/// The share of what was read once that L2 still has after `bytes` more.
double share_held(double bytes, double l2_bytes) { return l2_bytes > 0 ? std::clamp(2.5 - 2.0 * bytes / l2_bytes, 0.0, 1.0) : 0.0; }

/// Of the CTAs that read the same line of A, along m, this share reads it from memory again where all that run together read more than L2
/// holds: they do not keep pace. Along n, where they have B in common, they do: a producer waits for A first, so that who comes late to A
/// comes later still to B. (bf16, 3369 x 57344 x 8192, tiles of 128 x 128, bands of 8, on an H100: 20 GB are read along m, 6 along n;
/// with B loaded before A the difference was half of that.) Kernels with tiles of any width were not seen to do so.
constexpr double kApart = 0.25;

/// What the lines that all running CTAs read together cost, beside those that leave L2 for each GPC.
constexpr double kTogether = 0.5;

/// Tiles along the walk and across it, with the lines of a tile's operand in either direction.
struct Walk {
  double along, across, along_lines, across_lines;

  /// Lines that `workers` tiles, which follow each other `side` by side, read together.
  double lines(double side, double workers) const {
    double const length = std::min(along, std::ceil(workers / side));
    double const width = std::min(across, std::max(side, std::ceil(workers / length)));
    return length * along_lines + width * across_lines;
  }
  /// The same on average over all bands of `side` tiles and the last one, which may be narrower.
  double mean_lines(double side, double workers) const {
    side = std::min(side, across);
    double const rest = across - side * std::floor(across / side);
    return rest == 0 ? lines(side, workers) : (lines(side, workers) * (across - rest) + lines(rest, workers) * rest) / across;
  }
  /// Lines that the whole walk of `workers` tiles at a time reads from memory: the operand across in each band, the other one again for
  /// each band, less what L2 still holds. `apart`: kApart, or 0; `line_bytes`: of a line, `tile_bytes`: of a tile's output.
  double memory_lines(double side, double workers, double apart, double line_bytes, double tile_bytes, double l2_bytes) const {
    side = std::min(side, across);
    double const full = std::floor(across / side);
    double again = 0;
    for (auto const& [width, bands] : {std::pair{side, full}, std::pair{across - side * full, 1.0}}) {
      if (width <= 0) continue;
      bool const several = along * width >= workers;  // waves in a band; else bands in a wave
      double const length = several ? workers / width : along, beside = several ? width : workers / along;
      double const wave = (length * along_lines + beside * across_lines) * line_bytes + workers * tile_bytes;
      double const band = (along * along_lines + width * across_lines) * line_bytes + along * width * tile_bytes;
      double lines = along * along_lines * (several ? bands : bands * width / beside) * (1.0 - share_held(several ? band : wave, l2_bytes));
      if (l2_bytes > 0) lines *= 1.0 + (width - 1.0) * apart * std::clamp(wave / l2_bytes - 1.0, 0.0, 1.0);
      again += lines;
      if (several) again += bands * (along * width / workers - 1.0) * width * across_lines * (1.0 - share_held(wave, l2_bytes));
    }
    return across * across_lines + std::max(again, along * along_lines);
  }
};

}  // namespace

void choose_order(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device, GemmLaunch* launch) {
  launch->raster_order = RasterOrder::kAlongM;
  launch->max_swizzle_size = 1;
  TileSchedulerParams const schedule = schedule_of(kernel, problem, *launch, device);
  int64_t const tiles_m = schedule.tiles_m, tiles_n = schedule.tiles_n;
  if (tiles_m <= 1 || tiles_n <= 1) return;
  // In lines of A; those of a quantised weight count by its bits.
  double const weight = kernel.b_format == WeightFormat::kDense ? 1.0 : bits_of(kernel.b_format) / (8.0 * size_of(kernel.ab_type));
  double const rows = double(kernel.tile_m) * kernel.cluster_m, columns = double(tile_columns(kernel, *launch)) * kernel.cluster_n;
  double const row_lines = (kernel.swap ? weight : 1.0) * rows, column_lines = (kernel.swap ? 1.0 : weight) * columns;
  double const line_bytes = double(problem.k) * double(size_of(kernel.ab_type));
  double const tile_bytes = rows * columns * double(d_element_bytes(problem)) / (problem.gated ? 2.0 : 1.0);
  int64_t const workers = std::min<int64_t>(resident_workers(kernel, device), tiles_m * tiles_n);
  int64_t const neighbours = std::min(workers, neighbours_of(double(kernel.cluster_m) * kernel.cluster_n));
  double const groups = double(workers) / double(neighbours), waves = double(tiles_m * tiles_n) / double(workers);
  double least = 0;
  for (RasterOrder raster : {RasterOrder::kAlongM, RasterOrder::kAlongN}) {
    bool const along_m = raster == RasterOrder::kAlongM;
    double const apart = along_m && kernel.column_step == 0 ? kApart : 0.0;
    Walk const walk = along_m ? Walk{double(tiles_m), double(tiles_n), row_lines, column_lines}
                              : Walk{double(tiles_n), double(tiles_m), column_lines, row_lines};
    for (int swizzle : kSwizzles) {
      double const read = groups * walk.mean_lines(swizzle, double(neighbours)) + kTogether * walk.mean_lines(swizzle, double(workers));
      double const lines =
          waves * read + walk.memory_lines(swizzle, double(workers), apart, line_bytes, tile_bytes, shared_l2_bytes(device));
      if (least == 0 || lines < least) {
        least = lines;
        launch->raster_order = raster;
        launch->max_swizzle_size = swizzle;
      }
      if (swizzle >= walk.across) break;
    }
  }
}

}  // namespace minfer::gemm
