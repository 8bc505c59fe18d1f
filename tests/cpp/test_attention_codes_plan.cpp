// Plans for attention over caches of codes: parts of the keys or tiles of queries.
#include <string>

#include "minfer/attention.h"
#include "testing.h"

using namespace minfer;

namespace {

/// A chunk of `queries` of each of `batch` sequences over `keys`, 32 query heads and 8 of keys.
AttentionProblem chunk(WeightFormat format, int64_t batch, int64_t queries, int64_t keys, int64_t head_dim = 128) {
  AttentionProblem p;
  p.type = DataType::kBF16;
  p.cached = p.paged = true;
  p.kv_format = format;
  p.batch = batch, p.seqlen_q = queries, p.seqlen_k = keys;
  p.tokens_q = batch * queries, p.tokens_k = batch * keys;
  p.heads_q = 32, p.heads_kv = 8;
  p.head_dim = p.head_dim_v = head_dim;
  p.window_right = 0;
  p.page_size = 64, p.pages = batch * keys / 64;
  if (format == WeightFormat::kInt4) p.group_tokens = 64, p.groups_v = 1;
  return p;
}

Status plan(AttentionProblem const& problem, AttentionPlan* plan, char const* kernel = nullptr) {
  AttentionPlanOptions options;
  options.only_runnable = false;
  options.kernel = kernel;
  return plan_attention(problem, h200_properties(), options, plan);
}

constexpr WeightFormat kFormats[] = {WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4};

/// What kernels over tiles of bf16 queries say that they read: int8 is no number of float16's range.
WeightFormat tiles_of(WeightFormat format) { return format == WeightFormat::kInt8 ? format : WeightFormat::kCodes; }

}  // namespace

TEST_CASE(attention_over_codes_splits_keys_for_few_rows) {
  for (WeightFormat format : kFormats) {
    for (int64_t head_dim : {64, 96, 128, 192, 256}) {
      AttentionPlan found;
      for (int64_t batch : {1, 8, 128}) {
        CHECK(plan(chunk(format, batch, 1, 8192, head_dim), &found).ok());
        CHECK(found.kernel->schedule == Schedule::kSplitKv && found.kernel->b_format == format);
      }
      // 64 queries of one sequence make too few tiles to read a long context, unless that is divided.
      CHECK(plan(chunk(format, 1, 64, 131072, head_dim), &found).ok());
      CHECK(found.kernel->schedule == Schedule::kSplitKv || found.split_count > 1);
      CHECK(head_dim <= 192 || found.split_count == 0);
      AttentionProblem split = chunk(format, 8, 2048, 8192, head_dim);
      split.num_splits = 1;  // bits are to be those of any batch
      CHECK(plan(split, &found).ok());
      CHECK(found.kernel->schedule == Schedule::kSplitKv);
    }
  }
}

TEST_CASE(attention_over_codes_takes_tiles_for_many_rows) {
  struct {
    int64_t batch, queries, keys;
  } const shapes[] = {{1, 2048, 8192}, {8, 512, 8192}, {4, 2048, 2048}, {64, 128, 1024}};
  for (WeightFormat format : kFormats) {
    for (int64_t head_dim : {64, 96, 128, 192, 256}) {
      for (auto const& [batch, queries, keys] : shapes) {
        AttentionPlan found;
        CHECK(plan(chunk(format, batch, queries, keys, head_dim), &found).ok());
        CHECK(found.kernel->b_format == tiles_of(format) && found.kernel->tile_k >= head_dim);
        CHECK(found.kernel->tile_k == (head_dim <= 128 ? 128 : 256) && found.counted && found.workspace_bytes > 0);
      }
    }
  }
}

TEST_CASE(attention_over_codes_by_name) {
  for (WeightFormat format : kFormats) {
    AttentionPlan found;
    std::string const tiles = std::string("attention_sm90_bf16_d128_") + name_of(tiles_of(format)) + "_128x128_prefill";
    std::string const splits = std::string("attention_sm90_bf16_d128_") + name_of(format) + "_decode";
    for (std::string const& name : {tiles, splits}) {
      CHECK(plan(chunk(format, 1, 2048, 8192), &found, name.c_str()).ok() && found.kernel->name == name);
      CHECK(plan(chunk(format, 1, 1, 64), &found, name.c_str()).ok() && found.kernel->name == name);
      CHECK(!plan(chunk(WeightFormat::kDense, 1, 2048, 8192), &found, name.c_str()).ok());
      CHECK(!plan(chunk(format, 1, 2048, 8192, 256), &found, name.c_str()).ok());
    }
    AttentionProblem problem = chunk(format, 1, 2048, 8192);
    problem.num_splits = 2;
    CHECK(!plan(problem, &found, tiles.c_str()).ok());
    problem = chunk(format, 1, 2048, 8192);
    problem.cached = problem.paged = false;
    CHECK(!plan(problem, &found, tiles.c_str()).ok());
  }
  // Rows of codes that are not whole 16 bytes are the other kernel's.
  AttentionPlan found;
  CHECK(plan(chunk(WeightFormat::kInt8, 8, 2048, 8192, 24), &found).ok());
  CHECK(found.kernel->schedule == Schedule::kSplitKv);
}

// 64 prompts of 2048 tokens, 32 heads: each part of the keys takes more than a GiB.
TEST_CASE(attention_refuses_splits_that_take_too_much_memory) {
  AttentionPlan found;
  AttentionProblem split = chunk(WeightFormat::kInt8, 64, 2048, 8192);
  split.num_splits = 256;
  Status const status = plan(split, &found);
  CHECK(status.code == StatusCode::kNotSupported);
  std::string const message = status.message, limit = "it can be at most ";
  CHECK(message.find("num_splits = 256 would take a workspace of ") == 0);
  size_t const at = message.find(limit);
  CHECK(at != std::string::npos);
  int64_t const most = std::stoll(message.substr(at + limit.size()));
  CHECK(most > 1 && most < 256);
  split.num_splits = most;
  CHECK(plan(split, &found).ok() && found.workspace_bytes <= size_t(h200_properties().memory_bytes / 4));
  split.num_splits = most + 1;
  std::string const kernel = found.kernel->name;
  CHECK(!plan(split, &found).ok() && !plan(split, &found, kernel.c_str()).ok());
  split.num_splits = 1;
  CHECK(plan(split, &found).ok() && found.workspace_bytes == 0);
}
