// What every GEMM kernel's launch begins with: its schedule and the workspace behind it.
#pragma once

#include "gemm/launch.h"
#include "gemm/schedule.h"

namespace minfer::gemm {

/// The schedule of a launch of Config's kernel, as planning computed it from the registry, and its part of the workspace.
template <class Config>
Status describe_schedule(GemmLaunchArguments const& arguments, TileSchedulerParams* schedule, SplitWorkspace* split) {
  KernelInfo geometry{};
  geometry.swap = Config::kSwap;
  geometry.column_step = Config::kColumnStep;
  geometry.tile_m = Config::kTileM;
  geometry.tile_n = Config::kTileN;
  geometry.tile_k = Config::kTileK;
  geometry.cluster_m = Config::kClusterM;
  geometry.cluster_n = Config::kClusterN;
  geometry.schedule = Config::kSchedule;
  geometry.arch = Config::kSchedule == Schedule::kMultistage ? 80 : 90;
  geometry.b_format = Config::kFormat;
  geometry.threads = Config::kThreads;
  geometry.smem_bytes = Config::kSmemBytes;
  geometry.ctas_per_sm = Config::kCtasPerSm;
  if constexpr (requires { Config::kInPlaceRanges; }) geometry.in_place_ranges = Config::kInPlaceRanges;
  *schedule = schedule_of(geometry, *arguments.problem, arguments.launch, *arguments.device);
  if (size_t const needed = workspace_of(geometry, *schedule); needed > arguments.workspace_bytes) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the plan needs %zu", arguments.workspace_bytes,
                           needed);
  }
  int64_t const groups = int64_t(geometry.cluster_m) * geometry.cluster_n * split_groups(geometry);
  *split = split_workspace(arguments.workspace, schedule->slots() * groups, split_is_tagged(geometry));
  return Status::success();
}

}  // namespace minfer::gemm
