// Host-side creation of TMA descriptors for the operands that the kernels address themselves (C and D; A and B's come from CuTe).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Describes a tensor [planes, rows, columns] of 8-bit, 16-bit or 32-bit numbers with unit stride along columns, read or written in boxes
/// of box_rows x box_columns. Strides are in elements. A box's row is 16, 32, 64 or 128 bytes, and that is also the shared-memory swizzle
/// (16: none).
/// @return kInvalidArgument when the base or a stride is not a multiple of 16 bytes; kCudaError when the driver refuses.
Status encode_tensor_map_planes(CUtensorMap* map, DataType type, void const* base, int64_t columns, int64_t rows, int64_t planes,
                                int64_t row_stride, int64_t plane_stride, int box_columns, int box_rows);

/// How many bytes of 16-bit rows a load moves from DRAM into L2: kWide, 256 at a time; kAlone, no more than the box's rows. A cache's rows
/// are read once, and the rows next to them by another load, for which wide ones would be moved a second time (decode over 2 GB in rows of
/// 256 bytes: 4.2 TB/s with kWide, 4.4 with kAlone).
enum class RowFetch { kWide, kAlone };

/// Describes a tensor of `rank` (3 to 5) modes of elements of `element_bytes` (1 or 2), the first with unit stride, read in boxes whose
/// rows are swizzled shared-memory rows: box[0] elements are 32, 64 or 128 bytes. `strides` are those of the other modes, in bytes. Boxes
/// reach beyond the extents: loads fill with zeros.
/// @return as encode_tensor_map_planes.
Status encode_tensor_map_rows(CUtensorMap* map, int rank, void const* base, int64_t const* extents, int64_t const* strides, int const* box,
                              int element_bytes = 2, RowFetch fetch = RowFetch::kWide);

/// Describes a tensor of `rank` (2 or 3) modes, the first with unit stride, without a shared-memory swizzle; `strides` are those of the
/// others, in bytes. Boxes reach beyond the extents: loads fill with zeros.
/// @return as encode_tensor_map_planes.
Status encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, int rank, void const* base, int64_t const* extents,
                         int64_t const* strides, int const* box);

}  // namespace minfer
