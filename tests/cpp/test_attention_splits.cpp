// The items of attention that divides keys (attention/prefill/split_items.h) for plans of random calls: that they are all tiles and splits,
// each once, that partials have slots of their own, which the kernel behind finds again, and that nothing leads outside of the workspace.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "attention/prefill/split_items.h"
#include "gemm_problems.h"
#include "minfer/attention.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::attention;
using namespace minfer::testing;

namespace {

/// What SplitItems reads of the kernels' parameters.
struct Params {
  int32_t window_left, window_right, packed_heads, head_tiles, q_tiles, split_count, split_rows, max_splits, max_items;
};

struct Sequence {
  int32_t row_q, queries, keys;
};

struct Draw {
  std::mt19937 engine;
  int64_t operator()(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine); }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[(*this)(0, int64_t(values.size()) - 1)];
  }
};

struct Launch {
  AttentionProblem problem;
  AttentionPlan plan;
  Params params;
  std::vector<Sequence> sequences;
  std::string text;
};

/// A call over a cache. Lengths are what the operands allow, also longer than they were said to be.
Launch draw_launch(Draw& draw, bool batch_invariant = true) {
  Launch launch;
  AttentionProblem& p = launch.problem;
  p.batch = draw.of({1, 2, 5, 33, 100});
  p.heads_kv = draw.of({1, 2, 8});
  p.heads_q = p.heads_kv * draw.of({1, 2, 4, 7, 8, 12});
  p.head_dim = p.head_dim_v = draw.of({64, 128, 192});
  p.type = DataType::kBF16;
  p.cached = p.paged = true;
  p.page_size = 64;
  p.seqlen_k = 64 * draw.of({1, 9, 70, 300});
  p.pages = p.batch * p.seqlen_k / 64;
  p.tokens_k = p.pages * 64;
  p.window_left = draw.of({-1, -1, 30, 1000});
  p.window_right = draw.of({0, 0, -1});
  p.varlen = draw(0, 1) == 1;
  p.seqlen_q = draw.of({1, 1, 3, 40, 600});
  p.batch_invariant = batch_invariant;
  int32_t row = p.varlen ? int32_t(draw(0, 3)) : 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t const most = draw(0, 9) == 0 ? 2 * p.seqlen_q + 5 : p.seqlen_q;
    int32_t const queries = int32_t(p.varlen ? draw(0, most) : p.seqlen_q);
    launch.sequences.push_back({row, queries, int32_t(draw(0, 3) == 0 ? draw(0, 5) : draw(0, p.seqlen_k))});
    row += p.varlen ? queries : 0;
  }
  p.tokens_q = p.varlen ? row + draw(0, 3) : p.batch * p.seqlen_q;
  AttentionPlanOptions options;
  options.only_runnable = false;
  Status const status = plan_attention(p, h200_properties(), options, &launch.plan);
  if (!status.ok()) fail(__FILE__, __LINE__, status.message);
  AttentionPlan const& plan = launch.plan;
  int64_t const rows = p.seqlen_q * plan.packed_heads;
  launch.params = {int32_t(p.window_left),
                   int32_t(p.window_right),
                   int32_t(plan.packed_heads),
                   int32_t(p.heads_q / plan.packed_heads),
                   int32_t((rows + plan.kernel->tile_m - 1) / plan.kernel->tile_m),
                   int32_t(plan.split_count),
                   int32_t(plan.split_rows),
                   int32_t(plan.max_splits),
                   int32_t(plan.partial_slots)};
  launch.text = std::to_string(p.batch) + " sequences, " + std::to_string(p.seqlen_q) + " queries, " + std::to_string(p.seqlen_k) +
                " keys, heads " + std::to_string(p.heads_q) + "/" + std::to_string(p.heads_kv) + ", windows " +
                std::to_string(p.window_left) + " " + std::to_string(p.window_right) + (p.varlen ? ", varlen, " : ", ") + plan.kernel->name;
  return launch;
}

/// The key blocks of a tile, or of 64 rows of it, as the kernel's blocks_of() has them.
template <int kTileM, int kTileN>
KeyBlocks<kTileN> blocks_of(Params const& p, Sequence const& s, int first, int rows, int split, int split_blocks) {
  int const last = std::min(first + rows / p.packed_heads - 1, s.queries - 1);
  KeyBlocks<kTileN> blocks(Mask(s.queries, s.keys, p.window_left, p.window_right), first, last);
  if (split >= 0) blocks.cut(split * split_blocks, (split + 1) * split_blocks);
  return blocks;
}

template <int kTileM, int kTileN>
bool check(Launch const& launch) {
  using Items = SplitItems<kTileM, kTileN>;
  constexpr int kWarpgroupRows = kTileM < 64 ? kTileM : 64;
  Params const& p = launch.params;
  std::set<int64_t> slots;
  int64_t items = 0;
  bool divides = false;
  for (int b = 0; b < int(launch.sequences.size()); ++b) {
    Sequence const& s = launch.sequences[size_t(b)];
    auto const splits = Items::splits_of(p, s.queries, s.keys);
    bool const divided = Items::is_divided(p, s.queries, splits);
    int const length = splits.blocks * kTileN;
    CHECK(splits.blocks == Items::kSplitBlocks || p.split_count > 0);
    int const count = Items::count(p, s.queries, s.keys);
    items += count;
    auto const slot_of = [&](int head_tile, int first, int split) {
      return Items::slot_of(p, launch.problem.varlen, b, s.row_q, head_tile, first, split, splits.first);
    };
    std::map<std::tuple<int, int, int>, int64_t> of_items;  // head tile, first query, split -> slot
    for (int number = 0; number < count; ++number) {
      auto const item = Items::at(p, s.queries, s.keys, number);
      CHECK_EQUAL(item.split >= 0, divided);
      CHECK_EQUAL(item.split_blocks, splits.blocks);
      CHECK(item.head_tile >= 0 && item.head_tile < p.head_tiles && item.first >= 0 && item.first < s.queries);
      CHECK_EQUAL(item.first % (kTileM / p.packed_heads), 0);
      int64_t const slot = divided ? slot_of(item.head_tile, item.first, item.split) : -1;
      CHECK(of_items.try_emplace({item.head_tile, item.first, item.split}, slot).second);
      if (!divided) continue;
      divides = true;
      for (int split = splits.first; split < splits.first + splits.count; ++split) {  // CTAs that fold find the tile's other items
        auto const other = Items::at(p, s.queries, s.keys, Items::item_of(p, number, item.split, split));
        CHECK(other.head_tile == item.head_tile && other.first == item.first && other.split == split);
      }
      CHECK(slot >= 0 && slot < launch.plan.partial_slots && slots.insert(slot).second);
      // The blocks of all splits, and those outside of them, are the tile's; each warpgroup's are among its tile's.
      auto const tile = blocks_of<kTileM, kTileN>(p, s, item.first, kTileM, item.split, splits.blocks);
      CHECK(tile.begin <= tile.end);
      for (int row = 0; row < kTileM; row += kWarpgroupRows) {
        int const first = item.first + row / p.packed_heads;
        if (first >= s.queries) break;
        auto const own = blocks_of<kTileM, kTileN>(p, s, first, kWarpgroupRows, item.split, splits.blocks);
        CHECK(own.begin == own.end || (tile.begin <= own.begin && own.end <= tile.end));
        CHECK(own.begin >= item.split * splits.blocks && own.end <= (item.split + 1) * splits.blocks);
      }
    }
    int64_t const tiles = Items::tiles_of(p, s.queries) * p.head_tiles;
    CHECK_EQUAL(int64_t(of_items.size()), divided ? tiles * splits.count : tiles);
    using Part = typename Items::Part;  // the same items, the last splits apart
    std::set<std::tuple<int, int, int>> in_parts;
    for (auto const& [part, number_of_part] : {std::pair(Part::kWhole, Items::count_of_whole(p, s.queries, s.keys)),
                                               std::pair(Part::kLast, Items::count_of_last(p, s.queries))}) {
      for (int number = 0; number < number_of_part; ++number) {
        auto const item = Items::at(p, s.queries, s.keys, number, part);
        CHECK(of_items.contains({item.head_tile, item.first, item.split}));
        CHECK_EQUAL(!divided || item.split == splits.first + splits.count - 1, part == Part::kLast);
        CHECK(in_parts.insert({item.head_tile, item.first, item.split}).second);
      }
    }
    CHECK_EQUAL(in_parts.size(), of_items.size());
    if (!divided) continue;
    for (int query = 0; query < s.queries; ++query) {  // every key that a query sees is in an item, whose slot the merge finds
      Mask const mask(s.queries, s.keys, p.window_left, p.window_right);
      int const begin = mask.begin(query), end = mask.end(query), first = query - query % (kTileM / p.packed_heads);
      CHECK((query - first) * p.packed_heads + p.packed_heads <= launch.plan.slot_rows);
      for (int split = begin / length; begin < end && split * length < end; ++split) {
        auto const found = of_items.find({query % p.head_tiles, first, split});
        CHECK(found != of_items.end() && found->second == slot_of(query % p.head_tiles, first, split));
        int const from = std::max(begin, split * length), to = std::min(end, (split + 1) * length);
        int const rows = (query - first) * p.packed_heads / kWarpgroupRows * kWarpgroupRows;
        auto const own = blocks_of<kTileM, kTileN>(p, s, first + rows / p.packed_heads, kWarpgroupRows, split, splits.blocks);
        CHECK(own.begin * kTileN <= from && own.end * kTileN >= to);
      }
    }
  }
  CHECK(items <= launch.plan.partial_slots);
  return divides;
}

/// Whether the launch divides a sequence.
bool check_launch(Launch const& launch) {
  if (launch.plan.split_rows == 0) return false;  // it has the tiles of other kernels
  Context const at(launch.text);
  if (launch.plan.kernel->tile_m == 8) return launch.plan.kernel->tile_n == 80 ? check<8, 80>(launch) : check<8, 128>(launch);
  if (launch.plan.kernel->tile_n == 128) return launch.plan.kernel->tile_m == 128 ? check<128, 128>(launch) : check<192, 128>(launch);
  if (launch.plan.kernel->tile_n == 80) return launch.plan.kernel->tile_m == 128 ? check<128, 80>(launch) : check<192, 80>(launch);
  CHECK(launch.plan.kernel->tile_m == 128 && launch.plan.kernel->tile_n == 96);
  return check<128, 96>(launch);
}

/// All slots of sequences that overlap lie in the workspace.
template <int kTileM, int kTileN>
void check_overlapping(Launch const& launch, Draw& draw) {
  using Items = SplitItems<kTileM, kTileN>;
  int32_t const tokens = int32_t(launch.problem.tokens_q);
  for (int b = 0; b < int(launch.sequences.size()); ++b) {
    Sequence s{int32_t(draw(0, tokens)), 0, int32_t(draw(0, launch.problem.seqlen_k))};
    s.queries = int32_t(draw(0, tokens - s.row_q));
    auto const splits = Items::splits_of(launch.params, s.queries, s.keys);
    if (!Items::is_divided(launch.params, s.queries, splits)) continue;
    for (int number = 0; number < Items::count(launch.params, s.queries, s.keys); ++number) {
      auto const item = Items::at(launch.params, s.queries, s.keys, number);
      int64_t const slot = Items::slot_of(launch.params, true, b, s.row_q, item.head_tile, item.first, item.split, splits.first);
      CHECK(slot >= 0 && slot < launch.plan.partial_slots);
    }
  }
}

}  // namespace

TEST_CASE(splits_of_batch_invariant_attention_are_computed_once) {
  int divided = 0;
  for (int seed = 0; seed < 1500; ++seed) {
    Draw draw{std::mt19937(unsigned(seed))};
    Context const at("seed " + std::to_string(seed));
    divided += check_launch(draw_launch(draw));
  }
  CHECK(divided > 300);
}

TEST_CASE(splits_of_few_tiles_over_many_keys_are_computed_once) {
  int divided = 0;
  for (int seed = 0; seed < 3000; ++seed) {
    Draw draw{std::mt19937(unsigned(seed))};
    Context const at("seed " + std::to_string(seed));
    Launch const launch = draw_launch(draw, false);
    if (launch.plan.split_count == 0) continue;
    CHECK(launch.plan.kernel->tile_m >= 64 && launch.plan.split_count > 1);
    divided += check_launch(launch);
  }
  CHECK(divided > 100);
}

TEST_CASE(slots_of_sequences_that_overlap_are_in_the_workspace) {
  for (int seed = 0; seed < 500; ++seed) {
    Draw draw{std::mt19937(unsigned(seed))};
    Launch launch = draw_launch(draw);
    if (!launch.problem.varlen || launch.plan.split_rows == 0 || launch.plan.kernel->tile_n != 80) continue;
    Context const at(launch.text);
    switch (launch.plan.kernel->tile_m) {
      case 8: check_overlapping<8, 80>(launch, draw); break;
      case 128: check_overlapping<128, 80>(launch, draw); break;
      default: check_overlapping<192, 80>(launch, draw);
    }
  }
}
