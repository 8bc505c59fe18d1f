// plan_gemm: explicit kernel, else tuned row, else the analytic model over every legal candidate. Always answers for a legal problem.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gemm/cost_model.h"
#include "gemm/invariant_splits.h"
#include "gemm/realign.h"
#include "gemm/schedule.h"
#include "minfer/gemm.h"
#include "quantized_gemm/cost_model.h"

namespace minfer {

namespace gemm {
namespace {

constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;  // tile coordinates are 32-bit; leaves room for the last tile's overhang

/// Whether plan_gemm chooses from the kernel's family.
bool is_gemm(KernelInfo const& kernel) {
  for (char const* family : {"gemm", "scaled_gemm", "w4a16", "w4a8"}) {
    if (std::strcmp(kernel.family, family) == 0) return true;
  }
  return false;
}

/// Why `kernel` cannot compute `problem` on `device`, or null when it can.
char const* illegal(KernelInfo const& kernel, GemmProblem const& problem, DeviceProperties const& device) {
  if (!is_gemm(kernel)) return "it is not a GEMM kernel";
  if (kernel.b_format != problem.b_format) return "it reads B in another format";
  if (kernel.arch_exact ? device.compute_capability() != kernel.arch : device.compute_capability() < kernel.arch) {
    return "it does not run on this device's compute capability";
  }
  if (kernel.ab_type != problem.ab_type) return "it computes another element type";
  if (problem.b_format != WeightFormat::kDense && problem.group_size > 0 && problem.group_size < problem.k &&
      problem.group_size % kernel.group_multiple != 0) {
    return "its scales are of larger groups";
  }
  if (kernel.a_major != problem.a_major || kernel.b_major != problem.b_major) return "it reads other operand layouts";
  if (kernel.smem_bytes > device.smem_per_block) return "it needs more shared memory than a block of this device has";
  if (problem.k > 0 && (problem.a_alignment < kernel.alignment || problem.b_alignment < kernel.alignment)) {
    return "an operand's pointer or stride is not a multiple of 16 bytes";
  }
  if (kernel.arch >= 90 && problem.k == 0) return "it needs k > 0";
  if (problem.gated && kernel.tile_n == 1) return "its tiles are columns, without pairs of gate and up";
  // Vectors of 16 bytes along the contiguous mode, without a tail. Kernels of e4m3 have one.
  if (kernel.arch < 90 && kernel.alignment == 16 && kernel.ab_type != DataType::kE4M3) {
    int64_t const a_extent = problem.a_major == Major::kK ? problem.k : problem.m;
    int64_t const b_extent = problem.b_major == Major::kK ? problem.k : problem.n;
    int64_t const vector = 16 / size_of(problem.ab_type);
    if (a_extent % vector != 0 || b_extent % vector != 0) {
      return has_8_bits(problem) ? "k is not a multiple of 16" : "a contiguous extent is not a multiple of 8";
    }
  }
  return nullptr;
}

Status check(GemmProblem const& p) {
  if (p.m < 0 || p.n < 0 || p.k < 0 || p.batch < 0) {
    return Status::failure(StatusCode::kInvalidArgument, "sizes must not be negative, got m = %lld, n = %lld, k = %lld, batch = %lld",
                           (long long)p.m, (long long)p.n, (long long)p.k, (long long)p.batch);
  }
  if (p.m > kMaxExtent || p.n > kMaxExtent || p.k > kMaxExtent || p.batch > kMaxExtent) {
    return Status::failure(StatusCode::kNotSupported,
                           "an extent above %lld is not supported, got m = %lld, n = %lld, k = %lld, batch = %lld", (long long)kMaxExtent,
                           (long long)p.m, (long long)p.n, (long long)p.k, (long long)p.batch);
  }
  bool const narrow = has_8_bits(p);
  if (!narrow && p.ab_type != DataType::kF16 && p.ab_type != DataType::kBF16) {
    return Status::failure(StatusCode::kInvalidArgument, "A and B must be f16, bf16, e4m3 or s8, got %s", name_of(p.ab_type));
  }
  bool const f16 = p.d_type == DataType::kF16 || p.d_type == DataType::kBF16;
  if (!(narrow ? f16 : p.d_type == p.ab_type) && p.d_type != DataType::kF32) {
    return Status::failure(StatusCode::kInvalidArgument, "D must be %s or f32, got %s", narrow ? "f16, bf16" : name_of(p.ab_type),
                           name_of(p.d_type));
  }
  bool const e4m3 = p.ab_type == DataType::kE4M3, s8 = p.ab_type == DataType::kS8;
  if (((p.block_scaled || p.fast_accum) && !e4m3) || (p.d_int32 && !s8)) {
    return Status::failure(StatusCode::kInvalidArgument, "block scales and fast accumulation are of e4m3, a D of int32 is of s8, got %s",
                           name_of(p.ab_type));
  }
  if (p.d_int32 && (p.gated || p.has_c || p.d_fp8)) {
    return Status::failure(StatusCode::kInvalidArgument, "a D of int32 holds the sums themselves");
  }
  if (p.b_format != WeightFormat::kDense) {
    int const fixed = fixed_group_of(p.b_format);
    bool const power = p.group_size >= 32 && (p.group_size & (p.group_size - 1)) == 0;
    if (p.group_size != 0 && (fixed != 0 ? p.group_size != fixed : !power)) {
      return Status::failure(StatusCode::kInvalidArgument, "group_size of %s must be %s, got %d", name_of(p.b_format),
                             fixed == 32   ? "32"
                             : fixed == 16 ? "16"
                                           : "0 (all of k) or a power of two from 32 on",
                             p.group_size);
    }
    bool const in_groups = p.group_size == 0 || p.group_size >= p.k || p.group_size % 128 == 0;
    if (narrow && (p.b_format != WeightFormat::kInt4 || p.has_zeros || !in_groups || p.block_scaled || p.fast_accum || p.d_int32)) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "beside an A of 8 bits, quantised weights must be int4 without zero points, in groups of a multiple of 128");
    }
    if (p.n % 8 != 0 || p.k % 8 != 0 || p.batch != 1) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "quantised weights need n and k to be multiples of 8 and batch 1, got %lld, %lld, %lld", (long long)p.n,
                             (long long)p.k, (long long)p.batch);
    }
  }
  if (p.gated && p.n % 16 != 0) {
    return Status::failure(StatusCode::kInvalidArgument,
                           "a gated GEMM needs n to be a multiple of 16 (blocks of 8 gate and 8 up columns), got n = %lld", (long long)p.n);
  }
  return Status::success();
}

/// The tile grid must fit the scheduler's 32-bit indices.
bool fits(KernelInfo const& kernel, GemmProblem const& p, GemmLaunch const& launch) {
  int64_t const rows = kernel.swap ? p.n : p.m, columns = kernel.swap ? p.m : p.n;
  double const tiles = double(ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m)) *
                       double(ceil_div(columns, int64_t(tile_columns(kernel, launch)) * kernel.cluster_n)) * double(p.batch);
  double const items = launch.decomposition == Decomposition::kDataParallel ? tiles : tiles * double(ceil_div(p.k, kernel.tile_k) + 1);
  return items < 2147483648.0;
}

void finish(GemmPlan* plan, KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
            double predicted_us) {
  plan->kernel = &kernel;
  plan->launch = launch;
  plan->workspace_bytes = problem.m == 0 || problem.n == 0 || problem.batch == 0
                              ? 0
                              : workspace_of(kernel, schedule_of(kernel, realigned(problem, launch), launch, device));
  if (size_t const copies = copies_bytes(problem, launch)) plan->workspace_bytes = (plan->workspace_bytes + 255) / 256 * 256 + copies;
  plan->floor_us = gemm_floor_us(problem, device);
  plan->predicted_us = std::max(predicted_us, plan->floor_us);
}

/// CTAs with neighbouring numbers that mostly run in one GPC, where what several of them read of L2 is sent once (tile_scheduler.h).
constexpr double kNeighbours = 16;

/// Workers of `cluster` CTAs that are neighbours.
int64_t neighbours_of(double cluster) { return std::max<int64_t>(1, int64_t(kNeighbours / cluster + 0.5)); }

/// Tiles that are walked side by side, in the orders that plans choose from.
constexpr int kSwizzles[] = {1, 2, 3, 4, 5, 6, 8, 12, 16};

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

/// The order of tiles in which the fewest operand bytes leave L2 for the GPCs, and memory for L2: groups of neighbours work on as square a
/// set of tiles as there is, in bands that are wide enough for few of them to read the other operand again, and narrow enough for L2. Over
/// 254 random products of 16 and 8 bits with many tokens (seed 2805, an H100) it is 1.4 to 2.0 % slower than the best of 16 orders, at
/// worst 12 %; by the lines that leave L2 alone it was 1.4 to 2.2 %, at worst 37 %. `launch` has the columns of a tile.
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

constexpr int kSplits[] = {2, 3, 4, 5, 6, 7, 8, 10, 12, 16};

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
  if (candidates.splits > 1) {
    // Ranges of equal length, whatever the k tile is: invariant_splits sees to that.
    if (!kernel.in_place_ranges || !kernel.invariant_only) visit_orders(Decomposition::kSplitK, candidates.splits);
    if (kernel.in_place_ranges) visit_orders(Decomposition::kRanges, candidates.splits);
    return;
  }
  visit_orders(Decomposition::kDataParallel, 1);
  if (candidates.splits == 1 || problem.d_int32) return;  // partials are fp32
  if (k_tiles >= 4 && tiles % workers != 0 && tiles < 8 * workers) visit_orders(Decomposition::kStreamK, 1);
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

/// Why a launch that was asked for is none of the kernel's, or null.
char const* illegal(KernelInfo const& kernel, GemmLaunch const& launch) {
  if (launch.decomposition == Decomposition::kRanges && !kernel.in_place_ranges) return "its CTAs do not compute several ranges of k";
  if (launch.columns == 0) return nullptr;
  if (kernel.column_step == 0) return "its tiles have columns of their own";
  if (launch.columns < 0 || launch.columns > kernel.tile_n || launch.columns % kernel.column_step != 0) {
    return "columns must be a multiple of its column_step, at most its tile_n";
  }
  return nullptr;
}

/// Why a launch that was asked for is not for the problem, or null.
char const* illegal(GemmProblem const& problem, GemmLaunch const& launch) {
  if (problem.d_int32 && launch.decomposition != Decomposition::kDataParallel) return "sums of int32 are not split";
  if ((launch.realign_a || launch.realign_b) && has_8_bits(problem)) return "operands of 8 bits are not realigned";
  if (!launch.realign_a && !launch.realign_b) return nullptr;
  if (problem.b_format != WeightFormat::kDense) return "operands of a quantised GEMM are not realigned";
  if (!copies_fit(problem, launch)) return "the copies need more than 2^31 CTAs";
  return nullptr;
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

/// Whether operands of 8 bits have a kernel of the device's own MMAs. Portable ones, whose e4m3 becomes f16 before Hopper's mma.sync, are
/// several times as slow where MMAs count, and no faster elsewhere.
bool has_native_8_bits(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options) {
  if (!has_8_bits(problem) || options.force_arch != 0) return false;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  return std::any_of(kernels, kernels + count, [&](KernelInfo const& kernel) {
    return kernel.arch >= 90 && !(options.only_runnable && kernel.launch == nullptr) && illegal(kernel, problem, device) == nullptr;
  });
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
      for_each_prediction(kernel, own, copies, device, model, candidates, bound_us,
                          [&](GemmLaunch const& launch, double us) { visit(kernel, launch, us); });
    }
  });
}

struct Pick {
  KernelInfo const* kernel = nullptr;
  GemmLaunch launch;
  double us = 0;                                             // predicted
  double weighed = std::numeric_limits<double>::infinity();  // the least of all candidates
  int64_t candidates = 0;
};

/// What the busiest SM has to do, relative to an even share of it all.
double busiest_share(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  if (launch.decomposition == Decomposition::kStreamK) return 1.0;
  TileSchedulerParams const schedule = schedule_of(kernel, problem, launch, device);
  int64_t const items = int64_t(schedule.tiles()) * schedule.splits, ctas = int64_t(kernel.cluster_m) * kernel.cluster_n;
  int64_t const of_worker = ceil_div(items, schedule.workers), workers_of_sm = ceil_div(schedule.workers * ctas, device.sm_count);
  return double(of_worker * workers_of_sm) * device.sm_count / double(items * ctas);
}

/// What predictions of few rows are multiplied by. They are of launches by themselves. In a step of a model each launch begins, and loads
/// its first weights, under the end of the one in front of it, and then it counts more that all SMs have the same to load, and that the
/// next launch finds room beside this one. The factors are those with which the plans of the products of layers take least time in place:
/// of Llama-3.1-8B (1, 8 and 16 rows, int4; 1 and 16, FP8, also in the batch-invariant mode), Qwen2.5-7B and Llama-3.1-70B (1 row, int4)
/// on an H200. There a layer in FP8 takes 6 us less than by the predictions alone, of 91, and 4 in the mode; one in int4 2 us less, of 55,
/// in the mean. By themselves such launches are predicted to take 1 % more.
/// At least 1.
double factor_in_place(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device) {
  constexpr int64_t kFewRows = 16;
  constexpr double kLeastUs = 1.0;
  constexpr double kUneven = 0.15, kTwoCtas = 1.06;            // two CTAs of one launch on an SM
  constexpr double kCooperative = 1.04, kTokensByRows = 1.25;  // 8 bits; the latter: the tokens are the MMA's rows
  bool const quantised = problem.b_format != WeightFormat::kDense;
  if (problem.m > kFewRows || problem.m == 0 || problem.batch != 1 || kernel.arch < 90 || (!quantised && !has_8_bits(problem))) return 1.0;
  if (gemm_floor_us(problem, device) < kLeastUs) return 1.0;  // too little for it to matter which SM has what
  double const uneven = 1.0 + kUneven * (busiest_share(kernel, problem, launch, device) - 1.0);
  if (quantised) return uneven * (kernel.ctas_per_sm > 1 ? kTwoCtas : 1.0);
  return uneven * (kernel.schedule == Schedule::kCooperative ? kCooperative : 1.0) * (kernel.swap ? 1.0 : kTokensByRows);
}

/// The candidate with the least predicted time, of few rows in place.
Pick pick(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, Candidates candidates) {
  Pick best;
  if (has_dense_model(problem)) candidates.orders = Orders::kLater;
  // What is predicted to take longer than the best is weighed is not visited: factors are at least 1.
  for_each_candidate(problem, device, options, candidates, best.weighed,
                     [&](KernelInfo const& kernel, GemmLaunch const& launch, double us) {
                       ++best.candidates;
                       double const weighed = us * factor_in_place(kernel, problem, launch, device);
                       if (best.kernel != nullptr && weighed >= best.weighed) return;
                       best.kernel = &kernel;
                       best.launch = launch;
                       best.us = us;
                       best.weighed = weighed;
                     });
  if (best.kernel != nullptr && candidates.orders == Orders::kLater) choose_order(*best.kernel, problem, device, &best.launch);
  return best;
}

/// The candidates among which batch-invariant plans choose, for every m: those of one way to add up k, the first of these that any kernel
/// of the device has for operands of these types, and of invariant_splits ranges. Neither C, the epilogue nor how A lies in memory have a
/// say in it.
Candidates batch_invariant_candidates(GemmProblem problem, DeviceProperties const& device, GemmPlanOptions const& options) {
  Candidates candidates;
  candidates.splits = invariant_splits(problem);
  problem.m = kInvariantTile;
  problem.batch = 1;
  problem.has_c = problem.gated = problem.d_fp8 = false;
  problem.a_major = Major::kK;
  problem.a_alignment = 16;
  for (char const* sums : {"wgmma16", "mma16", "mma16_unaligned", "wgmma8", "mma8", "wgmma8_groups"}) {
    bool found = false;
    candidates.sums = sums;
    Candidates any = candidates;
    any.orders = Orders::kLater;
    double const bound = std::numeric_limits<double>::infinity();
    for_each_candidate(problem, device, options, any, bound, [&](KernelInfo const&, GemmLaunch const&, double) { found = true; });
    if (found) break;
  }
  return candidates;
}

/// Why a launch that was asked for adds up k in another way than batch-invariant plans do, or null.
char const* not_invariant(KernelInfo const& kernel, GemmLaunch const* launch, Candidates const& invariant) {
  if (std::strcmp(kernel.sums, invariant.sums) != 0)
    return "its kernel adds up k in another order than the kernels of other numbers of rows";
  if (launch == nullptr) return nullptr;
  bool const split = launch->decomposition == Decomposition::kSplitK || launch->decomposition == Decomposition::kRanges;
  if (launch->decomposition == Decomposition::kStreamK || (split ? launch->splits : 1) != invariant.splits) {
    return "it cuts k in other ranges than the launches of other numbers of rows";
  }
  return nullptr;
}

/// Edit distance, for the names nearest to a misspelt one.
int distance(char const* a, char const* b) {
  size_t const n = std::strlen(b);
  std::vector<int> row(n + 1);
  for (size_t j = 0; j <= n; ++j) row[j] = int(j);
  for (size_t i = 1; a[i - 1] != 0; ++i) {
    int diagonal = row[0];
    row[0] = int(i);
    for (size_t j = 1; j <= n; ++j) {
      int const above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[n];
}

Status unknown_kernel(char const* name) {
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  std::vector<std::pair<int, char const*>> names;
  for (int64_t i = 0; i < count; ++i) {
    if (is_gemm(kernels[i])) names.emplace_back(distance(name, kernels[i].name), kernels[i].name);
  }
  std::sort(names.begin(), names.end());
  std::string nearest;
  for (size_t i = 0; i < names.size() && i < 3; ++i) nearest += (i ? ", " : "") + std::string(names[i].second);
  return Status::failure(StatusCode::kUnknownKernel, "kernel '%.90s' is not in the registry; nearest: %s", name, nearest.c_str());
}

/// k of a scale; 0 where one scale is that of all k, which a problem can state in several ways.
int64_t normal_group(int64_t group_size, int64_t k) { return group_size >= k || group_size < 0 ? 0 : group_size; }

/// Whether a tuned row applies to a problem: of its m, or of an m that is an eighth smaller at most and that its kernel covers with the
/// same tiles, with the same weight format and groups. For fewer tokens the model knows better. find_row considers the zero points.
bool matches(GemmTunedRow const& row, GemmProblem const& p) {
  if (row.n != p.n || row.k != p.k || row.batch != p.batch || row.ab_type != p.ab_type || row.a_major != p.a_major ||
      row.b_major != p.b_major || row.b_format != p.b_format || row.gated != p.gated || row.has_c != p.has_c || p.m > row.m) {
    return false;
  }
  if (p.b_format != WeightFormat::kDense && normal_group(row.group_size, row.k) != normal_group(p.group_size, p.k)) return false;
  if (p.m == row.m) return true;
  if (8 * p.m < 7 * row.m) return false;
  KernelInfo const* kernel = find_kernel(row.kernel);
  if (kernel == nullptr) return false;
  int64_t const tile = kernel->swap ? tile_columns(*kernel, row.launch) : kernel->tile_m;
  return ceil_div(p.m, tile) == ceil_div(row.m, tile);
}

/// The launch of a row, with the copies in front of it: rows are of contiguous operands, and those that its kernel cannot read were copied
/// when it was measured, no others.
GemmLaunch launch_of(GemmTunedRow const& row, KernelInfo const& kernel) {
  GemmLaunch launch = row.launch;
  if (row.b_format != WeightFormat::kDense || kernel.alignment < 16) return launch;
  bool const portable = kernel.arch < 90;
  auto const misplaced = [&](Major major, Major read, int64_t extent) {
    int64_t const contiguous = major == Major::kK ? row.k : extent, lines = major == Major::kK ? extent : row.k;
    return major != read || (contiguous % 8 != 0 && (lines > 1 || portable));
  };
  launch.realign_a = misplaced(row.a_major, kernel.a_major, row.m);
  launch.realign_b = misplaced(row.b_major, kernel.b_major, row.n);
  if (portable && row.k % 8 != 0) launch.realign_a = launch.realign_b = launch.realign_a || launch.realign_b;
  return launch;
}

/// Zero points do not rule a row out: kernels run the same instructions with and without them (symmetric weights subtract a constant
/// from the same registers), and the additional bytes, 2 for each group, 3 % with groups of 128, slow all candidates alike. A row that was
/// measured with zero points where the problem has them, or without where it has none, comes first.
GemmTunedRow const* find_row(GemmTunedRow const* rows, int64_t count, GemmProblem const& problem, GemmPlanOptions const& options,
                             DeviceProperties const& device) {
  GemmTunedRow const* best = nullptr;
  auto const better = [&](GemmTunedRow const& row) {
    if (best == nullptr) return true;
    bool const own = row.has_zeros == problem.has_zeros, best_own = best->has_zeros == problem.has_zeros;
    return own != best_own ? own : row.m < best->m;
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!matches(rows[i], problem) || !better(rows[i])) continue;
    KernelInfo const* kernel = find_kernel(rows[i].kernel);
    if (kernel == nullptr || (options.only_runnable && kernel->launch == nullptr) || illegal(*kernel, rows[i].launch) != nullptr ||
        (options.force_arch != 0 && kernel->arch != options.force_arch)) {
      continue;
    }
    GemmLaunch const launch = launch_of(rows[i], *kernel);
    GemmProblem const own = realigned(problem, launch);
    if (illegal(problem, launch) != nullptr || illegal(*kernel, own, device) != nullptr || !fits(*kernel, own, launch)) continue;
    best = &rows[i];
  }
  return best;
}

}  // namespace
}  // namespace gemm

double gemm_bytes(GemmProblem const& p) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return 0.0;
  double const outputs = double(p.batch) * p.m * (p.gated ? p.n / 2 : p.n);
  double const element = size_of(p.ab_type);
  double const b_bytes = p.b_format == WeightFormat::kDense ? element * p.batch * double(p.n) * p.k : w4a16::weight_bytes(p);
  return element * p.batch * double(p.m) * p.k + b_bytes + outputs * (d_element_bytes(p) + (p.has_c ? size_of(p.d_type) : 0));
}

double gemm_floor_us(GemmProblem const& p, DeviceProperties const& device) {
  double const flops = 2.0 * p.batch * double(p.m) * p.n * p.k;
  return std::max(gemm_bytes(p) / device.read_bandwidth, flops / (device.matrix_rate * 2.0 / double(size_of(p.ab_type))));
}

// The compiler's comparison takes in every member, also one that is added later: cached plans depend on that.
bool GemmProblem::operator==(GemmProblem const&) const = default;
bool GemmLaunch::operator==(GemmLaunch const&) const = default;

Status plan_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plan) {
  using namespace gemm;
  *plan = GemmPlan{};
  if (Status status = check(problem); !status.ok()) return status;

  Candidates const candidates = problem.batch_invariant ? batch_invariant_candidates(problem, device, options) : Candidates{};
  if (options.kernel != nullptr) {
    KernelInfo const* kernel = find_kernel(options.kernel);
    if (kernel == nullptr) return unknown_kernel(options.kernel);
    if (problem.batch_invariant) {
      if (char const* why = not_invariant(*kernel, options.launch, candidates)) {
        return Status::failure(StatusCode::kInvalidArgument, "kernel %s is not batch invariant as it was asked for: %s", kernel->name, why);
      }
    }
    GemmLaunch const asked = options.launch != nullptr ? *options.launch : GemmLaunch{};
    if (char const* why = illegal(problem, asked)) {
      return Status::failure(StatusCode::kInvalidArgument,
                             "kernel %s cannot be launched with decomposition=%s,realign_a=%d,realign_b=%d: %s", kernel->name,
                             name_of(asked.decomposition), asked.realign_a, asked.realign_b, why);
    }
    GemmProblem const own = realigned(problem, asked);
    if (char const* why = illegal(*kernel, own, device)) {
      return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot compute this problem: %s", kernel->name, why);
    }
    if (options.only_runnable && kernel->launch == nullptr) {
      return Status::failure(StatusCode::kNotCompiled, "kernel %s is in the table but not in this build (archs: %s)", kernel->name,
                             build_archs()[0] ? build_archs() : "none");
    }
    if (options.launch != nullptr) {
      if (char const* why = illegal(*kernel, *options.launch)) {
        return Status::failure(StatusCode::kInvalidArgument, "kernel %s cannot be launched with columns=%d: %s", kernel->name,
                               options.launch->columns, why);
      }
      if (!fits(*kernel, own, asked)) {
        return Status::failure(StatusCode::kNotSupported, "kernel %s needs more than 2^31 work items for this problem", kernel->name);
      }
      finish(plan, *kernel, problem, asked, device,
             predict_us(*kernel, own, asked, device, model_of(options, device)) +
                 predict_copies_us(problem, asked, device, model_of(options, device)));
    } else {
      double best_us = std::numeric_limits<double>::infinity();
      for_each_prediction(*kernel, problem, Copies{}, device, model_of(options, device), candidates, best_us,
                          [&](GemmLaunch const& launch, double us) {
                            if (us >= best_us && plan->kernel != nullptr) return;
                            best_us = us;
                            finish(plan, *kernel, problem, launch, device, us);
                          });
      if (plan->kernel == nullptr) {
        return Status::failure(StatusCode::kNotSupported, "kernel %s needs more than 2^31 work items for this problem", kernel->name);
      }
    }
    plan->source = PlanSource::kOverride;
    std::snprintf(plan->reason, sizeof(plan->reason), "asked for by name");
    return Status::success();
  }

  if (options.use_tuned && !problem.batch_invariant && problem.m > 0) {
    GemmTunedRow const* row = find_row(options.user_rows, options.user_row_count, problem, options, device);
    char const* table = "user table";
    if (row == nullptr) {
      int64_t count = 0;
      GemmTunedRow const* rows = shipped_gemm_rows(device.name, &count);
      row = find_row(rows, count, problem, options, device);
      table = "shipped table";
    }
    if (row != nullptr) {
      KernelInfo const& kernel = *find_kernel(row->kernel);
      finish(plan, kernel, problem, launch_of(*row, kernel), device, row->us);
      plan->predicted_us = row->us;
      plan->source = PlanSource::kTuned;
      char const* other = row->has_zeros == problem.has_zeros ? "" : row->has_zeros ? ", with zero points" : ", without zero points";
      std::snprintf(plan->reason, sizeof(plan->reason), "%s: fastest measured for m = %lld%s", table, (long long)row->m, other);
      return Status::success();
    }
  }

  Pick const best = pick(problem, device, options, candidates);
  if (best.kernel == nullptr) {
    return Status::failure(
        StatusCode::kNotSupported, "no kernel %s computes %s%s%s %lld x %lld x %lld on compute capability %d.%d (archs of the build: %s)",
        options.only_runnable ? "of this build" : "of the table", name_of(problem.ab_type),
        problem.b_format == WeightFormat::kDense ? "" : " with weights in ",
        problem.b_format == WeightFormat::kDense ? "" : name_of(problem.b_format), (long long)problem.m, (long long)problem.n,
        (long long)problem.k, device.compute_major, device.compute_minor, build_archs()[0] ? build_archs() : "none");
  }
  finish(plan, *best.kernel, problem, best.launch, device, best.us);
  plan->source = PlanSource::kAnalytic;
  char sums[64] = "";
  if (problem.batch_invariant) {
    std::snprintf(sums, sizeof(sums), " that add up k by %s in %d %s", candidates.sums, candidates.splits,
                  candidates.splits > 1 ? "ranges" : "range");
  }
  std::snprintf(plan->reason, sizeof(plan->reason), "least predicted time of %lld candidates%s: %.1f us, floor %.1f us",
                (long long)best.candidates, sums, plan->predicted_us, plan->floor_us);
  return Status::success();
}

Status enumerate_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plans,
                      int64_t capacity, int64_t* count) {
  using namespace gemm;
  *count = 0;
  if (Status status = check(problem); !status.ok()) return status;
  std::vector<GemmPlan> all;
  double const no_bound = std::numeric_limits<double>::infinity();
  Candidates candidates = problem.batch_invariant ? batch_invariant_candidates(problem, device, options) : Candidates{};
  candidates.orders = Orders::kAll;
  for_each_candidate(problem, device, options, candidates, no_bound, [&](KernelInfo const& kernel, GemmLaunch const& launch, double us) {
    all.emplace_back();
    finish(&all.back(), kernel, problem, launch, device, us);
  });
  std::stable_sort(all.begin(), all.end(), [](GemmPlan const& a, GemmPlan const& b) { return a.predicted_us < b.predicted_us; });
  *count = int64_t(all.size());
  for (int64_t i = 0; i < *count && i < capacity; ++i) plans[i] = all[size_t(i)];
  return Status::success();
}

}  // namespace minfer
