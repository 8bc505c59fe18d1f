// Mainloop of 16-bit operands at any address and with any stride, for sm_80 onward: asynchronous copies of 4 bytes into a ring of stages,
// fragments by 32-bit loads, mma.sync m16n8k16 with fp32 accumulators.
//
// Copies. A line of an operand's tile is what is contiguous of it: 64 of k, or the tile's extent along m or n. It is copied in aligned
// words of two elements, as they lie in memory: where the line begins in the middle of a word, its elements lie in halves of neighbouring
// words, and there is one word more. Words without an element of the operand are not read but zeros; the other half of its first or last
// word may be read, and is set to zero where it stands for a k that the operand does not have.
// Fragments. An MMA may take its k, its rows and its columns in any order that A, B and the epilogue agree on, so lanes take neighbours:
// of the lanes that share a row, lane q has k = 16 q .. 16 q + 15 of the k tile, four for each of the tile's MMAs. Operands contiguous
// along k: nine words of the row are eight registers, each of them the word or, where the row begins in the middle of a word, two halves
// that one instruction puts together. Operands contiguous along m or n: a lane has rows 2 g and 2 g + 1, so that a word holds an element
// of each, and those of two neighbouring k are put together.
// Shared memory. Lines are one word longer than 32 or 16, and those of four lanes q eight banks apart: no two lanes meet in a bank.
#pragma once

#include <cstdint>

#include "common/dependent_launch.cuh"
#include "common/mma_sm80.cuh"
#include "cutlass/cutlass.h"
#include "gemm/schedule.h"
#include "minfer/types.h"

namespace minfer::gemm {

/// Copies 4 bytes, or zeros if not `inside`. By a predicate: a number of bytes to read would take the compiler six instructions a copy.
__device__ __forceinline__ void copy_async_4(uint32_t destination, uint64_t source, bool inside) {
  asm volatile(
      "{\n.reg .pred outside;\nsetp.eq.s32 outside, %2, 0;\ncp.async.ca.shared.global [%0], [%1], 4, outside;\n}" ::"r"(destination),
      "l"(source), "r"(int(inside))
      : "memory");
}

/// One operand: its tiles of kExtent rows of m or n and kTileK of k, in stages of kStageBytes.
template <Major kMajor, int kExtent, int kTileK, int kThreads>
struct UnalignedOperandSm80 {
  static_assert(kTileK == 64, "a lane's k of a tile are four for each of four MMAs");
  static constexpr bool kAlongK = kMajor == Major::kK;
  static constexpr int kLines = kAlongK ? kExtent : kTileK, kLength = kAlongK ? kTileK : kExtent;  // elements
  static constexpr int kWords = kLength / 2, kLineWords = kWords + 1;
  static constexpr int kSkew = kAlongK ? 0 : 8;  // words between 16 lines
  static constexpr int kStageBytes = 4 * (kLines * kLineWords + kSkew * (kLines / 16 - 1));
  static constexpr int kLanes = kWords, kTogether = kThreads / kLanes;  // threads along a line, and lines copied together
  static_assert(kThreads % kLanes == 0 && 16 % kTogether == 0 && kLines % kTogether == 0 && kLines % 16 == 0);

  static constexpr CUTLASS_HOST_DEVICE int offset_of(int line) { return line * kLineWords + line / 16 * kSkew; }  // words

  struct Params {
    uint64_t base;
    int64_t line_bytes, batch_bytes;
    int32_t extent;
  };

  /// A tile of the operand, and what a thread copies of it: one word of every kTogether-th line, and the last word of one line. The lines
  /// that a thread copies begin alike, since kTogether is even.
  struct Tile {
    uint64_t corner;       // address of the tile's first element
    uint64_t words, last;  // addresses of the thread's first word and of its last word of a line
    uint64_t step;         // bytes from a word to the thread's next
    uint64_t advance;      // bytes to the next k tile
    int lines, length;     // inside the operand, from the tile's first element on
    int word;              // number of the first word's first element in its line
    bool has_last;
  };
  static CUTLASS_DEVICE Tile tile_at(Params const& params, int block, int k_begin, int k_end, int l, int thread) {
    static_assert(kTogether % 2 == 0 && kLines <= kThreads);
    int const begin = block * kExtent;
    int64_t const across = kAlongK ? begin : k_begin, along = kAlongK ? k_begin : begin;
    uint64_t const line_bytes = uint64_t(params.line_bytes);
    Tile tile;
    tile.corner = params.base + uint64_t(l * params.batch_bytes + across * params.line_bytes + 2 * along);
    tile.words = tile.corner + uint32_t(thread) / kLanes * line_bytes;
    tile.word = 2 * int(uint32_t(thread) % kLanes) - (int(tile.words >> 1) & 1);
    tile.words = (tile.words & ~uint64_t(3)) + 4 * (uint32_t(thread) % kLanes);
    tile.last = tile.corner + uint32_t(thread) * line_bytes + 4 * kWords;
    tile.has_last = thread < kLines && (tile.last & 2) != 0;
    tile.last &= ~uint64_t(3);
    tile.step = kTogether * line_bytes;
    tile.advance = kAlongK ? 2 * kTileK : kTileK * line_bytes;
    int const extent = params.extent - begin, k = k_end - k_begin;
    tile.lines = kAlongK ? extent : k;
    tile.length = kAlongK ? k : extent;
    return tile;
  }
  static CUTLASS_DEVICE void advance(Tile& tile) {
    tile.words += tile.advance;
    tile.last += tile.advance;
    (kAlongK ? tile.length : tile.lines) -= kTileK;
  }

  /// Starts the copies of a tile: of its first kCopied lines.
  template <int kCopied = kLines>
  static CUTLASS_DEVICE void copy(uint32_t stage, Tile const& tile, int thread) {
    int const lane = int(unsigned(thread) % kLanes), first = int(unsigned(thread) / kLanes);
    int const lines = tile.word < tile.length ? tile.lines - first : 0;
    uint32_t const to = stage + 4 * uint32_t(first * kLineWords + lane);
    uint64_t from = tile.words;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCopied / kTogether; ++i) {
      copy_async_4(to + 4 * offset_of(i * kTogether), from, i * kTogether < lines);
      from += tile.step;
    }
    if (tile.has_last) {
      bool const inside = thread < tile.lines && kLength - 1 < tile.length;
      copy_async_4(stage + 4 * uint32_t(offset_of(thread) + kWords), tile.last, inside);
    }
  }

  /// The same where k has no more than kBriefK: the lines, or the words of each line, that load_brief reads.
  static CUTLASS_DEVICE void copy_brief(uint32_t stage, Params const& params, Tile const& tile, int thread) {
    if constexpr (kAlongK) {
      constexpr int kBriefLanes = kBriefK / 2, kBriefTogether = kThreads / kBriefLanes;
      int const lane = int(unsigned(thread) % kBriefLanes);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < (kLines + kBriefTogether - 1) / kBriefTogether; ++i) {
        int const line = int(unsigned(thread) / kBriefLanes) + i * kBriefTogether;
        uint64_t const from = tile.corner + uint32_t(line) * uint64_t(params.line_bytes);
        bool const inside = line < tile.lines && 2 * lane - (int(from >> 1) & 1) < tile.length;
        if (kLines % kBriefTogether == 0 || line < kLines) {
          copy_async_4(stage + 4 * uint32_t(line * kLineWords + lane), (from & ~uint64_t(3)) + 4 * uint32_t(lane), inside);
        }
      }
      if (tile.has_last) {
        bool const inside = thread < tile.lines && kBriefK - 1 < tile.length;
        copy_async_4(stage + 4 * uint32_t(thread * kLineWords + kBriefLanes), tile.last - 4 * (kWords - kBriefLanes), inside);
      }
    } else {
      copy<kBriefK>(stage, tile, thread);
    }
  }

  /// Sets the element behind the last k to zero, in every line of a copied tile that has `k` of them. Its word may have been read; those
  /// behind it are zeros.
  static CUTLASS_DEVICE void clear_behind(uint32_t const* stage, Tile const& tile, int k, int thread) {
    if (!kAlongK || thread >= kLines) return;
    uint16_t* const line = reinterpret_cast<uint16_t*>(const_cast<uint32_t*>(stage + offset_of(thread)));
    line[k + (tile.has_last ? 1 : 0)] = 0;  // a line that has a last word begins in the middle of its first
  }

  /// A lane's part of the rows from `first_row` of the tile on.
  struct Fragments {
    int offset;                      // words from a stage
    uint32_t shift_even, shift_odd;  // bits between a word and the pair that begins in it, in lines of even and odd number
  };
  static CUTLASS_DEVICE Fragments fragments_at(Params const& params, Tile const& tile, int first_row, int lane) {
    int const g = int(unsigned(lane) / 4), q = int(unsigned(lane) % 4);
    uint32_t const corner = uint32_t(tile.corner), line_bytes = uint32_t(params.line_bytes);
    if constexpr (kAlongK) {
      uint32_t const shift = ((corner + uint32_t(g) * line_bytes) & 2) * 8;
      return {(first_row + g) * kLineWords + 8 * q, shift, shift};
    } else {
      return {offset_of(16 * q) + first_row / 2 + g, (corner & 2) * 8, ((corner + line_bytes) & 2) * 8};
    }
  }

  /// The rows 16 block .. 16 block + 15 from the fragment's first row on. Register i of half h: k = 16 q + 2 i and the next, of row
  /// row_of(g, h) of the block.
  static CUTLASS_DEVICE void load(uint32_t const* stage, Fragments const& at, int block, uint32_t (&d)[2][8]) {
    load_run<8>(stage + at.offset, at, block, d);
  }
  /// The same where k has no more than kBriefK: k = 4 q + 2 i and the next.
  static CUTLASS_DEVICE void load_brief(uint32_t const* stage, Fragments const& at, int first_row, int lane, int block,
                                        uint32_t (&d)[2][2]) {
    int const g = int(unsigned(lane) / 4), q = int(unsigned(lane) % 4);
    load_run<2>(stage + (kAlongK ? (first_row + g) * kLineWords + 2 * q : 4 * q * kLineWords + first_row / 2 + g), at, block, d);
  }

  static constexpr CUTLASS_HOST_DEVICE int row_of(int g, int h) { return kAlongK ? 8 * h + g : 2 * g + h; }

 private:
  /// kPairs pairs of neighbours along k, the first in the words `from`, or in the lines from there on.
  template <int kPairs>
  static CUTLASS_DEVICE void load_run(uint32_t const* from, Fragments const& at, int block, uint32_t (&d)[2][kPairs]) {
    if constexpr (kAlongK) {
      CUTLASS_PRAGMA_UNROLL
      for (int h = 0; h < 2; ++h) {
        uint32_t words[kPairs + 1];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j <= kPairs; ++j) words[j] = from[(16 * block + 8 * h) * kLineWords + j];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPairs; ++i) d[h][i] = __funnelshift_r(words[i], words[i + 1], at.shift_even);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPairs; ++i) {
        uint32_t const* const even = from + 2 * i * kLineWords + 8 * block;
        uint32_t const x = __funnelshift_r(even[0], even[1], at.shift_even);
        uint32_t const y = __funnelshift_r(even[kLineWords], even[kLineWords + 1], at.shift_odd);
        d[0][i] = __byte_perm(x, y, 0x5410);
        d[1][i] = __byte_perm(x, y, 0x7632);
      }
    }
  }
};

template <class Config>
struct MainloopUnalignedSm80 {
  static constexpr int kThreads = Config::kThreads, kStages = Config::kStages, kTileK = Config::kTileK;
  static constexpr bool kCopiesAhead = false;
  static constexpr int kWarpM = Config::kTileM / Config::kWarpsM, kWarpN = Config::kTileN / Config::kWarpsN;
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 16;
  static constexpr int kValues = Config::kTileM * Config::kTileN / kThreads;  // accumulators of a thread
  static_assert(kThreads == 32 * Config::kWarpsM * Config::kWarpsN && !Config::kSwap && kWarpM % 16 == 0 && kWarpN % 16 == 0);
  using OperandA = UnalignedOperandSm80<Config::kMajorA, Config::kTileM, kTileK, kThreads>;
  using OperandB = UnalignedOperandSm80<Config::kMajorB, Config::kTileN, kTileK, kThreads>;
  static constexpr int kStageBytes = OperandA::kStageBytes + OperandB::kStageBytes;

  struct Params {
    typename OperandA::Params a;
    typename OperandB::Params b;
    int32_t k;
  };
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    union {
      alignas(16) uint32_t ring[kStages * kStageBytes / 4];
      typename Epilogue::TensorStorage staging;
    };
    [[no_unique_address]] typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  /// Value c of d[i][j]: block i of 16 rows, columns 8 (j % 2) .. of block j / 2 of 16 columns; within them as multiply_16x8x16 has it, at
  /// the operands' row_of.
  struct Accumulator {
    float d[kBlocksM][2 * kBlocksN][4];
    CUTLASS_DEVICE float& operator()(int i) { return d[i / (8 * kBlocksN)][i / 4 % (2 * kBlocksN)][i % 4]; }
    CUTLASS_DEVICE float const& operator()(int i) const { return d[i / (8 * kBlocksN)][i / 4 % (2 * kBlocksN)][i % 4]; }
  };
  static CUTLASS_DEVICE Accumulator make_accumulator() {
    Accumulator accumulator;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues; ++i) accumulator(i) = 0.0f;
    return accumulator;
  }

  struct Inputs {};
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE Inputs load_init(Params const&, Storage&, WorkItems const&, int) {
    return {};
  }

  /// Waits for the preceding kernel where the launch may depend on it. Returns when all threads have read the ring.
  template <class Storage, class Tile>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const&, Accumulator& accumulator, int k_begin, int k_count,
                                 Tile const& tile, int thread) {
    uint32_t const ring = shared_address(storage.ring);
    int const thread_b = thread ^ (kThreads / 2);  // so that the last words of A and B are copied by different threads
    auto a = OperandA::tile_at(params.a, tile.m, k_begin * kTileK, params.k, tile.l, thread);
    auto b = OperandB::tile_at(params.b, tile.n, k_begin * kTileK, params.k, tile.l, thread_b);
    int const warp = int(unsigned(thread) / 32), lane = int(unsigned(thread) % 32);
    int const row = warp / Config::kWarpsN * kWarpM, column = warp % Config::kWarpsN * kWarpN;
    auto const fragments_a = OperandA::fragments_at(params.a, a, row, lane);
    auto const fragments_b = OperandB::fragments_at(params.b, b, column, lane);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    wait_for_predecessor();  // behind the arithmetic of addresses
#endif
    __syncthreads();  // all have read the staging of the previous item
    if (params.k <= kBriefK) {
      if (k_count == 0) return;  // k is 0
      OperandA::copy_brief(ring, params.a, a, thread);
      OperandB::copy_brief(ring + OperandA::kStageBytes, params.b, b, thread_b);
      commit_copies();
      wait_for_copies<0>();
      __syncthreads();
      if (params.k < kBriefK) {
        OperandA::clear_behind(storage.ring, a, params.k, thread);
        OperandB::clear_behind(storage.ring + OperandA::kStageBytes / 4, b, params.k, thread_b);
        __syncthreads();
      }
      multiply_brief(storage.ring, fragments_a, fragments_b, row, column, lane, accumulator);
      __syncthreads();
      return;
    }
    int const ahead = k_count < kStages - 1 ? k_count : kStages - 1;  // k tiles
    int stage = 0, copy_stage = 0;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = -ahead; i < k_count; ++i) {
      if (i >= 0) {
        wait_for_copies<kStages - 2>();
        __syncthreads();
      }
      if (i + ahead < k_count) {
        OperandA::copy(ring + uint32_t(copy_stage * kStageBytes), a, thread);
        OperandB::copy(ring + uint32_t(copy_stage * kStageBytes + OperandA::kStageBytes), b, thread_b);
        OperandA::advance(a);
        OperandB::advance(b);
        copy_stage = copy_stage == kStages - 1 ? 0 : copy_stage + 1;
      }
      commit_copies();
      if (i < 0) {
        for (int rest = ahead; i == -1 && rest < kStages - 1; ++rest) commit_copies();  // the waits count kStages - 1 groups
        continue;
      }
      uint32_t* const arrived = storage.ring + stage * (kStageBytes / 4);
      if (int const k = params.k - (k_begin + i) * kTileK; k < kTileK) {  // the last k tile
        OperandA::clear_behind(arrived, a, k, thread);
        OperandB::clear_behind(arrived + OperandA::kStageBytes / 4, b, k, thread_b);
        __syncthreads();
      }
      multiply(arrived, fragments_a, fragments_b, accumulator);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __syncthreads();
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }

 private:
  static CUTLASS_DEVICE void multiply(uint32_t const* stage, typename OperandA::Fragments const& fragments_a,
                                      typename OperandB::Fragments const& fragments_b, Accumulator& accumulator) {
    uint32_t b[kBlocksN][2][8];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kBlocksN; ++j) OperandB::load(stage + OperandA::kStageBytes / 4, fragments_b, j, b[j]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBlocksM; ++i) {
      uint32_t a[2][8];
      OperandA::load(stage, fragments_a, i, a);
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < 4; ++step) {
        uint32_t const fragment[4] = {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]};
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 2 * kBlocksN; ++j) {
          multiply_16x8x16<Config::kType>(accumulator.d[i][j], fragment, b[j / 2][j % 2][2 * step], b[j / 2][j % 2][2 * step + 1]);
        }
      }
    }
  }

  /// One MMA for each block: k has no more than kBriefK.
  static CUTLASS_DEVICE void multiply_brief(uint32_t const* stage, typename OperandA::Fragments const& fragments_a,
                                            typename OperandB::Fragments const& fragments_b, int row, int column, int lane,
                                            Accumulator& accumulator) {
    uint32_t b[kBlocksN][2][2];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kBlocksN; ++j) OperandB::load_brief(stage + OperandA::kStageBytes / 4, fragments_b, column, lane, j, b[j]);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBlocksM; ++i) {
      uint32_t a[2][2];
      OperandA::load_brief(stage, fragments_a, row, lane, i, a);
      uint32_t const fragment[4] = {a[0][0], a[1][0], a[0][1], a[1][1]};
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 2 * kBlocksN; ++j) {
        multiply_16x8x16<Config::kType>(accumulator.d[i][j], fragment, b[j / 2][j % 2][0], b[j / 2][j % 2][1]);
      }
    }
  }
};

}  // namespace minfer::gemm
