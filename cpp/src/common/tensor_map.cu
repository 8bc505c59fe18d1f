#include "common/tensor_map.h"

#include "common/driver.h"
#include "minfer/loaded_kernel.h"

namespace minfer {

namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*, cuuint64_t const*,
                                 cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

EncodeTiled encode_tiled() {
  static auto const function = driver_function<EncodeTiled>("cuTensorMapEncodeTiled");
  return function;
}

Status no_encoder() {
  return Status::failure(StatusCode::kNotSupported, "the driver has no cuTensorMapEncodeTiled (CUDA 12.0 or newer is needed)");
}

/// TMA moves bits, so that only the size of a number matters.
CUtensorMapDataType unsigned_type(int element_bytes) {
  return element_bytes == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                              : CU_TENSOR_MAP_DATA_TYPE_UINT32;
}

/// The swizzle whose span is a row of row_bytes; none for 16.
CUtensorMapSwizzle swizzle_of(int row_bytes) {
  return row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
         : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
         : row_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                           : CU_TENSOR_MAP_SWIZZLE_NONE;
}

}  // namespace

Status encode_tensor_map_planes(CUtensorMap* map, DataType type, void const* base, int64_t columns, int64_t rows, int64_t planes,
                                int64_t row_stride, int64_t plane_stride, int box_columns, int box_rows) {
  EncodeTiled const encode = encode_tiled();
  if (encode == nullptr) return no_encoder();
  int const bytes = size_of(type), unit = 16 / bytes;  // elements of 16 bytes
  if (reinterpret_cast<uintptr_t>(base) % 16 != 0 || row_stride % unit != 0 || plane_stride % unit != 0) {
    return Status::failure(
        StatusCode::kInvalidArgument,
        "TMA needs 16-byte aligned pointers and strides, got base %% 16 = %d, row stride %lld, plane stride %lld elements",
        int(reinterpret_cast<uintptr_t>(base) % 16), (long long)row_stride, (long long)plane_stride);
  }
  // A stride of an extent-1 mode is never used but must be legal.
  int64_t const legal_row_stride = row_stride >= columns ? row_stride : (columns + unit - 1) / unit * unit;
  int64_t const legal_plane_stride = planes > 1 ? plane_stride : legal_row_stride;
  cuuint64_t const extents[3] = {cuuint64_t(columns), cuuint64_t(rows), cuuint64_t(planes)};
  cuuint64_t const strides[2] = {cuuint64_t(legal_row_stride) * bytes, cuuint64_t(legal_plane_stride) * bytes};
  cuuint32_t const box[3] = {cuuint32_t(box_columns), cuuint32_t(box_rows), 1};
  cuuint32_t const steps[3] = {1, 1, 1};
  CUresult const result =
      encode(map, unsigned_type(bytes), 3, const_cast<void*>(base), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle_of(box_columns * bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    Status status = Status::failure(
        StatusCode::kCudaError, "cuTensorMapEncodeTiled failed (%d) for [%lld, %lld, %lld], strides %lld, %lld elements", int(result),
        (long long)planes, (long long)rows, (long long)columns, (long long)legal_plane_stride, (long long)legal_row_stride);
    status.cuda_error = int(result);
    return status;
  }
  return Status::success();
}

namespace {

constexpr int kMaxRank = 5;

Status encode_modes(CUtensorMap* map, CUtensorMapDataType type, int rank, void const* base, int64_t const* extents, int64_t const* strides,
                    int const* box, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  EncodeTiled const encode = encode_tiled();
  if (encode == nullptr) return no_encoder();
  bool aligned = reinterpret_cast<uintptr_t>(base) % 16 == 0;
  for (int i = 0; i + 1 < rank; ++i) aligned = aligned && strides[i] % 16 == 0;
  if (!aligned) {
    return Status::failure(StatusCode::kInvalidArgument,
                           "TMA needs 16-byte aligned pointers and strides, got base %% 16 = %d, strides of %lld and %lld bytes",
                           int(reinterpret_cast<uintptr_t>(base) % 16), (long long)strides[0], (long long)(rank > 2 ? strides[1] : 0));
  }
  cuuint64_t extents_[kMaxRank] = {1, 1, 1, 1, 1}, strides_[kMaxRank - 1] = {16, 16, 16, 16};
  cuuint32_t box_[kMaxRank] = {1, 1, 1, 1, 1};
  cuuint32_t const steps[kMaxRank] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; ++i) {
    extents_[i] = cuuint64_t(extents[i]);
    box_[i] = cuuint32_t(box[i]);
    if (i > 0) strides_[i - 1] = cuuint64_t(strides[i - 1]);
  }
  CUresult const result = encode(map, type, cuuint32_t(rank), const_cast<void*>(base), extents_, strides_, box_, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::success();
  Status status = Status::failure(StatusCode::kCudaError, "cuTensorMapEncodeTiled failed (%d) for [%lld, %lld, %lld, %lld, %lld]",
                                  int(result), (long long)extents_[4], (long long)extents_[3], (long long)extents_[2],
                                  (long long)extents_[1], (long long)extents_[0]);
  status.cuda_error = int(result);
  return status;
}

}  // namespace

Status encode_tensor_map_rows(CUtensorMap* map, int rank, void const* base, int64_t const* extents, int64_t const* strides, int const* box,
                              int element_bytes, RowFetch fetch) {
  int const bytes = box[0] * element_bytes;
  CUtensorMapL2promotion const promotion = element_bytes == 2 && fetch == RowFetch::kWide ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                           : bytes == 128                                 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                           : bytes == 64                                  ? CU_TENSOR_MAP_L2_PROMOTION_L2_64B
                                                                                          : CU_TENSOR_MAP_L2_PROMOTION_NONE;
  return encode_modes(map, unsigned_type(element_bytes), rank, base, extents, strides, box, swizzle_of(bytes), promotion);
}

Status encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, void const* base, int64_t const* extents,
                         int64_t const* strides, int const* box) {
  return encode_modes(map, type, rank, base, extents, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
}

Status encode_tensor_map_argument(TensorMapArgument const& argument, void* map) {
  CUtensorMapDataType const type = unsigned_type(argument.element_bytes);
  CUtensorMapSwizzle const swizzle = argument.swizzle_bytes == 0 ? CU_TENSOR_MAP_SWIZZLE_NONE : swizzle_of(argument.swizzle_bytes);
  return encode_modes(static_cast<CUtensorMap*>(map), type, argument.modes, argument.base, argument.extents, argument.strides + 1,
                      argument.box, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

}  // namespace minfer
