// Epilogue of grouped kernels: d[row] = row_scale * act(acc + bias[expert]), or row_scale * act(gate) * up, for the rows of one expert's
// tile.
//
// The accumulators are D^T (weights on the MMA's rows): value e + 2 h + 4 j of slab mi is weight row 64 mi + 16 warp + 8 h + lane / 4,
// token 8 j + 2 (lane % 4) + e. kChunk tokens at a time are turned over by stmatrix.trans into shared memory, as [token][column] with
// 16-byte units at u ^ token % 8, and leave as whole 16-byte units. Codes of d are staged as 16-bit elements too, each a code and a byte of
// zeros, which is left out on the way to memory. Rows behind the tile's last token belong to the next expert and are not touched, which is
// why no TMA store writes them.
// Operands of 8 bits have scales: an accumulator is multiplied by that of its row of a and that of its row of the weight first. They are
// copied into shared memory, with the bias, while the tensor cores work. D may be codes whose scales are found here: a group is the outputs
// of one token in one warpgroup.
#pragma once

#include "common/named_barrier.cuh"
#include "cute/tensor.hpp"
#include "gemm/epilogue.cuh"
#include "moe/grouped/expert_tiles.cuh"

namespace minfer::moe {

struct GroupedEpilogueParams {
  void* d;                 // [rows, n_out] with leading dimension ldd
  void const* bias;        // [experts, n], of the weights' type, or null; gated: in the weight's own row order
  float const* alpha;      // [experts], or null: factors of the sums of quantised weights
  float const* row_scale;  // [rows], or null
  int64_t ldd, bias_stride;
  int32_t n;  // rows of an expert's weight
  ActivationParams activation;
  float gate_max, up_max, up_shift;  // gated: gate = min(gate, gate_max), up = clamp(up, +-up_max) + up_shift
  bool gated;
  int32_t gate_row_stride, up_row_offset;  // gate i is row i * gate_row_stride of the weight, its up row up_row_offset behind it
  bool gate_blocks;                        // rows are in the tiles' own order
  float const* d_scale;                    // d holds e4m3 codes of values / *d_scale; null: numbers
  bool codes;                              // d holds codes, of a byte
  bool vectors;                            // d and its rows are aligned to 8 elements
};

/// Where operands have 8 bits.
struct ScaledGroupedEpilogueParams : GroupedEpilogueParams {
  float const *token_scales, *channel_scales;     // of rows of a, and of rows of experts' weights in their own order; null: 1
  int64_t token_stride, token_expert_offset;      // in elements, as in ExpertScales
  int64_t channel_stride, channel_expert_stride;  // a stride of 0: one for all
  int32_t const* gather;                          // which row of a a row of d is of, or null
  int32_t a_rows;
  float* group_scales;  // codes' scales, [rows, groups of columns], or null
  int64_t group_stride;
  bool int8;      // codes with scales of groups are int8, else e4m3
  bool bf16;      // d, or bias where d has codes
  bool bias_f32;  // else of d's type
  bool plain;     // d is 16-bit numbers in whole units, of sums that nothing but scales has been applied to
};

/// The weight's row that row `row` of an expert's tiles is, or -1. Gated, tiles hold 8 gate rows, then their 8 up rows. `params` are an
/// epilogue's, or those of a mainloop that reads the weight row by row.
template <class Params>
__device__ __forceinline__ int weight_row(Params const& params, int row) {
  if (!params.gated) return row < params.n ? row : -1;
  int const output = row / 16 * 8 + row % 8;
  if (output >= params.n / 2) return -1;
  return params.gate_blocks ? row : output * params.gate_row_stride + row / 8 % 2 * params.up_row_offset;
}

/// Rows behind the last expert's are nobody's: zeros. By `threads` of every CTA.
template <class Storage>
__device__ void clear_rows_behind(ExpertRows const& rows, Storage const& tiles, GroupedEpilogueParams const& e, int thread, int threads) {
  if (rows.masked) return;
  int const n_out = e.gated ? e.n / 2 : e.n, last = rows.experts - 1;
  for (int row = tiles.first_row[last] + tiles.count[last] + int(blockIdx.x); row < rows.rows; row += int(gridDim.x)) {
    for (int column = thread; column < n_out; column += threads) {
      if (e.codes) {
        static_cast<uint8_t*>(e.d)[row * e.ldd + column] = 0;
      } else {
        static_cast<uint16_t*>(e.d)[row * e.ldd + column] = 0;
      }
    }
  }
}

/// Of a staged unit of codes, as much as lies inside a row.
__device__ __forceinline__ void copy_codes(uint4 const& unit, uint8_t* to, int inside, bool vectors) {
  uint2 const codes = make_uint2(__byte_perm(unit.x, unit.y, 0x6420), __byte_perm(unit.z, unit.w, 0x6420));
  if (vectors && inside >= 8) {
    *reinterpret_cast<uint2*>(to) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < inside) to[i] = uint8_t((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
  }
}

/// By a warpgroup, or kThreads of one: up to kRows staged rows of 16-bit elements, unit u of row r at u ^ r % 8, into d's rows from `row0`
/// and columns from `column0` on. kTogether units of a thread are read together.
template <class Type, int kRows, int kTogether = 4, int kThreads = 128>
__device__ __forceinline__ void copy_staged_rows(GroupedEpilogueParams const& params, char const* staged, int row_bytes, int units,
                                                 int64_t row0, int rows, int column0, int thread) {
  int const n_out = params.gated ? params.n / 2 : params.n, unit = thread % units, step = kThreads / units;
  int const inside = n_out - column0 - unit * 8;
  int64_t const first = row0 * params.ldd + column0 + unit * 8;
#pragma unroll 1
  for (int row = thread / units; row < rows; row += kTogether * step) {
    uint4 bits[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const r = row + i * step;
      if (r < kRows) bits[i] = *reinterpret_cast<uint4 const*>(staged + r * row_bytes + (unit ^ r % 8) * 16);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const r = row + i * step;
      if (r >= rows) continue;
      int64_t const to = first + r * params.ldd;
      if (params.codes) {
        copy_codes(bits[i], static_cast<uint8_t*>(params.d) + to, inside, params.vectors);
        continue;
      }
      Type* const at = static_cast<Type*>(params.d) + to;
      if (params.vectors && inside >= 8) {
        *reinterpret_cast<uint4*>(at) = bits[i];
      } else {
        uint32_t const words[4] = {bits[i].x, bits[i].y, bits[i].z, bits[i].w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint16_t const half = uint16_t(words[j / 2] >> (16 * (j % 2)));
          if (j < inside) at[j] = *reinterpret_cast<Type const*>(&half);
        }
      }
    }
  }
}

/// Two numbers of d as they are staged: of codes a byte and one of zeros each.
template <class Element>
__device__ __forceinline__ uint32_t pack_staged(GroupedEpilogueParams const& params, Element element, float low, float high, float factor) {
  return params.d_scale == nullptr ? element.pack(low, high) : __byte_perm(codes_e4m3(low, high, factor), 0, 0x4140);
}
/// Codes of numbers that have been divided by their scale. NaN becomes 0 as int8.
__device__ __forceinline__ uint32_t pack_staged_codes(float low, float high, bool int8) {
  auto const code = [](float x) { return uint32_t(min(max(__float2int_rn(x), -127), 127)) & 255; };
  return int8 ? code(low) | code(high) << 16 : __byte_perm(codes_e4m3(low, high, 1.0f), 0, 0x4140);
}
/// The gate and its up, which go through their limits, as one output.
template <int kCount, class Gate, class Up>
__device__ __forceinline__ void gate_outputs(GroupedEpilogueParams const& params, Gate const& gate, Up const& up) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) gate(i) = gate(i) > params.gate_max ? params.gate_max : gate(i);
  activate_all<kCount>(params.activation, gate);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    float u = up(i);  // compared and not fminf: NaN stays
    u = u > params.up_max ? params.up_max : u < -params.up_max ? -params.up_max : u;
    gate(i) *= u + params.up_shift;
  }
}
/// Sends for a scale, which is 1 where there is none.
__device__ __forceinline__ void request_scale(float* to, float const* from, bool exists) {
  if (!exists) {
    *to = 1.0f;
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from) : "memory");
  }
}

/// What a warpgroup has of a tile's rows of a and of the weight: scales, and a bias.
template <int kWeightRows, int kTokens>
struct ScaledLines {
  alignas(16) float channel[kWeightRows], bias[kWeightRows], token[kTokens];

  static __device__ bool needed(ScaledGroupedEpilogueParams const& params) {
    return params.token_scales != nullptr || params.channel_scales != nullptr || params.bias != nullptr;
  }
  /// token(at): which of the tile's tokens the at-th is.
  template <class Element, class Token>
  __device__ void request(ScaledGroupedEpilogueParams const& params, Element element, ExpertTile const& tile, int first_row, int thread,
                          Token const& token_of) {
#pragma unroll 1
    for (int at = thread; at < kWeightRows; at += 128) {
      int const row = weight_row(params, first_row + at);
      request_scale(&channel[at], params.channel_scales + tile.expert * params.channel_expert_stride + row * params.channel_stride,
                    row >= 0 && params.channel_scales != nullptr);
      float of_row = 0.0f;
      if (row >= 0 && params.bias != nullptr) {
        int64_t const index = tile.expert * params.bias_stride + row;
        of_row = params.bias_f32 ? load_operand(static_cast<float const*>(params.bias) + index)
                                 : element.to_float(load_operand(static_cast<typename Element::Type const*>(params.bias) + index));
      }
      bias[at] = of_row;
    }
#pragma unroll 1
    for (int at = thread; at < kTokens; at += 128) {
      int const in_tile = token_of(at);
      int64_t row = tile.row + in_tile;
      bool const exists = in_tile < tile.tokens && params.token_scales != nullptr;
      if (exists && params.gather != nullptr) row = load_operand(params.gather + row);
      bool const inside = exists && (params.gather == nullptr || uint64_t(row) < uint64_t(params.a_rows));
      request_scale(&token[at], params.token_scales + tile.expert * params.token_expert_offset + row * params.token_stride, inside);
    }
  }
};

/// Largest magnitudes of codes.
constexpr float kLargestInt8 = 127.0f;

/// What sums are multiplied by first: nothing, alpha of the expert, or scales of the rows of a and of the weight.
enum class SumFactor { kNone, kAlpha, kScales };

/// kTileM, kTileN: of one warpgroup. kStaged: tokens that are staged together.
template <class Element_, int kTileM, int kTileN, SumFactor kFactor = SumFactor::kNone, int kStaged = 32>
struct GroupedEpilogue {
  using Element = Element_;
  static constexpr bool kHasAlpha = kFactor == SumFactor::kAlpha, kScaled = kFactor == SumFactor::kScales;
  using Params = cute::conditional_t<kScaled, ScaledGroupedEpilogueParams, GroupedEpilogueParams>;
  static constexpr int kChunk = kTileN < kStaged ? kTileN : kStaged;
  static constexpr int kBlocks = kChunk / 8;
  static constexpr int kMmaM = kTileM / 64;
  static constexpr int kUnits = kTileM / 8;  // 16-byte units of a staged row
  static constexpr int kBytes = kChunk * kTileM * 2;

  /// Of one warpgroup.
  struct ScaledStorage : ScaledLines<kTileM, kTileN> {
    alignas(16) float largest[4][kChunk];  // magnitudes of outputs of a warp
  };
  using Storage = cute::conditional_t<kScaled, ScaledStorage, cute::tuple<>>;

  Params const& params;
  char* staged;
  Storage* storage;
  int thread, barrier_id;
  float bias[kMmaM][2] = {};
  float alpha = 1.0f;

  __device__ GroupedEpilogue(Params const& params, char* staged, Storage* storage, int thread, int barrier_id)
      : params(params), staged(staged), storage(storage), thread(thread), barrier_id(barrier_id) {}

  __device__ Element element() const {
    if constexpr (kScaled) {
      return {params.bf16};
    } else {
      return {};
    }
  }
  __device__ void synchronize() const { NamedBarrier<128>{barrier_id}.sync(); }

  /// Before store: the bias of the warpgroup's rows of the weight, from first_row on, and alpha.
  __device__ void prefetch(ExpertTile const& tile, int first_row) {
    if constexpr (kScaled) {
      if (has_lines()) {
        synchronize();  // those of the last tile have been read
        storage->request(params, element(), tile, first_row, thread, [](int at) { return at; });
      }
      return;
    }
    if (kHasAlpha && params.alpha != nullptr) alpha = load_operand(params.alpha + tile.expert);
    if (params.bias == nullptr) return;
    auto const* of_expert = static_cast<typename Element::Type const*>(params.bias) + tile.expert * params.bias_stride;
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const row = weight_row(params, first_row + 64 * mi + thread / 32 * 16 + 8 * h + thread % 32 / 4);
        bias[mi][h] = row >= 0 ? element().to_float(of_expert[row]) : 0.0f;
      }
    }
  }
  __device__ bool has_lines() const {
    if constexpr (kScaled) return Storage::needed(params);
    return false;
  }
  /// The values of a slab of 64 rows of the weight and a chunk of tokens, the accumulators' first, before their activation.
  template <class Accumulator>
  __device__ void values(Accumulator const& accumulator, int mi, int chunk, bool lines, float (&v)[4 * kBlocks]) const {
    int const lane = thread % 32, row = 64 * mi + thread / 32 * 16 + lane / 4;
    [[maybe_unused]] float channel[2] = {1.0f, 1.0f}, of_row[2] = {0.0f, 0.0f};
    if constexpr (kScaled) {
      if (lines) {
#pragma unroll
        for (int h = 0; h < 2; ++h) channel[h] = storage->channel[row + 8 * h], of_row[h] = storage->bias[row + 8 * h];
      }
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      [[maybe_unused]] float2 token = make_float2(1.0f, 1.0f);
      if constexpr (kScaled) {
        if (lines) token = *reinterpret_cast<float2 const*>(&storage->token[chunk * kChunk + 8 * j + 2 * (lane % 4)]);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float const sum = accumulator(mi * (kTileN / 2) + 4 * j + i);
        if constexpr (kScaled) {
          v[4 * j + i] = lines ? fmaf(sum, (i % 2 == 0 ? token.x : token.y) * channel[i / 2], of_row[i / 2]) : sum;
        } else {
          v[4 * j + i] = kHasAlpha ? fmaf(sum, alpha, bias[mi][i / 2]) : sum + bias[mi][i / 2];
        }
      }
    }
  }
  /// Gated: of values, the outputs of 8 rows of the weight and their ups, and the tokens of lane % 4.
  __device__ void gate(float (&v)[4 * kBlocks], float const (&scale)[kBlocks][2], float (&product)[kBlocks][2]) const {
    gate_outputs<2 * kBlocks>(
        params, [&](int i) -> float& { return v[i / 2 * 4 + i % 2]; }, [&](int i) { return v[i / 2 * 4 + 2 + i % 2]; });
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) product[i / 2][i % 2] = v[i / 2 * 4 + i % 2] * scale[i / 2][i % 2];
  }
  __device__ void write_gated(int mi, uint32_t const (&packed)[4]) const {
    int const lane = thread % 32, q = lane / 8 < kBlocks ? lane / 8 : kBlocks - 1, r = lane % 8;
    write<kBlocks>(8 * q + r, 4 * mi + thread / 32, packed);
  }

  /// Chunks of tokens, one after the other. The loop is not unrolled: each chunk's instructions would be fetched anew, which takes longer
  /// than they do (128 x 128 tiles of 8-bit operands: 3.8 us a tile). Accumulators move up for the next chunk instead; they are lost.
  template <class Accumulator>
  __device__ void store(Accumulator& accumulator, ExpertTile const& tile, int first_row) {
    int const lane = thread % 32, warp = thread / 32;
    float const factor = params.d_scale != nullptr ? gemm::load_code_factor(params.d_scale) : 0.0f;
    bool const lines = has_lines();
    if constexpr (kScaled) asm volatile("cp.async.wait_all;" ::: "memory");  // before a barrier that makes them everyone's
#pragma unroll 1
    for (int chunk = 0; chunk * kChunk < tile.tokens; ++chunk) {
      int const left = tile.tokens - chunk * kChunk;
      float scale[kBlocks][2];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          int const token = 8 * j + 2 * (lane % 4) + e;
          scale[j][e] = 1.0f;
          if (params.row_scale != nullptr && token < left) scale[j][e] = load_operand(params.row_scale + tile.row + chunk * kChunk + token);
        }
      }
      synchronize();  // the previous chunk has been read
      bool in_groups = false;
      if constexpr (kScaled) {
        in_groups = params.group_scales != nullptr;
        if (in_groups && first_row < params.n) store_groups(accumulator, tile, first_row, chunk, left, lines, scale);
      }
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) {
        if (kScaled && in_groups) break;
        float v[4 * kBlocks];
        values(accumulator, mi, chunk, lines, v);
        uint32_t packed[4];
        if (!params.gated) {
          activate_all<4 * kBlocks>(params.activation, [&](int i) -> float& { return v[i]; });
#pragma unroll
          for (int j = 0; j < kBlocks; j += 2) {
            constexpr bool kPair = kBlocks > 1;
#pragma unroll
            for (int i = 0; i < (kPair ? 4 : 2); ++i) {
              int const block = j + i / 2;
              packed[i] = pack(v[4 * block + 2 * (i % 2)] * scale[block][0], v[4 * block + 2 * (i % 2) + 1] * scale[block][1], factor);
            }
            int const q = lane / 8, r = lane % 8;
            write<kPair ? 4 : 2>(8 * (j + (kPair ? q / 2 : 0)) + r, 8 * mi + 2 * warp + q % 2, packed);
          }
        } else {
          float product[kBlocks][2];
          gate(v, scale, product);
#pragma unroll
          for (int j = 0; j < kBlocks; ++j) packed[j] = pack(product[j][0], product[j][1], factor);
          write_gated(mi, packed);
        }
      }
      synchronize();
      copy_out(tile, first_row, chunk, left < kChunk ? left : kChunk);
      if constexpr (kChunk < kTileN) {
#pragma unroll
        for (int mi = 0; mi < kMmaM; ++mi) {
#pragma unroll
          for (int i = 0; i < (kTileN - kChunk) / 2; ++i) {
            accumulator(mi * (kTileN / 2) + i) = accumulator(mi * (kTileN / 2) + i + kChunk / 2);
          }
        }
      }
    }
  }

  /// A chunk of gated outputs as codes: their group is all that a token has in this warpgroup.
  template <class Accumulator>
  __device__ void store_groups(Accumulator const& accumulator, ExpertTile const& tile, int first_row, int chunk, int left, bool lines,
                               float const (&scale)[kBlocks][2]) {
    int const lane = thread % 32, warp = thread / 32;
    float product[kMmaM][kBlocks][2], largest[kBlocks][2] = {};
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
      float v[4 * kBlocks];
      values(accumulator, mi, chunk, lines, v);
      gate(v, scale, product[mi]);
    }
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int mi = 0; mi < kMmaM; ++mi) largest[j][e] = fmaxf(largest[j][e], fabsf(product[mi][j][e]));
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2)
          largest[j][e] = fmaxf(largest[j][e], __shfl_xor_sync(0xffffffffu, largest[j][e], offset));
      }
      if (lane < 4) *reinterpret_cast<float2*>(&storage->largest[warp][8 * j + 2 * lane]) = make_float2(largest[j][0], largest[j][1]);
    }
    synchronize();
    float const largest_code = params.int8 ? kLargestInt8 : kLargestE4M3;
    int64_t const group = first_row / kTileM;
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      float factor[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const token = 8 * j + 2 * (lane % 4) + e;
        float most = storage->largest[0][token];
#pragma unroll
        for (int w = 1; w < 4; ++w) most = fmaxf(most, storage->largest[w][token]);
        float const of_group = most * (1.0f / largest_code);
        factor[e] = code_factor(of_group, reciprocal_without_call(of_group));
        if (warp == 0 && lane < 4 && token < left)
          params.group_scales[(tile.row + chunk * kChunk + token) * params.group_stride + group] = of_group;
      }
#pragma unroll
      for (int mi = 0; mi < kMmaM; ++mi) {
        product[mi][j][0] *= factor[0];
        product[mi][j][1] *= factor[1];
      }
    }
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
      uint32_t packed[4];
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) packed[j] = pack_staged_codes(product[mi][j][0], product[mi][j][1], params.int8);
      write_gated(mi, packed);
    }
  }
  __device__ uint32_t pack(float low, float high, float factor) const { return pack_staged(params, element(), low, high, factor); }

  /// Matrices of 8 tokens x 8 columns: lane 8 q + r addresses row r of the q-th.
  template <int kMatrices>
  __device__ void write(int token, int unit, uint32_t const (&d)[4]) const {
#if __CUDA_ARCH__ < 900
    write_elements<kMatrices>(token, unit, d);
#else
    uint32_t const address = cute::cast_smem_ptr_to_uint(staged) + token * (kTileM * 2) + (unit ^ token % 8) * 16;
    if constexpr (kMatrices == 4) {
      asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                   "r"(d[3])
                   : "memory");
    } else if constexpr (kMatrices == 2) {
      asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(d[0]), "r"(d[1]) : "memory");
    } else {
      static_assert(kMatrices == 1);
      asm volatile("stmatrix.sync.aligned.x1.trans.m8n8.shared.b16 [%0], {%1};" ::"r"(address), "r"(d[0]) : "memory");
    }
#endif
  }
  /// The same without stmatrix: lane l holds columns 2 (l % 4) and the next (tokens) of row l / 4 (a column of d) of every matrix.
  template <int kMatrices>
  __device__ void write_elements(int token, int unit, uint32_t const (&d)[4]) const {
    int const lane = thread % 32;
#pragma unroll
    for (int q = 0; q < kMatrices; ++q) {
      int const first = __shfl_sync(0xffffffffu, token, 8 * q), column = __shfl_sync(0xffffffffu, unit, 8 * q) * 8 + lane / 4;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int const row = first + 2 * (lane % 4) + e;
        char* const at = staged + row * (kTileM * 2) + (column / 8 ^ row % 8) * 16 + column % 8 * 2;
        *reinterpret_cast<uint16_t*>(at) = uint16_t(d[q] >> (16 * e));
      }
    }
  }

  __device__ void copy_out(ExpertTile const& tile, int first_row, int chunk, int tokens) const {
    int const units = params.gated ? kUnits / 2 : kUnits, column0 = params.gated ? first_row / 2 : first_row;
    constexpr int kTogether = kHasAlpha ? 1 : 4;  // kernels with quantised weights have no registers for more
    copy_staged_rows<typename Element::Type, kChunk, kTogether>(params, staged, kTileM * 2, units, tile.row + chunk * kChunk, tokens,
                                                                column0, thread);
  }
};

}  // namespace minfer::moe
