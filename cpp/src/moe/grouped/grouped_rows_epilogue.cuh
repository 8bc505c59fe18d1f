// Epilogue of grouped kernels whose rows are tokens: what grouped_epilogue.cuh computes, of 8-bit operands.
//
// Accumulator e + 2 h + 4 j of a block of 64 tokens is token 16 warp + 8 h + lane / 4, column 8 j + 2 (lane % 4) + e. A warp stages its 16
// tokens by stmatrix as [token][64 columns], 16-byte units at u ^ token % 8, and stores them as rows of 128 bytes, where it is not gated in
// two parts. No warp waits for another, nor for a TMA store that still reads what it has staged.
// Codes' scales of groups: a group is what a token has of a tile, kColumns / 2 outputs, in the registers of four lanes.
#pragma once

#include "moe/grouped/grouped_epilogue.cuh"

namespace minfer::moe {

/// kBlocks: of 64 tokens, of a warpgroup; the tile's blocks take turns at its kGroups warpgroups. kColumns: the weight's rows of a tile.
template <int kBlocks, int kColumns, int kGroups>
struct GroupedRowsEpilogue {
  using Element = AnyFloat16;
  using Params = ScaledGroupedEpilogueParams;
  static constexpr int kTokens = 64, kStaged = 64, kRowBytes = kStaged * 2, kBytes = kTokens * kRowBytes, kValues = kColumns / 2;
  static constexpr int kWarpTokens = 16, kUnits = kStaged / 8;
  static_assert(kColumns == 128, "gated, the outputs of a tile are the columns that are staged together");

  struct TensorStorage {
    alignas(1024) char staged[kGroups][kBytes];
  };
  using Lines = ScaledLines<kColumns, kTokens * kBlocks>;
  struct PipelineStorage {
    Lines of[kGroups];
  };

  Params const& params;
  char* staged;
  Lines* lines;
  int thread, barrier_id;

  __device__ GroupedRowsEpilogue(Params const& params, TensorStorage& storage, PipelineStorage& small, int group, int thread)
      : params(params) {
    place(storage, small, group, thread);
  }
  __device__ void place(TensorStorage& storage, PipelineStorage& small, int group, int thread_of_warpgroup) {
    staged = &storage.staged[group][0];
    lines = &small.of[group];
    thread = thread_of_warpgroup;
    barrier_id = group + 1;
  }
  static __device__ void prefetch_tma_descriptors(Params const&) {}
  static __device__ void init_barriers(PipelineStorage&) {}
  __device__ void synchronize() const { NamedBarrier<128>{barrier_id}.sync(); }
  __device__ Element element() const { return {params.bf16}; }

  /// A warpgroup's part of a tile: the weight's first row, and which blocks of tokens.
  struct Output {
    ExpertTile tile;
    int row, group;
    /// The tile's first token of a block.
    __device__ int token(int block) const { return (block * kGroups + group) * kTokens; }
  };
  /// What loops depend on is the same in a warp, and the compiler is to know that: else the mainloop, which follows for the next tile,
  /// counts as diverged, and its descriptors are not computed in uniform registers.
  static __device__ Output locate(ExpertTile tile, int group) {
    tile.tokens = __shfl_sync(0xffffffffu, tile.tokens, 0);
    return {tile, tile.weight_tile * kColumns, __shfl_sync(0xffffffffu, group, 0)};
  }

  template <class SchedulerParams, class SchedulerStorage>
  static CUTLASS_DEVICE void begin(Params const& params, SchedulerParams const& walk, SchedulerStorage const& storage, int thread,
                                   int threads) {
    clear_rows_behind(walk.rows, storage.tiles, params, thread, threads);
  }
  __device__ void prefetch(Output const& at) {
    if (!Lines::needed(params)) return;
    synchronize();  // those of the last tile have been read
    lines->request(params, element(), at.tile, at.row, thread, [&](int i) { return at.token(i / kTokens) + i % kTokens; });
  }

  template <class Accumulator>
  __device__ void store(Accumulator& accumulator, Output const& at) {
    if (Lines::needed(params)) {
      asm volatile("cp.async.wait_all;" ::: "memory");
      synchronize();  // the lines are everyone's
    }
    if (params.plain) {
      auto const store = [&](auto scaled) {
        if (params.bf16) {
          store_plain<DataType::kBF16, scaled.value>(accumulator, at);
        } else {
          store_plain<DataType::kF16, scaled.value>(accumulator, at);
        }
      };
      Lines::needed(params) ? store(cute::true_type{}) : store(cute::false_type{});
      return;
    }
    float const factor = params.d_scale != nullptr ? gemm::load_code_factor(params.d_scale) : 0.0f;
#pragma unroll 1
    for (int block = 0; block < kBlocks && at.token(block) < at.tile.tokens; ++block) {
      auto const copy = [&](int column) { copy_warp(at, block, column); };
      store_block(accumulator, at, block, factor, copy);
      if constexpr (kBlocks > 1) move_up(accumulator);
    }
  }
  static __device__ bool issues_stores(int) { return false; }
  static __device__ void store_tail() {}

 private:
  /// The sums as they are or, kScaled, times the scales of lines; in whole units. That code is short: the other has an instruction for
  /// every term, and a tile that jumps over most of them waits for instructions: 3000 cycles of a tile of 256 x 128, whose k tiles of 128
  /// take 1200 each.
  template <DataType kType, bool kScaled, class Accumulator>
  __device__ __forceinline__ void store_plain(Accumulator& accumulator, Output const& at) const {
    constexpr int kStep = 32 / kUnits, kOfLane = kWarpTokens / kStep;
    int const lane = thread % 32, unit = lane % kUnits, first = lane / kUnits, token = at.token(0) + thread / 32 * kWarpTokens + first;
    char const* const from = staged + (thread / 32 * kWarpTokens + first) * kRowBytes;
    auto* to = static_cast<uint16_t*>(params.d) + (int64_t(at.tile.row) + token) * params.ldd + at.row + unit * 8;
    int left = at.tile.tokens - token;
#pragma unroll 1
    for (int block = 0; block < kBlocks && at.token(block) < at.tile.tokens; ++block) {
#pragma unroll
      for (int part = 0; part < kColumns / kStaged; ++part) {
        if constexpr (kScaled) {
          float const* const token = &lines->token[block * kTokens + thread / 32 * kWarpTokens + lane / 4];
          float const of_token[2] = {token[0], token[8]};
#pragma unroll
          for (int j = 0; j < kStaged / 8; ++j) {
            float2 const channel = *reinterpret_cast<float2 const*>(&lines->channel[part * kStaged + 8 * j + 2 * (lane % 4)]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              accumulator(part * (kStaged / 2) + 4 * j + 2 * h) *= of_token[h] * channel.x;
              accumulator(part * (kStaged / 2) + 4 * j + 2 * h + 1) *= of_token[h] * channel.y;
            }
          }
        }
        __syncwarp();  // what was staged before has been read
#pragma unroll
        for (int j = 0; j < kStaged / 8; j += 2) {
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int const v = part * (kStaged / 2) + 4 * j + 2 * i;
            packed[i] = Float16<kType>::pack(accumulator(v), accumulator(v + 1));
          }
          write(j, packed);
        }
        __syncwarp();
        uint4 bits[kOfLane];
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          bits[i] = *reinterpret_cast<uint4 const*>(from + i * kStep * kRowBytes + (unit ^ (first + i * kStep) % 8) * 16);
        }
        bool const inside = at.row + part * kStaged + unit * 8 < params.n;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          if (inside && i * kStep < left) *reinterpret_cast<uint4*>(to + i * kStep * params.ldd + part * kStaged) = bits[i];
        }
      }
      to += kGroups * kTokens * params.ldd;
      left -= kGroups * kTokens;
      if constexpr (kBlocks > 1) move_up(accumulator);
    }
  }
  /// The loop over blocks is not unrolled, for its instructions' sake.
  template <class Accumulator>
  static __device__ __forceinline__ void move_up(Accumulator& accumulator) {
#pragma unroll
    for (int i = 0; i < kValues * (kBlocks - 1); ++i) accumulator(i) = accumulator(i + kValues);
  }

  /// What the warp has staged, into d's columns from `column` on.
  __device__ void copy_warp(Output const& at, int block, int column) const {
    __syncwarp();
    int const lane = thread % 32, token = at.token(block) + thread / 32 * kWarpTokens, rows = at.tile.tokens - token;
    char const* const own = staged + thread / 32 * kWarpTokens * kRowBytes;
    if (!params.codes && params.vectors && column + kStaged <= (params.gated ? params.n / 2 : params.n)) {
      constexpr int kStep = 32 / kUnits, kOfLane = kWarpTokens / kStep;
      int const unit = lane % kUnits, first = lane / kUnits;
      auto* to = static_cast<typename Element::Type*>(params.d) + (int64_t(at.tile.row) + token + first) * params.ldd + column + unit * 8;
      uint4 bits[kOfLane];
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        int const row = first + i * kStep;
        bits[i] = *reinterpret_cast<uint4 const*>(own + row * kRowBytes + (unit ^ row % 8) * 16);
      }
#pragma unroll
      for (int i = 0; i < kOfLane; ++i, to += kStep * params.ldd) {
        if (first + i * kStep < rows) *reinterpret_cast<uint4*>(to) = bits[i];
      }
    } else {
      copy_staged_rows<typename Element::Type, kWarpTokens, 4, 32>(params, own, kRowBytes, kUnits, at.tile.row + token,
                                                                   min(rows, kWarpTokens), column, lane);
    }
    __syncwarp();  // before the next is staged
  }

  /// copy(column): what has been staged is that of d from this column on.
  template <class Accumulator, class Copy>
  __device__ void store_block(Accumulator& accumulator, Output const& at, int block, float factor, Copy const& copy) {
    int const lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    float scale[2] = {1.0f, 1.0f};
    if (params.row_scale != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const token = at.token(block) + row + 8 * h;
        if (token < at.tile.tokens) scale[h] = load_operand(params.row_scale + at.tile.row + token);
      }
    }
    if (Lines::needed(params)) {
      float const token[2] = {lines->token[block * kTokens + row], lines->token[block * kTokens + row + 8]};
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        float2 const channel = *reinterpret_cast<float2 const*>(&lines->channel[8 * j + 2 * (lane % 4)]);
        float2 const bias = *reinterpret_cast<float2 const*>(&lines->bias[8 * j + 2 * (lane % 4)]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &low = accumulator(4 * j + 2 * h), &high = accumulator(4 * j + 2 * h + 1);
          low = fmaf(low, token[h] * channel.x, bias.x);
          high = fmaf(high, token[h] * channel.y, bias.y);
        }
      }
    }
    if (!params.gated) {
      activate_all<kValues>(params.activation, [&](int i) -> float& { return accumulator(i); });
#pragma unroll
      for (int part = 0; part < kColumns / kStaged; ++part) {
        packed_by(factor, [&](auto const& pack) {
#pragma unroll
          for (int j = 0; j < kStaged / 8; j += 2) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              int const v = part * (kStaged / 2) + 4 * j + 2 * i;
              packed[i] = pack(accumulator(v) * scale[i % 2], accumulator(v + 1) * scale[i % 2]);
            }
            write(j, packed);
          }
        });
        copy(at.row + part * kStaged);
      }
      return;
    }
    // Gates and ups take turns, 8 columns each: outputs take the gates' places.
    gate_outputs<kValues / 2>(
        params, [&](int i) -> float& { return accumulator(i / 4 * 8 + i % 4); }, [&](int i) { return accumulator(i / 4 * 8 + 4 + i % 4); });
    bool const in_groups = params.group_scales != nullptr;
    if (in_groups) find_scales(accumulator, at, block, scale);
    auto const stage = [&](auto const& pack) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 4) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const v = 4 * j + i / 2 * 8 + 2 * (i % 2);
          packed[i] = pack(accumulator(v) * scale[i % 2], accumulator(v + 1) * scale[i % 2]);
        }
        write(j / 2, packed);
      }
    };
    if (in_groups && params.int8) {
      stage([](float low, float high) { return pack_staged_codes(low, high, true); });
    } else if (in_groups) {
      stage([](float low, float high) { return pack_staged_codes(low, high, false); });
    } else {
      packed_by(factor, stage);
    }
    copy(at.row / 2);
  }

  /// Calls stage(pack), whose pack(low, high) gives two numbers as they are staged: the type is chosen once, not for each two.
  template <class Stage>
  __device__ void packed_by(float factor, Stage const& stage) const {
    if (params.d_scale != nullptr) {
      stage([&](float low, float high) { return __byte_perm(codes_e4m3(low, high, factor), 0, 0x4140); });
    } else if (params.bf16) {
      stage([](float low, float high) { return Float16<DataType::kBF16>::pack(low, high); });
    } else {
      stage([](float low, float high) { return Float16<DataType::kF16>::pack(low, high); });
    }
  }

  /// The scale of each of a thread's two tokens; `scale` then includes what outputs are multiplied by to be codes.
  template <class Accumulator>
  __device__ void find_scales(Accumulator const& accumulator, Output const& at, int block, float (&scale)[2]) const {
    int const lane = thread % 32, row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = 0.0f;
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        most = fmaxf(most, fmaxf(fabsf(accumulator(4 * j + 2 * h)), fabsf(accumulator(4 * j + 2 * h + 1))));
      }
      most *= fabsf(scale[h]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      float const of_group = most * (1.0f / (params.int8 ? kLargestInt8 : kLargestE4M3));
      scale[h] *= code_factor(of_group, reciprocal_without_call(of_group));
      int const token = at.token(block) + row + 8 * h;
      if (lane % 4 == 0 && token < at.tile.tokens && at.row < params.n) {
        params.group_scales[(at.tile.row + token) * params.group_stride + at.row / kColumns] = of_group;
      }
    }
  }

  /// Four matrices of 8 tokens x 8 columns: both halves of 16 tokens of column block j, then of j + 1.
  __device__ void write(int j, uint32_t const (&d)[4]) const {
    int const lane = thread % 32, token = thread / 32 * 16 + lane % 16, unit = j + lane / 16;
    uint32_t const address = cute::cast_smem_ptr_to_uint(staged) + token * kRowBytes + (unit ^ token % 8) * 16;
    asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                 "r"(d[3])
                 : "memory");
  }
};

}  // namespace minfer::moe
