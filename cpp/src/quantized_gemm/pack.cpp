// The size of a packed weight, and the entry points of a build without CUDA.
#include "minfer/w4a16.h"

#include "common/without_cuda.h"
#include "quantized_gemm/w4_layout.h"

namespace minfer {

int64_t packed_weight_bytes(WeightFormat format, int64_t n, int64_t k) {
  using namespace w4a16;
  if (format == WeightFormat::kDense) return n * k * 2;
  return (n + kBlockN - 1) / kBlockN * ((k + kBlockK - 1) / kBlockK) * block_words(bits_of(format)) * 4;
}

#if !MINFER_WITH_CUDA
Status pack_weight(WeightFormat, uint8_t const*, int64_t, int64_t, int64_t, void*, Stream) { return without_cuda(); }
Status dequantize_weight(QuantizedWeight const&, DataType, void*, Stream) { return without_cuda(); }
Status gather_columns(void const*, int64_t, int32_t const*, int64_t, int64_t, void*, bool, Stream) { return without_cuda(); }
#endif

}  // namespace minfer
