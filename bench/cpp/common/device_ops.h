// Device kernels that every benchmark needs: random operands, dense and quantised, references, their error norm, a spin.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "minfer/gemm.h"

namespace minfer::bench {

/// Normal random numbers with mean 0, in s8 rounded to integers; the same (seed, count) gives the same values on every device.
void fill_normal(void* data, DataType type, int64_t count, float deviation, uint64_t seed, cudaStream_t stream);

/// Uniform random numbers from [low, high), likewise.
void fill_uniform(void* data, DataType type, int64_t count, float low, float high, uint64_t seed, cudaStream_t stream);

/// Uniform random 4-bit codes, one to a byte, likewise.
void fill_codes(uint8_t* codes, int64_t count, uint64_t seed, cudaStream_t stream);

/// Random bytes: (bits & mask) | set, likewise.
void fill_bytes(void* data, int64_t count, uint8_t mask, uint8_t set, uint64_t seed, cudaStream_t stream);

/// An int4 cache's float16 [.., 2, run]: scales of 0.06 to 0.19, then minima of -1.9 to -0.1, likewise.
void fill_scales_and_minima(void* data, int64_t count, int64_t run, uint64_t seed, cudaStream_t stream);

/// W [n, k] of `out_type`, contiguous: (code - zero) * scale, rounded once. codes [n, k]; scales and zeros [ceil(k / group_size), n] of
/// `type`; zeros null: 8; group_size 0: all of k. Shares no code and no layout with the library's.
void dequantise_codes(uint8_t const* codes, void const* scales, void const* zeros, int64_t group_size, int64_t n, int64_t k, DataType type,
                      DataType out_type, void* out, cudaStream_t stream);

/// Codes of 8 bits with float32 scales: lines of A, or of B as [n, k].
struct ScaledLines {
  void const* codes = nullptr;
  DataType type = DataType::kE4M3;  // or kS8
  int64_t ld = 0;                   // from a line to the next, in codes
  OperandScales scales;             // of lines; or of blocks, of halves where 8 lines of gates and 8 of ups alternate
  int64_t block_lines = 1;          // of blocks: lines that share a scale
  int64_t group = 128;              // likewise, of k
  int32_t const* index = nullptr;   // line r is line index[r] of the codes and of the scales; null: it is r
};

/// out [lines, k], contiguous: code * scale, rounded once to float32. Shares no code with the library's.
void dequantise_lines(ScaledLines const& x, int64_t lines, int64_t k, float* out, cudaStream_t stream);

/// Every byte 0xff, which is a NaN in each of our types but s8: an element that a kernel fails to write cannot pass the check.
void poison(void* data, int64_t bytes, cudaStream_t stream);

/// D of the problem by the plainest tiled loop, products and sums in float64, rounded once to float32. A and B are numbers of ab_type, of
/// 16 bits or float32: scales are not read.
/// @param scratch [batch, m, n] floats when the problem is gated, else unused
/// @param reference [batch, m, n] floats (gated: n / 2)
void gemm_reference(GemmProblem const& problem, GemmOperands const& operands, float* scratch, float* reference, cudaStream_t stream);

/// out[r] = a[index[r]] for rows of k 16-bit elements, contiguous.
void gather_rows(void const* a, int32_t const* index, int64_t rows, int64_t k, void* out, cudaStream_t stream);

/// The epilogue of a grouped GEMM on its products z [rows, n]: out[r] = scale[r] * activation(z[r]), gated with the halves of z
/// scale[r] * activation(gate) * up; computed in float64, rounded once to `type`.
/// @param scale [rows], or null: ones
/// @param out [rows, n], gated [rows, n / 2]
void grouped_epilogue(float const* z, int64_t rows, int64_t n, bool gated, Activation activation, float const* scale, DataType type,
                      void* out, cudaStream_t stream);

/// out[t] = the sum over j of y[index[t, j]] for rows of n elements of `type`; sums in float64, rounded once to float32.
void sum_rows(void const* y, DataType type, int32_t const* index, int64_t tokens, int64_t top_k, int64_t n, float* out,
              cudaStream_t stream);

/// ||d - reference|| / ||reference|| over [batch, rows, columns]; NaN when d holds a NaN. Waits for the stream.
double relative_error(void const* d, DataType type, int64_t ldd, int64_t d_batch_stride, float const* reference, int64_t batch,
                      int64_t rows, int64_t columns, cudaStream_t stream);

/// Keeps the stream busy, so that what is enqueued meanwhile runs back to back.
void spin(double us, cudaStream_t stream);

}  // namespace minfer::bench
