#include "moe/grouped/cost_model.h"

#include <algorithm>
#include <cmath>

namespace minfer::moe {

namespace {

// Of the tensor cores' rate and of the read bandwidth, what a kernel's mainloop reaches.
struct Shares {
  double rate, bandwidth;
};

Shares shares_of(CostModel const& m, KernelInfo const& kernel) {
  if (kernel.arch < 90) return {m.rate_portable, m.bandwidth_portable};
  switch (kernel.tile_m * 1000 + kernel.tile_n) {
    case 64016: return {m.rate_64x16, m.bandwidth_64x16};
    case 64064: return {m.rate_64x64, m.bandwidth_64x64};
    case 128128: return {m.rate_128x128, m.bandwidth_128x128};
    case 128192: return {m.rate_128x192, m.bandwidth_128x192};
    case 128256: return {m.rate_128x256, m.bandwidth_128x256};
    case 256128: return {m.rate_256x128, m.bandwidth_256x128};
  }
  return {m.rate_other, m.bandwidth_other};
}

double active_experts(GroupedProblem const& p) {
  if (p.experts == 0 || p.rows == 0) return 0.0;
  double const experts = double(p.experts);
  return std::min(experts * -std::expm1(double(p.rows) * std::log1p(-1.0 / std::max(experts, 1.0 + 1e-9))), double(p.rows));
}

double weight_bytes(GroupedProblem const& p) {  // of an expert
  double const n = double(p.n), k = double(p.k);
  if (!quantised(p)) return 2.0 * n * k;
  double const groups = p.group_size > 0 ? std::ceil(k / p.group_size) : 1.0;
  return n * k * bits_of(p.b_format) / 8.0 + n * groups * (scale_bytes_of(p.b_format) + (p.has_zeros ? 2.0 : 0.0));
}

double bytes_of(GroupedProblem const& p) {
  double const n_out = double(p.gated ? p.n / 2 : p.n), rows = double(p.rows);
  return active_experts(p) * weight_bytes(p) + 2.0 * (rows * p.k + rows * n_out);
}

double stage_us(CostModel const& m, KernelInfo const& kernel) {
  bool const fine = kernel.group_multiple < 128;
  double const scaled = kernel.b_format == WeightFormat::kNvFp4 ? m.stage_nvfp4 : 1.0;
  switch (kernel.tile_n) {
    case 8: return scaled * (fine ? m.stage_8_fine_us : m.stage_8_us);
    case 16: return scaled * (fine ? m.stage_16_fine_us : m.stage_16_us);
    case 32: return m.stage_32_us;
    case 64: return scaled * (fine ? m.stage_64_fine_us : m.stage_64_us);
  }
  return scaled * (fine ? m.stage_128_fine_us : m.stage_128_us);
}

/// Expected tiles of an expert's tokens, were these a Poisson's: their normal tails.
double expected_token_tiles(double rows, int tile_n) {
  double const deviation = std::sqrt(2.0 * std::max(rows - 1.0, 1e-3));
  double tiles = 1.0;
  for (double edge = tile_n; edge < rows + 4.0 * deviation; edge += tile_n) tiles += 0.5 * std::erfc((edge + 0.5 - rows) / deviation);
  return tiles;
}

double copy_us(CostModel const& m, GroupedProblem const& p, DeviceProperties const& device) {
  return m.copy_us + 2.0 * p.rows * p.k / (device.read_bandwidth * m.copy_share);
}

double predict_quantised_us(CostModel const& m, KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device,
                            bool gather_first) {
  double const active = active_experts(p);
  if (active == 0.0) return m.quantised_start_us;
  double const workers = double(device.sm_count) * kernel.ctas_per_sm;
  double const tiles = active * expected_token_tiles(double(p.rows) / active, kernel.tile_n) * std::ceil(double(p.n) / kernel.tile_m);
  double const waves = tiles > 4 * workers ? tiles / workers + 0.5 : std::max(1.0, std::ceil(tiles / workers));
  double tile_us = std::ceil(double(p.k) / kernel.tile_k) * stage_us(m, kernel);
  if (p.gathered && !gather_first) tile_us *= m.quantised_gather;
  double const busy_us = waves * (tile_us + m.quantised_tile_us);
  double const tail = m.quantised_tail * std::min(1.0, std::max(0.0, std::ceil(tiles / workers) * workers / tiles - 1.0));
  double const stream_us = bytes_of(p) / (device.read_bandwidth * m.quantised_share) * (1.0 + tail);
  double const us = std::pow(std::pow(busy_us, m.quantised_power) + std::pow(stream_us, m.quantised_power), 1.0 / m.quantised_power);
  return m.quantised_start_us + (gather_first ? copy_us(m, p, device) : 0.0) + us;
}

}  // namespace

double floor_us(GroupedProblem const& p, DeviceProperties const& device) {
  return std::max(bytes_of(p) / device.read_bandwidth, 2.0 * p.rows * p.n * p.k / device.matrix_rate);
}

double predict_us(CostModel const& m, KernelInfo const& kernel, GroupedProblem const& p, DeviceProperties const& device,
                  bool gather_first) {
  if (quantised(p)) return predict_quantised_us(m, kernel, p, device, gather_first);
  double const active = active_experts(p);
  if (active == 0.0) return m.start_us;
  double const rows = double(p.rows) / active;
  double const token_tiles = std::max(1.0, std::floor((rows + m.spread * std::sqrt(rows)) / kernel.tile_n) + 1.0);
  double const weight_tiles = std::ceil(double(p.n) / kernel.tile_m);
  double const tiles = active * token_tiles * weight_tiles, workers = double(device.sm_count) * kernel.ctas_per_sm;
  double const waves = std::max(1.0, tiles > 4 * workers ? tiles / workers + 0.5 : std::ceil(tiles / workers));
  int const step = kernel.tile_n <= 128 ? 8 : 16;
  double const tokens = std::ceil(rows / token_tiles / step) * step;
  Shares shares = shares_of(m, kernel);
  // Mixtral's w2 at 16384 tokens: 6824 us, 5843 with 256 x 128; w13: 13454 and 12478.
  if (kernel.tile_n == 192 && rows > m.many_rows) shares.rate *= m.many_rate;
  // Mixtral's w2 at 1024 tokens: 475 us with 256 x 128, 398 with 128 x 192; at 2048 807 and 744, at 4096 1578 and 1505 with 128 x 256.
  if (kernel.tile_m == 256 && p.k > 2 * m.deep_k && rows < m.many_rows) shares.rate *= m.tall_rate;
  // Deep rows of many experts' weights, several tiles of tokens for each (not understood). DeepSeek's w13 at 16384 tokens: 13765 us with
  // 128 x 192, 17403 with 128 x 256, 18925 with 256 x 128, 24111 with 128 x 128; at 4096 4181, 4506, 4669 and 4635.
  if (kernel.tile_n >= 128 && kernel.tile_n != 192 && p.k > m.deep_k && active > m.deep_experts && rows > m.deep_rows)
    shares.rate *= m.deep_rate;
  double tile_us = 2.0 * kernel.tile_m * tokens * p.k / (device.matrix_rate / workers * shares.rate);
  if (p.gathered && !gather_first) {
    double const gather_us = 2.0 * tokens * p.k * kernel.ctas_per_sm / m.gather_bytes;
    tile_us = std::pow(std::pow(tile_us, m.gather_power) + std::pow(gather_us, m.gather_power), 1.0 / m.gather_power);
  }
  double const busy_us = waves * (tile_us + (kernel.schedule == Schedule::kPingpong ? m.pingpong_tile_us : m.cooperative_tile_us));
  double const tail = m.tail * std::max(0.0, std::ceil(tiles / workers) * workers / tiles - 1.0);
  double const stream_us = bytes_of(p) / (device.read_bandwidth * shares.bandwidth) * (1.0 + std::min(tail, 1.0));
  // Narrow tiles of a deep k give the gathering warps little to do at a time.
  double const gathered_us = p.gathered && !gather_first && kernel.tile_m == 64 ? m.narrow_gather * stream_us : stream_us;
  double const risk = kernel.tile_n < 64 && p.rows > m.narrow_rows ? m.narrow_risk : 1.0;
  double const us = std::pow(std::pow(busy_us, m.power) + std::pow(gathered_us, m.power), 1.0 / m.power);
  return m.start_us + (gather_first ? copy_us(m, p, device) : 0.0) + risk * us;
}

}  // namespace minfer::moe
