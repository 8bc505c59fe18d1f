// The instructions of kernels for sm_80 onward that are written without CuTe: asynchronous copies, ldmatrix, mma.sync.
#pragma once

#include <cstdint>

#include "minfer/types.h"

namespace minfer {

__device__ __forceinline__ uint32_t shared_address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }

/// Copies 16 bytes from global to shared memory, bypassing L1: the first `bytes` of them are read, the others are zeros.
__device__ __forceinline__ void copy_async_16(uint32_t destination, void const* source, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes) : "memory");
}
/// The same; zeros if not `inside`, and then `source` is not read.
__device__ __forceinline__ void copy_async_16(void* destination, void const* source, bool inside) {
  copy_async_16(shared_address(destination), source, inside ? 16 : 0);
}

/// Copies issued since the last call become one group, which may be empty.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most kPending groups of this thread are in flight. A barrier after it covers the copies of other threads.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes); of matrix q it gets columns
/// 2 (l % 4) and the next of row l / 4, in d[q].
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

/// As load_matrices, each matrix transposed: rows 2 (l % 4) and the next of column l / 4.
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

/// An 8 x 8 matrix of 16-bit elements in registers: lane l gives columns 2 (l % 4) and the next of row l / 4, and gets rows 2 (l % 4) and
/// the next of column l / 4.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// d += A.B, m16n8k16. Lane l holds
///   of A    a[i]: row l / 4 + 8 (i % 2), columns 2 (l % 4) + 8 (i / 2) and the next
///   of B    b0: rows 2 (l % 4) and the next of column l / 4; b1: the rows 8 below
///   of D    d[i]: row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2
template <DataType kType>
__device__ __forceinline__ void multiply_16x8x16(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(kType == DataType::kF16 || kType == DataType::kBF16);
  if constexpr (kType == DataType::kF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// d += A.B of int8, m16n8k32. Lane l holds of A a[i]: row l / 4 + 8 (i % 2), columns 4 (l % 4) + 16 (i / 2) and the next three; of B b[i]:
/// the same rows of column l / 4; of D as multiply_16x8x16.
__device__ __forceinline__ void multiply_s8(int32_t (&d)[4], uint32_t const (&a)[4], uint32_t const (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace minfer
