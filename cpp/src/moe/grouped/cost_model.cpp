#include "moe/grouped/cost_model.h"

#include <algorithm>
#include <cmath>

#include "quantized_gemm/cost_model.h"

namespace minfer::moe {

namespace {

/// See CostModel.
struct Rates {
  double rate, bandwidth, load, tile_us, token_us;
};
Rates rates_of(CostModel const& m, KernelInfo const& kernel) {
  if (kernel.arch < 90) return {m.rate_portable, m.bandwidth_portable, m.load_portable, m.tile_portable_us, m.token_portable_us};
  switch (kernel.tile_m * 1000 + kernel.tile_n) {
    case 64016: return {m.rate_64x16, m.bandwidth_64x16, m.load_64x16, m.tile_64x16_us, m.token_64x16_us};
    case 64064: return {m.rate_64x64, m.bandwidth_64x64, m.load_64x64, m.tile_64x64_us, m.token_64x64_us};
    case 128192: return {m.rate_128x192, m.bandwidth_128x192, m.load_128x192, m.tile_128x192_us, m.token_128x192_us};
    case 128256: return {m.rate_128x256, m.bandwidth_128x256, m.load_128x256, m.tile_128x256_us, m.token_128x256_us};
    case 256128: return {m.rate_256x128, m.bandwidth_256x128, m.load_256x128, m.tile_256x128_us, m.token_256x128_us};
  }
  return {m.rate_128x128, m.bandwidth_128x128, m.load_128x128, m.tile_128x128_us, m.token_128x128_us};
}

struct Stage {
  double us, gather, tile_us, token_us;
};
Stage stage_of(CostModel const& m, KernelInfo const& kernel) {
  bool const fine = kernel.group_multiple < 128;
  double const scaled = kernel.b_format == WeightFormat::kNvFp4 ? m.stage_nvfp4 : 1.0;
  if (kernel.tile_k == 128 && kernel.tile_n < 64) {  // the others divide k among warpgroups
    double const ordered = fine ? scaled * m.stage_ordered_fine : 1.0;
    if (kernel.tile_n > 16) return {m.stage_invariant_64x32_us, m.gather_32, m.tile_32_us, m.token_32_us};
    if (kernel.tile_n > 8) return {ordered * m.stage_ordered_128x16_us, m.gather_16, m.tile_16_us, m.token_16_us};
    double const stage_us = kernel.tile_m > 64 ? m.stage_ordered_128x8_us : m.stage_ordered_64x8_us;
    return {ordered * stage_us, m.gather_8, m.tile_8_us, m.token_8_us};
  }
  switch (kernel.tile_n) {
    case 8: return {scaled * (fine ? m.stage_8_fine_us : m.stage_8_us), m.gather_8, m.tile_8_us, m.token_8_us};
    case 16: return {scaled * (fine ? m.stage_16_fine_us : m.stage_16_us), m.gather_16, m.tile_16_us, m.token_16_us};
    case 32: return {m.stage_32_us, m.gather_32, m.tile_32_us, m.token_32_us};
    case 64: return {scaled * (fine ? m.stage_64_fine_us : m.stage_64_us), m.gather_64, m.tile_64_us, m.token_64_us};
  }
  return {scaled * (fine ? m.stage_128_fine_us : m.stage_128_us), m.gather_128, m.tile_128_us, m.token_128_us};
}

double weight_bytes(GroupedProblem const& p) {  // of an expert
  double const n = double(p.n), k = double(p.k);
  if (has_8_bits(p)) return n * k + (p.b_blocks ? n * k / 4096.0 : 0.0);
  if (!quantised(p)) return 2.0 * n * k;
  double const groups = p.group_size > 0 ? std::ceil(k / p.group_size) : 1.0;
  return n * k * bits_of(p.b_format) / 8.0 + n * groups * (scale_bytes_of(p.b_format) + (p.has_zeros ? 2.0 : 0.0));
}

double active_of(Routing const& routing) {
  double active = 0.0;
  for (int i = 0; i < routing.count; ++i) active += routing.groups[i].experts;
  return active;
}

double bytes_of(GroupedProblem const& p, double active) {
  double const n_out = double(p.gated ? p.n / 2 : p.n), rows = double(p.rows);
  double const scales = p.a_group > 0 ? 4.0 * std::ceil(double(p.k) / p.a_group) : 0.0;
  return active * weight_bytes(p) + rows * (size_of(p.type) * double(p.k) + scales) + (p.d_fp8 || p.d_groups ? 1.0 : 2.0) * rows * n_out;
}

/// Expected tiles of an expert's tokens, were these a Poisson's: their normal tails.
double expected_token_tiles(Routing::Group const& group, int tile_n) {
  double const rows = group.rows;
  if (group.exact) return std::max(1.0, std::ceil(rows / tile_n - 1e-9));
  double const deviation = std::sqrt(2.0 * std::max(rows - 1.0, 1e-3));
  if (deviation > 0.75 * tile_n) return rows / tile_n + 0.5;
  double const near = 2.6 * deviation, whole = std::max(1.0, std::floor((rows - near) / tile_n));  // whole: tiles that all have
  double tiles = whole;
  for (double edge = whole * tile_n; edge < rows + near; edge += tile_n) tiles += 0.5 * std::erfc((edge + 0.5 - rows) / deviation);
  return tiles;
}

/// The larger, and more where the other is nearly as large.
double bound(double a, double b) { return std::sqrt(std::sqrt(a * a * a * a + b * b * b * b)); }

/// The same, with another power.
double bound(double a, double b, double power) {
  double const most = std::max(a, b), ratio = std::min(a, b) / most;
  return ratio < 0.05 * power ? most : most * std::exp(std::log1p(std::pow(ratio, power)) / power);
}

double copy_us(CostModel const& m, GroupedProblem const& p, DeviceProperties const& device, double start_us) {
  return start_us + size_of(p.type) * double(p.rows) * p.k / (device.read_bandwidth * m.copy_share);
}

/// Whole waves. How many experts have rows, and how many tiles, is expected, not known, unless it is exact.
double whole_waves(double waves, bool exact) {
  if (exact) return std::ceil(waves - 1e-9);
  return (std::ceil(0.94 * waves) + std::ceil(waves) + std::ceil(1.06 * waves)) / 3.0;
}

/// The tiles of a launch: their number, and the time of their mainloops and epilogues.
struct Tiles {
  double count = 0.0, mainloops_us = 0.0, epilogues_us = 0.0, longest_us = 0.0;
  bool exact = true;

  void add(double tiles, double mainloop_us, double epilogue_us) {
    count += tiles;
    mainloops_us += tiles * mainloop_us;
    epilogues_us += tiles * epilogue_us;
    longest_us = std::max(longest_us, mainloop_us + epilogue_us);
  }
  /// Of the busiest of so many workers. Whole waves, of which many end less and less together. overlap: an epilogue runs under the next
  /// tile's mainloop, which belongs to another warpgroup.
  double busy_us(double workers, double last_wave, bool overlap) const {
    double const waves = count / workers, whole = waves > 4.0 ? waves + last_wave : whole_waves(waves, exact);
    if (whole <= 1.0) return longest_us;
    double const mainloop = mainloops_us / count, epilogue = epilogues_us / count, both = mainloop + epilogue;
    if (!overlap) return std::max(longest_us, whole * both);
    double const exposed = std::max(0.0, 0.5 * (epilogue - mainloop));  // of a tile's epilogue, where both warpgroups store
    return std::max(longest_us, both - exposed + (whole - 1.0) * (mainloop + exposed));
  }
  /// The part of the waves that is empty, of those that are full.
  double empty(double workers) const { return std::max(0.0, whole_waves(count / workers, exact) * workers / count - 1.0); }
};

double predict_quantised_us(CostModel const& m, KernelInfo const& kernel, GroupedProblem const& p, Routing const& routing,
                            DeviceProperties const& device, bool gather_first) {
  double const workers = double(device.sm_count) * kernel.ctas_per_sm, weight_tiles = std::ceil(double(p.n) / kernel.tile_m);
  Stage const stage = stage_of(m, kernel);
  double mainloop_us = std::ceil(double(p.k) / kernel.tile_k) * stage.us;
  bool const folded = w4a16::scales_fragments(kernel) && w4a16::folds(p.type, p.b_format, p.has_zeros) && kernel.tile_n < 128;
  if (folded) mainloop_us *= m.stage_folded;
  if (p.gathered && !gather_first) mainloop_us *= stage.gather;
  double const gated = p.gated ? m.quantised_gated : 1.0;
  Tiles tiles;
  tiles.exact = routing.groups[0].exact;
  for (int i = 0; i < routing.count; ++i) {
    Routing::Group const& group = routing.groups[i];
    double const token_tiles = expected_token_tiles(group, kernel.tile_n);
    tiles.add(group.experts * token_tiles * weight_tiles, mainloop_us, gated * (stage.tile_us + stage.token_us * group.rows / token_tiles));
  }
  double const busy_us = tiles.busy_us(workers, m.quantised_last_wave, false);
  double const tail = m.quantised_tail * std::min(1.0, tiles.empty(workers));
  double const stream_us = bytes_of(p, active_of(routing)) / (device.read_bandwidth * m.quantised_share) * (1.0 + tail);
  return m.quantised_start_us + (gather_first ? copy_us(m, p, device, m.quantised_copy_us) : 0.0) +
         bound(busy_us, stream_us, m.quantised_power);
}

struct ScaledStage {
  double us, column_us, tile_us, token_us;
};
ScaledStage scaled_stage_of(CostModel const& m, KernelInfo const& kernel) {
  if (!kernel.swap && kernel.tile_m <= 128)
    return {m.stage_rows_128_us, m.column_rows_128_us, m.scaled_tile_rows_128_us, m.scaled_token_rows_128_us};
  if (!kernel.swap) return {m.stage_rows_256_us, m.column_rows_256_us, m.scaled_tile_rows_256_us, m.scaled_token_rows_256_us};
  switch (kernel.tile_n) {
    case 16: return {m.stage_64x16_us, m.column_64x16_us, m.scaled_tile_64x16_us, m.scaled_token_64x16_us};
    case 64: return {m.stage_64x64_us, m.column_64x64_us, m.scaled_tile_64x64_us, m.scaled_token_64x64_us};
  }
  return {m.stage_128x128_us, m.column_128x128_us, m.scaled_tile_128x128_us, m.scaled_token_128x128_us};
}

double predict_scaled_us(CostModel const& m, KernelInfo const& kernel, GroupedProblem const& p, Routing const& routing,
                         DeviceProperties const& device, bool gather_first) {
  int const tile_rows = kernel.swap ? kernel.tile_m : kernel.tile_n, tile_tokens = kernel.swap ? kernel.tile_n : kernel.tile_m;
  double const workers = double(device.sm_count) * kernel.ctas_per_sm, together = kernel.cluster_n;
  double const weight_tiles = std::ceil(double(p.n) / tile_rows / together) * together;
  double const lines = kernel.tile_k / 128.0, k_tiles = std::ceil(double(p.k) / kernel.tile_k) * lines;
  int const step = !kernel.swap ? 64 : kernel.tile_n <= 16 ? 8 : 16;  // token_step of moe_scaled.toml
  ScaledStage const stage = scaled_stage_of(m, kernel);
  double const active = active_of(routing);
  // CTAs that share an SM, each of which the tensor cores serve half of the time.
  double const sharing = std::clamp(active * weight_tiles / double(device.sm_count), 1.0, double(kernel.ctas_per_sm));
  double const parts = p.a_group > 0 ? 128.0 / p.a_group : 1.0;
  double const factor =
      (p.a_group > 0 || p.b_blocks ? m.scaled_blocks : 1.0) * (1.0 + (kernel.swap ? m.scaled_parts : m.scaled_parts_rows) * (parts - 1.0));
  double const gathers = p.gathered && !gather_first ? m.scaled_gather : together > 1.0 ? m.scaled_cluster : 1.0;
  Tiles tiles;
  tiles.exact = routing.groups[0].exact;
  for (int i = 0; i < routing.count; ++i) {
    Routing::Group const& group = routing.groups[i];
    double const token_tiles = expected_token_tiles(group, tile_tokens);
    double const tokens = std::ceil(group.rows / token_tiles / step) * step;
    double const mainloop_us = k_tiles * gathers * factor * bound(stage.us * std::sqrt(sharing), stage.column_us * tokens * sharing);
    tiles.add(group.experts * token_tiles * weight_tiles, mainloop_us,
              (p.gated ? m.scaled_gated : 1.0) * (stage.tile_us + stage.token_us * tokens));
  }
  double const busy_us = tiles.busy_us(workers, m.scaled_last_wave, false);
  double const tail = m.scaled_tail * std::min(1.0, tiles.empty(workers));
  double const stream_us = bytes_of(p, active) / (device.read_bandwidth * m.scaled_share) * (1.0 + tail);
  return m.scaled_start_us + m.expert_us * double(p.experts) + (gather_first ? copy_us(m, p, device, m.scaled_copy_us) : 0.0) +
         bound(busy_us, stream_us, m.scaled_power);
}

/// The rows on so many experts, equally many or an expected number on each; none where there is nothing to do.
Routing one_group(GroupedProblem const& p, double active, bool exact) {
  Routing routing;
  if (p.experts > 0 && p.rows > 0) routing.groups[routing.count++] = {active, double(p.rows) / active, exact};
  return routing;
}

}  // namespace

Routing even_routing(GroupedProblem const& p, double top_k) {
  double const experts = double(p.experts), each = std::max(top_k, 1.0), tokens = double(p.rows) / each;
  double const share = std::min(each / std::max(experts, 1.0), 1.0 - 1e-9);
  return one_group(p, std::min(experts * -std::expm1(tokens * std::log1p(-share)), double(p.rows)), false);
}

Routing same_routing(CostModel const& m, GroupedProblem const& p, double top_k) {
  double const each = std::max(top_k == 0.0 ? m.same_experts : top_k, 1.0);
  return one_group(p, std::min({each, double(p.experts), double(p.rows)}), true);
}

Routing zipf_routing(CostModel const& m, GroupedProblem const& p, double top_k) {
  Routing routing;
  if (top_k == 0.0) top_k = m.zipf_experts;
  if (p.experts == 0 || p.rows == 0) return routing;
  // Groups of experts by rank. A token has one of a rank with probability 1 - exp(-x / rank), with x such that these sum up to top_k.
  double const each = std::min({std::max(top_k, 1.0), double(p.rows), double(p.experts)}), tokens = double(p.rows) / each;
  double first[Routing::kMaxGroups], experts[Routing::kMaxGroups];
  int groups = 0;
  double size = 1.0;
  for (double at = 1.0; at <= double(p.experts); at += size, size *= 3.0, ++groups) {
    if (groups == Routing::kMaxGroups - 1) size = double(p.experts);
    first[groups] = at;
    experts[groups] = std::min(size, double(p.experts) - at + 1.0);
  }
  auto const rank = [&](int i) { return experts[i] / std::log((first[i] + experts[i] - 0.5) / (first[i] - 0.5)); };  // harmonic mean
  double x = 1.0;
  for (int round = 0; round < 6; ++round) {
    double sum = 0.0, slope = 0.0;
    for (int i = 0; i < groups; ++i) {
      double const without = std::exp(-x / rank(i));
      sum += experts[i] * (1.0 - without);
      slope += experts[i] * without / rank(i);
    }
    double const change = (std::min(each, 0.98 * double(p.experts)) - sum) / std::max(slope, 1e-6);
    x += std::clamp(change, -0.5 * x, 4.0 * x);
  }
  double rows[Routing::kMaxGroups], total = 0.0;
  for (int i = 0; i < groups; ++i) total += rows[i] = tokens * experts[i] * (1.0 - std::exp(-x / rank(i)));
  for (int i = 0; i < groups; ++i) {
    double const all = rows[i] * double(p.rows) / total, active = std::min(experts[i] * -std::expm1(-all / experts[i]), all);
    if (active > 0.0) routing.groups[routing.count++] = {active, all / active, false};
  }
  return routing;
}

double floor_us(GroupedProblem const& p, DeviceProperties const& device) {
  return std::max(bytes_of(p, active_of(even_routing(p))) / device.read_bandwidth,
                  2.0 * p.rows * p.n * p.k / (device.matrix_rate * (has_8_bits(p) ? 2.0 : 1.0)));
}

double predict_us(CostModel const& m, KernelInfo const& kernel, GroupedProblem const& p, Routing const& routing,
                  DeviceProperties const& device, bool gather_first) {
  if (routing.count == 0) return quantised(p) ? m.quantised_start_us : m.start_us;
  if (quantised(p)) return predict_quantised_us(m, kernel, p, routing, device, gather_first);
  if (has_8_bits(p) && kernel.arch >= 90) return predict_scaled_us(m, kernel, p, routing, device, gather_first);
  double const element = size_of(p.type);
  double const workers = double(device.sm_count) * kernel.ctas_per_sm, k = double(p.k);
  double const weight_tiles = std::ceil(double(p.n) / kernel.tile_m), active = active_of(routing);
  int const step = kernel.tile_n <= 128 ? 8 : 16;
  Rates const rates = rates_of(m, kernel);
  bool const gathers = p.gathered && !gather_first;
  double loaded = 0.0;  // bytes, through L2
  // CTAs that share an SM.
  double const sharing = std::clamp(active * weight_tiles / double(device.sm_count), 1.0, double(kernel.ctas_per_sm));
  Tiles tiles;
  tiles.exact = routing.groups[0].exact;
  for (int i = 0; i < routing.count; ++i) {
    Routing::Group const& group = routing.groups[i];
    double const token_tiles = expected_token_tiles(group, kernel.tile_n);
    double const tokens = std::ceil(group.rows / token_tiles / step) * step;
    double rate = rates.rate;
    // Mixtral's w2 at 16384 tokens: 6824 us, 5843 with 256 x 128; w13: 13454 and 12478.
    if (kernel.tile_n == 192 && group.rows > m.many_rows) rate *= m.many_rate;
    // Mixtral's w2 at 1024 tokens: 475 us with 256 x 128, 398 with 128 x 192; at 2048 807 and 744, at 4096 1578 and 1505 with 128 x 256.
    if (kernel.tile_m == 256 && k > 2 * m.deep_k && group.rows < m.many_rows) rate *= m.tall_rate;
    // Deep rows of many experts' weights, several tiles of tokens for each (not understood). DeepSeek's w13 at 16384 tokens: 13765 us with
    // 128 x 192, 17403 with 128 x 256, 18925 with 256 x 128, 24111 with 128 x 128; at 4096 4181, 4506, 4669 and 4635.
    if (kernel.tile_n >= 128 && kernel.tile_n != 192 && k > m.deep_k && active > m.deep_experts && group.rows > m.deep_rows)
      rate *= m.deep_rate;
    double const product_us = 2.0 * kernel.tile_m * tokens * k / (device.matrix_rate / workers * rate);
    double const load_us = element * (kernel.tile_m + tokens) * k * sharing / rates.load;
    double mainloop_us = bound(product_us, load_us);
    if (gathers) {
      double const column_us = kernel.tile_m == 64 ? m.gather_narrow_us : m.gather_us;
      mainloop_us = bound(mainloop_us, k * sharing * (column_us + element * tokens / m.gather_bytes));
    }
    double const count = group.experts * token_tiles * weight_tiles;
    loaded += count * element * (kernel.tile_m + tokens) * k;
    tiles.add(count, mainloop_us, (p.gated ? m.gated : 1.0) * (rates.tile_us + rates.token_us * tokens));
  }
  double const tail = m.tail * tiles.empty(workers);
  double const stream_us = bytes_of(p, active) / (device.read_bandwidth * rates.bandwidth) * (1.0 + std::min(tail, 1.0));
  return m.start_us + m.expert_us * double(p.experts) + (gather_first ? copy_us(m, p, device, m.copy_us) : 0.0) +
         bound(bound(tiles.busy_us(workers, m.last_wave, kernel.schedule == Schedule::kPingpong), stream_us, m.power),
               loaded / (device.read_bandwidth * m.l2), m.l2_power);
}

}  // namespace minfer::moe
