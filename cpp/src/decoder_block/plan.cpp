// Whether what lies between two attentions is one launch.
//
// Launches of their own wait for the one in front of them and for their first bytes, while memory has nothing to do. In one launch the ring
// of weights fills while activations are on their way. On an H200, in us, in one launch and in launches of their own (and by the bytes of
// the weights alone), of weights of int4 in groups of 128, of e4m3 with scales of blocks, where an operator has a launch for its codes of
// activations besides, and of 16 bits, whose bytes take so long that launches matter little; the hidden sizes of the models:
//                   one token: int4    e4m3               bf16              two tokens: e4m3   bf16
//   Llama-3.2-1B    17.3, 22.8 (7.0)   21.1, 39.3 (13.7)  32.8, 37.5 (27)   26.9, 39.7         36.4, 38.3
//   Llama-3.2-3B    23.0, 29.6 (12)    31.8, 49.5 (23)    54.6, 53.8 (45)   36.5, 50.0         57.7, 53.4
//   Llama-3.1-8B    32.6, 43.6 (25)    56.4, 75.5 (49)    111, 108 (98)     59.7, 76.6         115, 107
//   Qwen2.5-7B      37.0, 45.4 (27)    61.7, 80.8 (52)    118, 115 (105)    66.5, 81.3         123, 114
//   Mistral 24B     78.1, 83.9 (64)    136, 156 (125)     278, 258 (250)
//   Llama-3.1-70B   107, 121 (99)      200, 229 (192)     407, 393 (385)
// Two tokens of int4 take as long either way.
// With one token's attention in front, as part of the launch or in launches of its own, by the keys of the sequence:
//                   1,024 keys: int4   e4m3               4,096: int4        e4m3              16,384: int4, e4m3
//   Llama-3.2-3B    29.4, 34.0         38.9, 42.2         35.0, 37.9         44.9, 46.5        58, 49     67, 58
//   Llama-3.1-8B    39.4, 43.7         62.9, 67.2         46.5, 48.1         67.4, 71.0        69, 60     91, 84
//   Qwen2.5-7B      45.0, 48.7         69.3, 73.3         49.6, 53.9         73.7, 77.3        72, 61     95, 86
//   Llama-3.1-70B   120, 132           208, 212           133, 138           219, 218          173, 150   260, 229
// Of several layers in a launch, 8 of them over 1,024 keys, a layer takes, beside one in a launch of its own:
//                   int4               e4m3               bf16
//   Llama-3.2-3B    27.6, 30.5         37.1, 39.8         59.0, 61.6
//   Llama-3.1-8B    38.7, 41.0         60.5, 63.0         116.0, 117.8
//   Qwen2.5-7B      43.1, 45.8         65.5, 69.2         121.1, 124.1
//   Llama-3.1-70B   116.6, 120.3       205.1, 208.1       413.5, 415.2
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "common/without_cuda.h"
#include "decoder_block/layout.h"
#include "distributed/exchange.h"
#include "gemm/invariant_splits.h"
#include "minfer/fused.h"
#include "minfer/gemm.h"
#include "minfer/registry.h"

namespace minfer {

namespace {

using namespace decoder_block;

constexpr int64_t kLeastStages = 4, kLeastLargeStages = 3;  // those of e4m3 and 16-bit weights have twice the bytes
constexpr int64_t kMaxExtent = (int64_t(1) << 31) - 512;
constexpr int64_t kMostDenseStages = 40;  // of a CTA, of 16-bit weights: above, the bytes take so long that launches matter little
// More stages under way keep memory busier, fewer let activations, which share its queues, arrive sooner: 2 to 6 of them, by the stages
// that a CTA has in all.
constexpr int64_t kStagesOfOneAhead = 18, kLeastAhead = 2, kMostAhead = 6;
constexpr int64_t kMostLargeAhead = 4;
// In the batch-invariant mode weights wait for longer, for activations and for consumers that convert them: with fewer stages memory waits,
// too. In us, in one launch and by the operators: Mistral 24B, which has 8, 86.1 and 85.4; Llama-3.1-70B, which has 9, 118.6 and 127.1.
constexpr int64_t kLeastUsefulStages = 9;
constexpr int64_t kMostCapacity = 4096;  // of a sequence whose attention is part of the launch, by itself

/// Why one launch cannot compute it, or null.
char const* unfit(DecoderBlockProblem const& p, DeviceProperties const& device) {
  if (device.compute_capability() != 90) return "it needs compute capability 9.0";
  if (p.m < 1 || p.m > kMostTokens) return "it takes 1 or 2 tokens";
  bool const int4 = p.weights == WeightFormat::kInt4;
  if (p.weights == WeightFormat::kFp8E4M3 && p.scales == DecoderBlockScales::kOther)
    return "scales of e4m3 weights must all be of rows, or all of blocks in float32";
  for (int i = 0; i < products_of(p); ++i) {
    if (p.k(i) < kUnit || p.k(i) % kUnit != 0) return "k of all weights must be multiples of 16";
    if (p.weights == WeightFormat::kFp8E4M3 && p.k(i) % 128 != 0) return "k of e4m3 weights must be multiples of 128";
    if (p.weights == WeightFormat::kDense && p.k(i) % 64 != 0) return "k of 16-bit weights must be multiples of 64";
    if (p.n(i) < 8 || p.n(i) % 8 != 0) return "there is nothing to multiply";
    if (k_stages(p.k(i)) > kMostKStages) return "a k is above 32768";
    bool const in_groups = p.group_size == 0 || p.group_size >= p.k(i) || (p.group_size >= 128 && (p.group_size & (p.group_size - 1)) == 0);
    if (int4 && !in_groups) return "groups must be of 128 times a power of two, or all of k";
  }
  return nullptr;
}

int64_t units_of(int64_t n) { return (n + kUnit - 1) / kUnit; }
int64_t slabs_of(int64_t n, int32_t ranges) { return (units_of(n) + units_of_slab(ranges) - 1) / units_of_slab(ranges); }

/// Of a launch. Layers share packets, which is safe where all CTAs have units of all products: a CTA that has a layer's q, k and v knows
/// that all others have read all packets of the layer in front.
int64_t most_layers_of(DecoderBlockProblem const& p, int64_t ctas) {
  return p.heads > 0 && (p.next == 0 || p.next == p.qkv()) && units_of(p.qkv()) >= ctas ? kMostLayers : 1;
}

/// Why the attention in front cannot be part of the launch, or null.
char const* unfit_attention(DecoderBlockProblem const& p, int64_t ctas) {
  if (p.m != 1) return "attention in the launch is of one token";
  if (p.heads_kv < 1 || p.heads % p.heads_kv != 0) return "heads of queries must be a multiple of those of keys";
  if (p.attention != p.heads * kHeadDim) return "heads in the launch must have 128 elements";
  if (p.heads / p.heads_kv > kMostGroup) return "a head of keys in the launch has at most 8 heads of queries";
  if (p.heads_kv > ctas) return "there are more heads of keys than thread blocks";
  if (p.layers > most_layers_of(p, ctas)) return "so many layers of these sizes are no launch";
  return nullptr;
}

/// As many as have something to do in each of the products whose outputs all CTAs wait for; in the batch-invariant mode, in one of those
/// whose packets CTA 0 has before it ends.
int64_t ctas_of(DecoderBlockProblem const& p, DecoderBlockPlan const& plan, DeviceProperties const& device) {
  int64_t units = device.sm_count, slabs = 1;
  for (int i = 0; i + 1 < kDecoderBlockProducts; ++i) {
    units = std::min(units, units_of(p.n(i)));
    if (p.batch_invariant && i + 1 < products_of(p)) slabs = std::max(slabs, slabs_of(p.n(i), plan.ranges[i]));
  }
  return p.batch_invariant ? std::min<int64_t>(device.sm_count, slabs) : units;
}

/// Of all products, in the CTA that has most.
int64_t stages_of_cta(DecoderBlockProblem const& p, int64_t ctas) {
  int64_t count = 0;
  for (int i = 0; i < kDecoderBlockProducts; ++i) count += (units_of(p.n(i)) + ctas - 1) / ctas * k_stages(p.k(i), stage_of(p.weights).k);
  return count;
}

/// Whether the mode sums products with int4 weights as WGMMA does, which in_order_sm90.cuh equals: it takes the first order that the build
/// has any kernel for.
bool sums_by_wgmma(DecoderBlockProblem const& p) {
  int64_t count = 0;
  KernelInfo const* const kernels = registry(&count);
  bool others = false;
  for (KernelInfo const* kernel = kernels; kernel != kernels + count; ++kernel) {
    if (kernel->launch == nullptr || std::strcmp(kernel->family, "w4a16") != 0 || kernel->b_format != p.weights ||
        kernel->ab_type != p.type)
      continue;
    if (kernel->arch == 90 && std::strcmp(kernel->sums, "wgmma16") == 0) return true;
    others = true;
  }
  return !others;
}

/// What the mode's operators would do one by one, which the launch has to do, too; or why it cannot, else null.
char const* plan_in_order(DecoderBlockProblem const& p, DeviceProperties const& device, DecoderBlockPlan* plan) {
  if (p.weights != WeightFormat::kInt4) return "of the batch-invariant mode, one launch has int4 weights";
  if (p.m > 1) return "in the batch-invariant mode it takes 1 token";
  if (!sums_by_wgmma(p)) return "the build's kernels of the batch-invariant mode sum in another order";
  for (int i = 0; i < products_of(p); ++i) {
    GemmProblem product;
    product.ab_type = product.d_type = p.type;
    product.m = p.m;
    product.n = p.n(i);
    product.k = p.k(i);
    product.b_format = p.weights;
    int32_t const ranges = plan->ranges[i] = gemm::invariant_splits(product);
    if (p.k(i) % (ranges * 2 * kBlockK) != 0) return "k of all weights must be multiples of 128 in the batch-invariant mode";
    if (ranges > kStrips) return "a row of a weight is summed in more ranges than four";
  }
  RowProblem norm;
  norm.type = p.type;
  norm.rows = p.m;
  norm.width = p.hidden;
  norm.batch_invariant = true;
  RowPlan rows;
  if (!plan_rows(norm, device, nullptr, &rows).ok() || rows.launch.cluster > 1 || rows.launch.threads % 32 != 0)
    return "in the batch-invariant mode, rows of the norms must be of 256 to 16384 columns";
  plan->norm_threads = rows.launch.threads;
  return nullptr;
}

}  // namespace

bool DecoderBlockProblem::operator==(DecoderBlockProblem const&) const = default;

size_t decoder_exchange_bytes(int64_t hidden, int32_t ranks) {
  using namespace distributed;
  return sizeof(ExchangeHeader) + size_t(kEpochs * kExchanges) * size_t(ranks) * size_t((hidden + 1) / 2) * kPacketBytes;
}

Status plan_decoder_block(DecoderBlockProblem const& problem, DeviceProperties const& device, bool forced, DecoderBlockPlan* plan) {
  *plan = DecoderBlockPlan{};
  DecoderBlockProblem const& p = problem;
  if (p.weights != WeightFormat::kInt4 && p.weights != WeightFormat::kFp8E4M3 && p.weights != WeightFormat::kDense)
    return Status::failure(StatusCode::kInvalidArgument, "weights must be int4, e4m3 or of 16 bits, got %s", name_of(p.weights));
  if (p.type != DataType::kF16 && p.type != DataType::kBF16)
    return Status::failure(StatusCode::kInvalidArgument, "numbers must be of 16 bits, got %s", name_of(p.type));
  if (p.layers < 1 || (p.layers > 1 && p.heads == 0))
    return Status::failure(StatusCode::kInvalidArgument, "%lld layers without attention", (long long)p.layers);
  for (int64_t extent : {p.m, p.attention, p.hidden, p.inter, p.next}) {
    if (extent < 0 || extent > kMaxExtent)
      return Status::failure(StatusCode::kInvalidArgument, "sizes must be 0 to %lld, got %lld", (long long)kMaxExtent, (long long)extent);
  }
  auto const separate = [&](char const* why) {
    if (forced) return Status::failure(StatusCode::kInvalidArgument, "no kernel computes the block in one launch: %s", why);
    std::snprintf(plan->reason, sizeof(plan->reason), "%s", why);
    return Status::success();
  };
  if (char const* why = unfit(p, device)) return separate(why);
  if (p.batch_invariant) {
    if (char const* why = plan_in_order(p, device, plan)) return separate(why);
  }
  int64_t const fixed = fixed_bytes(p.m, p.batch_invariant);
  int64_t stages = kMostStages;
  Layout layout = layout_of(p, stages, fixed);
  while (stages > 0 && layout.bytes > device.smem_per_block) layout = layout_of(p, --stages, fixed);
  bool const int4 = p.weights == WeightFormat::kInt4;
  int64_t const least_stages = p.batch_invariant ? kQuads + kLeastAhead : int4 ? kLeastStages : kLeastLargeStages;
  if (stages < least_stages) return separate("the activations leave no room for the weights' ring in shared memory");
  if (!forced && p.batch_invariant && stages < kLeastUsefulStages)
    return separate("the activations leave so little of shared memory that one launch is no faster in the batch-invariant mode");
  int64_t const ctas = ctas_of(p, *plan, device), stages_of_one = stages_of_cta(p, ctas);
  if (!forced && int4 && p.m > 1) return separate("two tokens take as long in launches of their own");
  if (!forced && p.weights == WeightFormat::kDense && stages_of_one > kMostDenseStages)
    return separate("the weights' bytes take so long that launches matter little");
  if (p.heads > 0) {
    if (p.batch_invariant) return separate("attention has a launch of its own in the batch-invariant mode");
    if (char const* why = unfit_attention(p, ctas)) return separate(why);
    if (!forced && p.capacity > kMostCapacity) return separate("attention to long sequences is faster in a launch of its own");
    plan->splits = int32_t(std::min<int64_t>(kMostSplits, ctas / p.heads_kv));
    plan->most_layers = int32_t(most_layers_of(p, ctas));
  }
  int64_t const most_ahead = int4 ? kMostAhead : kMostLargeAhead;
  plan->one_launch = true;
  plan->ctas = int32_t(ctas);
  plan->ahead = int32_t(std::min(p.batch_invariant ? stages - kQuads : stages,
                                 std::clamp((stages_of_one + kStagesOfOneAhead / 2) / kStagesOfOneAhead, kLeastAhead, most_ahead)));
  plan->stages = int32_t(stages);
  plan->smem_bytes = int32_t(layout.bytes);
  for (int i = 0; i < kDecoderBlockProducts; ++i) plan->workspace_bytes += size_t(packets_of(p, i)) * 16;
  AttentionPackets const packets = attention_packets_of(p, plan->splits);
  plan->workspace_bytes += size_t(packets.out + packets.partials + packets.ends) * 16;
  std::snprintf(plan->reason, sizeof(plan->reason), "%s",
                forced ? "one launch, by name" : "few tokens: weights are loaded while activations are on their way");
  return Status::success();
}

#if !MINFER_WITH_CUDA
Status run_decoder_block(DecoderBlockPlan const&, DecoderBlockProblem const&, DecoderBlockOperands const*, DeviceProperties const&, void*,
                         size_t, bool, Stream) {
  return without_cuda();
}
#endif

}  // namespace minfer
