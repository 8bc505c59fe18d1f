// Splits of a tile that are launched as a cluster: its partials go into the shared memory of the tile's owner (tiles_sm90.cuh).
#pragma once

#include "gemm/tile_scheduler.h"
#include "minfer/types.h"

namespace minfer::gemm {

constexpr int kMostClusterSplits = 8;

/// Whether the splits of each tile can be a cluster: all tiles' are resident at once, and a ring whose end the partials take has three
/// stages left. Clusters of other sizes than powers of two leave SMs idle: a plan without them was faster on average of the problems that
/// the 8-bit factors are fitted to.
inline bool fits_cluster(int64_t tiles, int32_t splits, DeviceProperties const& device, int64_t ring_bytes, int64_t stage_bytes,
                         int64_t partial_bytes) {
  if (splits != 2 && splits != 4 && splits != kMostClusterSplits) return false;
  int32_t const resident = device.max_clusters[splits / 4 + 1];
  return tiles <= resident && ring_bytes - (splits - 1) * partial_bytes >= 3 * stage_bytes;
}

/// The partials that a tile's owner receives where the splits of each tile are launched as a cluster; else 0.
inline int32_t cluster_partials(TileSchedulerParams const& schedule, DeviceProperties const& device, int32_t ring_bytes,
                                int32_t stage_bytes, int32_t partial_bytes) {
  bool const at_once = schedule.stream_tiles == 0 && schedule.workers == schedule.tiles() * schedule.splits;
  bool const fits = at_once && fits_cluster(schedule.tiles(), schedule.splits, device, ring_bytes, stage_bytes, partial_bytes);
  return fits ? schedule.splits - 1 : 0;
}

}  // namespace minfer::gemm
