// How an operand of a portable GEMM travels: global memory -> cp.async -> shared memory -> ldmatrix.
#pragma once

#include "cute/tensor.hpp"
#include "minfer/types.h"

namespace minfer::gemm {

/// kExtent rows of m or n, kTileK of k, contiguous along k or along the rows.
template <class Element, Major kMajor, int kExtent, int kTileK, int kThreads>
struct OperandSm80 {
  static constexpr int kRowBytes = kTileK * int(sizeof(Element));  // of a k-major tile
  static_assert(kRowBytes == 64 || kRowBytes == 128);
  static_assert(sizeof(Element) == 2 || kMajor == Major::kK, "ldmatrix transposes elements of 16 bits alone");
  using Copy = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>, Element>;
  static constexpr int kVector = 16 / int(sizeof(Element));

  static constexpr auto gmem_copy() {
    using namespace cute;
    if constexpr (kMajor == Major::kK) {
      constexpr int kAlongK = kTileK / kVector;
      return make_tiled_copy(Copy{}, Layout<Shape<Int<kThreads / kAlongK>, Int<kAlongK>>, Stride<Int<kAlongK>, _1>>{},
                             Layout<Shape<_1, Int<kVector>>>{});
    } else {
      constexpr int kAlongRows = (kExtent / kVector < kThreads ? kExtent / kVector : kThreads);
      constexpr int kRows = kAlongRows < 16 ? kAlongRows : 16;
      return make_tiled_copy(Copy{}, Layout<Shape<Int<kRows>, Int<kThreads / kRows>>, Stride<_1, Int<kRows>>>{},
                             Layout<Shape<Int<kVector>, _1>>{});
    }
  }
  using GmemCopy = decltype(gmem_copy());
  // 128-byte (k-major: kRowBytes) rows, 16-byte units XORed so that neither the copies nor ldmatrix meet in a bank.
  static constexpr int kUnitBits = kVector == 8 ? 3 : 4;  // of an element's number in its unit
  using SmemAtom =
      cute::conditional_t<kMajor == Major::kK,
                          decltype(cute::composition(
                              cute::Swizzle<(kRowBytes == 128 ? 3 : 2), kUnitBits, 3>{},
                              cute::Layout<cute::Shape<cute::_8, cute::Int<kTileK>>, cute::Stride<cute::Int<kTileK>, cute::_1>>{})),
                          decltype(cute::composition(cute::Swizzle<3, 3, 3>{},
                                                     cute::Layout<cute::Shape<cute::_64, cute::_8>, cute::Stride<cute::_1, cute::_64>>{}))>;
  using SmemCopy = cute::conditional_t<kMajor == Major::kK, cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>,
                                       cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>>;
  using GmemStride =
      cute::conditional_t<kMajor == Major::kK, cute::Stride<int64_t, cute::_1, int64_t>, cute::Stride<cute::_1, int64_t, int64_t>>;

  static __host__ __device__ GmemStride stride(int64_t leading, int64_t batch) {
    if constexpr (kMajor == Major::kK) {
      return cute::make_stride(leading, cute::_1{}, batch);
    } else {
      return cute::make_stride(cute::_1{}, leading, batch);
    }
  }
};

}  // namespace minfer::gemm
