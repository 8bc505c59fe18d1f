// Launches of the batch-invariant kernels for few rows: which of them, whatever is chosen has the same bits.
#pragma once

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "attention/prefill/few_rows_sm90.cuh"
#include "attention/prefill/few_rows_warps_sm90.cuh"

namespace minfer::attention {

/// The tensor map of the codes of keys or values: [pages, page_size, heads_kv, row_bytes].
inline Status describe_code_rows(CUtensorMap* map, void const* base, AttentionProblem const& p, int64_t row_bytes,
                                 int64_t const (&stride)[3], int box_bytes, int box_rows) {
  if (p.pages == 0 || p.page_size == 0) return Status::success();  // nothing is loaded
  auto const bytes = [](int64_t extent, int64_t codes) { return extent > 1 ? codes : 16; };
  int64_t const extents[4] = {row_bytes, p.heads_kv, p.page_size, p.pages};
  int64_t const strides[3] = {bytes(p.heads_kv, stride[2]), bytes(p.page_size, stride[1]), bytes(p.pages, stride[0])};
  int const box[4] = {box_bytes, 1, box_rows, 1};
  return encode_tensor_map_rows(map, 4, base, extents, strides, box, 1, RowFetch::kAlone);
}

/// tokens: which a box has to divide, in addition to a page.
template <class Config, class Params>
Status describe_few_rows(AttentionLaunchArguments arguments, int64_t tokens, Params* params) {
  using Traits = FewRowsTraits<Config>;
  AttentionPlan plan = *arguments.plan;
  plan.box_rows = std::gcd(plan.box_rows, tokens);
  arguments.plan = &plan;
  AttentionProblem const& p = *arguments.problem;
  AttentionOperands const& o = *arguments.operands;
  Status status = describe_operands<Config>(arguments, params);
  if constexpr (Traits::kCodes) {
    constexpr int kBits = bits_of(Traits::kFormat);
    auto const describe = [&](CUtensorMap* map, void const* codes, int64_t head_dim, int64_t const(&strides)[3]) {
      return describe_code_rows(map, codes, p, head_dim * kBits / 8, strides, Traits::kBoxBytes, int(arguments.plan->box_rows));
    };
    if (status.ok()) status = describe(&params->k, o.k, p.head_dim, o.k_strides);
    if (status.ok()) status = describe(&params->v, o.v, p.head_dim_v, o.v_strides);
  }
  if (!status.ok()) return status;
  set_prefill_arguments(arguments, Config::kTileM, params);
  set_split_arguments<Traits>(arguments, params);
  return status;
}

template <class Config>
Status launch_few_rows_warps(AttentionLaunchArguments const& arguments, int64_t items) {
  using Kernel = FewRowsWarpsSm90<Config>;
  typename Kernel::Params params{};
  if (Status status = describe_few_rows<Config>(arguments, Kernel::kStageKeys, &params); !status.ok()) return status;
  AttentionOperands const& o = *arguments.operands;
  params.queries = o.q;
  params.q_batch = o.q_strides[0], params.q_row = o.q_strides[1], params.q_head = o.q_strides[2];
  params.head_dim = int32_t(arguments.problem->head_dim);
  int64_t const ctas = std::clamp<int64_t>(items, 1, arguments.device->sm_count);
  Status status = launch_kernel<Kernel>(&few_rows_warps_sm90_kernel<Config>, params, arguments, ctas);
  if (status.ok() && arguments.plan->split_rows > 0) {
    status = launch_split_merge<typename Kernel::Traits, typename Kernel::BaseParams>(params, arguments);
  }
  return status;
}

template <class Config>
Status launch_few_rows_sm90(AttentionLaunchArguments const& arguments) {
  using Kernel = FewRowsSm90<Config>;
  using Traits = typename Kernel::Traits;
  static_assert(Config::kCtasPerSm == 2, "folds_in_launch() and the kernel disagree");
  constexpr int64_t kWarpItems = Traits::kCodes ? 4 : 2;  // of an SM, from which on each warp takes items of its own
  AttentionProblem const& p = *arguments.problem;
  AttentionPlan const& plan = *arguments.plan;
  int64_t const sms = arguments.device->sm_count, packed = plan.packed_heads;
  int64_t const tiles_of_sequences =
      p.varlen ? p.tokens_q * packed / Config::kTileM + p.batch : p.batch * ((p.seqlen_q * packed + Config::kTileM - 1) / Config::kTileM);
  int64_t const items = plan.split_rows > 0 ? plan.partial_slots : tiles_of_sequences * (p.heads_q / packed);
  int64_t const ctas = std::clamp<int64_t>(items, 1, sms * Config::kCtasPerSm);
  auto const launch_as = [&](auto* kernel, auto* run) {
    using Run = std::remove_pointer_t<decltype(kernel)>;
    typename Kernel::Params params{};
    Status status = describe_few_rows<Config>(arguments, Traits::kBoxTokens, &params);
    if (status.ok()) status = launch_kernel<Run>(run, params, arguments, ctas);
    if (status.ok() && plan.split_rows > 0 && params.packets == nullptr) status = launch_split_merge<Traits>(params, arguments);
    return status;
  };
  bool const one_split = plan.split_rows > 0 || p.seqlen_k <= split_keys_of(Config::kTileN);
  if (one_split && items > kWarpItems * sms && FewRowsWarpsSm90<Config>::fits(p, plan)) {
    return launch_few_rows_warps<Config>(arguments, items);
  }
  using Few = FewItems<Config>;
  if (ctas <= sms) return launch_as(static_cast<FewRowsSm90<Few>*>(nullptr), &few_rows_sm90_kernel<Few>);
  return launch_as(static_cast<Kernel*>(nullptr), &few_rows_sm90_kernel<Config>);
}

}  // namespace minfer::attention
