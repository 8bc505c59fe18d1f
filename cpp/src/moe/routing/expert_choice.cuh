// One warp chooses a token's experts from its logits, by the rules of RouterRules (moe_routing.h).
//
// Lane l holds the experts i * 32 + l. What they are chosen by is mapped to unsigned keys of the same order, so that a warp finds the
// largest key by one redux.sync and its smallest index by another. The key of the chosen expert is cleared, and top_k such steps give the
// list. An expert that cannot be chosen has the key 0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "minfer/moe_routing.h"

namespace minfer::moe {

struct ChoiceParams {
  RouterRules rules;
  Routes routes;
};

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fc00000u); }

/// The key of a number is at least 0x007fffff, that of -inf. NaN has the key of -inf, and both zeros have the same key.
__device__ __forceinline__ uint32_t key_of(float choice) {
  if (choice != choice) choice = -infinity();
  uint32_t const bits = __float_as_uint(choice + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float choice_of(uint32_t key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

/// Returns the index of the largest key, the smallest index among equals, to all lanes, and sets that key to 0.
template <int kPerLane>
__device__ __forceinline__ int take_best(uint32_t (&key)[kPerLane], int lane) {
  uint32_t best = key[0];
  int at = lane;
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) {
    if (key[i] > best) {
      best = key[i];
      at = i * 32 + lane;
    }
  }
  uint32_t const top = __reduce_max_sync(0xffffffffu, best);
  int const index = int(__reduce_min_sync(0xffffffffu, best == top ? unsigned(at) : 0x7fffffffu));
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * 32 + lane == index) key[i] = 0;
  }
  return index;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, step);  // all lanes add the same pairs, so they have the same bits
  return x;
}

/// Clears the keys of all experts outside of the topk_group best groups.
template <int kPerLane>
__device__ __forceinline__ void keep_best_groups(RouterRules const& rules, uint32_t (&key)[kPerLane], int lane) {
  int const size = rules.experts / rules.n_group;
  uint32_t group_key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) group_key[i] = 0;
#pragma unroll 1
  for (int g = 0; g < rules.n_group; ++g) {
    uint32_t best = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      uint32_t const k = unsigned(i * 32 + lane - g * size) < unsigned(size) ? key[i] : 0;
      second = max(second, min(best, k));
      best = max(best, k);
    }
    uint32_t const top = __reduce_max_sync(0xffffffffu, best);
    float score = choice_of(top);
    if (rules.correction_bias != nullptr && size > 1) {
      int const owner = __ffs(int(__ballot_sync(0xffffffffu, best == top))) - 1;
      score += choice_of(__reduce_max_sync(0xffffffffu, lane == owner ? second : best));
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * 32 + lane == g) group_key[i] = key_of(score);
    }
  }
  uint32_t kept = 0;  // bit i: key[i]
#pragma unroll 1
  for (int j = 0; j < rules.topk_group; ++j) {
    int const g = take_best(group_key, lane);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) kept |= unsigned(i * 32 + lane - g * size) < unsigned(size) ? 1u << i : 0u;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (!(kept >> i & 1)) key[i] = 0;
  }
}

/// Writes the token's weights and ids. A lane's i-th expert has the logit logit[i] and, where there is a bias, bias_of(i). Both are defined
/// also for i without an expert, and are then ignored. `scores`: kPerLane * 32 floats of shared memory for this warp alone.
template <int kPerLane, class BiasOf>
__device__ __forceinline__ void choose_experts(ChoiceParams const& params, int64_t token, float const (&logit)[kPerLane], BiasOf&& bias_of,
                                               float* scores, int lane) {
  RouterRules const& rules = params.rules;
  bool const biased = rules.correction_bias != nullptr, softmax = rules.scoring == RouterScoring::kSoftmax;
  bool has_nan = false;
  float max_logit = -infinity();
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (i * 32 + lane < rules.experts) {
      has_nan = has_nan || logit[i] != logit[i];
      max_logit = fmaxf(max_logit, logit[i]);  // ignores NaN
    }
  }
  has_nan = __any_sync(0xffffffffu, has_nan);
  max_logit = choice_of(__reduce_max_sync(0xffffffffu, key_of(max_logit)));

  // One exponential serves both scorings. Softmax takes that of the difference to the largest logit, which is set to 0 for the largest
  // logit itself, as inf - inf is NaN. Sigmoid takes that of negative numbers only: a small score stays above 0 as long as fp32 can
  // represent it.
  float exponential[kPerLane], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float const x = logit[i], exponent = softmax ? (x == max_logit ? 0.0f : x - max_logit) : -fabsf(x);
    exponential[i] = expf(exponent);
    sum += i * 32 + lane < rules.experts && x == x ? exponential[i] : 0.0f;
  }
  float const inverse = 1.0f / warp_sum(sum);

  uint32_t key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float const x = logit[i], e = exponential[i];
    float const score = softmax
                            ? e * inverse
                            : __fdividef(x < 0.0f ? e : 1.0f,
                                         1.0f + e);  // exact to two units in the last place, in a tenth of the code of an exact division
    scores[i * 32 + lane] = score;
    key[i] = i * 32 + lane < rules.experts ? key_of(biased && x == x ? score + bias_of(i) : x) : 0;
  }
  if (rules.topk_group < rules.n_group) keep_best_groups(rules, key, lane);

  int id = 0;  // the expert at position `lane` of the list
#pragma unroll 1
  for (int j = 0; j < rules.top_k; ++j) {
    int const index = take_best(key, lane);
    if (lane == j) id = index;
  }
  __syncwarp();
  float weight = lane < rules.top_k ? scores[id] : 0.0f;
  if (rules.renormalize) {
    float const sum = warp_sum(weight);
    weight = sum > 0.0f ? weight / sum : 0.0f;
  }
  weight *= rules.scale;
  if (lane < rules.top_k) {
    params.routes.weights[token * rules.top_k + lane] = has_nan ? not_a_number() : weight;
    params.routes.ids[token * rules.top_k + lane] = id;
  }
}

}  // namespace minfer::moe
