// The residual of an int4 cache in decode: a sequence's newest tokens, of no complete token group, which are stored in 16 bits. A warp
// takes 16 of them at a time by way of its own shared memory: 16 rows of kMergedDim f16, 16-byte aligned, in the order of the codes'
// operands, so that ldmatrix finds the elements where queries and output have them.
#pragma once

#include "attention/decode/softmax.cuh"
#include "attention/shared/prefetch_rows.cuh"
#include "common/mma_sm80.cuh"

namespace minfer::attention {

template <class Traits>
struct DecodeResidual : Traits {
  using Softmax = DecodeSoftmax<Traits>;
  using KeyBlock = DecodeKeyBlock<Traits>;
  using Traits::kHeadDim, Traits::kMergedDim, Traits::kMergePasses, Traits::kMmaType, Traits::kSteps;
  using typename Traits::Element, typename Traits::Params, typename Traits::Queries;
  template <int kRowTiles>
  using State = typename Softmax::template State<kRowTiles>;
  template <int kRowTiles>
  using Scores = typename Softmax::template Scores<kRowTiles>;

  static constexpr int kVectors = 16 * kMergedDim / 8 / 32;           // vectors of 16 bytes that a lane loads
  static constexpr int kAtOnce = kHeadDim <= 128 ? kVectors / 2 : 2;  // loads under way at a time

  /// The address of a vector of a token in the warp's shared memory.
  static CUTLASS_DEVICE uint32_t address_of(uint32_t room, int token, int vector) {
    return room + token * (kMergedDim * 2) + (vector ^ token % 8) * 16;
  }

  /// Loads kMergedDim elements of 16 tokens, pass `pass` of head_dim, of which tokens [begin, end) are seen; the others become zeros. from:
  /// the first token's first element in `base`.
  static CUTLASS_DEVICE void load(Params const& params, DecodeWorkItem const& work, uint32_t room, void const* base, int head_dim, int pass,
                                  int first, int begin, int end, int lane) {
    int64_t const row = int64_t(params.heads_kv) * head_dim;
    auto const* const from = static_cast<Element const*>(base) + (int64_t(work.batch) * params.group_tokens + first) * row +
                             int64_t(work.kv_head) * head_dim + pass * kMergedDim;
    __syncwarp();
#pragma unroll 1
    for (int done = 0; done < kVectors; done += kAtOnce) {
      uint4 loads[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const token = ((done + i) * 32 + lane) / (kMergedDim / 8), d = ((done + i) * 32 + lane) % (kMergedDim / 8) * 8;
        loads[i] = make_uint4(0, 0, 0, 0);
        if (token >= begin && token < end && pass * kMergedDim + d < head_dim) {
          loads[i] = __ldcg(reinterpret_cast<uint4 const*>(from + token * row + d));
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        int const token = ((done + i) * 32 + lane) / (kMergedDim / 8), d = ((done + i) * 32 + lane) % (kMergedDim / 8) * 8;
        auto const* const elements = reinterpret_cast<Element const*>(&loads[i]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // elements e and e + 4 are neighbours in the operands
          int const position = d / 32 * 32 + e / 2 * 16 + e % 2 * 8 + d % 32 / 8 * 2;
          uint32_t const pair = KeyBlock::pack(float(elements[e]), float(elements[e + 4]));
          asm volatile("st.shared.u32 [%0], %1;" ::"r"(address_of(room, token, position / 8) + position % 8 * 2), "r"(pair) : "memory");
        }
      }
    }
    __syncwarp();
  }

  /// Prefetches what a work item will load; called by a whole warp.
  static CUTLASS_DEVICE void prefetch(Params const& params, DecodeWorkItem const& work, int keys_in_codes, int lane) {
    auto const rows = [&](void const* base, int head_dim) {
      int64_t const stride = int64_t(params.heads_kv) * head_dim * 2;
      prefetch_rows(static_cast<char const*>(base) + work.batch * params.group_tokens * stride + int64_t(work.kv_head) * head_dim * 2,
                    stride, head_dim * 2, work.seqlen_k - keys_in_codes, lane);
    };
    rows(params.k_residual, params.head_dim);
    rows(params.v_residual, params.head_dim_v);
  }

  /// Adds 16 tokens from token `first` of the residual on to the warp's partial. keys_in_codes: keys of the sequence before the residual.
  template <int kRowTiles>
  static CUTLASS_DEVICE void compute(Params const& params, uint32_t room, DecodeWorkItem const& work, Queries const& queries,
                                     State<kRowTiles>& state, Scores<kRowTiles> const& scores, int first, int keys_in_codes, int lane) {
    make_opaque(lane);  // as in DecodeMainloop::compute_keys
    int const begin = scores.first_key - keys_in_codes - first, end = work.seqlen_k - keys_in_codes - first;  // tokens that are seen
    float s[1][kRowTiles][4] = {};
#pragma unroll
    for (int pass = 0; pass < kMergePasses; ++pass) {
      load(params, work, room, params.k_residual, params.head_dim, pass, first, begin, end, lane);
#pragma unroll
      for (int step = 0; step < kMergedDim / 16; ++step) {
        uint32_t a[4];
        load_matrices(address_of(room, lane % 16, 2 * step + lane / 16), a);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          uint2 const q = queries.of[i][pass * (kMergedDim / 16) + step][lane];
          multiply_16x8x16<kMmaType>(s[0][i], a, q.x, q.y);
        }
      }
    }
    typename Softmax::template TokenScales<1> no_scales;
    Softmax::template step<true>(params, s, state, scores, no_scales, keys_in_codes + first, lane);
    uint32_t p[1][kRowTiles][2];
    Softmax::transpose(s, p);
#pragma unroll
    for (int pass = 0; pass < kMergePasses; ++pass) {
      load(params, work, room, params.v_residual, params.head_dim_v, pass, first, begin, end, lane);
#pragma unroll
      for (int tile = 0; tile < kMergedDim / 16; ++tile) {
        uint32_t a[4];
        load_matrices_transposed(address_of(room, lane / 16 * 8 + lane % 8, 2 * tile + lane / 8 % 2), a);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          multiply_16x8x16<kMmaType>(state.output[pass * (kMergedDim / 16) + tile][i], a, p[0][i][0], p[0][i][1]);
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace minfer::attention
