// Which kernels and launches plan_gemm chooses from, and what the model predicts of them.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/cost_model.h"
#include "gemm/realign.h"
#include "gemm/schedule.h"
#include "gemm/tile_order.h"
#include "minfer/gemm.h"
#include "quantized_gemm/cost_model.h"

namespace minfer::gemm {

/// Whether plan_gemm chooses from the kernel's family.
bool is_gemm(KernelInfo const& kernel);

/// Why `kernel` cannot compute `problem` on `device`, or null when it can.
char const* illegal(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device);
/// Whether of stream-K a CTA goes on with the sums of the one in front (gemm.toml: continues_sums): a tile has the bits of one CTA's.
bool continues_sums(KernelInfo const& kernel);
/// Why a launch that was asked for is none of the kernel's, or null.
char const* illegal(KernelInfo const& kernel, GemmLaunch const& launch);
/// Why a launch that was asked for is not for the problem, or null.
char const* illegal(GemmProblem const& problem, GemmLaunch const& launch);

/// The tile grid must fit the scheduler's 32-bit indices.
bool fits(KernelInfo const& kernel, GemmProblem const& p, GemmLaunch const& launch);

/// Whether operands of 8 bits have a kernel of the device's own MMAs. Portable ones, whose e4m3 becomes f16 before Hopper's mma.sync, are
/// several times as slow where MMAs count, and no faster elsewhere.
bool has_native_8_bits(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options);

/// Numbers of splits that are candidates where plans choose them.
constexpr int kSplits[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 16};

/// Up to so many rows tiles are not continued. By itself a product of one row is as much faster so as one of 16, but a decode step of
/// Llama-3.1-8B with one sequence takes 3.6 % longer, with 16 as long.
constexpr int64_t kMostWholeRows = 8;

/// The orders of tiles that are candidates.
enum class Orders {
  kChosen,
  kAll,    // each that makes another schedule, the chosen one first
  kLater,  // of has_dense_model, where no prediction depends on the order: none is chosen yet
};

/// Which launches are candidates.
struct Candidates {
  Orders orders = Orders::kChosen;
  int32_t splits = 0;          // of every tile: 1 for none; 0: any number, and stream-K
  char const* sums = nullptr;  // of the kernels; null: any, but for those of batch-invariant plans alone
};

/// The decompositions that are candidates for one kernel in tiles of `tile_n` columns.
template <class Visit>
void for_each_launch(KernelInfo const& kernel, int32_t tile_n, GemmProblem const& problem, DeviceProperties const& device,
                     Candidates const& candidates, Visit&& visit) {
  int64_t const rows = kernel.swap ? problem.n : problem.m, columns = kernel.swap ? problem.m : problem.n;
  int64_t const tiles_m = ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m);
  int64_t const tiles_n = ceil_div(columns, int64_t(tile_n) * kernel.cluster_n);
  int64_t const tiles = tiles_m * tiles_n * problem.batch;
  int64_t const workers = resident_workers(kernel, device);
  int64_t const k_tiles = ceil_div(problem.k, kernel.tile_k);

  GemmLaunch chosen;
  chosen.columns = kernel.column_step > 0 ? tile_n : 0;
  if (candidates.orders != Orders::kLater) choose_order(kernel, problem, device, &chosen);
  bool const many = tiles_m > 1 && tiles_n > 1;
  auto const visit_orders = [&](Decomposition decomposition, int splits) {
    GemmLaunch launch = chosen;
    launch.decomposition = decomposition;
    launch.splits = splits;
    visit(launch);
    if (candidates.orders != Orders::kAll || !many) return;
    for (RasterOrder raster : {RasterOrder::kAlongM, RasterOrder::kAlongN}) {
      int64_t const across = raster == RasterOrder::kAlongM ? tiles_n : tiles_m;
      for (int swizzle : kSwizzles) {
        if (raster != chosen.raster_order || swizzle != chosen.max_swizzle_size) {
          launch.raster_order = raster;
          launch.max_swizzle_size = swizzle;
          visit(launch);
        }
        if (swizzle >= across) break;
      }
    }
  };
  bool const continues = continues_sums(kernel);
  if (candidates.splits > 1) {
    if (continues) return;
    // Ranges of equal length, whatever the k tile is: invariant_splits sees to that.
    if (!kernel.in_place_ranges || !kernel.invariant_only) visit_orders(Decomposition::kSplitK, candidates.splits);
    if (kernel.in_place_ranges) visit_orders(Decomposition::kRanges, candidates.splits);
    return;
  }
  visit_orders(Decomposition::kDataParallel, 1);
  if ((candidates.splits == 1 && !continues) || problem.d_int32) return;  // partials are fp32
  bool const divisible = k_tiles >= 4 && tiles % workers != 0 && tiles < 8 * workers;
  if (continues) {  // of fewer tiles more than two CTAs share each, and wait for each other
    if (divisible && problem.m > kMostWholeRows && 3 * tiles > 2 * workers) visit_orders(Decomposition::kStreamK, 1);
    return;
  }
  if (divisible) visit_orders(Decomposition::kStreamK, 1);
  for (int splits : kSplits) {
    if (k_tiles >= 2 * splits && tiles * splits <= 3 * workers) visit_orders(Decomposition::kSplitK, splits);
  }
}

/// The widths of tiles worth a look: those that divide the columns into the fewest tiles, and into more, evenly: up to kMoreTiles more, and
/// as many as narrower tiles fill all SMs with, down to kNarrowest of the kernel's width; and, of operands of 8 bits, the narrowest of
/// which there are no more than run at a time, where that is narrower still: the loads of a few tiles are then divided among all SMs.
template <class Visit>
void for_each_width(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device, Visit&& visit) {
  if (kernel.column_step == 0) {
    visit(kernel.tile_n);
    return;
  }
  constexpr int64_t kMoreTiles = 4;
  constexpr double kNarrowest = 2.0 / 3.0;
  int64_t const columns = std::max<int64_t>(1, kernel.swap ? problem.m : problem.n), step = kernel.column_step;
  int64_t const rows = kernel.swap ? problem.n : problem.m;
  int64_t const rows_of_tiles = std::max<int64_t>(1, ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m) * problem.batch);
  bool const narrow = size_of(problem.ab_type) == 1;
  int64_t const in_one_wave = narrow ? resident_workers(kernel, device) / rows_of_tiles * kernel.cluster_n : 0;  // tiles of a row
  int64_t const fewest = ceil_div(columns, kernel.tile_n);
  int64_t before = kernel.tile_n + step, narrowest = 0;
  for (int64_t width = kernel.tile_n; width > 0; width -= step) {
    int64_t const tiles = ceil_div(columns, width);
    bool const looked_at = tiles <= fewest + kMoreTiles || double(width) >= kNarrowest * kernel.tile_n;
    if (!looked_at && tiles > in_one_wave) break;
    int64_t const tile_n = ceil_div(ceil_div(columns, tiles), step) * step;
    if (tile_n == before) continue;  // wider tiles hold the columns as well
    before = tile_n;
    if (looked_at) {
      visit(int32_t(tile_n));
    } else {
      narrowest = tile_n;
    }
  }
  if (narrowest > 0) visit(int32_t(narrowest));
}

/// What a launch does in front of the kernel.
struct Copies {
  GemmLaunch flags;  // realign_a and realign_b alone
  double us = 0;     // predicted
};

/// Visits (launch, predicted time), all of the kernel's where `bound_us` is never less than a launch's time: widths that cannot take less
/// are left out. `problem` is the kernel's: the realigned one where there are copies.
template <class Visit>
void for_each_prediction(KernelInfo const& kernel, GemmProblem const& problem, Copies const& copies, DeviceProperties const& device,
                         ScaledModel const& model, Candidates const& candidates, double const& bound_us, Visit&& visit) {
  bool const empty = problem.m == 0 || problem.n == 0 || problem.batch == 0, dense = has_dense_model(problem);
  for_each_width(kernel, problem, device, [&](int32_t tile_n) {
    GemmLaunch widest;
    widest.columns = kernel.column_step > 0 ? tile_n : 0;
    if (!fits(kernel, problem, widest)) return;
    if (empty || !dense) {
      Candidates all = candidates;
      if (!dense) all.orders = Orders::kAll;
      for_each_launch(kernel, tile_n, problem, device, all, [&](GemmLaunch const& launch) {
        if (fits(kernel, problem, launch)) visit(launch, empty ? 0.0 : w4a16::predict_us(kernel, problem, launch, device, model));
      });
      return;
    }
    TileCost const cost(kernel, problem, tile_n, device, model);
    if (cost.least_us() + copies.us > bound_us) return;
    for_each_launch(kernel, tile_n, problem, device, candidates, [&](GemmLaunch launch) {
      launch.realign_a = copies.flags.realign_a;
      launch.realign_b = copies.flags.realign_b;
      if (launch.decomposition == Decomposition::kDataParallel || fits(kernel, problem, launch)) {
        visit(launch, cost.us(launch) + copies.us);
      }
    });
  });
}

/// Visits (flags of the copies, and their predicted time) of all copies that are candidates, none of them first. An operand is misplaced
/// where it is not K-major and 16-byte aligned; kernels for sm_80 have vectors without a tail, so there k must be a multiple of 8, too.
/// Behind copies no operand is left unaligned: the kernels that would read it need no copies.
template <class Visit>
void for_each_copies(GemmProblem const& problem, DeviceProperties const& device, ScaledModel const& model, int32_t arch, Visit&& visit) {
  visit(Copies{});
  if (problem.b_format != WeightFormat::kDense || has_8_bits(problem) || problem.m == 0 || problem.n == 0 || problem.k == 0 ||
      problem.batch == 0)
    return;
  bool const tail = arch < 90 && problem.k % 8 != 0;
  bool const a = problem.a_major != Major::kK || problem.a_alignment < 16 || tail;
  bool const b = problem.b_major != Major::kK || problem.b_alignment < 16 || tail;
  for (int flags = 1; flags < 4; ++flags) {
    Copies copies;
    copies.flags.realign_a = (flags & 1) != 0;
    copies.flags.realign_b = (flags & 2) != 0;
    bool const needless = (copies.flags.realign_a && !a) || (copies.flags.realign_b && !b);
    bool const unaligned = realigned(problem, copies.flags).a_alignment < 16 || realigned(problem, copies.flags).b_alignment < 16;
    if (needless || unaligned || illegal(problem, copies.flags) != nullptr) continue;
    copies.us = predict_copies_us(problem, copies.flags, device, model);
    visit(copies);
  }
}

/// Visits (kernel, launch, predicted time) of the kernels that can compute the problem, as it is or with operands that are copied first;
/// see for_each_prediction. Behind copies come kernels for sm_90 on devices of compute capability 9.0, aligned ones for sm_80 on others.
template <class Visit>
void for_each_candidate(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options,
                        Candidates const& candidates, double const& bound_us, Visit&& visit) {
  ScaledModel const model = model_of(options, device);
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  int32_t const copied_arch = device.compute_capability() == 90 && options.force_arch != 80 ? 90 : 80;
  bool const native = has_native_8_bits(problem, device, options);
  for_each_copies(problem, device, model, copied_arch, [&](Copies const& copies) {
    if (copies.us > bound_us) return;
    GemmProblem const own = realigned(problem, copies.flags);
    for (int64_t i = 0; i < count; ++i) {
      KernelInfo const& kernel = kernels[i];
      if (options.only_runnable && kernel.launch == nullptr) continue;
      if ((options.force_arch != 0 && kernel.arch != options.force_arch) || (native && kernel.arch < 90)) continue;
      if (candidates.sums == nullptr ? kernel.invariant_only : std::strcmp(kernel.sums, candidates.sums) != 0) continue;
      if (kernel.in_place_ranges && kernel.invariant_only && candidates.splits <= 1) continue;
      if (copies.us > 0 && (kernel.arch != copied_arch || kernel.alignment < 16)) continue;
      if (illegal(kernel, own, device) != nullptr) continue;
      bool const continues = continues_sums(kernel);  // whole tiles are another kernel's
      for_each_prediction(kernel, own, copies, device, model, candidates, bound_us, [&](GemmLaunch const& launch, double us) {
        if (!continues || launch.decomposition == Decomposition::kStreamK) visit(kernel, launch, us);
      });
    }
  });
}

}  // namespace minfer::gemm
