#include "attention/cost_model.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

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

double square(double x) { return x * x; }
/// The largest, and more where others are nearly as large.
double bound(double a, double b, double c = 0.0) { return std::sqrt(std::sqrt(square(square(a)) + square(square(b)) + square(square(c)))); }

/// See CostModel.
struct TileCost {
  double fixed_us, all, longest;
};
TileCost cost_of(CostModel const& m, KernelInfo const& kernel) {
  if (kernel.arch < 90) return {m.fixed_portable_us, m.all_portable, m.longest_portable};
  if (converts(kernel)) {
    return kernel.tile_k > 128 ? TileCost{m.fixed_codes_d256_us, m.all_codes_d256, m.longest_codes_d256}
                               : TileCost{m.fixed_codes_d128_us, m.all_codes_d128, m.longest_codes_d128};
  }
  if (kernel.tile_k <= 64) return {m.fixed_d64_us, m.all_d64, m.longest_d64};
  if (kernel.tile_k <= 128) {
    constexpr double kShort = 1.06;  // of key blocks that are shorter than those for which the constants are
    double const factor = kernel.tile_m == 128 && kernel.tile_n < 128 ? kShort : 1.0;
    return kernel.tile_m > 128 ? TileCost{m.fixed_tall_us, m.all_tall, m.longest_tall}
                               : TileCost{m.fixed_d128_us, factor * m.all_d128, factor * m.longest_d128};
  }
  if (kernel.tile_k > 192) return {m.fixed_d256_us, m.all_d256, m.longest_d256};
  return kernel.head_dim_v <= 128 ? TileCost{m.fixed_d192x128_us, m.all_d192x128, m.longest_d192x128}
                                  : TileCost{m.fixed_d192_us, m.all_d192, m.longest_d192};
}

/// The mean number of keys that so many neighbouring queries of a sequence see together.
double keys_seen(AttentionProblem const& p, double queries = 1.0) {
  double const q = double(p.seqlen_q), k = double(p.seqlen_k), shift = k - q;
  if (p.window_left < 0 && p.window_right < 0) return k;
  auto const limit = [&](double x) { return std::clamp(x, 0.0, k); };
  double total = 0.0;
  constexpr int kSamples = 8;
  double const apart = 0.5 * (std::min(queries, q) - 1.0);  // of the first and the last of them from their middle
  for (int i = 0; i < kSamples; ++i) {
    double const query = std::clamp((i + 0.5) * q / kSamples - 0.5, apart, std::max(q - 1.0 - apart, apart));
    double const end = p.window_right < 0 ? k : limit(query + apart + shift + double(p.window_right) + 1.0);
    double const begin = p.window_left < 0 ? 0.0 : limit(query - apart + shift - double(p.window_left));
    total += std::max(0.0, end - begin) / kSamples;
  }
  return total;
}

double flops_of(AttentionProblem const& p) {
  return 2.0 * double(p.tokens_q) * double(p.heads_q) * keys_seen(p) * double(p.head_dim + p.head_dim_v);
}

/// The keys that a tile's warpgroups visit, in whole key blocks: all of them together, the one that visits most, and those that are loaded.
struct TileKeys {
  double all = 0.0, longest = 0.0, loaded = 0.0;
};
struct VisitedKeys {
  TileKeys mean, most;  // over tiles, of the tile with most
};
TileKeys keys_of_tile(AttentionProblem const& p, KernelInfo const& kernel, int64_t packed_heads, int64_t tile) {
  constexpr int64_t kRows = 64;
  int64_t const seqlen_q = std::max<int64_t>(p.seqlen_q, 1), shift = p.seqlen_k - p.seqlen_q;
  int64_t const rows = kernel.arch < 90 ? kernel.tile_m : kRows;  // in portable kernels, every warp visits all keys of the tile
  int64_t const first_row = tile * kernel.tile_m, last_row = std::min(first_row + kernel.tile_m, seqlen_q * packed_heads);
  TileKeys visited;
  int64_t first_block = INT64_MAX, last_block = 0;
  for (int64_t row = first_row; row < last_row; row += rows) {
    int64_t const first = row / packed_heads, last = std::min((row + rows - 1) / packed_heads, seqlen_q - 1);
    int64_t const end = p.window_right < 0 ? p.seqlen_k : std::clamp<int64_t>(last + shift + p.window_right + 1, 0, p.seqlen_k);
    int64_t const begin = p.window_left < 0 ? 0 : std::max<int64_t>(first + shift - p.window_left, 0);
    int64_t const block = begin / kernel.tile_n, blocks = std::max<int64_t>((end + kernel.tile_n - 1) / kernel.tile_n - block, 0);
    double const keys = double(blocks * kernel.tile_n);
    visited.all += keys * double(rows / kRows);
    visited.longest = std::max(visited.longest, keys);
    first_block = std::min(first_block, block);
    last_block = std::max(last_block, block + blocks);
  }
  visited.loaded = double(std::max<int64_t>(last_block - first_block, 0) * kernel.tile_n);
  return visited;
}
VisitedKeys keys_visited(AttentionProblem const& p, KernelInfo const& kernel, int64_t packed_heads) {
  constexpr int64_t kSamples = 8;  // only kSamples tiles are evaluated, evenly spread, since this runs at every call
  int64_t const tiles = (std::max<int64_t>(p.seqlen_q, 1) * packed_heads + kernel.tile_m - 1) / kernel.tile_m;
  bool const same = p.window_left < 0 && p.window_right < 0;  // all tiles but the last have as many keys
  int64_t const samples = same ? 1 : std::min(tiles, kSamples);
  VisitedKeys visited;
  auto const at_most = [&](TileKeys const& keys) {
    if (keys.all + keys.longest > visited.most.all + visited.most.longest) visited.most = keys;
  };
  for (int64_t i = 0; i < samples; ++i) {
    int64_t const tile = same ? 0 : (2 * i + 1) * tiles / (2 * samples);
    TileKeys const keys = keys_of_tile(p, kernel, packed_heads, tile);
    visited.mean.all += keys.all / double(samples);
    visited.mean.longest += keys.longest / double(samples);
    visited.mean.loaded += keys.loaded / double(samples);
    at_most(keys);
  }
  if (!same) at_most(keys_of_tile(p, kernel, packed_heads, tiles - 1));
  return visited;
}

double row_bytes(AttentionProblem const& p) { return double(p.head_dim + p.head_dim_v) * bits_of(p.kv_format) / 8.0; }  // of K and V
double query_bytes(AttentionProblem const& p) { return 2.0 * double(p.tokens_q) * double(p.heads_q) * double(p.head_dim + p.head_dim_v); }

/// The keys of a sequence that its queries see, together.
double keys_read(AttentionProblem const& p) {
  return std::min(double(p.seqlen_k), p.window_left < 0 ? double(p.seqlen_k) : double(p.window_left + p.seqlen_q));
}

double load_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, double keys) {
  if (converts(kernel)) {
    double const block_us = p.kv_format == WeightFormat::kInt4   ? m.convert_int4_us
                            : p.kv_format == WeightFormat::kInt8 ? m.convert_int8_us
                                                                 : m.convert_fp8_us;
    double const residual_us = p.kv_format == WeightFormat::kInt4 ? m.residual_us : 0.0;
    return keys * double(p.head_dim + p.head_dim_v) / 32768 * block_us + residual_us;
  }
  double const columns = double((kernel.tile_k + kernel.head_dim_v) / 64);
  double const boxes = p.paged ? double(kernel.tile_n) / double(std::gcd(int64_t(kernel.tile_n), p.page_size)) : 1.0;
  double const loaders = kernel.tile_k > 64 && kernel.tile_n % 64 != 0 ? 4.0 : 2.0;  // PrefillProducer::kLoaders
  return keys / kernel.tile_n * (m.block_us + (boxes * columns * m.box_us + (p.paged ? m.page_us : 0.0)) / loaders);
}

double predict_prefill_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  int64_t const packed_heads = choose_packed_heads(kernel, p);
  double const tiles = tiles_of(p, kernel.tile_m, packed_heads), sms = double(device.sm_count);
  VisitedKeys const keys = keys_visited(p, kernel, packed_heads);
  TileCost const cost = cost_of(m, kernel);
  double const key_us = 2.0 * 64 * double(kernel.tile_k + kernel.head_dim_v) / (device.matrix_rate / sms);
  auto const tile_us = [&](TileKeys const& k) {
    return bound(key_us * (cost.all * k.all + cost.longest * k.longest), load_us(m, kernel, p, k.loaded));
  };
  double const mean_us = tile_us(keys.mean), most_us = tile_us(keys.most),
               next_us = mean_us + m.next_tile * cost.fixed_us + (p.cached ? m.next_cached_us : 0.0);
  double const waves = tiles / sms;
  double busy_us = most_us;
  if (waves > 1.0) {
    // Tiles that cost the same make whole waves. Others, the longest first, fill the last one: `uneven` is 1 where the shortest takes no
    // time.
    double const uneven = p.varlen ? 1.0 : std::clamp((most_us - mean_us) / mean_us, 0.0, 1.0);
    busy_us = std::max(most_us, mean_us + (waves - 1.0 + (std::ceil(waves) - waves) * (1.0 - uneven) + m.last_wave * uneven) * next_us);
  }
  // Blocks that reach behind a sequence's end in the cache are loaded whole.
  double const blocks = keys_read(p) / kernel.tile_n;
  double const rows = double(p.batch) * double(p.heads_kv) * (p.cached ? std::ceil(blocks) : blocks) * kernel.tile_n;
  double const stream_us = (rows * row_bytes(p) + query_bytes(p)) / (m.bandwidth * device.read_bandwidth);
  double const l2_us = (tiles * keys.mean.loaded * row_bytes(p) + query_bytes(p)) / (m.l2 * device.read_bandwidth);
  double const us = m.start_us + cost.fixed_us + bound(busy_us, stream_us, l2_us);
  return p.cached && p.batch > 1 ? us * (waves > 1.0 ? m.uneven : m.uneven * m.uneven) : us;
}

double predict_decode_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  constexpr double kMinKeys = double(kMinSplitKeys);
  double const sms = double(device.sm_count), group = double(p.heads_q / std::max<int64_t>(p.heads_kv, 1));
  double const row_tiles = rows_of(p) <= 8 ? 1.0 : kernel.tile_m / 8, tile_rows = 8.0 * row_tiles;
  double const queries = p.varlen ? double(p.tokens_q) / double(std::max<int64_t>(p.batch, 1)) : double(p.seqlen_q);
  double const items = std::ceil(std::max(queries * group, 1.0) / tile_rows) * double(p.batch) * double(p.heads_kv);
  double const keys = keys_seen(p, std::max((tile_rows / group), 1.0));  // of an output tile
  double const blocks = std::max(1.0, std::ceil(keys / kernel.tile_n));
  double const least = std::max(1.0, kMinKeys / kernel.tile_n), evenly = std::ceil(items * blocks / sms);
  double cta_blocks = std::max(evenly, std::min(least, items * blocks));
  // A CTA's range that does not end with an output tile has parts of one more.
  double const ratio = std::max(cta_blocks, blocks) / std::min(cta_blocks, blocks), whole = std::ceil(cta_blocks / blocks);
  double cta_items = std::min(ratio == std::floor(ratio) ? whole : whole + 1.0, items);
  if (items <= sms && p.batch <= 32) {  // ranges that no two output tiles share, as in DecodeTileScheduler
    double const warps = kernel.threads / 32 - (kernel.arch < 90 ? 0 : 4);
    auto const part = [&](double ctas) { return ctas < items ? blocks : std::ceil(blocks / std::floor(ctas / items)); };
    double own = blocks <= warps ? blocks : std::min(part(0.75 * sms), std::max(part(sms), std::min(2.0 * warps, blocks)));
    own = std::max(own, std::min(least, blocks));
    if (own <= evenly + warps) cta_blocks = own, cta_items = 1.0;
  }
  bool const codes = p.kv_format != WeightFormat::kDense;
  double const key = !codes                               ? m.key_dense
                     : p.kv_format == WeightFormat::kInt4 ? m.key_int4
                     : p.kv_format == WeightFormat::kInt8 ? m.key_int8
                                                          : m.key_fp8;
  double const rows = kernel.tile_k <= 64 ? m.rows_d64 : kernel.tile_k <= 128 ? m.rows_d128 : m.rows_d256;
  double const key_us = 2.0 * 8 * double(kernel.tile_k + kernel.head_dim_v) / (device.matrix_rate / sms);
  double const item_us = (kernel.tile_k <= 64    ? m.item_d64_us
                          : kernel.tile_k <= 128 ? m.item_d128_us
                                                 : m.item_d256_us) *
                         (codes ? m.item_codes : 1.0) * (1.0 + m.item_rows * (row_tiles - 1.0));
  double step_us = key_us * (key + rows * row_tiles);
  if (kernel.arch < 90) step_us *= m.decode_portable;
  // The last CTA of an output tile merges what the others leave.
  double const merge_us = std::max(0.0, blocks / cta_blocks - 1.0) * m.merge_us * row_tiles * double(kernel.head_dim_v) / 128;
  double const busy_us = cta_blocks * kernel.tile_n * step_us + cta_items * item_us;
  double const read = double(p.batch) * double(p.heads_kv) * keys_read(p) * row_bytes(p) + query_bytes(p);
  double const stream_us = read / (m.decode_bandwidth * device.read_bandwidth);
  double const l2_us = items * blocks * kernel.tile_n * row_bytes(p) / (m.decode_l2 * device.read_bandwidth);
  return m.decode_start_us + (p.batch > 32 ? m.decode_table_us : 0.0) + bound(busy_us, stream_us, l2_us) + merge_us;
}

}  // namespace

double floor_us(AttentionProblem const& p, DeviceProperties const& device) {
  double const share = p.seqlen_k > 0 ? keys_read(p) / double(p.seqlen_k) : 0.0;
  double const keys = p.cached ? double(p.batch) * keys_read(p) : share * double(p.tokens_k);
  double const bytes = query_bytes(p) + keys * double(p.heads_kv) * row_bytes(p);
  return std::max(bytes / device.read_bandwidth, flops_of(p) / device.matrix_rate);
}

AttentionProblem with_last_page(AttentionProblem const& problem, double share) {
  AttentionProblem p = problem;
  int64_t const empty = int64_t((1.0 - share) * double(p.page_size));
  if (p.paged) p.seqlen_k = std::max({p.seqlen_k - empty, std::min(p.seqlen_q, p.seqlen_k), int64_t(1)});
  return p;
}

double predict_us(CostModel const& m, KernelInfo const& kernel, AttentionProblem const& p, DeviceProperties const& device) {
  return splits_keys(kernel) ? predict_decode_us(m, kernel, p, device) : predict_prefill_us(m, kernel, p, device);
}

}  // namespace minfer::attention
