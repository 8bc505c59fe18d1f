// Router with its matrix: logits = x.w_gate^T for up to 64 tokens, and each token's experts, in one launch.
//
// The weights are 0.1 to 4 MB that nothing but the number of requests under way can hurry, so they are spread over all SMs: a CTA has an expert
// tile and a piece of k, its warps divide the piece in steps of 32 of k, and all loads of a warp are sent for before the first MMA.
// mma.sync, the experts being its m, the tokens its n. Fragments come straight from global memory, 16 bytes a lane: lane l reads k 8 (l % 4) to
// + 7 of row l / 4, of both operands, and hands them to two MMAs as if they were pairs 0 and 1, 2 and 3 of their k. Any order of k will do
// where both operands have the same.
// Sums. Warps meet in shared memory, CTAs in the workspace as tagged 16-byte vectors (split_reduction.cuh): two logits, of experts e and
// e + 8, and the launch's nonce, for every token, split and pair. A vector is its own flag, so no CTA waits for a fence or a counter.
// Everything is added in ascending order of k.
// Choice. Tokens belong to the last CTAs (router_owners.h). A token's CTA gathers its logits by all threads and gives it to one warp
// (expert_choice.cuh). Then, and not before its sum is complete, its vectors are cleared for a replay, by warps that have no token.
//
// Progress. A CTA waits only after it has published all that it owes, and one without a token does not wait. A token's CTA waits for all
// CTAs, so, unless it is the last one, for some that are started after it, and these may have no place: in a part of a device (MPS, a green
// context), beside kernels that hold the SMs. Hence it waits for a number of polls, and then leaves its tokens to the last CTA, if that has
// not begun. The two agree by a mark in the workspace, into which both exchange the launch's nonce, the last CTA into those of all others
// as soon as it begins; who finds the nonce there was second.
//   If that is the other CTA, the last one has begun and will not look again. But CTAs are started in the order of blockIdx, so all have
//   been: the CTA stays, and waits as long as it takes.
//   If that is the last CTA, the other one has left. It has cleared nothing, so the last CTA finds, or will find, all of the vectors, and
//   chooses for those tokens after its own.
// So whoever waits without end waits for CTAs that have been started, keep their SM and publish without waiting: a launch ends with any
// number of CTAs resident together, one too (tests/cpp/test_router_progress.cpp).
// Who sums a token clears its vectors, and each was written once. A mark that the last CTA finds set is cleared by it. Any other is cleared
// by the CTA whose it is, when its tokens are complete and it sees the nonce there: the last CTA's, which has begun, since its vectors have
// come, or its own on top of that. No order is asked of different words, so nothing is fenced. When all are resident, this costs the last
// CTA an exchange under the loads of the weights, the others a look and a store in a warp that has no token, and with one token nothing.
//
// The weights' lines are asked into L2 before the predecessor is waited for (dependent_launch.cuh).
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
  int32_t tiles, splits, chunk;
  int32_t vectors;             // of a token and split: 8 to a block of 16 experts
  int32_t parts, part_splits;  // where several threads share a vector in `gather`, each sums a part of it, consecutive splits
  RouterOwners owners;
  Packet* partials;  // [tokens][splits][vectors]
  uint64_t* marks;   // [owners.count()] by rank; rank 0 has no use for its own
  uint64_t nonce;
  bool prefetch;
};

__device__ __forceinline__ void copy_async_4(void* destination, void const* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(destination)), "l"(source) : "memory");
}

/// Sets the mark; returns the nonce if it had been set before.
__device__ __forceinline__ uint64_t exchange_mark(uint64_t* mark, uint64_t nonce) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(before) : "l"(mark), "l"(nonce) : "memory");
  return before;
}
__device__ __forceinline__ uint64_t load_mark(uint64_t const* mark) {
  uint64_t now;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(mark) : "memory");
  return now;
}
__device__ __forceinline__ void clear_mark(uint64_t* mark) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(mark), "l"(uint64_t(0)) : "memory");
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

/// kMmaM blocks of 16 experts and kMmaN eights of tokens to a warp; kTokenWarps warps divide the tokens, the others k.
template <DataType kType, int kMmaM, int kMmaN, int kTokenWarps>
struct RouterTile {
  static constexpr int kTile = kMmaM * kRouterBlock, kTokens = kMmaN * kTokenWarps * 8, kWarpsK = kWarps / kTokenWarps;
  static constexpr int kRow = kTile + 4;  // keeps the fragments' four pairs of tokens in different banks
  static constexpr int kGathered = 1024;  // floats of a token: logits, or parts of them

  union Shared {
    float sums[kWarpsK][kTokens][kRow];
    float gathered[kWarps][kGathered];
  };

  float value[kMmaM][kMmaN][4] = {};

  /// `token`: the warp's first. Steps first + warp_k, + kWarpsK, ... up to end.
  template <bool kVectors>
  __device__ __forceinline__ void multiply(RouterGemmParams const& params, int expert, int token, int first, int end, int lane) {
    // Steps whose loads are under way together: 48 to 64 registers. Single elements need several a step.
    constexpr int kBatch = !kVectors ? 1 : kMmaM * kMmaN <= 2 ? 4 : 2;
    int const row_w = expert + lane / 4, row_x = token + lane / 4;
    uint16_t const *w = params.w + row_w * params.ldw, *x = params.x + row_x * params.ldx;
#pragma unroll 1
    for (int step = first; step < end; step += kBatch * kWarpsK) {
      uint4 a[kBatch][kMmaM][2], b[kBatch][kMmaN];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        bool const inside = step + i * kWarpsK < end;
        int const k = (step + i * kWarpsK) * kRouterUnit + lane % 4 * 8;
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

  /// Asks for the weights that multiply will load.
  static __device__ __forceinline__ void prefetch(RouterGemmParams const& params, int expert, int first, int end, int lane) {
#pragma unroll 1
    for (int step = first; step < end; step += kWarpsK) {
      int const k = step * kRouterUnit + lane % 4 * 8;
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
          shared.sums[warp_k][(token_warp * kMmaN + n) * 8 + lane % 4 * 2 + i % 2][m * kRouterBlock + lane / 4 + 8 * (i / 2)] =
              value[m][n][i];
        }
      }
    }
  }

  static __device__ __forceinline__ Packet* packet_at(RouterGemmParams const& params, int token, int split, int vector) {
    return params.partials + ((int64_t(token) * params.splits + split) * params.vectors + vector);
  }

  /// The sums of the CTA's warps into the workspace.
  static __device__ __forceinline__ void publish(RouterGemmParams const& params, Shared const& shared, int tile, int split) {
#pragma unroll 1
    for (int i = int(threadIdx.x); i < params.tokens * kMmaM * 8; i += kThreads) {
      int const row = i % 8 + i / 8 % kMmaM * kRouterBlock, vector = tile * kMmaM * 8 + i % (8 * kMmaM), token = i / (8 * kMmaM);
      if (vector >= params.vectors) continue;
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarpsK; ++w) {
        low += shared.sums[w][token][row];
        high += shared.sums[w][token][row + 8];
      }
      store_packet(packet_at(params, token, split, vector), numbers_of(low, high), params.nonce);
    }
  }

  /// Whether all vectors were there before `patience` polls (RouterOwners) were over. They stay there.
  static __device__ __forceinline__ bool gather(RouterGemmParams const& params, int token, float* gathered, int patience) {
    constexpr int kTogether = 4;
#pragma unroll 1
    for (int i = int(threadIdx.x); i < params.parts * params.vectors; i += kThreads) {
      int const vector = i % params.vectors, part = i / params.vectors;
      int const begin = part * params.part_splits, end = min(begin + params.part_splits, params.splits);
      float low = 0.0f, high = 0.0f;
#pragma unroll 1
      for (int split = begin; split < end; split += kTogether) {
        Packet packets[kTogether];
#pragma unroll 1
        for (;;) {
          bool all = true;
#pragma unroll
          for (int j = 0; j < kTogether; ++j) {
            poll_packet(packets[j], packet_at(params, token, min(split + j, end - 1), vector));
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
      int const expert = vector / 8 * kRouterBlock + vector % 8;
      gathered[part * 2 * params.vectors + expert] = low;
      gathered[part * 2 * params.vectors + expert + 8] = high;
    }
    return true;
  }

  /// A token's vectors, by `threads` threads.
  static __device__ __forceinline__ void clear(RouterGemmParams const& params, int token, int thread, int threads) {
#pragma unroll 1
    for (int i = thread; i < params.splits * params.vectors; i += threads) clear_packet(packet_at(params, token, 0, i));
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
        for (int part = 0; part < params.parts; ++part) logit[i] += gathered[part * 2 * params.vectors + expert];
      }
    }
    __syncwarp();  // the logits have been read, their memory is the scores'
    choose_experts(params.choice, token, logit, [&](int i) { return biases[i * 32 + lane]; }, gathered, lane);
  }
};

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
  int const steps = (params.hidden + kRouterUnit - 1) / kRouterUnit;
  auto const first_step = [&](int item) { return item / params.tiles * params.chunk + warp_k; };
  auto const end_step = [&](int item) { return min((item / params.tiles + 1) * params.chunk, steps); };
  RouterOwners const& owners = params.owners;
  int const rank = owners.rank_of(int(blockIdx.x));

#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  if (params.prefetch && token_warp == 0) {
    int const item = int(blockIdx.x);
    Tile::prefetch(params, item % params.tiles * Tile::kTile, first_step(item), end_step(item), lane);
  }
  wait_for_predecessor();
#endif
  uint64_t found = 0;  // the nonce: the CTA of rank `thread` has left its tokens to this one
  if (rank == 0 && thread > 0 && thread < owners.count()) found = exchange_mark(params.marks + thread, params.nonce);
  if (rules.correction_bias != nullptr) {  // on its way beside the weights
#pragma unroll 1
    for (int expert = thread; expert < rules.experts; expert += kThreads) copy_async_4(&biases[expert], rules.correction_bias + expert);
  }
#pragma unroll 1
  for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
    Tile sums;
    sums.template multiply<kVectors>(params, item % params.tiles * Tile::kTile, token_warp * kMmaN * 8, first_step(item), end_step(item),
                                     lane);
    __syncthreads();  // the tile before it has been published
    sums.store(shared, warp_k, token_warp, lane);
    __syncthreads();
    Tile::publish(params, shared, item % params.tiles, item / params.tiles);
  }
  commit_copies();
  wait_for_copies<0>();

  if (rank >= owners.count()) return;
  bool more = false;
#pragma unroll 1
  for (bool begins = true; begins || more; begins = false) {  // up to kWarps tokens at a time
    __syncthreads();                                          // what lay in `shared` has been read
    uint64_t const todo = begins ? owners.tokens_of(uint64_t(1) << rank) : next_tokens;
    bool const clears_mark = begins && rank > 0 && thread == kThreads - 1;
    uint64_t mark = clears_mark ? load_mark(params.marks + rank) : 0;
    int patience = begins ? owners.patience(rank) : RouterOwners::kForever;  // where one token is complete all CTAs have begun
    uint64_t rest;
    int count;
#pragma unroll 1
    for (;;) {
      bool all = true;
      rest = todo;
      count = 0;
#pragma unroll 1
      for (; rest != 0 && count < kWarps && all; rest &= rest - 1, ++count) {
        all = Tile::gather(params, __ffsll(int64_t(rest)) - 1, shared.gathered[count], patience);
      }
      if (!__syncthreads_or(!all || found == params.nonce)) break;
      if (rank == 0) {  // its patience has no end: some have left
        if (warp < 2) left[warp] = __ballot_sync(0xffffffffu, found == params.nonce);
        __syncthreads();
        rest |= owners.tokens_of(uint64_t(left[1]) << 32 | left[0]);
        if (found == params.nonce) clear_mark(params.marks + thread);
        break;
      }
      if (__syncthreads_or(thread == 0 && exchange_mark(params.marks + rank, params.nonce) != params.nonce)) return;
      patience = RouterOwners::kForever;
    }
    // In shared memory, and `found` known again: choose_experts leaves no register for 64 bits.
    found = 0;
    more = rest != 0;
    if (thread == 0) next_tokens = rest;
    if (int const first = count < kWarps ? count : 0; warp >= first) {  // warps that have no token, if there are some
      uint64_t set = todo;
#pragma unroll 1
      for (int i = 0; i < count; ++i, set &= set - 1) {
        Tile::clear(params, __ffsll(int64_t(set)) - 1, thread - first * 32, kThreads - first * 32);
      }
      if (clears_mark) {
        while (mark != params.nonce) mark = load_mark(params.marks + rank);
        clear_mark(params.marks + rank);
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
  params.chunk = plan.chunk;
  params.vectors = int32_t(plan.vectors(rules.experts));
  int32_t const threads_to_vector = std::max(1, kThreads / params.vectors);
  params.part_splits = (plan.splits + threads_to_vector - 1) / threads_to_vector;
  params.parts = (plan.splits + params.part_splits - 1) / params.part_splits;
  params.owners = RouterOwners(params.tokens, plan.ctas);
  params.partials = static_cast<Packet*>(workspace);
  params.marks = reinterpret_cast<uint64_t*>(static_cast<char*>(workspace) + plan.partials_bytes(gemm.tokens, rules.experts));
  params.nonce = next_nonce();
  params.prefetch = programmatic;
  LaunchShape shape;
  shape.grid = dim3(unsigned(plan.ctas));
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  auto const aligned = [](void const* base, int64_t ld) { return reinterpret_cast<uintptr_t>(base) % 16 == 0 && ld % 8 == 0; };
  bool const vectors =
      gemm.hidden % 8 == 0 && aligned(gemm.x, gemm.tokens > 1 ? gemm.ldx : 8) && aligned(gemm.w_gate, rules.experts > 1 ? gemm.ldw : 8);
  if (gemm.type == DataType::kF16) {
    return vectors ? launch_router_gemm<DataType::kF16, true>(params, plan.tokens, shape)
                   : launch_router_gemm<DataType::kF16, false>(params, plan.tokens, shape);
  }
  return vectors ? launch_router_gemm<DataType::kBF16, true>(params, plan.tokens, shape)
                 : launch_router_gemm<DataType::kBF16, false>(params, plan.tokens, shape);
}

}  // namespace minfer
