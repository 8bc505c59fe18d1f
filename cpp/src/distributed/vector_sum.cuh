// Sums of vectors of 16-bit numbers in fp32, which are rounded once.
#pragma once

#include "common/float16.cuh"
#include "distributed/exchange.h"

namespace minfer::distributed {

template <DataType kType>
__device__ __forceinline__ void add(float (&sums)[kVectorElements], uint4 const& x) {
  uint32_t const words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const pair = Float16<kType>::unpack(words[i]);
    sums[2 * i] += pair.x;
    sums[2 * i + 1] += pair.y;
  }
}
template <DataType kType>
__device__ __forceinline__ uint4 rounded(float const (&sums)[kVectorElements]) {
  return make_uint4(Float16<kType>::pack(sums[0], sums[1]), Float16<kType>::pack(sums[2], sums[3]), Float16<kType>::pack(sums[4], sums[5]),
                    Float16<kType>::pack(sums[6], sums[7]));
}

}  // namespace minfer::distributed
