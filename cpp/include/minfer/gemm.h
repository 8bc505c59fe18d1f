// Dense GEMM: D = activation(alpha * A.B + beta * C + bias), 16-bit operands, fp32 accumulation. D is stored in 16 bits, as float32, or as
// the codes of RowQuant::kFp8Tensor (fused.h), whose scale is given: all the others need more of a row than a tile has.
//
//   GemmProblem  what is computed: sizes, types, majors, alignments (no pointers)
//   plan_gemm    pure: problem x device x options -> GemmPlan (kernel, launch configuration, workspace)
//   run_gemm     launches a plan on a stream; allocates nothing, synchronises nothing
#pragma once

#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// What is computed. Strides are not part of it, only what they allow: `*_alignment` is the largest power of two
/// (at most 16) in bytes that divides the operand's pointer and each of its strides. TMA needs 16.
struct GemmProblem {
  int64_t m = 0, n = 0, k = 0, batch = 1;  // n counts B's columns, so a gated D has n / 2
  DataType ab_type = DataType::kF16;       // A, and B where it is not quantised
  DataType d_type = DataType::kF16;        // ab_type or kF32
  bool d_fp8 = false;                      // D holds e4m3 codes of values / d_scale, a byte each, whatever d_type is
  // Operands of 8 bits, e4m3 or s8: d_type is kF16, kBF16 or kF32, and c and bias are of it or float32 (of a D of kF32 or codes: or bf16).
  bool block_scaled = false;  // scales of 128 of k (OperandScales::blocks)
  bool fast_accum = false;    // e4m3: the tensor core adds up all of k; else fp32 sums of 128 of k each
  bool d_int32 = false;       // s8: D holds the sums themselves, int32
  Major a_major = Major::kK;
  Major b_major = Major::kK;  // kK: b is [k, n] with stride 1 along k, as in weight.t()
  int32_t a_alignment = 16, b_alignment = 16, d_alignment = 16;
  bool has_c = false;                            // beta != 0 and C present
  int32_t c_alignment = 16;                      // 16 and c a full [m, n] row-major tensor of D's type: TMA reads it; else 0
  bool gated = false;                            // D = act(gate) * up over 8-column blocks of B (pack_gate_up)
  WeightFormat b_format = WeightFormat::kDense;  // the fields below are of the other formats
  int32_t group_size = 0;                        // k of a scale; 0: all of k
  bool has_zeros = false;
  // Only launches that add up an element of D in an order which follows from n, k and the types: m, batch, the device's SMs and tuned rows
  // have no say in it.
  bool batch_invariant = false;

  /// Whether all members are equal, so that a plan of one is a plan of the other.
  bool operator==(GemmProblem const& other) const;
};

/// Scales of an operand of 8 bits, whose numbers are multiplied by them. A stride of 0 is that of one scale for all.
struct OperandScales {
  void const* data = nullptr;  // null: none
  int64_t row_stride = 0;      // of A's rows, or B's columns; of B's blocks, of 128 columns
  int64_t k_stride = 0;        // of blocks, of 128 of k
  bool blocks = false;         // whether there is one for each 128 of k; else float32
  bool exponents = false;      // blocks: bytes that are powers of two, e8m0; else float32
  bool halves = false;         // blocks of a gated B: gates and ups have their own, each of 128 columns of its half
  int64_t up_offset = 0;       // halves: from the scales of the gates to those of the ups
};

/// Where it is. Leading dimensions and strides are in elements. B is described as [n, k].
struct GemmOperands {
  void const* a = nullptr;
  int64_t lda = 0, a_batch_stride = 0;  // stride of A's non-contiguous mode
  void const* b = nullptr;
  int64_t ldb = 0, b_batch_stride = 0;
  OperandScales a_scale, b_scale;   // operands of 8 bits
  int32_t const* a_zero = nullptr;  // s8: zero points of A's rows, or null: 0; then also the sums of B's columns
  int64_t a_zero_stride = 0;        // 0: one for all rows
  int32_t const* b_sums = nullptr;
  void const* b_scales = nullptr;            // quantised B: [k / group_size, n], leading dimension ld_scales; b is packed then
  DataType b_scales_type = DataType::kBF16;  // beside an A of 8 bits: kF16 or kBF16; else the 16-bit scales are of A's type
  void const* b_zeros = nullptr;             // likewise, or null: 8
  int64_t ld_scales = 0, ld_zeros = 0;
  bool b_is_constant = false;  // nothing that still runs writes b, or b_scales or b_zeros, so they may be read before the launch's turn
  void const* c = nullptr;     // may be broadcast: a stride of 0 repeats the row, the column or both
  DataType c_type = DataType::kF16;
  int64_t c_stride_m = 0, c_stride_n = 0, c_batch_stride = 0;
  void const* bias = nullptr;  // [n], elements of bias_type
  DataType bias_type = DataType::kF16;
  void* d = nullptr;  // [batch, m, n] row-major (gated: n / 2), leading dimension ldd
  int64_t ldd = 0, d_batch_stride = 0;
  float const* d_scale = nullptr;  // d_fp8: one number, on the device
  float alpha = 1.0f, beta = 0.0f;
  Activation activation = Activation::kNone;
};

enum class Decomposition : int32_t {
  kDataParallel = 0,  // persistent CTAs walk whole output tiles
  kStreamK = 1,       // the k-iterations of the last waves are shared out evenly; ordered fp32 fix-up
  kSplitK = 2,        // each output tile is cut in `splits` equal k-ranges; ordered fp32 fix-up
  kRanges = 3,        // the same ranges, sums and bits, by one CTA: sm_90 kernels whose warpgroups share a tile
};
inline char const* name_of(Decomposition d) {
  return d == Decomposition::kDataParallel ? "persistent"
         : d == Decomposition::kStreamK    ? "stream_k"
         : d == Decomposition::kSplitK     ? "split_k"
                                           : "ranges";
}

/// Run-time knobs: they cost no instantiation.
struct GemmLaunch {
  Decomposition decomposition = Decomposition::kDataParallel;
  int32_t splits = 1;            // of each output tile, with kSplitK or kRanges
  int32_t max_swizzle_size = 1;  // tiles walked side by side before the raster advances (1 to 16)
  RasterOrder raster_order = RasterOrder::kAlongM;
  int32_t columns = 0;  // of a tile: a multiple of the kernel's column_step up to its tile_n; 0: tile_n
  // A, B are copied first, by one launch in front of the kernel's, into K-major rows in the workspace that TMA addresses. Whatever majors
  // and alignments the problem has, the kernel computes one in which they are K-major with an alignment of 16. Dense operands only.
  bool realign_a = false, realign_b = false;

  /// Whether all members are equal.
  bool operator==(GemmLaunch const& other) const;
};

enum class PlanSource : int32_t { kOverride = 0, kTuned = 1, kAnalytic = 2 };
inline char const* name_of(PlanSource s) {
  return s == PlanSource::kOverride ? "override" : s == PlanSource::kTuned ? "tuned" : "analytic";
}

struct GemmPlan {
  KernelInfo const* kernel = nullptr;
  GemmLaunch launch;
  size_t workspace_bytes = 0;  // need not be initialised; 256-byte aligned
  double predicted_us = 0;     // of the analytic model, or the tuned row's measurement
  double floor_us = 0;         // max(bytes / read bandwidth, flops / matrix rate)
  PlanSource source = PlanSource::kAnalytic;
  char reason[200] = {0};
};

/// One measured row: this problem runs fastest so. Rows of `cpp/configs/tuned/<device>.csv` and of users' own tables.
struct GemmTunedRow {
  int64_t m, n, k, batch;
  DataType ab_type;
  Major a_major, b_major;
  WeightFormat b_format = WeightFormat::kDense;
  int32_t group_size = 0;  // of quantised B, as in GemmProblem
  bool has_zeros = false;
  bool has_c, gated;
  char const* kernel;  // registry name
  GemmLaunch launch;   // without realign_a and realign_b, which follow from the kernel and the problem
  float us;
};

struct GemmModel;  // constants of the analytic model, gemm/cost_model.h

struct GemmPlanOptions {
  char const* kernel = nullptr;        // force this kernel by name; its launch configuration is still chosen unless `launch` is set
  GemmLaunch const* launch = nullptr;  // with `kernel`: force its launch configuration too
  bool use_tuned = true;
  bool only_runnable = true;                // false: also kernels that are not in this build (plans read without a GPU)
  int32_t force_arch = 0;                   // 80: portable kernels only (MINFER_FORCE_ARCH)
  GemmTunedRow const* user_rows = nullptr;  // consulted before the table that ships
  int64_t user_row_count = 0;
  GemmModel const* model = nullptr;  // instead of the one that ships for the device
};

/// Chooses kernel and launch: the explicit one, else a tuned row, else the analytic model. Pure and thread-safe.
/// @return kInvalidArgument (sizes, types), kUnknownKernel (nearest names in the message), kNotCompiled, kNotSupported.
Status plan_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plan);

/// Every legal (kernel, launch) for the problem with its predicted time, best first; for the tuner.
/// Writes at most `capacity` plans and returns how many there are in `count`.
Status enumerate_gemm(GemmProblem const& problem, DeviceProperties const& device, GemmPlanOptions const& options, GemmPlan* plans,
                      int64_t capacity, int64_t* count);

/// Bytes of an element of D.
inline int64_t d_element_bytes(GemmProblem const& problem) { return problem.d_fp8 ? 1 : problem.d_int32 ? 4 : size_of(problem.d_type); }

/// Whether A is of 8 bits, and B, unless its weights are quantised.
inline bool has_8_bits(GemmProblem const& problem) { return problem.ab_type == DataType::kE4M3 || problem.ab_type == DataType::kS8; }

/// Whether the time of its launches follows from the model of dense GEMM: also that of quantised weights beside an A of 8 bits.
inline bool has_dense_model(GemmProblem const& problem) { return problem.b_format == WeightFormat::kDense || has_8_bits(problem); }

/// Bytes that a launch must move: A, B as it is stored (packed codes, scales and zero points), C where it is read, and D.
double gemm_bytes(GemmProblem const& problem);

/// Time that no implementation beats on this device: max(bytes / read_bandwidth, flops / matrix_rate), in us.
double gemm_floor_us(GemmProblem const& problem, DeviceProperties const& device);

/// Launches the plan on `stream`. `workspace` holds plan.workspace_bytes bytes, 256-byte aligned, any content.
Status run_gemm(GemmPlan const& plan, GemmProblem const& problem, GemmOperands const& operands, DeviceProperties const& device,
                void* workspace, size_t workspace_bytes, Stream stream);

/// The tuned rows that ship for `device_name` (as in DeviceProperties::name); count 0 when there is no table.
GemmTunedRow const* shipped_gemm_rows(char const* device_name, int64_t* count);

}  // namespace minfer
