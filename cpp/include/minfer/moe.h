// Grouped GEMM: rows that are sorted by expert, each expert with a weight of its own. Only the device knows how many rows an expert has.
//
//   d[r] = row_scale[r] * activation(a[source(r)] . b[e]^T + bias[e])             for the rows r of expert e
//   d[r] = row_scale[r] * (activation(gate) * up)                                 gated
//
// b[e] is 16-bit, or has quantised weights, alpha[e] * (code - zero) * scale, in the packed layout of the W4A16 operators (w4a16.h). Or a
// and b are both of 8 bits, e4m3 or int8, times their scales.
//
//   GroupedProblem   what is computed: sizes, types, what alignments allow (no pointers)
//   plan_grouped     pure: problem x device x options -> GroupedPlan
//   run_grouped      launches a plan on a stream; allocates nothing, synchronises nothing
#pragma once

#include "minfer/gemm.h"
#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

/// Most experts of one launch.
constexpr int kMaxGroupedExperts = 512;

struct GroupedProblem {
  int64_t rows = 0;  // of d; masked: experts * max_rows
  int64_t experts = 0;
  int64_t n = 0, k = 0;  // n counts the weight's rows, so a gated d has n / 2 columns
  DataType type = DataType::kF16;
  bool gated = false, gathered = false;
  bool d_fp8 = false;  // d holds e4m3 codes of values / d_scale, a byte each, as in GemmProblem
  // Operands of 8 bits, whose d and bias have a type of their own.
  DataType d_type = DataType::kBF16;  // f16 or bf16
  int32_t a_group = 0;                // k of a scale of a row: 128, 64 or 32; 0: all of k
  bool b_blocks = false;              // e4m3: the weight has scales of blocks of 128 x 128
  bool fast_accum = false;            // e4m3: sums without other scales are left to the tensor core; else fp32 sums of 128 of k each
  bool d_groups = false;  // gated: d holds codes of `type`, with a scale for each group of columns of a row: d_group_of(kernel) of them
  int64_t max_rows = 0;   // > 0, masked: expert e's rows are the first counts[e] of max_rows
  int32_t a_alignment = 16, b_alignment = 16,
          d_alignment = 16;  // largest power of two (at most 16) that divides pointer and strides, in bytes
  WeightFormat b_format = WeightFormat::kDense;
  int64_t group_size = 0;  // quantised: columns of k that share a scale; 0: all of k
  bool has_zeros = false;
  // Only kernels that add up an element of d as those for any other number of rows do: which one follows from the weight and the types.
  bool batch_invariant = false;

  /// Whether all members are equal, so that a plan of one is a plan of the other.
  bool operator==(GroupedProblem const& other) const;
};

/// Strides are in elements.
struct GroupedOperands {
  void const* a = nullptr;  // [a_rows, k]
  int64_t lda = 0, a_rows = 0;
  void const* b = nullptr;               // [experts, n, k], k contiguous; quantised: [experts, ceil(n / 64), ceil(k / 64), block]
  int64_t ldb = 0, b_expert_stride = 0;  // of 16-bit weights
  // Quantised: [experts, groups of k, n], of a's type, mxfp4 and nvfp4: bytes. zeros: of a's type, or null; their rows follow each other.
  void const *b_scales = nullptr, *b_zeros = nullptr;
  int64_t ld_scales = 0;             // from a row of scales to the next one, also from an expert's last; a multiple of 16 bytes
  float const* alpha = nullptr;      // quantised: [experts], or null
  int32_t const* offsets = nullptr;  // [experts]: where each expert's rows end; masked: how many it has
  int32_t const* gather = nullptr;   // [rows]: the row of a that is multiplied, or null
  float const* row_scale = nullptr;  // [rows], or null
  void const* bias = nullptr;        // [experts, n] of a's type, in the order of the weight's rows, or null
  int64_t bias_stride = 0;
  // 8 bits. a_scale: of rows of a, gathered or not; masked, those of an expert's begin a_scale_expert_stride behind the last one's.
  // b_scale: of an expert's rows of the weight, or of blocks as in GemmProblem, but those of gates and ups (up_offset) in any gate layout.
  OperandScales a_scale, b_scale;
  int64_t a_scale_expert_stride = 0, b_scale_expert_stride = 0;
  bool bias_f32 = false;      // bias is float32; else of d's 16-bit type
  float* d_scales = nullptr;  // d_groups: [rows, groups]
  int64_t d_scales_stride = 0;
  void* d = nullptr;  // [rows, n or n / 2]
  int64_t ldd = 0;
  float const* d_scale = nullptr;  // d_fp8: one number, on the device
  Activation activation = Activation::kNone;
  float silu_scale = 1.0f;  // silu(x) = x * sigmoid(silu_scale * x)
  // Gated: gate = min(gate, gate_max), up = clamp(up, -up_max, up_max) + up_shift; infinities and 0 leave them alone.
  float gate_max = 0.0f, up_max = 0.0f, up_shift = 0.0f;
  GateLayout gate_layout = GateLayout::kHalves;
};

struct GroupedPlan {
  KernelInfo const* kernel = nullptr;
  double predicted_us = 0, floor_us = 0;  // for rows that are spread evenly over the experts
  // Whether rows are gathered into the workspace before, by a launch of its own, and not by the loader: the loader's copies keep up with
  // the weights' bytes, not with the tensor cores.
  bool gather_first = false;
  size_t workspace_bytes = 0;  // any content; 256-byte aligned
  PlanSource source = PlanSource::kAnalytic;
  char reason[200] = {0};
};

/// Columns of d that share a scale where the kernel finds it (GroupedProblem::d_groups): 32 or 64.
int32_t d_group_of(KernelInfo const& kernel);

struct GroupedPlanOptions {
  char const* kernel = nullptr;  // force this kernel by name
  bool gather_first = false;     // with a forced kernel: rows are gathered by a launch of its own, which must be possible
  bool only_runnable = true;     // false: also kernels that are not in this build
  int32_t force_arch = 0;        // 80: portable kernels only
};

/// Chooses the kernel: the explicit one, else the one that is predicted to lose least, whether the rows are spread evenly over the experts,
/// by their popularity or all over a few. Gated quantised weights have GateLayout::kBlocks.
/// @return kInvalidArgument (sizes, types), kUnknownKernel, kNotCompiled, kNotSupported.
Status plan_grouped(GroupedProblem const& problem, DeviceProperties const& device, GroupedPlanOptions const& options, GroupedPlan* plan);

/// Launches the plan on `stream`; `workspace` holds plan.workspace_bytes bytes. Rows of d behind the last offset are set to zero or to its
/// code; masked: rows behind an expert's count are left alone.
Status run_grouped(GroupedPlan const& plan, GroupedProblem const& problem, GroupedOperands const& operands, DeviceProperties const& device,
                   void* workspace, size_t workspace_bytes, Stream stream);

}  // namespace minfer
