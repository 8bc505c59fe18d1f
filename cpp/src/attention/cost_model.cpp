#include "attention/cost_model.h"

#include <algorithm>
#include <cmath>

namespace minfer::attention {

double tiles_of(AttentionProblem const& p, int tile_m, int64_t packed_heads) {
  double const queries = p.varlen ? double(p.tokens_q) / double(std::max<int64_t>(p.batch, 1)) : double(p.seqlen_q);
  return std::ceil(std::max(queries, 1.0) * double(packed_heads) / tile_m) * double(p.batch) * double(p.heads_q / packed_heads);
}

int64_t choose_packed_heads(KernelInfo const& kernel, AttentionProblem const& p) {
  int64_t const group = p.heads_kv > 0 ? p.heads_q / p.heads_kv : 1;
  if (group == 1 || 64 % group != 0) return 1;  // a warpgroup's 64 rows hold whole queries
  return tiles_of(p, kernel.tile_m, group) < tiles_of(p, kernel.tile_m, 1) ? group : 1;
}

namespace {

/// See CostModel.
struct TileCost {
  double fixed_us, all, longest;
};
TileCost cost_of(CostModel const& m, KernelInfo const& kernel) {
  if (kernel.arch < 90) return {m.fixed_portable_us, m.all_portable, m.longest_portable};
  return kernel.tile_m >= 192 ? TileCost{m.fixed_192_us, m.all_192, m.longest_192} : TileCost{m.fixed_128_us, m.all_128, m.longest_128};
}

/// The mean number of keys that a query of a sequence sees.
double keys_seen(AttentionProblem const& p) {
  double const q = double(p.seqlen_q), k = double(p.seqlen_k), shift = k - q;
  auto const limit = [&](double x) { return std::clamp(x, 0.0, k); };
  double total = 0.0;
  constexpr int kSamples = 16;
  for (int i = 0; i < kSamples; ++i) {
    double const query = (i + 0.5) * q / kSamples;
    double const end = p.window_right < 0 ? k : limit(query + shift + double(p.window_right) + 1.0);
    double const begin = p.window_left < 0 ? 0.0 : limit(query + shift - double(p.window_left));
    total += std::max(0.0, end - begin) / kSamples;
  }
  return total;
}

double flops_of(AttentionProblem const& p) {
  return 2.0 * double(p.tokens_q) * double(p.heads_q) * keys_seen(p) * double(p.head_dim + p.head_dim_v);
}

/// The keys that the warpgroups of a tile visit, in whole key blocks, as a mean over tiles: of all of them, and of the one that visits
/// most.
struct TileKeys {
  double all = 0.0, longest = 0.0;
};
TileKeys keys_visited(AttentionProblem const& p, KernelInfo const& kernel, int64_t packed_heads) {
  constexpr int64_t kRows = 64, kSamples = 8;  // only kSamples tiles are evaluated, evenly spread, since this runs at every call
  int64_t const seqlen_q = std::max<int64_t>(p.seqlen_q, 1), shift = p.seqlen_k - p.seqlen_q;
  int64_t const rows = kernel.arch < 90 ? kernel.tile_m : kRows;  // in portable kernels, every warp visits all keys of the tile
  int64_t const tiles = (seqlen_q * packed_heads + kernel.tile_m - 1) / kernel.tile_m, samples = std::min(tiles, kSamples);
  TileKeys visited;
  for (int64_t i = 0; i < samples; ++i) {
    int64_t const tile = (2 * i + 1) * tiles / (2 * samples);
    int64_t longest = 0;
    for (int64_t row = tile * kernel.tile_m; row < std::min((tile + 1) * kernel.tile_m, seqlen_q * packed_heads); row += rows) {
      int64_t const first = row / packed_heads, last = std::min((row + rows - 1) / packed_heads, seqlen_q - 1);
      int64_t const end = p.window_right < 0 ? p.seqlen_k : std::clamp<int64_t>(last + shift + p.window_right + 1, 0, p.seqlen_k);
      int64_t const begin = p.window_left < 0 ? 0 : std::max<int64_t>(first + shift - p.window_left, 0);
      int64_t const blocks = (end + kernel.tile_n - 1) / kernel.tile_n - begin / kernel.tile_n;
      int64_t const keys = std::max<int64_t>(blocks, 0) * kernel.tile_n;
      visited.all += double(keys * (rows / kRows)) / double(samples);
      longest = std::max(longest, keys);
    }
    visited.longest += double(longest) / double(samples);
  }
  return visited;
}

double predict_prefill_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  int64_t const packed_heads = choose_packed_heads(kernel, p);
  double const tiles = tiles_of(p, kernel.tile_m, packed_heads), sms = double(device.sm_count);
  TileKeys const keys = keys_visited(p, kernel, packed_heads);
  TileCost const cost = cost_of(m, kernel);
  double const key_us = 2.0 * 64 * double(kernel.tile_k + kernel.head_dim_v) / (device.matrix_rate / sms);
  double const mma_us = key_us * (cost.all * keys.all + cost.longest * keys.longest);
  double const block_us = p.kv_format == WeightFormat::kInt4   ? m.convert_int4_us
                          : p.kv_format == WeightFormat::kInt8 ? m.convert_int8_us
                                                               : m.convert_fp8_us;
  double const convert_us = converts(kernel) ? keys.longest * double(p.head_dim + p.head_dim_v) / 32768 * block_us : 0.0;
  double const tile_us = std::max(mma_us, convert_us) + cost.fixed_us;
  return m.start_us + std::max(1.0, tiles / sms + (tiles > sms ? m.last_wave : 0.0)) * tile_us;
}

double predict_decode_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  int64_t const tiles = (rows_of(p) + kernel.tile_m - 1) / kernel.tile_m;
  double const codes = double(p.batch) * double(p.seqlen_k) * p.heads_kv * (p.head_dim + p.head_dim_v) * bits_of(p.kv_format) / 8.0;
  double const reads_us = codes / device.read_bandwidth, l2_us = codes * double(tiles - 1) / (m.decode_l2 * device.read_bandwidth);
  double const mma_us = (p.kv_format == WeightFormat::kInt4 ? m.decode_mma_int4 : m.decode_mma) * flops_of(p) / device.matrix_rate;
  return m.decode_start_us + std::max(reads_us + l2_us, mma_us);
}

}  // namespace

double floor_us(AttentionProblem const& p, DeviceProperties const& device) {
  double const bytes =
      2.0 * (double(p.tokens_q) * p.heads_q * (p.head_dim + p.head_dim_v) + double(p.tokens_k) * p.heads_kv * (p.head_dim + p.head_dim_v));
  return std::max(bytes / device.read_bandwidth, flops_of(p) / device.matrix_rate);
}

double predict_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  return splits_keys(kernel) ? predict_decode_us(m, kernel, p, device) : predict_prefill_us(m, kernel, p, device);
}

}  // namespace minfer::attention
