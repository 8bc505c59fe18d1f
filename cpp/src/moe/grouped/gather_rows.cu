// Copies the rows of A into expert order, for the grouped kernels that do not gather rows themselves. A row number outside of A gives
// zeros.
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "moe/grouped/launch.h"

namespace minfer::moe {

namespace {

constexpr int kThreads = 256, kVectors = 4;  // kVectors: 16-byte loads of a thread in flight

__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(uint4 const* a, int64_t lda, int64_t a_rows, int32_t const* gather, int64_t rows, int32_t row_vectors, uint4* out) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    int64_t const source = gather[row];
    bool const inside = uint64_t(source) < uint64_t(a_rows);
    uint4 const* const from = a + (inside ? source : 0) * lda;
    uint4* const to = out + row * row_vectors;
    for (int first = int(threadIdx.x); first < row_vectors; first += kVectors * kThreads) {
      uint4 values[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        values[i] = make_uint4(0, 0, 0, 0);
        if (inside && first + i * kThreads < row_vectors) values[i] = load_operand(from + first + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if (first + i * kThreads < row_vectors) to[first + i * kThreads] = values[i];
      }
    }
  }
}

}  // namespace

Status gather_rows(void const* a, int64_t a_stride, int64_t a_rows, int32_t const* gather, int64_t rows, int64_t row_bytes, void* out,
                   bool programmatic, Stream stream) {
  if (rows == 0 || row_bytes == 0) return Status::success();
  LaunchShape shape;
  shape.grid = dim3(unsigned(rows < 65536 ? rows : 65536));
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of gather_rows", &gather_rows_kernel, static_cast<uint4 const*>(a), a_stride / 16, a_rows, gather, rows,
                int32_t(row_bytes / 16), static_cast<uint4*>(out));
}

}  // namespace minfer::moe
