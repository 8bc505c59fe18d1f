// WGMMA on operands in lines of 128 swizzled bytes of shared memory, as TMA writes them: descriptors that mainloops compute themselves.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/util.hpp"
#include "cute/tensor.hpp"

namespace minfer::gemm {

constexpr int kWgmmaLineBytes = 128;

/// One warpgroup's instruction of `Op` on 64 rows: accumulators += A . B, or = where `keep` is 0.
template <class Op, class Sum, int... kAt>
CUTLASS_DEVICE void multiply(uint64_t a, uint64_t b, Sum* accumulators, cute::GMMA::ScaleOut keep, std::integer_sequence<int, kAt...>) {
  Op::fma(a, b, accumulators[kAt]..., keep);
}

/// The same with A in registers, in the order of the instruction's fragments.
template <class Op, class Sum, int... kAt>
CUTLASS_DEVICE void multiply(uint32_t const* a, uint64_t b, Sum* accumulators, cute::GMMA::ScaleOut keep,
                             std::integer_sequence<int, kAt...>) {
  Op::fma(a[0], a[1], a[2], a[3], b, accumulators[kAt]..., keep);
}

/// The descriptor of an operand in such lines, along k or along its rows, 8 lines after each other. Only its low word depends on where they
/// are, in units of 16 bytes: addresses are added there, without a carry, in uniform registers.
CUTLASS_DEVICE uint64_t descriptor_of(uint32_t low) {
  cute::GmmaDescriptor of{};
  of.bitfield.stride_byte_offset_ = 8 * kWgmmaLineBytes >> 4;
  of.bitfield.layout_type_ = uint8_t(cute::GMMA::LayoutType::B128);
  return of.desc_ | low;
}
/// `next`: units from 64 rows, or columns, that are contiguous along m or n to the next 64. Not read where 64 rows, or 16 of k, are no
/// longer than a line.
CUTLASS_DEVICE uint32_t low_word_of(void const* rows, int next = 1) {
  cute::GmmaDescriptor of{};
  of.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(rows) >> 4;
  of.bitfield.leading_byte_offset_ = next;
  return uint32_t(of.desc_);
}

}  // namespace minfer::gemm
