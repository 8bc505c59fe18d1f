// Plans of attention on GPUs that are not here: every problem has a kernel, of sm_90 on Hopper and a portable one elsewhere, which fits.
#include <cstring>
#include <functional>
#include <map>
#include <sstream>
#include <tuple>
#include <vector>

#include "gemm_problems.h"
#include "minfer/attention.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

std::string text_of(AttentionProblem const& p) {
  std::ostringstream text;
  text << name_of(p.type) << " batch " << p.batch << ", " << p.seqlen_q << " queries, " << p.seqlen_k << " keys, heads " << p.heads_q << "/"
       << p.heads_kv << ", head_dim " << p.head_dim << "/" << p.head_dim_v << (p.varlen ? ", varlen" : "") << (p.cached ? ", cached " : " ")
       << name_of(p.kv_format) << (p.paged ? ", pages of " : " ") << p.page_size << ", splits " << p.num_splits;
  return text.str();
}

AttentionProblem problem_of(int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t heads_q, int64_t heads_kv, int64_t head_dim,
                            int64_t head_dim_v) {
  AttentionProblem p;
  p.batch = batch, p.heads_q = heads_q, p.heads_kv = heads_kv;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.tokens_q = batch * seqlen_q, p.tokens_k = batch * seqlen_k;
  p.head_dim = head_dim, p.head_dim_v = head_dim_v;
  return p;
}

AttentionProblem cached(AttentionProblem p, WeightFormat format, int64_t page_size) {
  p.cached = true;
  p.kv_format = format;
  p.paged = page_size > 0;
  p.page_size = page_size > 0 ? page_size : p.seqlen_k;
  p.pages = p.paged ? p.batch * (p.seqlen_k / page_size + 1) : p.batch;
  p.tokens_k = p.pages * p.page_size;
  p.window_right = 0;
  if (format == WeightFormat::kInt4) p.group_tokens = 32, p.groups_v = 1;
  return p;
}

/// Calls `visit` with attention over tensors and over caches of every format, few queries and many.
void for_each_problem(std::function<void(AttentionProblem const&)> const& visit) {
  int64_t const dims[][2] = {{8, 8}, {64, 64}, {80, 80}, {96, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
  int64_t const heads[][2] = {{1, 1}, {8, 8}, {32, 8}, {64, 1}, {24, 2}};
  for (auto const& dim : dims) {
    for (auto const& head : heads) {
      for (int64_t batch : {1, 7, 300}) {
        for (int64_t queries : {1, 5, 130, 4096}) {
          for (int64_t keys : {0, 64, 1024, 131072}) {
            AttentionProblem p = problem_of(batch, queries, keys, head[0], head[1], dim[0], dim[1]);
            p.type = (batch + queries) % 2 ? DataType::kF16 : DataType::kBF16;
            p.varlen = queries == 130;
            visit(p);
            p.window_left = 100, p.window_right = 0;
            visit(p);
            for (WeightFormat format : {WeightFormat::kDense, WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4}) {
              if (format == WeightFormat::kInt4 && (dim[0] % 32 || dim[1] % 32)) continue;
              for (int64_t page_size : {0, 32, 96, 1024}) {
                AttentionProblem q = cached(p, format, page_size);
                visit(q);
                q.num_splits = 3;
                if (p.tokens_q < 100000) visit(q);  // parts of more may take too much memory
              }
            }
          }
        }
      }
    }
  }
}

AttentionPlan plan_of(AttentionProblem const& p, DeviceProperties const& device) {
  AttentionPlanOptions options;
  options.only_runnable = false;
  AttentionPlan plan;
  Status const status = plan_attention(p, device, options, &plan);
  if (!status.ok()) fail(__FILE__, __LINE__, status.message);
  return plan;
}

/// The plan's kernel can compute the problem on the device.
void check_plan(AttentionPlan const& plan, AttentionProblem const& p, DeviceProperties const& device) {
  KernelInfo const& kernel = *plan.kernel;
  CHECK(kernel.ab_type == p.type && kernel.tile_k >= p.head_dim && kernel.head_dim_v >= p.head_dim_v);
  CHECK(kernel.smem_bytes <= device.smem_per_block);
  std::string const operation = kernel.operation;
  bool const divides = plan.split_count > 0 && operation == "attention_divided";
  CHECK(divides || operation == (p.batch_invariant || plan.split_count > 0 ? "attention_invariant" : "attention"));
  int64_t const group = p.heads_q / p.heads_kv;
  CHECK(plan.predicted_us >= plan.floor_us && plan.floor_us >= 0);
  if (p.cached) CHECK(plan.box_rows > 0 && kernel.tile_n % plan.box_rows == 0 && (!p.paged || p.page_size % plan.box_rows == 0));
  if (kernel.schedule == Schedule::kSplitKv) {
    CHECK(p.cached && kernel.b_format == p.kv_format);
    CHECK((plan.box_rows & (plan.box_rows - 1)) == 0);
    CHECK(plan.row_tiles == 1 ? true : plan.row_tiles == kernel.tile_m / 8);
    CHECK(plan.ctas >= 1 && plan.ctas % plan.lockstep == 0 && p.heads_kv % plan.lockstep == 0 && plan.min_key_blocks >= 1);
    CHECK(plan.ctas <= device.sm_count * kernel.ctas_per_sm);
    CHECK(p.num_splits > 0 || plan.partial_slots == plan.ctas);
    CHECK(plan.workspace_bytes >= size_t(plan.partial_slots * 8 * plan.row_tiles * kernel.tile_k * 4));
  } else {
    CHECK(p.num_splits == 0 && group % plan.packed_heads == 0 && kernel.tile_m % plan.packed_heads == 0);
    if (plan.split_count == 0) CHECK_EQUAL(plan.counted, plan.workspace_bytes > 0);
  }
  if (plan.split_count > 0) {  // a tile of many rows, whose splits fill a few waves
    CHECK(kernel.tile_m >= 64 && plan.split_count > 1 && plan.split_rows == p.seqlen_q * plan.packed_heads && !plan.counted);
    CHECK_EQUAL(plan.max_splits, plan.split_count + (p.window_left >= 0 ? 1 : 0));
    CHECK(plan.workspace_bytes >= size_t(plan.partial_slots * plan.slot_rows * (p.head_dim_v + 2) * 4));
    CHECK(plan.workspace_bytes <= size_t(5) << 28);
  }
}

}  // namespace

TEST_CASE(attention_plans_always_answer_on_portable_devices) {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    DeviceProperties const& device = devices[i];
    for_each_problem([&](AttentionProblem const& p) {
      Context const at(std::string(device.name) + ": " + text_of(p));
      AttentionPlan const plan = plan_of(p, device);
      check_plan(plan, p, device);
      CHECK_EQUAL(plan.kernel->arch, 80);
      CHECK(!plan.kernel->arch_exact);
      if (plan.kernel->schedule == Schedule::kSplitKv) return;
      // A CTA for each tile; persistent ones that share a counter where the device alone knows the tiles.
      CHECK_EQUAL(plan.counted, p.varlen);
      int64_t const tiles =
          (p.seqlen_q * plan.packed_heads + plan.kernel->tile_m - 1) / plan.kernel->tile_m * p.batch * (p.heads_q / plan.packed_heads);
      CHECK(plan.ctas >= 1 && (p.varlen ? plan.ctas <= 2 * device.sm_count : plan.ctas == std::min<int64_t>(tiles, 1 << 20)));
    });
  }
}

TEST_CASE(attention_plans_on_hopper_are_of_hopper_kernels) {
  DeviceProperties const device = h200_properties();
  for_each_problem([&](AttentionProblem const& p) {
    Context const at(text_of(p));
    AttentionPlan const plan = plan_of(p, device);
    check_plan(plan, p, device);
    CHECK_EQUAL(plan.kernel->arch, 90);
  });
}

TEST_CASE(split_kv_kernels_follow_from_head_dims_alone) {
  DeviceProperties const h200 = h200_properties();
  // With a given number of splits a sequence has the same bits in every batch, so the same kernel.
  for (int64_t head_dim : {64, 128, 256}) {
    for (WeightFormat format : {WeightFormat::kDense, WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4}) {
      for (int64_t batch : {1, 5, 40, 300}) {
        for (int64_t keys : {64, 700, 8192}) {
          AttentionProblem p = cached(problem_of(batch, 1, keys, 8, 2, head_dim, head_dim), format, 64);
          Context const at(text_of(p));
          for (int64_t splits : {0, 1, 8}) {
            p.num_splits = splits;
            KernelInfo const& kernel = *plan_of(p, h200).kernel;
            if (splits == 0 && kernel.schedule != Schedule::kSplitKv) continue;
            CHECK(kernel.schedule == Schedule::kSplitKv);
            CHECK_EQUAL(int64_t(kernel.tile_k), head_dim);
          }
        }
      }
    }
  }
}

TEST_CASE(few_queries_over_short_caches_are_of_split_kv_kernels) {
  // On an H100, prefill's kernel takes 8.9 us over 320 keys of one sequence in 16 bits, where split-KV takes 4.8.
  DeviceProperties const h200 = h200_properties();
  for (WeightFormat format : {WeightFormat::kDense, WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4}) {
    for (int64_t batch : {1, 4, 16}) {
      for (int64_t keys : {192, 320, 448, 1024}) {
        AttentionProblem const p = cached(problem_of(batch, 1, keys, 32, 8, 128, 128), format, 64);
        Context const at(text_of(p));
        CHECK(plan_of(p, h200).kernel->schedule == Schedule::kSplitKv);
      }
    }
  }
}

TEST_CASE(portable_decode_fills_the_shared_memory_of_an_sm) {
  int count = 0;
  DeviceProperties const* devices = portable_devices(&count);
  for (int i = 0; i < count; ++i) {
    for (int64_t head_dim : {64, 128, 256}) {
      for (WeightFormat format : {WeightFormat::kDense, WeightFormat::kFp8E4M3, WeightFormat::kInt8, WeightFormat::kInt4}) {
        AttentionProblem const p = cached(problem_of(4, 1, 8192, 32, 8, head_dim, head_dim), format, 64);
        Context const at(std::string(devices[i].name) + ": " + text_of(p));
        AttentionPlan const plan = plan_of(p, devices[i]);
        int64_t const per_sm = devices[i].compute_capability() == 80 ? 2 : 1;
        CHECK(plan.ctas > 0.95 * per_sm * devices[i].sm_count && plan.ctas <= per_sm * devices[i].sm_count);
        CHECK(per_sm * (plan.kernel->smem_bytes + 1024) <= devices[i].smem_per_block + 1024);  // a block costs 1 KiB more than it has
      }
    }
  }
}

TEST_CASE(kernels_of_the_other_architecture_are_refused_by_name) {
  AttentionProblem const p = problem_of(2, 300, 300, 8, 2, 128, 128);
  AttentionPlanOptions options;
  options.only_runnable = false;
  AttentionPlan plan;
  int count = 0;
  DeviceProperties const ampere = portable_devices(&count)[0];
  AttentionPlan const native = plan_of(p, h200_properties()), portable = plan_of(p, ampere);
  options.kernel = native.kernel->name;
  Status const status = plan_attention(p, ampere, options, &plan);
  CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "compute capability") != nullptr);
  options.kernel = portable.kernel->name;
  CHECK(plan_attention(p, h200_properties(), options, &plan).ok());  // a build for 90 holds it
  CHECK(plan.kernel == portable.kernel && plan.source == PlanSource::kOverride);
}

TEST_CASE(pieces_beyond_32_bits_are_another_kernels) {
  DeviceProperties const device = h200_properties();
  // 64 tiles of rows and 2^25 slices of keys, by a table of few pages again and again.
  AttentionProblem p = problem_of(2, 128, int64_t(1) << 30, 8, 1, 128, 128);
  p.cached = p.paged = true;
  p.page_size = 256;
  p.pages = 16;
  p.tokens_k = p.pages * p.page_size;
  p.window_right = 0;
  AttentionPlan plan = plan_of(p, device);
  CHECK(plan.kernel->schedule != Schedule::kSplitKv);
  AttentionProblem decode = p;
  decode.seqlen_q = 1, decode.tokens_q = 2;
  plan = plan_of(decode, device);
  CHECK(plan.kernel->schedule == Schedule::kSplitKv);
  AttentionPlanOptions options;
  options.only_runnable = false;
  options.kernel = plan.kernel->name;
  Status const status = plan_attention(p, device, options, &plan);
  CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "more pieces than it can number") != nullptr);
  decode.heads_q = decode.heads_kv = 113;  // a prime: no heads in lockstep
  options.kernel = nullptr;
  CHECK(plan_attention(decode, device, options, &plan).ok() && plan.kernel->schedule != Schedule::kSplitKv);
}

namespace {

/// Whether the batch-invariant mode has a kernel: of codes, rows are whole vectors of 16 bytes.
bool has_invariant_kernel(AttentionProblem const& p) {
  if (p.num_splits > 0) return false;
  if (p.kv_format == WeightFormat::kDense) return true;
  int64_t const bits = p.kv_format == WeightFormat::kInt4 ? 4 : 8;
  return p.head_dim * bits % 128 == 0 && p.head_dim_v * bits % 128 == 0;
}

}  // namespace

TEST_CASE(batch_invariant_kernels_follow_from_types_and_head_dims_alone) {
  DeviceProperties const devices[] = {h200_properties(), [] {
                                        DeviceProperties fewer = h200_properties();
                                        fewer.sm_count = 78;
                                        fewer.memory_bytes = 0;
                                        return fewer;
                                      }()};
  std::map<std::tuple<DataType, int64_t, int64_t, bool>, KernelInfo const*> kernels;
  int divided = 0, whole = 0, few = 0;
  for (DeviceProperties const& device : devices) {
    for_each_problem([&](AttentionProblem p) {
      if (!has_invariant_kernel(p)) return;
      p.batch_invariant = true;
      Context const at(text_of(p));
      AttentionPlan const plan = plan_of(p, device);
      KernelInfo const& kernel = *plan.kernel;
      CHECK_EQUAL(std::string(kernel.operation), "attention_invariant");
      CHECK(kernel.ab_type == p.type && kernel.tile_k >= p.head_dim && kernel.head_dim_v >= p.head_dim_v);
      CHECK(plan.predicted_us >= plan.floor_us);
      CHECK_EQUAL(kernel.b_format == WeightFormat::kDense, p.kv_format == WeightFormat::kDense);
      bool const codes = p.kv_format != WeightFormat::kDense;
      // The same key blocks for any number of rows.
      auto const [known, is_new] = kernels.try_emplace({p.type, p.head_dim, p.head_dim_v, codes}, plan.kernel);
      CHECK_EQUAL(known->second->tile_n, kernel.tile_n);
      CHECK(known->second->tile_k == kernel.tile_k && known->second->head_dim_v == kernel.head_dim_v);
      CHECK(kernel.tile_m >= 64 || (kernel.tile_m == 8 && p.seqlen_q * (p.heads_q / p.heads_kv) <= 32 * 64));
      few += kernel.tile_m == 8;
      if (kernel.tile_k > 192) {  // all keys are one split
        CHECK(plan.split_keys == 0 && plan.split_rows == 0);
      } else {
        CHECK(plan.split_keys % kernel.tile_n == 0 && plan.split_keys >= 448 && plan.split_keys <= 576);
      }
      CHECK(p.heads_q / p.heads_kv % plan.packed_heads == 0 && kernel.tile_m % plan.packed_heads == 0);
      ++(plan.split_rows > 0 ? divided : whole);
      if (plan.split_rows == 0) return;
      // Slots for all rows and splits that there may be, in no more memory than may be taken.
      CHECK(plan.max_splits > 1 && plan.slot_rows <= kernel.tile_m && plan.slot_rows <= plan.split_rows);
      CHECK(p.window_left >= 0 || plan.max_splits * plan.split_keys >= p.seqlen_k);
      int64_t const rows = std::min(p.seqlen_q * plan.packed_heads, plan.split_rows);
      int64_t const tiles = p.batch * ((rows + kernel.tile_m - 1) / kernel.tile_m) * (p.heads_q / plan.packed_heads);
      CHECK(plan.partial_slots >= tiles * plan.max_splits && plan.partial_slots <= int64_t(1) << 30);
      CHECK(plan.workspace_bytes >= size_t(plan.partial_slots * plan.slot_rows * (p.head_dim_v + 2) * 4));
      CHECK(plan.workspace_bytes <= size_t(5) << 28);
    });
  }
  CHECK(divided > 100 && whole > 100 && few > 100);
}

TEST_CASE(batch_invariant_decode_divides_long_keys) {
  auto const plan_for = [](int64_t batch, int64_t queries, int64_t keys) {
    AttentionProblem p = cached(problem_of(batch, queries, keys, 32, 8, 128, 128), WeightFormat::kDense, 64);
    p.type = DataType::kBF16;
    p.batch_invariant = true;
    return plan_of(p, h200_properties());
  };
  AttentionPlan const alone = plan_for(1, 1, 65536), many = plan_for(256, 1, 512), prefill = plan_for(1, 8192, 8192);
  CHECK_EQUAL(alone.split_rows, 4);
  CHECK_EQUAL(alone.packed_heads, 4);
  CHECK(!alone.counted && alone.max_splits >= 65536 / 576);
  CHECK_EQUAL(prefill.split_rows, 0);
  CHECK(alone.kernel == many.kernel && alone.kernel->tile_m == 8 && prefill.kernel->tile_m == 192);
  CHECK_EQUAL(alone.kernel->tile_n, prefill.kernel->tile_n);
  CHECK(plan_for(1, 8, 4096).kernel == alone.kernel && plan_for(1, 9, 4096).kernel->tile_m > 8);  // 32 rows and 36
}

TEST_CASE(few_tiles_over_many_keys_are_divided) {
  auto const plan_for = [](int64_t batch, int64_t queries, int64_t keys, WeightFormat format = WeightFormat::kDense) {
    AttentionProblem p = cached(problem_of(batch, queries, keys, 32, 8, 128, 128), format, 64);
    p.type = DataType::kBF16;
    p.window_right = 0;
    return plan_of(p, h200_properties());
  };
  for (int64_t queries : {64, 128, 200}) {
    for (int64_t keys : {8192, 32768}) {
      AttentionPlan const plan = plan_for(1, queries, keys);
      Context const at(std::to_string(queries) + " queries, " + std::to_string(keys) + " keys");
      CHECK(plan.split_count > 1 && plan.split_rows == queries * plan.packed_heads && plan.max_splits == plan.split_count);
      // A wave or few of items that have nearly as many keys each.
      CHECK(double(plan.partial_slots) <= 3.0 * 132 && plan.split_keys == 0 && plan.workspace_bytes > 0);
    }
    CHECK(plan_for(1, queries, 32768, WeightFormat::kFp8E4M3).split_count > 1);
  }
  CHECK_EQUAL(plan_for(1, 4096, 32768).split_count, 0);  // tiles for all SMs
  CHECK_EQUAL(plan_for(1, 64, 256).split_count, 0);      // few keys
  CHECK_EQUAL(plan_for(64, 1, 8192).split_count, 0);     // decode has kernels of its own
}

TEST_CASE(batch_invariant_short_queries_take_smaller_tiles_of_the_same_key_blocks) {
  auto const plan_for = [](int64_t batch, int64_t queries, int64_t keys) {
    AttentionProblem p = cached(problem_of(batch, queries, keys, 32, 8, 128, 128), WeightFormat::kDense, 64);
    p.type = DataType::kBF16;
    p.window_right = 0;
    p.batch_invariant = true;
    return plan_of(p, h200_properties());
  };
  AttentionPlan const shorter = plan_for(1, 300, 3000), longer = plan_for(1, 8192, 8192);
  CHECK_EQUAL(shorter.kernel->tile_m, 128);  // tiles of 192 rows take longer each, and fewer SMs have one
  CHECK_EQUAL(longer.kernel->tile_m, 192);
  CHECK(shorter.kernel->tile_n == longer.kernel->tile_n && shorter.split_keys == longer.split_keys);
  CHECK(shorter.predicted_us < longer.predicted_us);
}

TEST_CASE(batch_invariant_attention_says_what_it_cannot_do) {
  AttentionProblem p = cached(problem_of(2, 1, 4096, 32, 8, 128, 128), WeightFormat::kDense, 64);
  p.batch_invariant = true;
  AttentionPlanOptions options;
  options.only_runnable = false;
  AttentionPlan plan;
  int count = 0;
  Status status = plan_attention(p, portable_devices(&count)[0], options, &plan);
  CHECK(status.code == StatusCode::kNotSupported && std::strstr(status.message, "batch-invariant attention") != nullptr);
  options.kernel = "attention_sm90_f16_d128_decode";
  status = plan_attention(p, h200_properties(), options, &plan);
  CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "depend on what else is computed") != nullptr);
  options.kernel = nullptr;
  p.num_splits = 4;
  status = plan_attention(p, h200_properties(), options, &plan);
  CHECK(status.code == StatusCode::kInvalidArgument && std::strstr(status.message, "num_splits must not be given") != nullptr);
  p.num_splits = 0, p.batch_invariant = false;
  options.kernel = "attention_sm90_f16_d128_192x80_prefill_invariant";
  CHECK(plan_attention(p, h200_properties(), options, &plan).ok());  // by name, outside of the mode, too
}
