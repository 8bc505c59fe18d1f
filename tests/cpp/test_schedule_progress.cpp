// Progress of launches whose workers wait for each other: whether they end, however few workers are resident together.
//
// A worker is simulated as the kernels behave (kernel_sm90.cuh, gemm_sm80.cuh, w4a16_sm80.cuh): it takes TileScheduler's items in order; in
// an item that does not own its tile it publishes its partial, in one that does it waits for all partials of the tile. Workers start in
// order, as many as can be resident, and stay resident to their end. The outcome does not depend on which worker is faster: a partial that
// was published stays published, and a worker that has ended frees its SM for good, so letting every worker go as far as it can, in any
// order, ends in one state. (The halves of a pingpong CTA take items in turns and one goes on while the other waits: that only helps.)
// Where stream-K's workers continue sums (continued_sums_sm90.cuh), an item that does not begin a tile waits for the worker in front,
// before it publishes its own.
//
// Attention's decode (attention/decode/tile_scheduler.cuh) waits by the same rule, argued there. It is not simulated: its arithmetic is
// that of a warp, each lane of which holds a sequence, and of values that the device reads, so running it here would mean to write it a
// second time. The router (router_gemm.cu) waits for higher CTAs, too, but not without end: test_router_progress.cpp.
#include <algorithm>
#include <string>
#include <vector>

#include "gemm/schedule.h"
#include "gemm/tile_scheduler.h"
#include "gemm_problems.h"
#include "minfer/gemm.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::gemm;
using namespace minfer::testing;

namespace {

std::string text_of(TileSchedulerParams const& p) {
  return std::to_string(p.tiles()) + " tiles of " + std::to_string(p.k_tiles) + " k-iterations, " + std::to_string(p.workers) +
         " workers, " + std::to_string(p.splits) + " splits, " + std::to_string(p.stream_tiles) + " stream tiles";
}

std::vector<std::vector<WorkItem>> items_of(TileSchedulerParams const& schedule) {
  std::vector<std::vector<WorkItem>> items(size_t(schedule.workers));
  for (int32_t worker = 0; worker < schedule.workers; ++worker) {
    TileScheduler scheduler(schedule, worker);
    for (WorkItem item = scheduler.next(); item.valid; item = scheduler.next()) items[size_t(worker)].push_back(item);
  }
  return items;
}

/// Whether all workers end when `resident` of them have a place at a time. continues: they go on with each other's sums.
bool ends(std::vector<std::vector<WorkItem>> const& items, int32_t slots, int32_t resident, bool continues) {
  std::vector<char> published(size_t(slots), 0);
  std::vector<size_t> done(items.size(), 0);
  std::vector<size_t> running;
  size_t started = 0, ended = 0;
  for (bool moves = true; moves;) {
    moves = false;
    while (running.size() < size_t(resident) && started < items.size()) running.push_back(started++);
    for (size_t i = 0; i < running.size();) {
      size_t const worker = running[i];
      for (; done[worker] < items[worker].size(); ++done[worker], moves = true) {
        WorkItem const& item = items[worker][done[worker]];
        if (continues && item.k_begin > 0 && !published[worker - 1]) break;
        if (!item.owner()) {
          published[size_t(item.slot)] = 1;
          continue;
        }
        auto const first = published.begin() + item.first_partial;
        if (!continues && std::count(first, first + item.partials, 1) != item.partials) break;
      }
      if (done[worker] < items[worker].size()) {
        ++i;
        continue;
      }
      running.erase(running.begin() + long(i));
      ++ended;
      moves = true;
    }
  }
  return ended == items.size();
}

/// Every k tile of every output tile is computed once; every partial is published once, by a lower worker that has waited for nothing
/// before, and awaited once. Then that the launch ends.
void check_schedule(TileSchedulerParams const& schedule) {
  Context const at(text_of(schedule));
  auto const items = items_of(schedule);
  std::vector<int32_t> computed(size_t(schedule.tiles()), 0), owners(size_t(schedule.tiles()), 0);
  std::vector<int32_t> sender(size_t(schedule.slots()), -1), tile_of(size_t(schedule.slots()), -1), awaited(size_t(schedule.slots()), 0);
  std::vector<char> waits_before(size_t(schedule.slots()), 0);
  for (size_t worker = 0; worker < items.size(); ++worker) {
    bool waited = false;
    for (WorkItem const& item : items[worker]) {
      CHECK(item.tile >= 0 && item.tile < schedule.tiles() && item.k_begin >= 0 && item.k_begin + item.k_count <= schedule.k_tiles);
      computed[size_t(item.tile)] += item.k_count;
      if (item.owner()) {
        CHECK_EQUAL(item.k_begin + item.k_count, schedule.k_tiles);
        ++owners[size_t(item.tile)];
        waited = waited || item.partials > 0;
      } else {
        CHECK(item.slot < schedule.slots() && sender[size_t(item.slot)] < 0);
        sender[size_t(item.slot)] = int32_t(worker);
        tile_of[size_t(item.slot)] = item.tile;
        waits_before[size_t(item.slot)] = waited;
      }
    }
  }
  for (size_t tile = 0; tile < computed.size(); ++tile) {
    CHECK_EQUAL(computed[tile], schedule.k_tiles);
    CHECK_EQUAL(owners[tile], 1);
  }
  for (size_t worker = 0; worker < items.size(); ++worker) {
    for (WorkItem const& item : items[worker]) {
      for (int32_t slot = item.first_partial; item.owner() && slot < item.first_partial + item.partials; ++slot) {
        CHECK(slot < schedule.slots() && sender[size_t(slot)] >= 0);
        CHECK(sender[size_t(slot)] < int32_t(worker));
        CHECK(!waits_before[size_t(slot)]);
        CHECK_EQUAL(tile_of[size_t(slot)], item.tile);
        ++awaited[size_t(slot)];
      }
    }
  }
  for (size_t slot = 0; slot < sender.size(); ++slot) CHECK_EQUAL(awaited[slot], sender[slot] >= 0 ? 1 : 0);
  int32_t const workers = schedule.workers;
  for (int32_t resident : {1, 2, 3, workers / 2, workers - 1, workers}) {
    if (resident < 1 || resident > workers) continue;
    Context const places(std::to_string(resident) + " resident");
    CHECK(ends(items, schedule.slots(), resident, false));
    CHECK(schedule.stream_tiles == 0 || ends(items, schedule.slots(), resident, true));
  }
}

/// Where sums are continued: an item that does not begin a tile finds in the slot of the worker in front what that one has left of the k
/// tiles right before, and each slot is read once.
void check_continued(TileSchedulerParams const& schedule) {
  Context const at(text_of(schedule));
  auto const items = items_of(schedule);
  std::vector<WorkItem> left(items.size());
  std::vector<int32_t> read(items.size(), 0);
  for (size_t worker = 0; worker < items.size(); ++worker) {
    for (WorkItem const& item : items[worker]) {
      if (item.owner()) continue;
      CHECK_EQUAL(item.slot, int32_t(worker));
      CHECK(!left[worker].valid);
      left[worker] = item;
    }
  }
  for (size_t worker = 0; worker < items.size(); ++worker) {
    for (WorkItem const& item : items[worker]) {
      if (item.k_begin == 0) continue;
      CHECK(worker > 0 && left[worker - 1].valid && left[worker - 1].tile == item.tile);
      CHECK_EQUAL(left[worker - 1].k_begin + left[worker - 1].k_count, item.k_begin);
      ++read[worker - 1];
    }
  }
  for (size_t worker = 0; worker < items.size(); ++worker) CHECK_EQUAL(read[worker], left[worker].valid ? 1 : 0);
}

}  // namespace

TEST_CASE(progress_of_every_decomposition) {
  for (int32_t max_workers : {1, 2, 3, 7, 16, 33, 66, 107, 132, 264}) {
    for (int64_t tiles : {1, 2, 5, 16, 33, 34, 57, 131, 132, 133, 265, 400}) {
      for (int64_t k_tiles : {1, 2, 3, 8, 13, 64}) {
        auto const make = [&](Decomposition decomposition, int32_t splits) {
          return make_schedule(tiles, 1, 1, k_tiles, max_workers, decomposition, splits, 1, RasterOrder::kAlongM);
        };
        check_schedule(make(Decomposition::kDataParallel, 1));
        check_schedule(make(Decomposition::kStreamK, 1));
        check_continued(make(Decomposition::kStreamK, 1));
        for (int32_t splits : {2, 3, 4, 5, 6, 7, 8, 13, 40, 300}) check_schedule(make(Decomposition::kSplitK, splits));
      }
    }
  }
}

TEST_CASE(progress_of_batches_and_long_walks) {
  for (Decomposition decomposition : {Decomposition::kStreamK, Decomposition::kSplitK}) {
    for (int32_t splits : {2, 5, 8}) {
      check_schedule(make_schedule(9, 7, 5, 11, 132, decomposition, splits, 4, RasterOrder::kAlongN));
      check_schedule(make_schedule(1057, 1, 1, 16, 132, decomposition, splits, 1, RasterOrder::kAlongM));
    }
  }
}

/// As the operators make them: kernels with clusters, with two CTAs to an SM and of 128 threads; devices of other sizes.
TEST_CASE(progress_of_plans) {
  int count = 0;
  DeviceProperties const* const portable = portable_devices(&count);
  std::vector<DeviceProperties> devices(portable, portable + count);
  devices.push_back(h200_properties());
  for (DeviceProperties const& device : devices) {
    for (int64_t m : {1, 17, 300, 2048}) {
      for (int64_t n : {64, 520, 4096, 7168}) {
        for (int64_t k : {200, 4096, 16384}) {
          for (bool quantized : {false, true}) {
            GemmProblem problem = problem_of(m, n, k);
            if (quantized) {
              problem.b_format = WeightFormat::kInt4;
              problem.group_size = 128;
            }
            Context const at(minfer::testing::text_of(problem) + " on " + device.name);
            GemmPlan plan;
            CHECK(plan_gemm(problem, device, analytic_options(), &plan).ok());
            for (int32_t splits : {1, 2, 3, 5, 8}) {
              GemmLaunch launch = plan.launch;
              if (splits > 1) {
                launch.decomposition = Decomposition::kSplitK;
                launch.splits = splits;
              }
              check_schedule(schedule_of(*plan.kernel, problem, launch, device));
            }
          }
        }
      }
    }
  }
}

/// What the simulation is for: items dealt out to a number of workers that their splits do not divide.
TEST_CASE(progress_needs_rounds_of_whole_tiles) {
  auto const least = [](int32_t tiles, int32_t splits, int32_t workers) {
    TileSchedulerParams schedule;
    schedule.tiles_m = tiles, schedule.tiles_n = 1, schedule.k_tiles = 16;
    schedule.workers = workers, schedule.splits = splits;
    schedule.precompute();
    auto const items = items_of(schedule);
    for (int32_t resident = 1;; ++resident) {
      if (ends(items, schedule.slots(), resident, false)) return resident;
    }
  };
  CHECK_EQUAL(least(34, 8, 132), 3);
  CHECK_EQUAL(least(1057, 5, 132), 114);
  CHECK_EQUAL(least(1057, 5, 130), 1);
}
