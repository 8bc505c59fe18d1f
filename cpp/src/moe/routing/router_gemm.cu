// The router with its matrix: logits = x.w_gate^T for up to 64 tokens, and each token's experts, in one launch.
//
// The weights are 0.1 to 4 MB, and how fast they arrive depends on the number of requests in flight alone. So they are spread over all SMs:
// a work item is a tile of experts and a split of k, the warps of a CTA divide the split in steps of 32 of k, and a warp issues all loads
// of several steps before their first MMA. The MMAs are mma.sync with the experts as m and the tokens as n. Fragments come straight from
// global memory, 16 bytes a lane: lane l reads k 8 (l % 4) to 8 (l % 4) + 7 of row l / 4 of both operands and passes them to two MMAs as
// their k pairs 0 and 1, and 2 and 3. Any order of k is right where both operands have the same. Sums. Warps add up in shared memory, CTAs
// in the workspace, by packets (common/packet.cuh) with the launch's nonce as the tag: one for every token, split and pair of logits, of
// experts e and e + 8. No CTA waits for a fence or a counter. Everything is added in ascending order of k. Choice. The tokens are owned by
// the last CTAs (router_owners.h). All threads of a token's owner add up its logits, and one warp chooses its experts (expert_choice.cuh).
// Warps without a token meanwhile clear the token's packets for a replay of the launch, and not before its sums are complete.
//
// Progress. A CTA waits only after it has published all of its packets, and a CTA that owns no token does not wait. An owner waits for all
// CTAs, so, unless it is the last one, for some that start after it, and these may never become resident while it waits: in a part of a
// device (MPS, a green context), or next to kernels that hold the SMs. Hence an owner polls a limited number of times and then leaves its
// tokens to the last CTA, if that has not begun. The two agree by the owner's flag in the workspace: both exchange the launch's nonce into
// it, the last CTA into the flags of all owners as soon as it begins, and whichever finds the nonce there came second.
//   If the owner came second, the last CTA has begun and will not read the flag again. But CTAs start in the order of blockIdx, so all
//   have started: the owner stays and waits without a limit.
//   If the last CTA came second, the owner has left. It has cleared nothing, so the last CTA finds, or will find, all of the packets, and
//   chooses for those tokens after its own.
// So a CTA that waits without a limit waits for CTAs that have started, keep their SM and publish without waiting: a launch ends with any
// number of resident CTAs, also with one (tests/cpp/test_router_progress.cpp). The CTA that adds up a token clears its packets, and each of
// them was written once. A flag that the last CTA finds raised is cleared by it. Any other is cleared by its owner, when its tokens are
// complete and it reads the nonce there: the last CTA's, which has begun, since its packets have arrived, or its own on top of that. No
// order of accesses to different words is needed, so there is no fence. When all CTAs are resident, this costs the last CTA an exchange
// during the loads of the weights, the other owners a load and a store in a warp that has no token, and nothing where there is one token.
//
// The weights' lines are prefetched into L2 before the wait for the predecessor (common/dependent_launch.cuh).
#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "common/mma_sm80.cuh"
#include "common/nonce.h"
#include "common/packet.cuh"
#include "moe/routing/expert_choice.cuh"
#include "moe/routing/router_gemm_plan.h"
#include "moe/routing/router_owners.h"

namespace minfer {

namespace moe {
namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;

struct RouterGemmParams {
  ChoiceParams choice;
  uint16_t const* x;  // [tokens, hidden]
  uint16_t const* w;  // [experts, hidden]
  int64_t ldx, ldw;
  int32_t tokens, hidden;
  int32_t tiles, splits, split_steps;
  int32_t packets;               // of a token and split: 8 for 16 experts
  int32_t ranges, range_splits;  // `gather` adds up the splits in ranges of consecutive ones, a thread for each range and pair of logits
  RouterOwners owners;
  Packet* partials;  // [tokens][splits][packets]
  uint64_t* flags;   // [owners.count()] by rank; that of rank 0 is not used
  uint64_t nonce;
  bool prefetch;
};

__device__ __forceinline__ void copy_async_4(void* destination, void const* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(destination)), "l"(source) : "memory");
}

/// Raises the flag; returns the nonce if it was raised before.
__device__ __forceinline__ uint64_t exchange_flag(uint64_t* flag, uint64_t nonce) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(flag), "l"(nonce) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t load_flag(uint64_t const* flag) {
  uint64_t now;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(flag) : "memory");
  return now;
}
__device__ __forceinline__ void clear_flag(uint64_t* flag) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(uint64_t(0)) : "memory");
}

template <bool kVectors>
__device__ __forceinline__ uint4 load_8(uint16_t const* row, int k, int hidden, bool inside) {
  if constexpr (kVectors) {
    return inside && k < hidden ? load_operand(reinterpret_cast<uint4 const*>(row + k)) : make_uint4(0, 0, 0, 0);
  } else {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t const low = inside && k + 2 * i < hidden ? row[k + 2 * i] : 0,
                     high = inside && k + 2 * i + 1 < hidden ? row[k + 2 * i + 1] : 0;
      word[i] = low | high << 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
  }
}

/// A work item's tile: kMmaM times 16 experts. A warp has all of them and kMmaN times 8 tokens; kTokenWarps warps divide the tokens among
/// them, and kWarpsK such groups divide k.
template <DataType kType, int kMmaM, int kMmaN, int kTokenWarps>
struct RouterTile {
  static constexpr int kExperts = kMmaM * kRouterMmaExperts, kWarpTokens = kMmaN * 8, kTokens = kWarpTokens * kTokenWarps,
                       kWarpsK = kWarps / kTokenWarps;
  static constexpr int kPitch = kExperts + 4;  // keeps the fragments' four pairs of tokens in different banks
  static constexpr int kGathered = 1024;       // floats of a token: logits, or sums over a range of splits

  union Shared {
    float sums[kWarpsK][kTokens][kPitch];
    float gathered[kWarps][kGathered];
  };

  float value[kMmaM][kMmaN][4] = {};

  /// Adds the products of the steps first, first + kWarpsK, ... below `end`. `expert` and `token` are the warp's first.
  template <bool kVectors>
  __device__ __forceinline__ void multiply(RouterGemmParams const& params, int expert, int token, int first, int end, int lane) {
    // Steps whose loads are in flight together: 48 to 64 registers. Loads of single elements need several registers a step.
    constexpr int kBatch = !kVectors ? 1 : kMmaM * kMmaN <= 2 ? 4 : 2;
    int const row_w = expert + lane / 4, row_x = token + lane / 4;
    uint16_t const *w = params.w + row_w * params.ldw, *x = params.x + row_x * params.ldx;
#pragma unroll 1
    for (int step = first; step < end; step += kBatch * kWarpsK) {
      uint4 a[kBatch][kMmaM][2], b[kBatch][kMmaN];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        bool const inside = step + i * kWarpsK < end;
        int const k = (step + i * kWarpsK) * kRouterStepK + lane % 4 * 8;
#pragma unroll
        for (int m = 0; m < kMmaM * 2; ++m) {
          a[i][m / 2][m % 2] =
              load_8<kVectors>(w + 8 * m * params.ldw, k, params.hidden, inside && row_w + 8 * m < params.choice.rules.experts);
        }
#pragma unroll
        for (int n = 0; n < kMmaN; ++n) {
          b[i][n] = load_8<kVectors>(x + 8 * n * params.ldx, k, params.hidden, inside && row_x + 8 * n < params.tokens);
          if constexpr (!kVectors) __syncwarp();  // keeps all tokens' elements from waiting in registers at once
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
#pragma unroll
        for (int m = 0; m < kMmaM; ++m) {
          uint4 const &upper = a[i][m][0], &lower = a[i][m][1];
          uint32_t const front[4] = {upper.x, lower.x, upper.y, lower.y}, back[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
          for (int n = 0; n < kMmaN; ++n) {
            multiply_16x8x16<kType>(value[m][n], front, b[i][n].x, b[i][n].y);
            multiply_16x8x16<kType>(value[m][n], back, b[i][n].z, b[i][n].w);
          }
        }
      }
    }
  }

  /// Prefetches into L2 the weights that `multiply` will load.
  static __device__ __forceinline__ void prefetch(RouterGemmParams const& params, int expert, int first, int end, int lane) {
#pragma unroll 1
    for (int step = first; step < end; step += kWarpsK) {
      int const k = step * kRouterStepK + lane % 4 * 8;
#pragma unroll
      for (int m = 0; m < kMmaM * 2; ++m) {
        int const row = expert + 8 * m + lane / 4;
        if (row < params.choice.rules.experts && k < params.hidden) {
          asm volatile("prefetch.global.L2 [%0];" ::"l"(params.w + row * params.ldw + k));
        }
      }
    }
  }

  __device__ __forceinline__ void store(Shared& shared, int warp_k, int token_warp, int lane) const {
#pragma unroll
    for (int m = 0; m < kMmaM; ++m) {
#pragma unroll
      for (int n = 0; n < kMmaN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          shared.sums[warp_k][(token_warp * kMmaN + n) * 8 + lane % 4 * 2 + i % 2][m * kRouterMmaExperts + lane / 4 + 8 * (i / 2)] =
              value[m][n][i];
        }
      }
    }
  }

  static __device__ __forceinline__ Packet* packet_at(RouterGemmParams const& params, int token, int split, int packet) {
    return params.partials + ((int64_t(token) * params.splits + split) * params.packets + packet);
  }

  /// Adds up the warps' sums and stores them in the workspace.
  static __device__ __forceinline__ void publish(RouterGemmParams const& params, Shared const& shared, int tile, int split) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < params.tokens * kMmaM * 8; i += kThreads) {
      int const row = i % 8 + i / 8 % kMmaM * kRouterMmaExperts, packet = tile * kMmaM * 8 + i % (8 * kMmaM), token = i / (8 * kMmaM);
      if (packet >= params.packets) continue;
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarpsK; ++w) {
        low += shared.sums[w][token][row];
        high += shared.sums[w][token][row + 8];
      }
      store_packet(packet_at(params, token, split, packet), numbers_of(low, high), params.nonce);
    }
  }

  /// Adds up a token's packets, which stay where they are. Returns false if they have not all arrived after `patience` polls
  /// (RouterOwners).
  static __device__ __forceinline__ bool gather(RouterGemmParams const& params, int token, float* gathered, int patience) {
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < params.ranges * params.packets; i += kThreads) {
      int const packet = i % params.packets, range = i / params.packets;
      int const begin = range * params.range_splits, end = min(begin + params.range_splits, params.splits);
      float low = 0.0f, high = 0.0f;
#pragma unroll 1
      for (int split = begin; split < end; split += kTogether) {
        Packet packets[kTogether];
#pragma unroll 1
        for (;;) {
          bool all = true;
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            poll_packet(packets[j], packet_at(params, token, min(split + j, end - 1), packet));
          }
#pragma unroll
          for (int j = 0; j < kTogether; ++j) all = all && packets[j].tag == params.nonce;
          if (all) break;
          if (patience == 0) return false;
          patience -= patience > 0 ? 1 : 0;
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (split + j < end) {
            float2 const pair = packets[j].get();
            low += pair.x;
            high += pair.y;
          }
        }
      }
      int const expert = packet / 8 * kRouterMmaExperts + packet % 8;
      gathered[range * 2 * params.packets + expert] = low;
      gathered[range * 2 * params.packets + expert + 8] = high;
    }
    return true;
  }

  /// Clears a token's packets, by `threads` threads.
  static __device__ __forceinline__ void clear(RouterGemmParams const& params, int token, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < params.splits * params.packets; i += threads) clear_packet(packet_at(params, token, 0, i));
  }

  /// Clears the packets of the first `count` tokens of a set.
  static __device__ __forceinline__ void clear_all(RouterGemmParams const& params, uint64_t tokens, int count, int thread, int threads) {
#pragma unroll 1
    for (int i = 0; i < count; ++i, tokens &= tokens - 1) clear(params, __ffsll(int64_t(tokens)) - 1, thread, threads);
  }

  template <int kPerLane>
  static __device__ __forceinline__ void choose(RouterGemmParams const& params, int token, float* gathered, float const* biases, int lane) {
    float logit[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      int const expert = i * 32 + lane;
      logit[i] = 0.0f;
      if (expert < params.choice.rules.experts) {
#pragma unroll 1
        for (int range = 0; range < params.ranges; ++range) logit[i] += gathered[range * 2 * params.packets + expert];
      }
    }
    __syncwarp();  // all lanes have read their logits: the memory now holds the scores
    choose_experts(params.choice, token, logit, [&](int i) { return biases[i * 32 + lane]; }, gathered, lane);
  }
};

/// Adds up the logits of up to kWarps tokens of `todo`; their number is `count`, and `rest` are the tokens of later rounds. The last CTA,
/// of rank 0, adds to `rest` the tokens of the owners that have left: `found` of thread r is the nonce if the owner of rank r has. Returns
/// false if this owner has left its tokens.
template <class Tile>
__device__ __forceinline__ bool gather_round(RouterGemmParams const& params, typename Tile::Shared& shared, uint32_t (&left)[2],
                                             uint64_t todo, uint64_t found, int patience, int rank, int thread, int warp, uint64_t& rest,
                                             int& count) {
  RouterOwners const& owners = params.owners;
#pragma unroll 1
  for (;;) {
    bool all = true;
    rest = todo;
    count = 0;
#pragma unroll 1
    for (; rest != 0 && count < kWarps && all; rest &= rest - 1, ++count) {
      all = Tile::gather(params, __ffsll(int64_t(rest)) - 1, shared.gathered[count], patience);
    }
    if (!__syncthreads_or(!all || found == params.nonce)) return true;
    if (rank == 0) {  // it waits without a limit, so all packets are there, and other owners have left
      if (warp < 2) left[warp] = __ballot_sync(0xffffffffu, found == params.nonce);
      __syncthreads();
      rest |= owners.tokens_of(uint64_t(left[1]) << 32 | left[0]);
      if (found == params.nonce) clear_flag(params.flags + thread);
      return true;
    }
    if (__syncthreads_or(thread == 0 && exchange_flag(params.flags + rank, params.nonce) != params.nonce)) return false;
    patience = RouterOwners::kForever;
  }
}

template <DataType kType, int kMmaM, int kMmaN, int kTokenWarps, bool kVectors>
__global__ void __launch_bounds__(kThreads, 2) router_gemm_kernel(__grid_constant__ RouterGemmParams const params) {
  using Tile = RouterTile<kType, kMmaM, kMmaN, kTokenWarps>;
  __shared__ typename Tile::Shared shared;
  __shared__ float biases[kMaxExperts];
  __shared__ uint64_t next_tokens;
  __shared__ uint32_t left[2];
  RouterRules const& rules = params.choice.rules;
  int const thread = int(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int const warp_k = warp / kTokenWarps, token_warp = warp % kTokenWarps;
  int const items = params.tiles * params.splits;
  int const steps = (params.hidden + kRouterStepK - 1) / kRouterStepK;
  auto const first_step = [&](int item) { return item / params.tiles * params.split_steps + warp_k; };
  auto const end_step = [&](int item) { return min((item / params.tiles + 1) * params.split_steps, steps); };
  RouterOwners const& owners = params.owners;
  int const rank = owners.rank_of(int(blockIdx.x));

#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  if (params.prefetch && token_warp == 0) {
    int const item = int(blockIdx.x);
    Tile::prefetch(params, item % params.tiles * Tile::kExperts, first_step(item), end_step(item), lane);
  }
  wait_for_predecessor();
#endif
  uint64_t found = 0;  // the nonce if the owner of rank `thread` has left its tokens to this CTA
  if (rank == 0 && thread > 0 && thread < owners.count()) found = exchange_flag(params.flags + thread, params.nonce);
  if (rules.correction_bias != nullptr) {  // asynchronously, during the loads of the weights
#pragma unroll 1
    for (int expert = thread; expert < rules.experts; expert += kThreads) copy_async_4(&biases[expert], rules.correction_bias + expert);
  }
#pragma unroll 1
  for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
    Tile sums;
    sums.template multiply<kVectors>(params, item % params.tiles * Tile::kExperts, token_warp * kMmaN * 8, first_step(item), end_step(item),
                                     lane);
    __syncthreads();  // the previous item has been published
    sums.store(shared, warp_k, token_warp, lane);
    __syncthreads();
    Tile::publish(params, shared, item % params.tiles, item / params.tiles);
  }
  commit_copies();
  wait_for_copies<0>();

  if (rank >= owners.count()) return;
  bool more = false;
#pragma unroll 1
  for (bool begins = true; begins || more; begins = false) {  // rounds of up to kWarps tokens
    __syncthreads();                                          // the round before has read its shared memory
    uint64_t const todo = begins ? owners.tokens_of(uint64_t(1) << rank) : next_tokens;
    bool const clears_flag = begins && rank > 0 && thread == kThreads - 1;
    uint64_t flag = clears_flag ? load_flag(params.flags + rank) : 0;
    int const patience = begins ? owners.patience(rank) : RouterOwners::kForever;  // where one token is complete all CTAs have begun
    uint64_t rest;
    int count;
    if (!gather_round<Tile>(params, shared, left, todo, found, patience, rank, thread, warp, rest, count)) return;
    // The next round's tokens are kept in shared memory and `found` is a constant again: choose_experts leaves no register for 64 bits.
    found = 0;
    more = rest != 0;
    if (thread == 0) next_tokens = rest;
    if (int const first = count < kWarps ? count : 0; warp >= first) {  // the warps without a token, or all where there are none
      Tile::clear_all(params, todo, count, thread - first * 32, kThreads - first * 32);
      if (clears_flag) {
        while (flag != params.nonce) flag = load_flag(params.flags + rank);
        clear_flag(params.flags + rank);
      }
    }
    if (warp < count) {
      uint64_t set = todo;
#pragma unroll 1
      for (int i = 0; i < warp; ++i) set &= set - 1;
      int const token = __ffsll(int64_t(set)) - 1;
      if (rules.experts <= 64) {
        Tile::template choose<2>(params, token, shared.gathered[warp], biases, lane);
      } else if (rules.experts <= 256) {
        Tile::template choose<8>(params, token, shared.gathered[warp], biases, lane);
      } else {
        Tile::template choose<32>(params, token, shared.gathered[warp], biases, lane);
      }
    }
  }
}

template <DataType kType, bool kVectors>
Status launch_router_gemm(RouterGemmParams const& params, int tokens, LaunchShape const& shape) {
  char const* what = "launch of moe_router_gemm";
  switch (tokens) {
    case 8: return launch(shape, what, &router_gemm_kernel<kType, 1, 1, 1, kVectors>, params);
    case 16: return launch(shape, what, &router_gemm_kernel<kType, 1, 2, 1, kVectors>, params);
    case 32: return launch(shape, what, &router_gemm_kernel<kType, 2, 4, 1, kVectors>, params);
    default: return launch(shape, what, &router_gemm_kernel<kType, 2, 4, 2, kVectors>, params);
  }
}

}  // namespace
}  // namespace moe

Status route_tokens(RouterGemm const& gemm, RouterRules const& rules, Routes const& routes, DeviceProperties const& device, void* workspace,
                    size_t workspace_bytes, bool programmatic, Stream stream) {
  using namespace moe;
  if (gemm.tokens == 0) return Status::success();
  if (gemm.tokens > kRouteTokensMax) {
    return Status::failure(StatusCode::kNotSupported, "%lld tokens are more than the %lld of one launch", (long long)gemm.tokens,
                           (long long)kRouteTokensMax);
  }
  if (gemm.type == DataType::kF32) return Status::failure(StatusCode::kInvalidArgument, "x and w_gate must be 16-bit");
  RouterGemmPlan const plan = plan_router_gemm(gemm.tokens, gemm.hidden, rules.experts, device.sm_count);
  if (size_t const needed = plan.workspace_bytes(gemm.tokens, rules.experts); workspace_bytes < needed) {
    return Status::failure(StatusCode::kWorkspaceTooSmall, "workspace has %zu bytes, the launch needs %zu", workspace_bytes, needed);
  }
  RouterGemmParams params{};
  params.choice = {rules, routes};
  params.x = static_cast<uint16_t const*>(gemm.x);
  params.w = static_cast<uint16_t const*>(gemm.w_gate);
  params.ldx = gemm.ldx;
  params.ldw = gemm.ldw;
  params.tokens = int32_t(gemm.tokens);
  params.hidden = int32_t(gemm.hidden);
  params.tiles = plan.tiles;
  params.splits = plan.splits;
  params.split_steps = plan.split_steps;
  params.packets = int32_t(plan.packets(rules.experts));
  int32_t const max_ranges = std::max(1, kThreads / params.packets);
  params.range_splits = (plan.splits + max_ranges - 1) / max_ranges;
  params.ranges = (plan.splits + params.range_splits - 1) / params.range_splits;
  params.owners = RouterOwners(params.tokens, plan.ctas);
  params.partials = static_cast<Packet*>(workspace);
  params.flags = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace) + plan.partials_bytes(gemm.tokens, rules.experts));
  params.nonce = next_nonce();
  params.prefetch = programmatic;
  LaunchShape shape;
  shape.grid = dim3(unsigned(plan.ctas));
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  bool const vectors = gemm.hidden % 8 == 0 && begins_vector(gemm.x) && (gemm.tokens <= 1 || gemm.ldx % 8 == 0) &&
                       begins_vector(gemm.w_gate) && (rules.experts <= 1 || gemm.ldw % 8 == 0);
  if (gemm.type == DataType::kF16) {
    return vectors ? launch_router_gemm<DataType::kF16, true>(params, plan.tokens, shape)
                   : launch_router_gemm<DataType::kF16, false>(params, plan.tokens, shape);
  }
  return vectors ? launch_router_gemm<DataType::kBF16, true>(params, plan.tokens, shape)
                 : launch_router_gemm<DataType::kBF16, false>(params, plan.tokens, shape);
}

}  // namespace minfer
