// The CUTLASS type of a DataType's numbers, of which kernels make their tensors and instructions.
#pragma once

#include <cstdint>

#include "cutlass/numeric_types.h"
#include "minfer/types.h"

namespace minfer {

template <DataType kType>
struct CutlassElementOf {
  static_assert(size_of(kType) == 0, "kernels have no operands or results of this type");
};
template <>
struct CutlassElementOf<DataType::kF16> {
  using Type = cutlass::half_t;
};
template <>
struct CutlassElementOf<DataType::kBF16> {
  using Type = cutlass::bfloat16_t;
};
template <>
struct CutlassElementOf<DataType::kF32> {
  using Type = float;
};
template <>
struct CutlassElementOf<DataType::kE4M3> {
  using Type = cutlass::float_e4m3_t;
};
template <>
struct CutlassElementOf<DataType::kS8> {
  using Type = int8_t;
};

template <DataType kType>
using CutlassElement = typename CutlassElementOf<kType>::Type;

}  // namespace minfer
