// Epilogue of the sm_90 kernels: accumulators of one consumer warpgroup -> D.
//
// Fast path (16-bit D that TMA can address, C absent or a full matrix of D's type): registers -> stmatrix -> swizzled shared memory -> TMA
// store, in boxes of up to 64 contiguous outputs. C arrives by TMA in the very box buffer that D leaves from: it is requested before the
// mainloop, read with ldmatrix in the fragment's own layout, and overwritten in place.
// A gated D without C takes the fast path too, in boxes of half the width.
// General path (float32 D, broadcast or float32 C, unaligned D): 64 x 32 accumulators at a time go through the same shared memory in
// fp32 and are finished by a rolled, coalesced loop.
//
// Box b of a warpgroup, 64 rows of MMA tile mi each:
//   no swap: 64 rows of m x kBoxColumns (64, 32 or 16) columns of n;   b = chunk * kMmaM + mi
//   swap:    kTileN rows of m x 64 columns of n (the MMA rows are n);  b = mi
// Shared memory of a box: rows of kBoxColumns, their 16-byte units in TMA's swizzle for that width.
#pragma once

#include <cuda.h>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "gemm/epilogue.cuh"

namespace minfer::gemm {

struct EpilogueSm90Params {
  CUtensorMap tma_c, tma_d;
  EpilogueParams general;
  bool store_by_tma;  // fast path
  bool load_c_by_tma;
};

template <class Config>
struct EpilogueSm90 {
  using Element = ElementOf<Config::kType>;

  static constexpr bool kSwap = Config::kSwap;
  static constexpr int kConsumers = Config::kSchedule == Schedule::kCooperative ? 2 : 1;  // warpgroups that share a tile
  static constexpr int kMmaM = Config::kTileM / (64 * kConsumers);
  static constexpr int kTileN = Config::kTileN;
  static constexpr int kBoxRows = kSwap ? kTileN : 64;
  static constexpr int kBoxColumns = kSwap || kTileN % 64 == 0 ? 64 : (kTileN % 32 == 0 ? 32 : 16);
  static constexpr int kRowBytes = kBoxColumns * 2;
  static constexpr int kBoxBytes = kBoxRows * kRowBytes;
  static constexpr int kBoxes = kSwap ? kMmaM : kMmaM * (kTileN / kBoxColumns);  // of a warpgroup
  static constexpr int kBuffers = Config::kEpilogueChunks;
  static constexpr int kGeneralColumns = kTileN >= 32 ? 32 : (kTileN >= 16 ? 16 : 8);
  static constexpr int kGeneralBytes = 64 * kGeneralColumns * 4;
  static constexpr int kRegionBytes = ((kBuffers * kBoxBytes > kGeneralBytes ? kBuffers * kBoxBytes : kGeneralBytes) + 1023) / 1024 * 1024;
  static_assert(kTileN % 8 == 0 && kBoxRows <= 256 && (kSwap || kTileN % kBoxColumns == 0));
  static_assert(kBuffers >= 1 && kBuffers <= kBoxes && kBuffers <= 32);
  static_assert(kBoxBytes % (8 * kRowBytes) == 0, "every box starts on a whole period of its swizzle");

  // A gated box holds half the columns of an ordinary one, in rows of half the bytes.
  static constexpr int kGatedColumns = kBoxColumns / 2;
  static constexpr bool kGatedBoxes = kGatedColumns >= 16 && kMmaM == 1;  // with two MMA tiles a thread its addresses spill

  struct Buffers {
    alignas(1024) char of[2][kRegionBytes];  // [consumer warpgroup]
  };
  struct Barriers {
    alignas(8) uint64_t c_full[2][kBuffers];
  };

  EpilogueSm90Params const& params;
  char* buffers;  // of this warpgroup
  uint64_t* c_full;
  int thread;      // in the warpgroup
  int barrier_id;  // named barrier of the warpgroup
  uint32_t c_phase = 0;

  __device__ EpilogueSm90(EpilogueSm90Params const& params, Buffers& storage, Barriers& barriers, int warpgroup, int thread)
      : params(params),
        buffers(&storage.of[warpgroup][0]),
        c_full(&barriers.c_full[warpgroup][0]),
        thread(thread),
        barrier_id(warpgroup + 1) {}

  static __device__ void initialize(Barriers& barriers) {
    for (int w = 0; w < 2; ++w) {
      for (int b = 0; b < kBuffers; ++b) cutlass::arch::ClusterTransactionBarrier::init(&barriers.c_full[w][b], 1);
    }
  }

  __device__ void synchronize() const { asm volatile("bar.sync %0, 128;" ::"r"(barrier_id) : "memory"); }

  // Top left corner of box b in the caller's (m, n); tile_row and tile_column are of the kernel's own tile.
  static __device__ int box_m(int b, int tile_row, int tile_column, int warpgroup) {
    return kSwap ? tile_column : mma_row(b % kMmaM, tile_row, warpgroup);
  }
  static __device__ int box_n(int b, int tile_row, int tile_column, int warpgroup) {
    return kSwap ? mma_row(b, tile_row, warpgroup) : tile_column + b / kMmaM * kBoxColumns;
  }
  // TMA's swizzle of the 16-byte units of a row of 128, 64 or 32 bytes.
  static __device__ int swizzle(int unit, int row) {
    return kRowBytes == 128 ? unit ^ (row & 7) : (kRowBytes == 64 ? unit ^ (row >> 1 & 3) : unit ^ (row >> 2 & 1));
  }
  static __device__ int gated_swizzle(int unit, int row) { return kGatedColumns == 32 ? unit ^ (row >> 1 & 3) : unit ^ (row >> 2 & 1); }
  static __device__ int mma_row(int mi, int tile_row, int warpgroup) { return tile_row + (mi * kConsumers + warpgroup) * 64; }

  __device__ void request_c(int b, int tile_row, int tile_column, int l, int warpgroup) {
    uint64_t* barrier = &c_full[b % kBuffers];
    cutlass::arch::ClusterTransactionBarrier::arrive_and_expect_tx(barrier, kBoxBytes);
    cute::SM90_TMA_LOAD_3D::copy(&params.tma_c, barrier, uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                 buffers + b % kBuffers * kBoxBytes, box_n(b, tile_row, tile_column, warpgroup),
                                 box_m(b, tile_row, tile_column, warpgroup), l);
  }

  /// Before the mainloop of a tile this CTA owns: asks for C while the tensor cores work.
  __device__ void prefetch(int tile_row, int tile_column, int l, int warpgroup) {
    if (params.load_c_by_tma && thread == 0) {
      cute::tma_store_wait<0>();  // the previous tile's stores have left the buffers
#pragma unroll
      for (int b = 0; b < kBuffers; ++b) request_c(b, tile_row, tile_column, l, warpgroup);
#pragma unroll
      for (int b = kBuffers; b < kBoxes; ++b) {  // asked for when a buffer is free, by then out of L2
        cute::SM90_TMA_LOAD_3D::PREFETCH::copy(&params.tma_c, box_n(b, tile_row, tile_column, warpgroup),
                                               box_m(b, tile_row, tile_column, warpgroup), l);
      }
    }
  }

  template <class Accumulator>
  __device__ void store(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    if (params.store_by_tma) {
      if constexpr (kGatedBoxes) {
        if (params.general.gated) {
          store_gated_boxes(acc, tile_row, tile_column, l, warpgroup);
          return;
        }
      }
      store_boxes(acc, tile_row, tile_column, l, warpgroup);
    } else {
      store_general(acc, tile_row, tile_column, l, warpgroup);
    }
  }

  // acc(i): value e + 2 h + 4 j + (kTileN / 2) mi of this thread is row 16 (thread / 32) + 8 h + lane / 4 of MMA tile mi, column
  // 8 j + 2 (lane % 4) + e (the WGMMA accumulator layout).
  template <class Accumulator>
  __device__ void store_boxes(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    EpilogueParams const& e = params.general;
    int const lane = thread % 32, warp = thread / 32;
    if (!params.load_c_by_tma) {
      if (thread == 0) cute::tma_store_wait<0>();
      synchronize();
    }
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      int const buffer = b % kBuffers;
      char* box = buffers + buffer * kBoxBytes;
      uint32_t const box_address = cute::cast_smem_ptr_to_uint(box);
      if (b >= kBuffers && !params.load_c_by_tma) {
        if (thread == 0) cute::tma_store_wait<kBuffers - 1>();  // this buffer's store, the oldest, has been read
        synchronize();
      }
      if (params.load_c_by_tma) {
        cutlass::arch::ClusterTransactionBarrier::wait(&c_full[buffer], c_phase >> buffer & 1);
        c_phase ^= 1u << buffer;
      }
      int const mi = kSwap ? b : b % kMmaM;
      int const n_box = box_n(b, tile_row, tile_column, warpgroup);
      constexpr int kColumnBlocks = (kSwap ? kTileN : kBoxColumns) / 8;  // 8-column blocks of the accumulator in a box
      int const first_block = kSwap ? 0 : b / kMmaM * kColumnBlocks;
      float row_bias[2] = {0.0f, 0.0f};  // swap: n runs along the accumulator's rows
      if (kSwap && e.bias != nullptr) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          int const n = n_box + 16 * warp + 8 * h + lane / 4;
          row_bias[h] = n < e.n ? load_bias<Config::kType>(e, n) : 0.0f;
        }
      }
#pragma unroll
      for (int j = 0; j < kColumnBlocks; j += 2) {
        constexpr int kOdd = kColumnBlocks % 2;
        bool const pair = !(kOdd && j + 1 == kColumnBlocks);  // a last single block: stored with .x2
        // 8x8 matrix q of four: rows 8 (q % 2) of the warp's 16, column block j + q / 2. Lane 8 q + r addresses its row r.
        int const q = lane / 8, r = lane % 8;
        uint32_t unit_address;
        if constexpr (kSwap) {
          int const row = 8 * (j + (pair ? q / 2 : 0)) + r;  // m within the box
          int const unit = 2 * warp + q % 2;                 // 8 consecutive n
          unit_address = box_address + row * kRowBytes + (swizzle(unit, row) << 4);
        } else {
          int const row = 16 * warp + 8 * (q % 2) + r;
          int const unit = j + q / 2;
          unit_address = box_address + row * kRowBytes + (swizzle(unit, row) << 4);
        }
        float v[8];  // [block][h][e]
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          int const block = i / 4;
          int const index = mi * (kTileN / 2) + (first_block + j + (pair ? block : 0)) * 4 + i % 4;
          v[i] = e.alpha * acc(index);
        }
        if (params.load_c_by_tma) {
          uint32_t c[4];
          load_matrices(unit_address, c, pair);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float2 const pair_of_c = Element::unpack(c[i]);
            v[2 * i] = fmaf(e.beta, pair_of_c.x, v[2 * i]);
            v[2 * i + 1] = fmaf(e.beta, pair_of_c.y, v[2 * i + 1]);
          }
        }
        if (e.bias != nullptr) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if constexpr (kSwap) {
              v[i] += row_bias[i / 2 % 2];
            } else if (i / 2 % 2 == 0) {
              int const n = n_box + 8 * (j + i / 4) + 2 * (lane % 4) + i % 2;
              float const bias = n < e.n ? load_bias<Config::kType>(e, n) : 0.0f;
              v[i] += bias;
              v[i + 2] += bias;
            }
          }
        }
        if (e.activation.smooth || e.activation.relu) {
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = activate(e.activation, v[i]);
        }
        uint32_t const packed[4] = {Element::pack(v[0], v[1]), Element::pack(v[2], v[3]), Element::pack(v[4], v[5]),
                                    Element::pack(v[6], v[7])};
        store_matrices(unit_address, packed, pair);
      }
      cutlass::arch::fence_view_async_shared();
      synchronize();
      if (thread == 0) {
        cute::SM90_TMA_STORE_3D::copy(&params.tma_d, box, n_box, box_m(b, tile_row, tile_column, warpgroup), l);
        cute::tma_store_arrive();
        if (params.load_c_by_tma && b + kBuffers < kBoxes) {
          cute::tma_store_wait<0>();
          request_c(b + kBuffers, tile_row, tile_column, l, warpgroup);
        }
      }
    }
  }

  // Gate and up of an output are in the same thread: 8-column blocks 2 i and 2 i + 1 of the accumulator, or, swapped, its rows 8 h apart.
  template <class Accumulator>
  __device__ void store_gated_boxes(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    EpilogueParams const& e = params.general;
    constexpr int kGatedRowBytes = kGatedColumns * 2;
    constexpr int kGatedBoxBytes = kBoxRows * kGatedRowBytes;
    int const lane = thread % 32, warp = thread / 32;
    int const q = lane / 8, r = lane % 8;
    if (thread == 0) cute::tma_store_wait<0>();
    synchronize();
#pragma unroll
    for (int b = 0; b < kBoxes; ++b) {
      char* box = buffers + b % kBuffers * kGatedBoxBytes;
      uint32_t const box_address = cute::cast_smem_ptr_to_uint(box);
      if (b >= kBuffers) {
        if (thread == 0) cute::tma_store_wait<kBuffers - 1>();
        synchronize();
      }
      int const mi = kSwap ? b : b % kMmaM;
      int const n_box = box_n(b, tile_row, tile_column, warpgroup);  // of B's columns; D's are half of it
      auto const bias_at = [&](int n) { return e.bias != nullptr && n < e.n ? load_bias<Config::kType>(e, n) : 0.0f; };
      auto const gate_up = [&](float gate, float up, float gate_bias, float up_bias) {
        return activate(e.activation, fmaf(e.alpha, gate, gate_bias)) * fmaf(e.alpha, up, up_bias);
      };
      if constexpr (kSwap) {
        // One 8x8 matrix (8 outputs of n, 8 of m) a token block; four go out in one stmatrix.
        float const gate_bias = bias_at(n_box + 16 * warp + lane / 4), up_bias = bias_at(n_box + 16 * warp + 8 + lane / 4);
        constexpr int kBlocks = kTileN / 8;
#pragma unroll
        for (int j = 0; j < kBlocks; j += 4) {
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int const at = mi * (kTileN / 2) + (j + i < kBlocks ? j + i : j) * 4;
            packed[i] =
                Element::pack(gate_up(acc(at), acc(at + 2), gate_bias, up_bias), gate_up(acc(at + 1), acc(at + 3), gate_bias, up_bias));
          }
          int const count = kBlocks - j < 4 ? kBlocks - j : 4;
          int const row = 8 * (j + (q < count ? q : 0)) + r;  // m within the box
          uint32_t const address = box_address + row * kGatedRowBytes + (gated_swizzle(warp, row) << 4);
          if (count == 4) {
            asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(packed[0]),
                         "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                         : "memory");
          } else {
            // count 1 to 3: matrices beyond it repeat block j's values at block j's address
            asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(packed[0]),
                         "r"(count > 1 ? packed[1] : packed[0]), "r"(count > 2 ? packed[2] : packed[0]), "r"(packed[0])
                         : "memory");
          }
        }
      } else {
        // Accumulator blocks j to j + 3 (gate, up, gate, up) make two output blocks: four 8x8 matrices (row half q % 2, output block q / 2).
        constexpr int kColumnBlocks = kBoxColumns / 8;
        int const first_block = b / kMmaM * kColumnBlocks;
#pragma unroll
        for (int j = 0; j < kColumnBlocks; j += 4) {
          uint32_t packed[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // row half i % 2, output block i / 2
            int const gate = mi * (kTileN / 2) + (first_block + j + i / 2 * 2) * 4 + i % 2 * 2, up = gate + 4;
            int const n = n_box + 8 * (j + i / 2 * 2) + 2 * (lane % 4);
            packed[i] = Element::pack(gate_up(acc(gate), acc(up), bias_at(n), bias_at(n + 8)),
                                      gate_up(acc(gate + 1), acc(up + 1), bias_at(n + 1), bias_at(n + 9)));
          }
          int const row = 16 * warp + 8 * (q % 2) + r;
          uint32_t const address = box_address + row * kGatedRowBytes + (gated_swizzle(j / 2 + q / 2, row) << 4);
          asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(packed[0]), "r"(packed[1]),
                       "r"(packed[2]), "r"(packed[3])
                       : "memory");
        }
      }
      cutlass::arch::fence_view_async_shared();
      synchronize();
      if (thread == 0) {
        cute::SM90_TMA_STORE_3D::copy(&params.tma_d, box, n_box / 2, box_m(b, tile_row, tile_column, warpgroup), l);
        cute::tma_store_arrive();
      }
    }
  }

  template <class Accumulator>
  __device__ void store_general(Accumulator const& acc, int tile_row, int tile_column, int l, int warpgroup) {
    int const lane = thread % 32, warp = thread / 32;
    float* staged = reinterpret_cast<float*>(buffers);  // [64][kGeneralColumns], 16-byte unit u of row r at u ^ (r % kUnits)
    constexpr int kUnits = kGeneralColumns / 4;
    auto at = [&](int row, int column) -> float& {
      return staged[row * kGeneralColumns + ((column / 4) ^ (row & (kUnits - 1))) * 4 + column % 4];
    };
#pragma unroll
    for (int mi = 0; mi < kMmaM; ++mi) {
      int const row0 = mma_row(mi, tile_row, warpgroup);
#pragma unroll
      for (int column0 = 0; column0 < kTileN; column0 += kGeneralColumns) {
        constexpr int kBlocks = kGeneralColumns / 8;
        synchronize();
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
          if (column0 + 8 * j < kTileN) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              int const index = mi * (kTileN / 2) + (column0 / 8 + j) * 4 + h * 2;
              float2* slot = reinterpret_cast<float2*>(&at(16 * warp + 8 * h + lane / 4, 8 * j + 2 * (lane % 4)));
              *slot = make_float2(acc(index), acc(index + 1));
            }
          }
        }
        synchronize();
        int const columns = kTileN - column0 < kGeneralColumns ? kTileN - column0 : kGeneralColumns;
        if constexpr (kSwap) {
          store_rectangle<Config::kType>(params.general, tile_column + column0, row0, l, columns, 64, thread, 128,
                                         [&](int row, int column) { return at(column, row); });
        } else {
          store_rectangle<Config::kType>(params.general, row0, tile_column + column0, l, 64, columns, thread, 128,
                                         [&](int row, int column) { return at(row, column); });
        }
      }
    }
    synchronize();
  }

  static __device__ void load_matrices(uint32_t address, uint32_t (&d)[4], bool four) {
    if constexpr (kSwap) {
      if (four) {
        asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                     : "r"(address)
                     : "memory");
      } else {
        asm volatile("ldmatrix.sync.aligned.x2.trans.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(d[0]), "=r"(d[1]) : "r"(address) : "memory");
        d[2] = d[3] = 0;
      }
    } else {
      asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                   : "r"(address)
                   : "memory");
    }
  }
  static __device__ void store_matrices(uint32_t address, uint32_t const (&d)[4], bool four) {
    if constexpr (kSwap) {
      if (four) {
        asm volatile("stmatrix.sync.aligned.x4.trans.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]),
                     "r"(d[2]), "r"(d[3])
                     : "memory");
      } else {
        asm volatile("stmatrix.sync.aligned.x2.trans.m8n8.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(d[0]), "r"(d[1]) : "memory");
      }
    } else {
      asm volatile("stmatrix.sync.aligned.x4.m8n8.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                   "r"(d[3])
                   : "memory");
    }
  }
};

}  // namespace minfer::gemm
