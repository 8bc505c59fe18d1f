// Plans of what lies between two attentions: one launch or several.
#include <cstring>

#include "decoder_block/layout.h"
#include "gemm/invariant_splits.h"
#include "gemm_problems.h"
#include "minfer/decoder_block.h"
#include "testing.h"

using namespace minfer;
using namespace minfer::testing;

namespace {

DecoderBlockProblem llama_8b(int64_t m = 1) {
  DecoderBlockProblem p;
  p.m = m;
  p.attention = p.hidden = 4096;
  p.inter = 14336;
  p.next = 6144;
  p.group_size = 128;
  return p;
}

DecoderBlockProblem llama_8b_e4m3(DecoderBlockScales scales, int64_t m = 1) {
  DecoderBlockProblem p = llama_8b(m);
  p.weights = WeightFormat::kFp8E4M3;
  p.scales = scales;
  return p;
}

DecoderBlockPlan plan_of(DecoderBlockProblem const& problem, bool forced = false, DeviceProperties const& device = h200_properties()) {
  DecoderBlockPlan plan;
  Status const status = plan_decoder_block(problem, device, forced, &plan);
  if (!status.ok()) fail(__FILE__, __LINE__, status.message);
  return plan;
}

StatusCode forced_code(DecoderBlockProblem const& problem, DeviceProperties const& device = h200_properties()) {
  DecoderBlockPlan plan;
  return plan_decoder_block(problem, device, true, &plan).code;
}

}  // namespace

TEST_CASE(decoder_block_of_one_token) {
  DeviceProperties const device = h200_properties();
  DecoderBlockPlan const plan = plan_of(llama_8b());
  CHECK(plan.one_launch);
  CHECK(plan.ctas == device.sm_count);
  CHECK(plan.smem_bytes <= device.smem_per_block);
  CHECK(plan.stages > plan.ahead && plan.ahead >= 2);
  CHECK(plan.workspace_bytes == size_t(4096 + 14336 + 4096) / 4 * 16);
}

TEST_CASE(decoder_block_of_more_tokens) {
  CHECK(!plan_of(llama_8b(2)).one_launch);
  CHECK(plan_of(llama_8b(2), true).one_launch);
  CHECK(!plan_of(llama_8b(3)).one_launch);
  CHECK(forced_code(llama_8b(3)) == StatusCode::kInvalidArgument);
  CHECK(!plan_of(llama_8b(0)).one_launch);
}

TEST_CASE(decoder_block_limits) {
  DecoderBlockProblem p = llama_8b();
  p.group_size = 64;
  CHECK(forced_code(p) == StatusCode::kInvalidArgument);
  p.group_size = 0;
  CHECK(plan_of(p).one_launch);
  p = llama_8b();
  p.inter = 14344;  // no multiple of 16
  CHECK(forced_code(p) == StatusCode::kInvalidArgument);
  p.inter = 32768 + 16;
  CHECK(forced_code(p) == StatusCode::kInvalidArgument);
  DeviceProperties other = h200_properties();
  other.compute_major = 10;
  CHECK(!plan_of(llama_8b(), false, other).one_launch);
  p = llama_8b();
  p.type = DataType::kF32;
  DecoderBlockPlan plan;
  CHECK(plan_decoder_block(p, h200_properties(), false, &plan).code == StatusCode::kInvalidArgument);
}

// In the batch-invariant mode the launch has the ranges of k of the operators one by one, and the threads of their norm.
TEST_CASE(decoder_block_in_order) {
  using namespace decoder_block;
  DecoderBlockProblem p = llama_8b();
  p.batch_invariant = true;
  DecoderBlockPlan const plan = plan_of(p);
  CHECK(plan.one_launch);
  for (int i = 0; i < kDecoderBlockProducts; ++i) {
    GemmProblem product;
    product.ab_type = product.d_type = p.type;
    product.m = 1;
    product.n = p.n(i);
    product.k = p.k(i);
    product.b_format = p.weights;
    CHECK(plan.ranges[i] == gemm::invariant_splits(product));
  }
  CHECK(plan.ranges[0] == 4 && plan.ranges[1] == 1 && plan.ranges[2] == 4 && plan.ranges[3] == 4);
  CHECK(plan.norm_threads == 256);  // two vectors of 8 each
  CHECK(plan.ctas == h200_properties().sm_count && plan.smem_bytes <= h200_properties().smem_per_block);
  CHECK(plan.ahead >= 2 && plan.ahead + kQuads <= plan.stages);
  CHECK(plan.workspace_bytes == plan_of(llama_8b()).workspace_bytes);
  Layout const layout = layout_of(p, 4, fixed_bytes(1, true));
  CHECK(layout.fixed == 4 * (kStrips * kStripBlocks * kBlockBytes + kStrips * kStripScaleBytes));
  CHECK(layout.pitch[0] == 14336 * 2 + 64 && layout.pitch[1] == 4096 * 2 + 64);

  // So wide an MLP leaves its launch few stages.
  p.attention = 4096;
  p.hidden = 5120;
  p.inter = 32768;
  CHECK(!plan_of(p).one_launch && plan_of(p, true).one_launch && plan_of(p, true).stages >= kQuads + 2);

  // Slabs of 64 rows in one range: no more CTAs than some product in front of others has slabs.
  p.attention = p.hidden = 512;
  p.inter = 1024;
  p.next = 768;
  CHECK(plan_of(p, true).ctas == 2 * 1024 / 64);
  p.next = 0;
  CHECK(plan_of(p, true).one_launch);

  auto const refused = [&](auto const& change) {
    DecoderBlockProblem other = llama_8b();
    other.batch_invariant = true;
    change(other);
    return forced_code(other) == StatusCode::kInvalidArgument;
  };
  CHECK(refused([](DecoderBlockProblem& q) { q.m = 2; }));
  CHECK(refused([](DecoderBlockProblem& q) { q.inter = 14336 + 64; }));
  CHECK(refused([](DecoderBlockProblem& q) { q.hidden = q.attention = 128; }));     // a norm by less than a warp
  CHECK(refused([](DecoderBlockProblem& q) { q.hidden = q.attention = 32768; }));   // by two CTAs
  CHECK(refused([](DecoderBlockProblem& q) { q.next = 1024, q.hidden = 16384; }));  // eight ranges
  CHECK(refused([](DecoderBlockProblem& q) { q.weights = WeightFormat::kDense; }));
  CHECK(refused([](DecoderBlockProblem& q) { q.weights = WeightFormat::kFp8E4M3; }));
  CHECK(refused([](DecoderBlockProblem& q) { q.heads = 32, q.heads_kv = 8, q.capacity = 2048; }));
}

TEST_CASE(decoder_block_of_e4m3) {
  for (DecoderBlockScales scales : {DecoderBlockScales::kRows, DecoderBlockScales::kBlocks}) {
    for (int64_t m : {1, 2}) {
      DecoderBlockPlan const plan = plan_of(llama_8b_e4m3(scales, m));
      CHECK(plan.one_launch && plan.smem_bytes <= h200_properties().smem_per_block);
      CHECK(plan.stages >= plan.ahead && plan.ahead >= 2 && plan.ahead <= 4);
    }
    DecoderBlockProblem p = llama_8b_e4m3(scales);
    decoder_block::Layout const layout = decoder_block::layout_of(p, 4, decoder_block::fixed_bytes(1));
    CHECK(layout.fixed == 4 * (32768 + 128));  // stages that begin at multiples of 1024, their scales behind them
    p.group_size = 48;                         // which is of int4 alone
    CHECK(plan_of(p, true).one_launch);
    p.inter = 14336 + 64;
    CHECK(forced_code(p) == StatusCode::kInvalidArgument);
  }
  CHECK(forced_code(llama_8b_e4m3(DecoderBlockScales::kOther)) == StatusCode::kInvalidArgument);
  CHECK(!plan_of(llama_8b_e4m3(DecoderBlockScales::kOther)).one_launch);
  DecoderBlockProblem p = llama_8b();
  p.weights = WeightFormat::kNf4;
  DecoderBlockPlan plan;
  CHECK(plan_decoder_block(p, h200_properties(), false, &plan).code == StatusCode::kInvalidArgument);
}

TEST_CASE(decoder_block_with_attention) {
  DecoderBlockProblem p = llama_8b();
  size_t const without = plan_of(p).workspace_bytes;
  p.heads = 32;
  p.heads_kv = 8;
  p.capacity = 2048;
  DecoderBlockPlan const plan = plan_of(p);
  CHECK(plan.one_launch && plan.splits == 16);
  CHECK(plan.workspace_bytes == without + size_t(4096 / 4 + 32 * 16 * 64 + 32 * 16) * 16);
  CHECK(plan.smem_bytes <= h200_properties().smem_per_block);
  // Several layers exchange q, k and v by packets, too; the last one need not have them.
  CHECK(plan.most_layers == decoder_block::kMostLayers);
  for (int64_t next : {6144, 0}) {
    DecoderBlockProblem stack = p;
    stack.next = next;
    stack.layers = 24;
    CHECK(plan_of(stack).workspace_bytes == plan.workspace_bytes + size_t(6144 / 4) * 16);
    stack.layers = 25;
    CHECK(forced_code(stack) == StatusCode::kInvalidArgument);
    stack.layers = 0;
    CHECK(forced_code(stack) == StatusCode::kInvalidArgument);
  }
  {
    DecoderBlockProblem stack = p;
    stack.next = 6160;  // not what the next layer takes
    CHECK(plan_of(stack).most_layers == 1);
    stack.layers = 2;
    CHECK(forced_code(stack) == StatusCode::kInvalidArgument);
  }
  p.capacity = 1 << 20;
  CHECK(!plan_of(p).one_launch && plan_of(p, true).one_launch);
  p.capacity = 2048;
  for (int64_t heads_kv : {0, 2, 5}) {  // none, groups of 16, no divisor
    DecoderBlockProblem other = p;
    other.heads_kv = heads_kv;
    CHECK(!plan_of(other).one_launch && forced_code(other) == StatusCode::kInvalidArgument);
  }
  DecoderBlockProblem other = p;
  other.heads = 64;  // of 64 elements
  CHECK(forced_code(other) == StatusCode::kInvalidArgument);
  other = p;
  other.m = 2;
  CHECK(forced_code(other) == StatusCode::kInvalidArgument);
}

TEST_CASE(decoder_block_of_large_models) {
  DecoderBlockProblem p = llama_8b();
  p.attention = p.hidden = 8192;
  p.inter = 28672;
  p.next = 10240;
  CHECK(plan_of(p).one_launch && plan_of(p).ahead > plan_of(llama_8b()).ahead);
  p.weights = WeightFormat::kFp8E4M3;
  p.scales = DecoderBlockScales::kBlocks;
  CHECK(plan_of(p).one_launch);
}

// Stages of half as many columns; the bytes of large models' weights take so long that launches matter little.
TEST_CASE(decoder_block_of_16_bits) {
  DecoderBlockProblem p = llama_8b();
  p.weights = WeightFormat::kDense;
  CHECK(!plan_of(p).one_launch);
  DecoderBlockPlan const forced = plan_of(p, true);
  CHECK(forced.one_launch && forced.stages >= forced.ahead && forced.ahead >= 2 && forced.ahead <= 4);
  CHECK(decoder_block::layout_of(p, 3, decoder_block::fixed_bytes(1)).fixed == 3 * 32768);
  p.attention = p.hidden = 2048;
  p.inter = 8192;
  p.next = 3072;
  for (int64_t m : {1, 2}) {
    p.m = m;
    CHECK(plan_of(p).one_launch && plan_of(p).smem_bytes <= h200_properties().smem_per_block);
  }
  p.inter = 8192 + 32;  // no multiple of 64
  CHECK(forced_code(p) == StatusCode::kInvalidArgument);
}

// A model's last layer: nothing is multiplied behind the residual, and what makes it does not travel.
TEST_CASE(decoder_block_of_a_last_layer) {
  DecoderBlockProblem p = llama_8b();
  size_t const with_next = plan_of(p).workspace_bytes;
  p.next = 0;
  CHECK(plan_of(p).one_launch && plan_of(p).most_layers == 1);
  CHECK(plan_of(p).workspace_bytes == with_next - size_t(4096 / 4) * 16);
}

// A CTA without a unit of a product whose outputs others wait for would not be known to have read the launch's number.
TEST_CASE(decoder_block_ctas_have_units) {
  for (int64_t hidden : {128, 512, 1024, 2048, 3584}) {
    DecoderBlockProblem p = llama_8b();
    p.attention = p.hidden = hidden;
    p.inter = 2 * hidden;
    p.next = 8;
    DecoderBlockPlan const plan = plan_of(p, true);
    CHECK(plan.ctas <= hidden / decoder_block::kUnit);
    decoder_block::Layout const layout = decoder_block::layout_of(p, plan.stages, decoder_block::fixed_bytes(1));
    CHECK(layout.bytes == plan.smem_bytes);
    CHECK(layout.activations[0] % 16 == 0 && layout.activations[1] % 16 == 0 && layout.groups[0] % 16 == 0);
  }
}
