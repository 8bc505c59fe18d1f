// The operators between the GEMMs: normalisation, activation, quantisation, softmax of rows; rotary embedding; embedding. Each is one
// launch that reads and writes its bytes once. Memory in the caller's hands; nothing is allocated, nothing synchronised.
//
// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
#pragma once

#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

// ---- Operators on rows -------------------------------------------------------------------------------------------------------------

/// What is computed of each row x of `width` outputs, in fp32.
enum class RowOperation : int32_t {
  kRmsNorm = 0,          // y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset); with a residual, x = residual += x first
  kLayerNorm = 1,        // y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias
  kSoftmax = 2,          // y = exp(x - max(x)) / sum(exp(x - max(x))), or its logarithm
  kActivation = 3,       // y = activation(x + bias)
  kGatedActivation = 4,  // y = activation(gate) * up, of rows of 2 * width
  kQuantize = 5,         // y = x
};
inline char const* name_of(RowOperation operation) {
  switch (operation) {
    case RowOperation::kRmsNorm: return "rms_norm";
    case RowOperation::kLayerNorm: return "layer_norm";
    case RowOperation::kSoftmax: return "softmax";
    case RowOperation::kActivation: return "activation";
    case RowOperation::kGatedActivation: return "gated_activation";
    case RowOperation::kQuantize: return "quantize";
  }
  return "?";
}

/// How y is stored: as numbers of x's type, or as 8-bit codes q = round(y / scale) with float32 scales. y is not rounded before.
///   fp8_tensor    e4m3, saturated at +-448; one scale, which is given
///   fp8_token     e4m3; a row's scale is max |y| / 448
///   fp8_block128  e4m3; the same for each 128 columns of a row, from column 0 on. Scales are column-major
///   int8_token    -127 to 127; a row's scale is max |y| / 127
/// Where a scale is 0, codes are 0.
enum class RowQuant : int32_t { kNone = 0, kFp8Tensor = 1, kFp8Token = 2, kFp8Block128 = 3, kInt8Token = 4 };
constexpr RowQuant kRowQuants[] = {RowQuant::kFp8Tensor, RowQuant::kFp8Token, RowQuant::kFp8Block128, RowQuant::kInt8Token};
constexpr int64_t kQuantBlock = 128;

inline char const* name_of(RowQuant quant) {
  switch (quant) {
    case RowQuant::kNone: return "none";
    case RowQuant::kFp8Tensor: return "fp8_tensor";
    case RowQuant::kFp8Token: return "fp8_token";
    case RowQuant::kFp8Block128: return "fp8_block128";
    case RowQuant::kInt8Token: return "int8_token";
  }
  return "?";
}

struct RowProblem {
  RowOperation operation = RowOperation::kRmsNorm;
  DataType type = DataType::kBF16;  // of x, y, residual, weight and bias: 16-bit; softmax and activation also float32
  RowQuant quant = RowQuant::kNone;
  int64_t rows = 0;              // below 2^31
  int64_t width = 0;             // outputs of a row, below 2^31
  bool adds = false;             // rms_norm: with a residual
  bool batch_invariant = false;  // a row is divided among threads as its width says, whatever the number of rows
};

/// Rows of a tensor: row r begins (r / inner) * outer_stride + (r % inner) * inner_stride elements behind `data`, and is contiguous.
struct RowTensor {
  void* data = nullptr;
  int64_t outer_stride = 0, inner_stride = 0;
};

struct RowOperands {
  RowTensor x, y, residual;      // y: null where only codes are stored. residual: null without one
  int64_t inner = 1;             // rows that follow each other at inner_stride, of all three
  void const* weight = nullptr;  // [width], or null: ones
  void const* bias = nullptr;    // [width], or null: zeros
  float eps = 0.0f, weight_offset = 0.0f;
  Activation activation = Activation::kNone;
  float sigmoid_slope = 1.0f;  // of silu
  float gate_max = __builtin_inff(), up_max = __builtin_inff(),
        up_shift = 0;  // gate = min(gate, gate_max), up = clamp(up, +-up_max) + up_shift
  GateLayout gate_layout = GateLayout::kHalves;
  bool logarithm = false;        // of a softmax
  void* q = nullptr;             // [rows, width] codes, contiguous
  float const* scale = nullptr;  // fp8_tensor: one
  float* scales = nullptr;       // [rows]; fp8_block128: [blocks][scales_stride]
  int64_t scales_stride = 0;
};

/// How a row's elements lie in threads. Of an operator that takes whole rows, vector j (8 elements) of thread t of the CTA with rank c
/// is the row's vector (j * cluster + c) * threads + t. Of another one, vector j of thread t of part p is number (p * vectors + j) *
/// threads + t, with the kernel's `vectors`.
struct RowLaunch {
  int32_t threads = 0;       // of a row: 1, 2, 4, .. 32, or a multiple of 32 up to kMaxRowThreads
  int32_t rows_per_cta = 1;  // more than one: whole rows of up to 32 threads, elements of a power of two
  int32_t cluster = 1;       // whole rows: CTAs that share a row, 1, 2, 4, 8
  int32_t parts = 1;         // else: groups of threads that share a row
  int32_t groups = 0;        // of a kernel with a ring: CTAs, or clusters, that share the rows out
};
constexpr int32_t kMaxRowThreads = 512;

struct RowPlan {
  KernelInfo const* kernel = nullptr;
  RowLaunch launch;
};

/// Of a launch: which kernel, and what is not zero of `launch`.
struct RowOverride {
  KernelInfo const* kernel = nullptr;
  RowLaunch launch{0, 0, 0, 0};
};

Status plan_rows(RowProblem const& problem, DeviceProperties const& device, RowOverride const* forced, RowPlan* plan);
Status run_rows(RowPlan const& plan, RowProblem const& problem, RowOperands const& operands, bool programmatic, Stream stream);

// ---- Rotary embedding --------------------------------------------------------------------------------------------------------------

/// Rotates, in place, the first rotary_dim elements of each head of q and of k: pairs (x_i, x_j) become (x_i cos - x_j sin, x_j cos + x_i
/// sin), with j = i + rotary_dim / 2, or interleaved i even and j = i + 1. In fp32, rounded once.
struct Rope {
  DataType type = DataType::kBF16;
  struct Heads {
    void* data = nullptr;  // [tokens, heads, head_dim]
    int64_t heads = 0, token_stride = 0, head_stride = 0;
  };
  Heads q, k;  // k: 0 heads without one
  int64_t tokens = 0;
  int64_t rotary_dim = 0;           // even
  float const* cos_sin = nullptr;   // [length, rotary_dim]: rotary_dim / 2 cosines, then as many sines; contiguous
  int64_t length = 0;               // positions outside of 0..length - 1 read zeros
  void const* positions = nullptr;  // [tokens]
  bool positions_64bit = true;
  bool interleaved = false;
};
Status rotate(Rope const& rope, DeviceProperties const& device, bool programmatic, Stream stream);

// ---- Embedding ---------------------------------------------------------------------------------------------------------------------

/// out[i] = weight[ids[i]] * scale, rounded once; zeros where there is no such row.
struct Embedding {
  DataType type = DataType::kBF16;  // 16-bit or float32
  void const* ids = nullptr;        // [count], contiguous
  bool ids_64bit = true;
  int64_t count = 0;
  void const* weight = nullptr;  // [vocabulary, width], rows contiguous
  int64_t vocabulary = 0, width = 0, weight_stride = 0;
  bool scaled = false;
  float scale = 1.0f;
  void* out = nullptr;  // [count, width], rows contiguous
  int64_t out_stride = 0;
};
Status embed(Embedding const& embedding, bool programmatic, Stream stream);

// ---- Dequantisation ----------------------------------------------------------------------------------------------------------------

/// y = q * scale, in fp32, rounded once: the inverse of kQuantize.
struct Dequantize {
  RowQuant quant = RowQuant::kFp8Token;
  DataType type = DataType::kBF16;  // of y: 16-bit or float32
  int64_t rows = 0, width = 0;
  void const* q = nullptr;  // [rows, width], contiguous
  float const* scales =
      nullptr;  // fp8_tensor: one; [rows]; fp8_block128: block b of row r at r * scales_row_stride + b * scales_block_stride
  int64_t scales_row_stride = 0, scales_block_stride = 0;
  void* y = nullptr;  // [rows, width], contiguous
};
Status dequantize(Dequantize const& dequantize, bool programmatic, Stream stream);

// ---- Hadamard transform ------------------------------------------------------------------------------------------------------------

/// Each block of a row becomes H block / sqrt(its size), in fp32, rounded once. Of a power of two H is Sylvester's, of 12, 20 and 28
/// Paley's, of the product of one of these with a power of two their Kronecker product. transpose: H^T, which is the inverse.
struct Hadamard {
  DataType type = DataType::kBF16;  // 16-bit or float32
  RowTensor x, y;                   // y may be x
  int64_t inner = 1;                // rows that follow each other at inner_stride, of both
  int64_t rows = 0, width = 0;
  int64_t block = 0;  // elements, a divisor of width
  bool transpose = false;
};

/// block = outer * 2^bits.
struct HadamardShape {
  int outer = 1, bits = 0;
};
constexpr int64_t kMostHadamardBlock = 32768;
/// False for blocks that are no power of two, nor 12, 20 or 28 times one, or above kMostHadamardBlock.
inline bool find_hadamard_shape(int64_t block, HadamardShape* shape) {
  if (block < 1 || block > kMostHadamardBlock) return false;
  int64_t odd = block;
  int bits = 0;
  while (odd % 2 == 0) odd /= 2, ++bits;
  if (odd == 1) {
    *shape = {1, bits};
    return true;
  }
  *shape = {int(4 * odd), bits - 2};
  return bits >= 2 && (odd == 3 || odd == 5 || odd == 7);
}
Status transform(Hadamard const& hadamard, DeviceProperties const& device, bool programmatic, Stream stream);

}  // namespace minfer
