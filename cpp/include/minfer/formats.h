// Generated from cpp/configs/formats.toml: edit that file, then run python cpp/codegen/generate.py --formats.
// Number types, and how weights and caches of keys and values are stored.
#pragma once

#include <cstdint>

// clang-format off
namespace minfer {

/// A number type of operands, results or scales.
enum class DataType : int32_t {
  kF16 = 0,
  kBF16 = 1,
  kF32 = 2,
  kE4M3 = 3,
  kS8 = 4,
  kE8M0 = 5,
};
constexpr int bits_of(DataType of) {
  switch (of) {
    case DataType::kF16: return 16;
    case DataType::kBF16: return 16;
    case DataType::kF32: return 32;
    case DataType::kE4M3: return 8;
    case DataType::kS8: return 8;
    case DataType::kE8M0: return 8;
    default: return 0;
  }
}
/// Bytes of a number.
constexpr int size_of(DataType of) { return bits_of(of) / 8; }
constexpr char const* name_of(DataType of) {
  switch (of) {
    case DataType::kF16: return "f16";
    case DataType::kBF16: return "bf16";
    case DataType::kF32: return "f32";
    case DataType::kE4M3: return "e4m3";
    case DataType::kS8: return "s8";
    case DataType::kE8M0: return "e8m0";
    default: return "?";
  }
}

/// How B is stored. kDense: as numbers of A's type. Otherwise as codes in the packed layout of quantized_gemm/w4_layout.h,
/// with scales for groups of consecutive k: (value of the code - zero point) * scale. kCodes is of attention kernels alone: a
/// cache of keys and values as kFp8E4M3, kInt8 or kInt4, whichever a call has.
enum class WeightFormat : int32_t {
  kDense = 0,
  kInt4 = 1,
  kNf4 = 2,
  kMxFp4 = 3,
  kNvFp4 = 4,
  kInt8 = 5,
  kFp8E4M3 = 6,
  kCodes = 7,
};
/// Those of quantised weights.
constexpr WeightFormat kWeightFormats[] = {
    WeightFormat::kInt4,
    WeightFormat::kNf4,
    WeightFormat::kMxFp4,
    WeightFormat::kNvFp4,
    WeightFormat::kInt8,
    WeightFormat::kFp8E4M3,
};
constexpr char const* name_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kDense: return "dense";
    case WeightFormat::kInt4: return "int4";
    case WeightFormat::kNf4: return "nf4";
    case WeightFormat::kMxFp4: return "mxfp4";
    case WeightFormat::kNvFp4: return "nvfp4";
    case WeightFormat::kInt8: return "int8";
    case WeightFormat::kFp8E4M3: return "fp8_e4m3";
    case WeightFormat::kCodes: return "codes";
    default: return "?";
  }
}
/// Of a code; of kCodes 0.
constexpr int bits_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kDense: return 16;
    case WeightFormat::kInt4: return 4;
    case WeightFormat::kNf4: return 4;
    case WeightFormat::kMxFp4: return 4;
    case WeightFormat::kNvFp4: return 4;
    case WeightFormat::kInt8: return 8;
    case WeightFormat::kFp8E4M3: return 8;
    default: return 0;
  }
}
/// Bytes of a stored scale.
constexpr int scale_bytes_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kMxFp4: return 1;
    case WeightFormat::kNvFp4: return 1;
    default: return 2;
  }
}
/// k of a scale where the format prescribes it, else 0.
constexpr int fixed_group_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kMxFp4: return 32;
    case WeightFormat::kNvFp4: return 16;
    default: return 0;
  }
}
constexpr bool has_zero_points(WeightFormat of) {
  switch (of) {
    case WeightFormat::kInt4: return true;
    case WeightFormat::kInt8: return true;
    default: return false;
  }
}
/// The zero point where none are stored.
constexpr float symmetric_zero_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kInt4: return 8.0f;
    case WeightFormat::kInt8: return 128.0f;
    default: return 0.0f;
  }
}

/// What a code stands for, before zero point and scale. kInteger: itself, unsigned.
enum class CodeValues : int32_t {
  kNone = 0,
  kInteger = 1,
  kNf4 = 2,
  kE2M1 = 3,
  kE4M3 = 4,
};
constexpr CodeValues values_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kInt4: return CodeValues::kInteger;
    case WeightFormat::kNf4: return CodeValues::kNf4;
    case WeightFormat::kMxFp4: return CodeValues::kE2M1;
    case WeightFormat::kNvFp4: return CodeValues::kE2M1;
    case WeightFormat::kInt8: return CodeValues::kInteger;
    case WeightFormat::kFp8E4M3: return CodeValues::kE4M3;
    default: return CodeValues::kNone;
  }
}
/// Where the bits of a code are in the packed layout.
enum class CodeOrder : int32_t {
  kPlain = 0,
  kBook = 1,
  kE2M1 = 2,
};
constexpr CodeOrder order_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kNf4: return CodeOrder::kBook;
    case WeightFormat::kMxFp4: return CodeOrder::kE2M1;
    case WeightFormat::kNvFp4: return CodeOrder::kE2M1;
    default: return CodeOrder::kPlain;
  }
}

/// The code books, and which of them a format has; -1 for none.
struct CodeBooks {
  float values[1][16];
};
constexpr CodeBooks kCodeBooks = {{
    {
      -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
      -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
      0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
      0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
    },
}};
constexpr int code_book_of(WeightFormat of) {
  switch (of) {
    case WeightFormat::kNf4: return 0;
    default: return -1;
  }
}
/// What kernels multiply a code book by, so that its values lie nearer to numbers of the type; the sums make up for it.
constexpr float book_factor_of(WeightFormat format, DataType type) {
  if (format == WeightFormat::kNf4 && type == DataType::kF16) return 0.6831f;
  if (format == WeightFormat::kNf4 && type == DataType::kBF16) return 0.71843f;
  return 1.0f;
}

}  // namespace minfer
