// Split-K inside a cluster: when the pieces of every tile are resident at once, one tile's CTAs are launched as a cluster and hand their partial
// sums to the tile's owner through distributed shared memory, in the same order and with the same bits as through the workspace.
#pragma once

#include "gemm/schedule.h"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a16 {

/// Pieces beside the owner's own for which a kernel has room; 0: none. A code book takes the room.
constexpr int max_cluster_pieces(WeightFormat format, int tile_n) {
  return has_code_book(format) ? 0 : tile_n <= 16 ? 3 : tile_n <= 32 ? 1 : 0;
}

/// Pieces that a tile's owner receives from its cluster; 0: they meet in the workspace.
inline int32_t cluster_pieces(WeightFormat format, int tile_n, int ctas_per_sm, gemm::TileSchedulerParams const& schedule,
                              DeviceProperties const& device) {
  int32_t const splits = schedule.splits;
  if (splits < 2 || splits > max_cluster_pieces(format, tile_n) + 1 || schedule.stream_tiles > 0) return 0;
  if (schedule.workers != schedule.tiles() * splits) return 0;  // CTAs with several tiles would have to wait for each other
  int32_t const resident = device.max_clusters[splits > 2 ? 2 : 1] * ctas_per_sm;
  return schedule.tiles() <= resident ? splits - 1 : 0;
}

}  // namespace minfer::w4a16
