// A consumer of few_rows_warps_sm90.cuh.
#pragma once

#include "attention/prefill/few_rows_warps_facts.cuh"

namespace minfer::attention {

/// A warp, which computes items of its own.
template <class Facts>
struct FewRowsWarp : Facts {
  using Facts::empty_at, Facts::full_at, Facts::kBlockStages, Facts::kCodes, Facts::kInt4, Facts::kInt8, Facts::kMmaType, Facts::kRowBytes,
      Facts::kScalesQueries, Facts::kSigns, Facts::kStageKeys, Facts::kStageTiles, Facts::kSteps, Facts::kTileN, Facts::kTokenTiles,
      Facts::kType, Facts::range_of, Facts::scales_at, Facts::stage_at;
  using typename Facts::Codes, typename Facts::Consumer, typename Facts::Int4, typename Facts::Params, typename Facts::Range,
      typename Facts::Ring, typename Facts::SharedStorage, typename Facts::Tile, typename Facts::TokenScale, typename Facts::Traits;

  Params const& params;
  SharedStorage& storage;
  int const warp, lane;
  uint32_t const base;
  Ring ring{};

  /// Waits for the next stage and returns its number.
  CUTLASS_DEVICE int wait() const {
    wait_for_phase(full_at(base, warp, ring.index), ring.phase);
    return ring.index;
  }
  CUTLASS_DEVICE void release() {
    __syncwarp();
    if (lane == 0) arrive_at(empty_at(base, warp, ring.index));
    ring.advance();
  }

  /// The queries as B operands; codes have another order (KvCodes::operand_of). Returns what their scores are multiplied by. Lanes
  /// 4 g + c have row g.
  CUTLASS_DEVICE float load_queries(Tile const& tile, uint32_t (&b)[kSteps][2]) const {
    int const row = lane / 4, query = tile.first + Traits::over_packed_heads(params, row);
    int const head = tile.head_tile * params.packed_heads + (row & (params.packed_heads - 1));
    bool const is_query = query < tile.seqlen_q;
    int64_t const batch = params.cu_seqlens_q != nullptr ? 0 : tile.batch;
    auto const* const from = static_cast<uint16_t const*>(params.queries) + batch * params.q_batch +
                             (int64_t(tile.row_q) + (is_query ? query : tile.first)) * params.q_row + head * params.q_head;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int const column = kCodes ? 16 * s + 4 * (lane % 4) + 2 * half : 16 * s + 8 * half + 2 * (lane % 4);
        b[s][half] = 0;
        if (is_query && column < params.head_dim) b[s][half] = load_operand(reinterpret_cast<uint32_t const*>(from + column));
      }
    }
    if constexpr (!kSigns && !kScalesQueries) {
      return 1.0f;
    } else if constexpr (kSigns) {
      float const sign = sign_of_keys(params, Traits::kv_head_of(params, tile));
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) b[i / 2][i % 2] = Consumer::with_sign(b[i / 2][i % 2], sign);
      return 1.0f;
    } else {  // as scale_query()
      using From = Float16<kType>;
      float max = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        float2 const pair = From::unpack(b[i / 2][i % 2]);
        max = fmaxf(max, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
#pragma unroll
      for (int x = 1; x < 4; x *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, x));
      float const factor = query_factor(max), signed_factor = factor * sign_of_keys(params, Traits::kv_head_of(params, tile));
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        float2 const pair = From::unpack(b[i / 2][i % 2]);
        b[i / 2][i % 2] = Float16<DataType::kF16>::pack(pair.x * signed_factor, pair.y * signed_factor);
      }
      return inverse_of_power(factor);
    }
  }

  /// int4: S^T of a stage's keys.
  CUTLASS_DEVICE void multiply_int4_keys(int stage, int kv_head, uint32_t const (&b)[kSteps][2], float (&scores)[kStageTiles][4]) const {
    uint32_t const keys = stage_at(base, warp, stage), unit = scales_at(base, warp, stage);
    typename Int4::Constants const constants(kv_head, lane);
    Consumer::clear(scores);
#pragma unroll
    for (int s = 0; s < kSteps; s += 2) {
      typename Int4::KeyScales const first(unit, s, lane), second(unit, s + 1, lane);
      uint32_t const of_lane = Int4::address_of_keys(keys, 0, s / 2, lane);
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint4 const x = Int4::load_keys(of_lane + (16 * t + 8 * i) * Int4::kRowBytes);
          Int4::convert_keys(x.x, x.y, first, constants, a[0][i], a[0][2 + i]);
          Int4::convert_keys(x.z, x.w, second, constants, a[1][i], a[1][2 + i]);
        }
        multiply_16x8x16<kMmaType>(scores[t], a[0], b[s][0], b[s][1]);
        multiply_16x8x16<kMmaType>(scores[t], a[1], b[s + 1][0], b[s + 1][1]);
      }
    }
  }
  /// Of keys from `key` on, which are in the residual. b is as before behind it: it turns, so that the loop is not unrolled; the loads of
  /// all steps at once would take registers that the loops over codes then lack.
  CUTLASS_DEVICE void multiply_residual_keys(typename Int4::Residual const& from, int key, uint32_t (&b)[kSteps][2],
                                             float (&scores)[kStageTiles][4]) const {
    constexpr int kAtOnce = 4;
    Consumer::clear(scores);
#pragma unroll 1
    for (int s = 0; s < kSteps; s += kAtOnce) {
      uint32_t a[kAtOnce][kStageTiles][4];
#pragma unroll
      for (int i = 0; i < kAtOnce * kStageTiles; ++i) {
        from.load_keys(key + 16 * (i % kStageTiles), s + i / kStageTiles, lane, a[i / kStageTiles][i % kStageTiles]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce * kStageTiles; ++i) {
        int const step = i / kStageTiles;
        multiply_16x8x16<kMmaType>(scores[i % kStageTiles], a[step][i % kStageTiles], b[step][0], b[step][1]);
      }
      uint32_t first[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (i < kAtOnce) first[i][j] = b[i][j];
          b[i][j] = i + kAtOnce < kSteps ? b[(i + kAtOnce) % kSteps][j] : first[i + kAtOnce - kSteps][j];
        }
      }
    }
  }
  /// S^T of a stage's keys.
  CUTLASS_DEVICE void multiply_keys(int stage, uint32_t kept, uint32_t const (&b)[kSteps][2], float (&scores)[kStageTiles][4]) const {
    uint32_t const keys = stage_at(base, warp, stage);
    TokenScale scales[kStageTiles][2];
    Consumer::clear(scores);
#pragma unroll
    for (int t = 0; t < kStageTiles; ++t) {
      if constexpr (kInt8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[t][i] = TokenScale(storage.scales[warp][stage][16 * t + 8 * i + lane / 4]);
      }
    }
    constexpr int kStepsOfVectors = kCodes ? 2 : 1;  // MMAs of two vectors of 16 bytes
#pragma unroll
    for (int s = 0; s < kSteps; s += kStepsOfVectors) {
#pragma unroll
      for (int t = 0; t < kStageTiles; ++t) {
        uint32_t x[4], a[4];
        load_matrices(Consumer::address_of(keys, kStageKeys, 16 * t + lane % 16, 2 * s / kStepsOfVectors + lane / 16), x);
        if constexpr (kCodes) {
          if constexpr (kSigns) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] &= kept;
          }
          Consumer::template convert_keys<0>(x, scales[t], a);
          multiply_16x8x16<kMmaType>(scores[t], a, b[s][0], b[s][1]);
          Consumer::template convert_keys<1>(x, scales[t], a);
          multiply_16x8x16<kMmaType>(scores[t], a, b[s + 1][0], b[s + 1][1]);
        } else {
          multiply_16x8x16<kMmaType>(scores[t], x, b[s][0], b[s][1]);
        }
      }
    }
  }
  /// int4: O^T += V^T.P^T of a stage's keys.
  CUTLASS_DEVICE void multiply_int4_values(int stage, int kv_head, uint2 const* p, float (&output)[kSteps][4]) const {
    uint32_t const values = stage_at(base, warp, stage), unit = scales_at(base, warp, stage);
    typename Int4::Constants const constants(kv_head, lane);
#pragma unroll
    for (int t = 0; t < kStageTiles; ++t) {
      typename Int4::ValueScales scales;
#pragma unroll
      for (int v = 0; v < kSteps / 2; v += 2) {  // vectors of 32 channels
        uint32_t x[4];                           // {tokens 0-7 of the first vector, of the second, tokens 8-15 likewise}
        load_matrices_transposed(Int4::address_of(values, 16 * t + lane / 16 * 8 + lane % 8, v + lane / 8 % 2), x);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if ((v + j) % params.vectors_of_group == 0) {
            scales = typename Int4::ValueScales(unit, t, (v + j) / params.vectors_of_group, params.groups_v, lane);
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              Int4::convert_values(x[2 * i + j] >> 8 * tile, scales.scale[i], scales.minimum[i], constants, a[2 * i], a[2 * i + 1]);
            }
            multiply_16x8x16<kMmaType>(output[2 * (v + j) + tile], a, p[t].x, p[t].y);
          }
        }
      }
    }
  }
  /// Of values from `key` on, which are in the residual.
  CUTLASS_DEVICE void multiply_residual_values(typename Int4::Residual const& from, int key, uint2 const* p,
                                               float (&output)[kSteps][4]) const {
#pragma unroll
    for (int t = 0; t < kStageTiles; ++t) {
#pragma unroll
      for (int v = 0; v < kSteps / 2; ++v) {
        uint32_t a[2][4];
        from.load_values(key + 16 * t, v, lane, a);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) multiply_16x8x16<kMmaType>(output[2 * v + tile], a[tile], p[t].x, p[t].y);
      }
    }
  }

  /// O^T += V^T.P^T of a stage's keys.
  CUTLASS_DEVICE void multiply_values(int stage, uint2 const* p, float (&output)[kSteps][4]) const {
    uint32_t const values = stage_at(base, warp, stage);
#pragma unroll
    for (int t = 0; t < kStageTiles; ++t) {
      int const key = 16 * t + lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
      if constexpr (kCodes) {
        TokenScale scales[4];
        if constexpr (kInt8) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scales[i] = TokenScale(storage.scales[warp][stage][16 * t + i / 2 * 8 + 2 * (lane % 4) + i % 2]);
          }
        }
#pragma unroll
        for (int i = 0; i < kSteps; i += 2) {
          uint32_t x[4], a[4];
          load_matrices_transposed(Consumer::address_of(values, kStageKeys, key, i + half), x);
          Consumer::template convert_values<0>(x, scales, a);
          multiply_16x8x16<kMmaType>(output[i], a, p[t].x, p[t].y);
          Consumer::template convert_values<1>(x, scales, a);
          multiply_16x8x16<kMmaType>(output[i + 1], a, p[t].x, p[t].y);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          uint32_t a[4];
          load_matrices_transposed(Consumer::address_of(values, kStageKeys, key, 2 * i + half), a);
          multiply_16x8x16<kMmaType>(output[i], a, p[t].x, p[t].y);
        }
      }
    }
  }
  /// Values of keys outside of [begin, end) become zeros: their probabilities are zero, but 0 * NaN is NaN. Codes with scales are so
  /// where these are.
  CUTLASS_DEVICE void clear_unseen(int stage, int begin, int end) const {
    if (begin <= 0 && end >= kStageKeys) return;
    if constexpr (kInt4) {
      for (int plane = 0; plane < 2 * params.groups_v; ++plane) {
        if (lane < begin || lane >= end) storage.scales[warp][stage][plane * Int4::kUnit + lane] = 0;
      }
    } else {
      constexpr int kVectors = kRowBytes / 16;
      uint32_t const values = stage_at(base, warp, stage);
#pragma unroll 1
      for (int i = lane; i < kStageKeys * kVectors; i += 32) {
        int const key = i / kVectors;
        if (key >= begin && key < end) continue;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(Consumer::address_of(values, kStageKeys, key, i % kVectors)), "r"(0)
                     : "memory");
        if constexpr (kInt8) storage.scales[warp][stage][key] = 0.0f;
      }
    }
    cutlass::arch::fence_view_async_shared();  // before TMA loads into the stage again
    __syncwarp();
  }

  /// Moves a block's scores down by a stage, whose scores become the last ones.
  static CUTLASS_DEVICE void push(float (&scores)[kTokenTiles][4], float const (&of_stage)[kStageTiles][4]) {
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        scores[t][x] = t + kStageTiles < kTokenTiles ? scores[t + kStageTiles][x] : of_stage[t + kStageTiles - kTokenTiles][x];
      }
    }
  }

  CUTLASS_DEVICE int in_codes_of(Tile const& tile) const {
    if constexpr (kInt4) return Int4::in_codes(params, tile.seqlen_k);
    return tile.seqlen_k;
  }

  CUTLASS_DEVICE void compute(Tile const& tile) {
    uint32_t b[kSteps][2];
    float const of_query = load_queries(tile, b);
    float const query_scale[2] = {__shfl_sync(0xffffffffu, of_query, lane % 4 * 8), __shfl_sync(0xffffffffu, of_query, lane % 4 * 8 + 4)};
    auto const seen = Consumer::seen_keys(params, tile);
    Range const range = range_of(params, tile);
    uint32_t kept = 0xffffffffu;
    int const kv_head = Traits::kv_head_of(params, tile), in_codes = in_codes_of(tile);
    if constexpr (kSigns) kept = sign_of_keys(params, kv_head) == 0.0f ? 0 : kept;
    float output[kSteps][4], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {0.0f, 0.0f};
    Consumer::clear(output);
    int const last_block = range.end > range.begin ? (range.end - 1) / kBlockStages : -1, first_block = range.begin / kBlockStages;
#pragma unroll 1
    for (int block = last_block; block >= first_block; --block) {
      int const first = range.first_of(block) - block * kBlockStages, end = range.end_of(block) - block * kBlockStages;
      float scores[kTokenTiles][4], block_max[2] = {-INFINITY, -INFINITY};
      Consumer::clear(scores);
      // Loops over stages are not unrolled: with a copy for each stage, warps waited for instructions a fifth of the time.
#pragma unroll 1
      for (int i = 0; i < kBlockStages; ++i) {
        float of_stage[kStageTiles][4];
        int const key = (block * kBlockStages + i) * kStageKeys;
        if (i < first || i >= end) {
#pragma unroll
          for (int t = 0; t < kStageTiles; ++t) {
#pragma unroll
            for (int x = 0; x < 4; ++x) of_stage[t][x] = -INFINITY;
          }
        } else if (kInt4 && key >= in_codes) {
          if constexpr (kInt4) multiply_residual_keys(Consumer::residual_of(params, params.keys, tile, seen), key, b, of_stage);
        } else {
          if constexpr (kInt4) {
            multiply_int4_keys(wait(), kv_head, b, of_stage);
          } else {
            multiply_keys(wait(), kept, b, of_stage);
          }
          release();
        }
        push(scores, of_stage);
      }
      int own = lane;
      if constexpr (kInt4) make_opaque(own);  // what is computed from it is computed anew for each block: kept, it would be spilled
      auto const rows = Consumer::rows_of(params, query_scale, tile, own);
      Consumer::cap_and_mask(params, rows, block * kTileN, own, scores);
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) block_max[x % 2] = fmaxf(block_max[x % 2], scores[t][x]);
      }
      // As OnlineSoftmax::step().
      float rescale[2], offset[2];
      bool raised = false;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int x = 4; x < 32; x *= 2) block_max[e] = fmaxf(block_max[e], __shfl_xor_sync(0xffffffffu, block_max[e], x));
        block_max[e] = __fmul_rn(block_max[e], rows.scale_log2[e]);
        rescale[e] = 1.0f;
        if (block_max[e] > row_max[e] + kRaiseThreshold) {
          rescale[e] = exp2_fast(row_max[e] - block_max[e]);
          row_max[e] = block_max[e];
          raised = true;
        }
        offset[e] = row_max[e] == -INFINITY ? 0.0f : row_max[e];
      }
      uint2 p[kTokenTiles];
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          scores[t][x] = exp2_fast(fmaf(scores[t][x], rows.scale_log2[x % 2], -offset[x % 2]));
          sum[x % 2] += scores[t][x];
        }
        using F = Float16<kMmaType>;
        p[t] = make_uint2(transpose_matrix(F::pack(scores[t][0], scores[t][1])), transpose_matrix(F::pack(scores[t][2], scores[t][3])));
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], 4);
        row_sum[e] = fmaf(row_sum[e], rescale[e], sum[e]);
      }
      if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
#pragma unroll
          for (int x = 0; x < 4; ++x) output[i][x] *= rescale[x % 2];
        }
      }
#pragma unroll 1
      for (int i = 0; i < kBlockStages; ++i) {
        int const key = (block * kBlockStages + i) * kStageKeys;
        if (i < first || i >= end) {
          // probabilities of zero add nothing
        } else if (kInt4 && key >= in_codes) {
          if constexpr (kInt4) multiply_residual_values(Consumer::residual_of(params, params.values, tile, seen), key, p, output);
        } else {
          int const stage = wait();
          clear_unseen(stage, seen.begin - key, seen.end - key);
          if constexpr (kInt4) {
            multiply_int4_values(stage, kv_head, p, output);
          } else {
            multiply_values(stage, p, output);
          }
          release();
        }
#pragma unroll
        for (int t = kStageTiles; t < kTokenTiles; ++t) p[t - kStageTiles] = p[t];  // the next stage's come first
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      row_sum[e] += __shfl_xor_sync(0xffffffffu, row_sum[e], 8);
      row_sum[e] += __shfl_xor_sync(0xffffffffu, row_sum[e], 16);
    }
    // As a fold of the only split; the kernel that folds splits does it otherwise.
    SplitState total[2] = {{-INFINITY, 0.0f}, {-INFINITY, 0.0f}};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      SplitWeights const weights = fold_state(total[e], {row_max[e], row_sum[e]});
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int x = e; x < 4; x += 2) output[i][x] = fold_output(0.0f, output[i][x], weights);
      }
    }
    auto const column_of = [&](int i, int x) { return Codes::row_of(i, lane / 4, x / 2); };
    if (tile.split >= 0) {
      Consumer::template store_partial<kSteps>(params, tile, total, output, lane, column_of);
    } else {
      Consumer::template store<kSteps>(params, tile, Consumer::value_scale(params, tile), total, output, lane, column_of);
    }
  }
};

}  // namespace minfer::attention
