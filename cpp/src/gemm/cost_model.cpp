// The analytic cost model of dense GEMM, and of GEMM with activations of 8 bits and int4 weights. A launch takes
//   start + the busiest worker's k tiles and tiles, or HBM traffic + exposed epilogue + fix-up of partials
// in us. A k tile's time is that of its MMAs on an SM of its own, or of all SMs together, which power holds to less, or that of its bytes'
// latency over the ring's stages; L2's bandwidth did not show in the fit beside these, in the order of tiles that the plan chooses. Kernels
// for unaligned operands, several of whose CTAs share an SM, have a formula of the same constants (grid_us). The constants are measured:
// the rates of a device and a few factors of each kernel, fitted to timings of random problems (python/minfer/planning/calibrate.py, which
// evaluates this formula through minfer::_predict_gemm). configs/models has those that ship.
#include "gemm/cost_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "gemm/cluster_splits.h"
#include "quantized_gemm/cost_model.h"

namespace minfer {

GemmModelName model_name_of(KernelInfo const& kernel) {
  GemmModelName name;
  char const* const element = name_of(kernel.ab_type);
  char const* const family_end = std::strchr(kernel.name, '_');
  char const* const from = family_end == nullptr ? kernel.name : family_end + 1;  // <arch>_<element>_<layout>_...
  char const* const at = std::strstr(from, element);
  if (at == nullptr) {
    std::snprintf(name.text, sizeof(name.text), "%s", from);
  } else {
    std::snprintf(name.text, sizeof(name.text), "%.*s%s", int(at - from), from, at + std::strlen(element) + 1);
  }
  return name;
}

}  // namespace minfer

namespace minfer::gemm {

namespace {

constexpr char kDefaultDevice[] = "NVIDIA H200";

/// (a^4 + b^4 + ..)^(1/4) of sums of fourth powers: the largest, and a little of the others.
double fourth_root(double x) { return std::sqrt(std::sqrt(x)); }
double fourth_power(double x) { return x * x * (x * x); }

constexpr double kCopyStartAloneUs = 1.4;  // us of a copy's launch that no other one overlaps, before compute capability 9.0

// Of kernels for unaligned operands, in rates.fixup: of a tile with partials, and of each partial.
constexpr double kGridFixup = 1.5, kGridPartial = 0.05;

constexpr double kMostResident = 4;  // launches that read at a time
constexpr double kFewRounds = 3;     // of split tiles: more have batch-invariant plans alone

// Of SMs that do not read, to the time in which all of them read: measured with weights for m <= 48, 80 CTAs reach 3.2 TB/s, 108 3.7, 120
// 4.0, and 132 4.2.
constexpr double kFewSms = 0.55;

// Where an operand is contiguous along m or n and has fewer numbers in a row of k than half a line of L2, all SMs ask for the same few
// lines: us of each row, were all SMs to read it. At 8 x 6656 x 448 nn it is 4 us of 9.
constexpr int64_t kNarrow = 32;
constexpr double kNarrowUs = 0.005;

constexpr double kMostStages = 12;  // of kernels whose launches choose the tiles' columns

/// Bytes of a weight's number; scales of groups are a few more.
double weight_bytes(KernelInfo const& kernel) {
  return kernel.b_format == WeightFormat::kDense ? size_of(kernel.ab_type) : bits_of(kernel.b_format) / 8.0;
}

/// Bytes of a stage of tiles of `tile_n` columns. Those of a quantised weight are the rows, and have a line of scales.
int64_t stage_bytes(KernelInfo const& kernel, int32_t tile_n) {
  int64_t const line = kernel.tile_k * int64_t(size_of(kernel.ab_type));
  if (kernel.b_format == WeightFormat::kDense) return (kernel.tile_m + tile_n) * line;
  return int64_t(kernel.tile_m * kernel.tile_k * weight_bytes(kernel)) + tile_n * line + 1024;
}

/// Stages of a ring: narrow tiles in a kernel for wider ones have more.
double stages_of(KernelInfo const& kernel, int32_t tile_n) {
  if (kernel.column_step == 0) return std::max(1, kernel.stages);
  return std::min(kMostStages, double(kernel.stages) * double(stage_bytes(kernel, kernel.tile_n)) / double(stage_bytes(kernel, tile_n)));
}

}  // namespace

GemmKernelFactors const& factors_of(GemmModel const& model, KernelInfo const& kernel) {
  static constexpr GemmKernelFactors kNone;
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  bool const registered = &kernel >= kernels && &kernel < kernels + count;
  return registered && model.factors != nullptr ? model.factors[&kernel - kernels] : kNone;
}

ScaledModel model_of(GemmPlanOptions const& options, DeviceProperties const& device) {
  if (options.model != nullptr) return {options.model};
  if (GemmModel const* own = shipped_gemm_model(device.name)) return {own};
  static DeviceProperties const h200 = h200_properties();
  double const sm_scale = device.matrix_rate / device.sm_count * h200.sm_count / h200.matrix_rate;
  return {shipped_gemm_model(kDefaultDevice), sm_scale, device.read_bandwidth / h200.read_bandwidth};
}

GemmRates scaled_rates(ScaledModel const& scaled) {
  GemmRates rates = scaled.model->rates;
  for (double GemmRates::*rate : {&GemmRates::sm_rate, &GemmRates::gpu_rate, &GemmRates::epilogue, &GemmRates::fixup_bytes,
                                  &GemmRates::quantized_cycles, &GemmRates::quantized_epilogue, &GemmRates::quantized_partial_bytes}) {
    rates.*rate *= scaled.sm_scale;
  }
  for (double GemmRates::*rate :
       {&GemmRates::bandwidth, &GemmRates::copy_bandwidth, &GemmRates::quantized_bandwidth, &GemmRates::quantized_sm_bandwidth}) {
    rates.*rate *= scaled.memory_scale;
  }
  return rates;
}

TileCost::TileCost(KernelInfo const& kernel, GemmProblem const& problem, int32_t tile_n, DeviceProperties const& device,
                   ScaledModel const& scaled)
    : rates_(scaled.model->rates), factors_(factors_of(*scaled.model, kernel)) {
  int64_t const rows = kernel.swap ? problem.n : problem.m, columns = kernel.swap ? problem.m : problem.n;
  tiles_m_ = ceil_div(rows, int64_t(kernel.tile_m) * kernel.cluster_m);
  tiles_n_ = ceil_div(columns, int64_t(tile_n) * kernel.cluster_n);
  tiles_ = tiles_m_ * tiles_n_ * problem.batch;
  k_tiles_ = ceil_div(problem.k, kernel.tile_k);
  workers_ = resident_workers(kernel, device);
  stream_workers_ = stream_workers(kernel, device, tiles_ * k_tiles_);
  pingpong_ = kernel.schedule == Schedule::kPingpong;
  portable_ = kernel.arch < 90;
  grid_ = portable_ && kernel.alignment < 16;
  // A CTA of a vector kernel shares its k out among its threads: what its k tiles lack it does not wait for.
  bool const vector = grid_ && (kernel.tile_m == 1 || kernel.tile_n == 1);
  k_fill_ = vector && k_tiles_ > 0 ? double(problem.k) / double(k_tiles_ * kernel.tile_k) : 1.0;
  sms_ = device.sm_count;
  cluster_ = double(kernel.cluster_m) * kernel.cluster_n;
  GemmRates const& r = rates_;
  // As kernels of 8-bit operands with one block of 64 rows a warpgroup do.
  int const sharing = pingpong_ ? 1 : kernel.threads / 128 - 1;
  most_cluster_splits_ = 0;
  ring_stages_ = partial_stages_ = 0;
  if (!portable_ && size_of(problem.ab_type) == 1 && kernel.column_step > 0 && cluster_ == 1 && kernel.tile_m == 64 * sharing) {
    int64_t const stage = stage_bytes(kernel, tile_n), ring = kernel.stages * stage_bytes(kernel, kernel.tile_n);
    int64_t const partial = 4 * int64_t(kernel.tile_m) * tile_n;
    for (int32_t splits = 2; splits <= kMostClusterSplits; splits *= 2) {
      if (fits_cluster(tiles_, splits, device, ring, stage, partial)) most_cluster_splits_ = splits;
    }
    ring_stages_ = double(ring) / double(stage);
    partial_stages_ = double(partial) / double(stage);
  }

  double const uneven = !portable_ && problem.k % 64 != 0 ? r.uneven : 1.0;
  double const tile_k = grid_ && problem.k <= kBriefK ? kBriefK : kernel.tile_k;
  double const element = size_of(problem.ab_type), wide = element / 2.0;  // operands of 8 bits take half the time
  narrow_ = element == 1;
  double const scales = !problem.block_scaled ? 1.0 : kernel.swap ? r.block_scales_swap : r.block_scales;
  double const flops = 2.0 * kernel.tile_m * tile_k * wide * factors_.compute * uneven * scales;  // of a column
  double const rate = scaled.sm_scale;
  alone_ = fourth_power((tile_n + r.columns) * flops / (r.sm_rate * rate));
  latency_ = fourth_power(r.latency / stages_of(kernel, tile_n) * factors_.latency);
  shared_ = fourth_power(tile_n * flops / (r.gpu_rate * rate * sms_ / 132.0));
  if (narrow_) {  // what a CTA loads itself of a k tile
    double const loaded = (double(kernel.tile_m) / kernel.cluster_n + double(tile_n) / kernel.cluster_m) * kernel.tile_k;
    shared_ += fourth_power(loaded / (r.narrow_l2 * scaled.memory_scale));
  }

  bool const narrow = (problem.a_major == Major::kMN && problem.m < kNarrow) || (problem.b_major == Major::kMN && problem.n < kNarrow);
  narrow_us_ = narrow && !portable_ ? kernel.tile_k * kNarrowUs / (sms_ * sms_) : 0.0;

  double const tile_values = double(kernel.tile_m) * tile_n;
  // The epilogue's time goes by elements and their type; codes take as long as 16-bit numbers that TMA cannot store.
  double const outputs = problem.gated ? 0.5 : 1.0, stored = size_of(problem.d_type) * outputs,
               d_bytes = d_element_bytes(problem) * outputs;
  bool const by_tma = problem.d_type != DataType::kF32 && !problem.d_fp8 && !problem.d_int32 && problem.d_alignment == 16 &&
                      (!problem.has_c || problem.c_alignment == 16);
  epilogue_us_ = (tile_values * stored * (problem.has_c ? r.c_epilogue : 1.0) / (r.epilogue * rate) + (problem.has_c ? r.c_start : 0.0)) *
                 (by_tma          ? 1.0
                  : problem.has_c ? r.general_c
                                  : r.general) *
                 factors_.epilogue;
  partial_us_ = 4.0 * tile_values / (r.fixup_bytes * rate) * (pingpong_ ? r.fixup_pingpong : 1.0);
  tile_us_ = (pingpong_ ? r.tile_pingpong : r.tile) * factors_.tile;
  double const row_element = kernel.swap ? weight_bytes(kernel) : element;
  double const bytes = problem.batch * ((row_element * double(rows) + element * double(columns)) * problem.k +
                                        double(rows) * columns * (d_bytes + (problem.has_c ? r.c_bytes * stored : 0.0)));
  bytes_us_ = bytes / (r.bandwidth * scaled.memory_scale) * factors_.bytes;
  // Workers of stream-K reach the tiles of a row at different times: what L2 does not hold of all rows by then is read for each.
  double const row_bytes = row_element * problem.batch * double(rows) * problem.k;
  reread_us_ =
      std::max(0.0, row_bytes - double(device.l2_bytes)) * (double(tiles_n_) - 1.0) / (r.bandwidth * scaled.memory_scale) * factors_.bytes;
  start_us_ = r.start + r.cluster * std::log2(cluster_);
}

double TileCost::iteration_us(double workers, double latency) const {
  double const ctas = workers * cluster_;
  double const alone = ctas > sms_ ? alone_ * fourth_power(ctas / sms_) : alone_;  // several CTAs share an SM
  return fourth_root(alone + shared_ * fourth_power(ctas) + latency) + narrow_us_ * ctas * ctas;
}

double TileCost::us(GemmLaunch const& launch) const {
  GemmRates const& r = rates_;
  double const tiles = double(tiles_), k_tiles = double(k_tiles_);
  double workers = std::min(tiles, double(workers_)), iterations, last = 0, last_workers = 0, owned, partials = 0;
  bool several = false, stream = false;
  int64_t const splits = launch.decomposition == Decomposition::kSplitK ? std::min<int64_t>({launch.splits, k_tiles_, workers_}) : 1;
  int64_t const waves = tiles_ / stream_workers_, tail = tiles_ - waves * stream_workers_;
  if (splits > 1) {
    double const items = tiles * splits;
    workers = items <= workers_ ? items : double(workers_ / splits * splits);
    double const rounds = std::ceil(items / workers);
    iterations = rounds * std::ceil(k_tiles / splits);
    owned = items <= workers_ ? 1 : std::ceil(tiles / workers);
    partials = double(splits - 1);
    several = rounds > 1;
  } else if (launch.decomposition == Decomposition::kStreamK && k_tiles_ > 1 && tail > 0) {
    double const shared_tiles = waves == 0 ? tiles : double(tail + stream_workers_), whole = waves > 0 ? double(waves - 1) : 0.0;
    workers = std::min(shared_tiles * k_tiles, double(stream_workers_));
    iterations = std::ceil(shared_tiles * k_tiles / workers) + whole * k_tiles;
    owned = std::ceil(shared_tiles / workers) + whole;
    partials = std::max(1.0, workers / shared_tiles);
    several = stream = true;
  } else if (grid_) {  // CTAs follow each other one by one, not in waves
    owned = std::max(1.0, tiles / double(workers_));
    iterations = owned * k_tiles;
  } else {
    owned = std::ceil(tiles / workers);
    iterations = owned * k_tiles;
    last = k_tiles;
    last_workers = tiles - (owned - 1) * workers;
    several = owned > 1;
  }

  if (grid_) return grid_us(workers, iterations * k_fill_, owned, partials);
  bool const in_cluster =
      splits > 1 && splits <= most_cluster_splits_ && std::has_single_bit(uint64_t(splits)) && tiles * splits <= double(workers_);
  double latency = latency_;
  if (in_cluster) {  // of the stages that partials leave
    double const left = ring_stages_ - partials * partial_stages_;
    latency *= fourth_power(std::min(kMostStages, ring_stages_) / std::min(kMostStages, left));
  }
  double k_us = iteration_us(workers, latency) * (iterations - last);
  if (last > 0) k_us += iteration_us(last_workers, latency) * last;
  double const idle = !pingpong_ ? 0.0 : several ? r.idle_tiles / std::sqrt(owned) : r.idle;
  double const divided = stream ? r.stream : !narrow_ || splits <= 1 ? 0.0 : several ? r.narrow_rounds : r.narrow_split;
  double const busy_us = k_us * (1.0 + idle) * (1.0 + divided) + owned * tile_us_;
  double const resident = portable_ ? 1.0 : std::floor(workers_ / workers);                       // launches that are
  double const uneven = k_tiles > 0 ? iterations * workers / (tiles * k_tiles) : 1.0;             // the busiest SM's bytes over the mean's
  double const reading = std::min(sms_, workers * cluster_ * std::min(resident, kMostResident));  // SMs, of all launches that do
  double const hbm_us = (bytes_us_ + (stream ? reread_us_ : 0.0)) * (1.0 + kFewSms * (uneven * sms_ / reading - 1.0));
  double const main_us = std::sqrt(busy_us * busy_us + hbm_us * hbm_us);
  double const exposed_us =
      pingpong_ ? epilogue_us_ + r.exposed * (owned - 1) * std::max(0.0, epilogue_us_ - main_us / owned) : epilogue_us_ * owned;
  // Of many rounds each tile's partials, as of batch-invariant plans with many rows; of a few, the last ones'.
  double const exchanged = splits > 1 && tiles * splits > kFewRounds * workers_ ? owned : 1.0;
  double const fixup_us = in_cluster     ? r.fixup_cluster + partials * partial_us_ * r.cluster_partial
                          : partials > 0 ? r.fixup + (partials - 1) * r.partial + exchanged * (partials + 1) * partial_us_
                                         : 0.0;
  // A range's sums are left and read again by the CTA that adds the next one's, tile by tile.
  int64_t const ranges = launch.decomposition == Decomposition::kRanges ? std::min<int64_t>(launch.splits, k_tiles_) : 1;
  double const left_us = owned * double(ranges - 1) * 2.0 * partial_us_;
  double const start_us =
      start_us_ - (resident >= 2 ? r.overlap_two : 0.0) - (resident >= 3 ? r.overlap_three : 0.0) - (resident >= 4 ? r.overlap_four : 0.0);
  return start_us * factors_.start + main_us + exposed_us + fixup_us + left_us;
}

/// Of the kernels for unaligned operands, several of whose CTAs share an SM: k tiles and tiles take a CTA its own latency, or the SM the
/// instructions of all its CTAs. Partials are waited for together.
double TileCost::grid_us(double workers, double iterations, double owned, double partials) const {
  GemmRates const& r = rates_;
  double const share = std::ceil(workers / sms_);  // CTAs of an SM
  double const item_us = fourth_root(fourth_power(tile_us_) + fourth_power(share * epilogue_us_));
  double const busy_us = iteration_us(share * sms_, latency_) * iterations + owned * item_us;
  double const hbm_us = bytes_us_ * (1.0 + kFewSms * (sms_ / std::min(sms_, workers) - 1.0));
  double const fixup_us = partials > 0 ? (kGridFixup + kGridPartial * partials) * r.fixup + (partials + 1) * partial_us_ : 0.0;
  return start_us_ * factors_.start + std::sqrt(busy_us * busy_us + hbm_us * hbm_us) + fixup_us;
}

double TileCost::least_us() const {
  double const workers = std::min(double(workers_), double(tiles_) * k_tiles_);
  double const busy_us = iteration_us(workers, latency_) * double(tiles_) * k_tiles_ / workers;
  GemmRates const& r = rates_;
  return (start_us_ - r.overlap_two - r.overlap_three - r.overlap_four) * factors_.start + std::max(busy_us, bytes_us_);
}

double predict_us(KernelInfo const& kernel, GemmProblem const& problem, GemmLaunch const& launch, DeviceProperties const& device,
                  ScaledModel const& scaled) {
  if (problem.m == 0 || problem.n == 0 || problem.batch == 0) return 0.0;  // nothing is launched
  if (!has_dense_model(problem)) return w4a16::predict_us(kernel, problem, launch, device, scaled);
  return TileCost(kernel, problem, tile_columns(kernel, launch), device, scaled).us(launch);
}

/// A launch, and the bytes that cross HBM. The copies' bytes are read from there. They stay in L2, where the kernel finds them, up to half
/// of its size; what is more is written to HBM, and the kernel's own prediction has the time in which it is read again.
double predict_copies_us(GemmProblem const& p, GemmLaunch const& launch, DeviceProperties const& device, ScaledModel const& scaled) {
  if ((!launch.realign_a && !launch.realign_b) || p.m == 0 || p.n == 0 || p.k == 0 || p.batch == 0) return 0.0;
  GemmRates const& r = scaled.model->rates;
  double const a = launch.realign_a ? 2.0 * p.batch * double(p.m) * p.k : 0.0,
               b = launch.realign_b ? 2.0 * p.batch * double(p.n) * p.k : 0.0;
  double const transposed = (p.a_major == Major::kMN ? a : 0.0) + (p.b_major == Major::kMN ? b : 0.0);
  double const written = std::max(0.0, a + b - 0.5 * double(device.l2_bytes));
  double const start_us = r.copy + (device.compute_capability() >= 90 ? 0.0 : kCopyStartAloneUs);
  return start_us + (a + b + written + r.copy_transposed * transposed) / (r.copy_bandwidth * scaled.memory_scale);
}

}  // namespace minfer::gemm
