// The copy in front of a GEMM whose operands its kernel cannot address: column-major A, row-major B, or a base or stride that is no
// multiple of 16 bytes. One launch copies A, B or both into K-major rows in the workspace (GemmLaunch::realign_a, realign_b). Private to
// the library.
//
// A row of a copy begins on a multiple of 16 bytes, of 128 where k is long enough for that to cost little, because a TMA box then reads
// whole lines. What is behind a row's k elements is zero up to the next multiple of 8, and not written further on: a kernel that copies
// 16 bytes at a time may take k rounded up to 8 where both operands are copies, and TMA is told k and fills with zeros behind it.
#pragma once

#include "minfer/gemm.h"

namespace minfer::gemm {

/// Elements from one row of a copy to the next.
inline int64_t realigned_stride(int64_t k) {
  int64_t const unit = k >= 512 ? 64 : 8;
  return (k + unit - 1) / unit * unit;
}

/// Bytes of a copy of [batch, rows, k], so that what is behind it is 256-byte aligned, too.
inline size_t realigned_bytes(int64_t rows, int64_t k, int64_t batch) {
  return (size_t(batch) * size_t(rows) * size_t(realigned_stride(k)) * 2 + 255) / 256 * 256;
}

/// The problem that the kernel of such a launch computes.
inline GemmProblem realigned(GemmProblem problem, GemmLaunch const& launch) {
  if (launch.realign_a) {
    problem.a_major = Major::kK;
    problem.a_alignment = 16;
  }
  if (launch.realign_b) {
    problem.b_major = Major::kK;
    problem.b_alignment = 16;
  }
  if (launch.realign_a && launch.realign_b) problem.k = (problem.k + 7) / 8 * 8;  // the copies end in zeros
  return problem;
}

/// Bytes that the launch's copies take in the workspace, behind the kernel's own.
inline size_t copies_bytes(GemmProblem const& p, GemmLaunch const& launch) {
  if (p.m == 0 || p.n == 0 || p.k == 0 || p.batch == 0) return 0;
  return (launch.realign_a ? realigned_bytes(p.m, p.k, p.batch) : 0) + (launch.realign_b ? realigned_bytes(p.n, p.k, p.batch) : 0);
}

/// An operand to copy: [batch, rows, k] where its major is kK, else [batch, k, rows], strides in elements. No copy where `to` is null.
struct RealignedOperand {
  void const* from = nullptr;
  Major major = Major::kK;
  int64_t rows = 0, ld = 0, batch_stride = 0;
  void* to = nullptr;  // [batch, rows, realigned_stride(k)], 16-byte aligned
};

/// What a CTA of the copy covers, and how many CTAs a matrix takes. A row of vectors of 8 elements is shared by 2^lanes threads, each of
/// which has 2^along vectors of it and the same ones of kVectors / 2^along rows; a transposing CTA has a tile.
struct RealignShape {
  static constexpr int kThreads = 256, kVectors = 4;          // kVectors: 16-byte stores of a thread
  static constexpr int64_t kTileRows = 64, kTileLines = 128;  // of a transposing CTA: rows of the copy, elements of k
  int lanes = 0, along = 0;                                   // log2
  int64_t blocks_x = 0, blocks_y = 0;                         // along the contiguous mode of the operand, and across it
  RealignShape(Major major, int64_t rows, int64_t k) {
    auto const blocks = [](int64_t extent, int64_t size) { return (extent + size - 1) / size; };
    if (major == Major::kMN) {
      blocks_x = blocks(rows, kTileRows);
      blocks_y = blocks(k, kTileLines);
      return;
    }
    int64_t const vectors = blocks(k, 8);
    while (lanes < 5 && (int64_t(1) << lanes) < vectors) ++lanes;
    while ((1 << along) < kVectors && (int64_t(1) << (lanes + along)) < vectors) ++along;
    blocks_x = blocks(vectors, int64_t(1) << (lanes + along));
    blocks_y = blocks(rows, int64_t(kThreads) * kVectors >> (lanes + along));
  }
};

/// Whether one launch covers the copies.
inline bool copies_fit(GemmProblem const& p, GemmLaunch const& launch) {
  RealignShape const a(p.a_major, p.m, p.k), b(p.b_major, p.n, p.k);
  double const blocks_a = launch.realign_a ? double(a.blocks_x) * double(a.blocks_y) : 0;
  double const blocks_b = launch.realign_b ? double(b.blocks_x) * double(b.blocks_y) : 0;
  return (blocks_a + blocks_b) * double(p.batch) < 2147483648.0;
}

/// Launches the copies of one or two operands with the same k and batch, neither of them 0. copies_fit has been asked.
Status realign(RealignedOperand const& a, RealignedOperand const& b, int64_t k, int64_t batch, bool programmatic, Stream stream);

}  // namespace minfer::gemm
