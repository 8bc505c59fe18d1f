// Vectors of elements: 16 bytes, or a single element where addresses do not allow that, that one instruction moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace minfer {

constexpr size_t kVectorBytes = 16;

/// kWidth elements. Wider ones than kVectorBytes take several instructions.
template <class T, int kWidth>
struct alignas(sizeof(T) * kWidth < kVectorBytes ? sizeof(T) * kWidth : kVectorBytes) AlignedVector {
  T value[kWidth];
};

/// Whether a vector of 16 bytes may begin at an address.
inline bool begins_vector(void const* address) { return reinterpret_cast<uintptr_t>(address) % kVectorBytes == 0; }
/// Whether one may begin at each row, rows being so many elements apart.
inline bool begin_vectors(void const* rows, int64_t element_bytes, std::initializer_list<int64_t> strides) {
  for (int64_t const stride : strides) {
    if (stride * element_bytes % int64_t(kVectorBytes) != 0) return false;
  }
  return begins_vector(rows);
}

}  // namespace minfer
