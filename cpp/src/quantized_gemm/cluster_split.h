// Split-K inside a cluster: when the CTAs of all splits of every tile are resident at once, those of one tile are launched as a cluster and
// pass their partials to the tile's owner through distributed shared memory, in the same order and with the same bits as through the
// workspace.
#pragma once

#include "gemm/schedule.h"
#include "quantized_gemm/w4_layout.h"

namespace minfer::w4a16 {

/// The partials for which an owner's CTA has room in shared memory. With a code book, which takes that room, there are none.
constexpr int max_cluster_partials(WeightFormat format, int tile_n) {
  return has_code_book(format) ? 0 : tile_n <= 16 ? 3 : tile_n <= 32 ? 1 : 0;
}

/// The partials that a tile's owner receives from its cluster; 0: partials go through the workspace.
inline int32_t cluster_partials(WeightFormat format, int tile_n, int ctas_per_sm, gemm::TileSchedulerParams const& schedule,
                                DeviceProperties const& device) {
  int32_t const splits = schedule.splits;
  if (splits < 2 || splits > max_cluster_partials(format, tile_n) + 1 || schedule.stream_tiles > 0) return 0;
  if (schedule.workers != schedule.tiles() * splits) return 0;  // CTAs with several tiles would have to wait for each other
  int32_t const resident = device.max_clusters[splits > 2 ? 2 : 1] * ctas_per_sm;
  return schedule.tiles() <= resident ? splits - 1 : 0;
}

}  // namespace minfer::w4a16
