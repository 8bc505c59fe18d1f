// RMS norm and the dense GEMM behind it in one launch, for few tokens: D = activation(rms_norm(x) . B + bias).
//
//   NormGemmProblem  what is computed: sizes, type, and what alignments and strides allow (no pointers)
//   plan_norm_gemm   pure: problem x device x options -> NormGemmPlan: a kernel for one launch, or none, which says that the row kernel of
//                    the norm (fused.h) and a GEMM (gemm.h) are two launches
//   run_norm_gemm    launches a plan that has a kernel; allocates nothing, synchronises nothing
#pragma once

#include "minfer/gemm.h"
#include "minfer/registry.h"
#include "minfer/status.h"
#include "minfer/types.h"

namespace minfer {

struct NormGemmProblem {
  DataType type = DataType::kBF16;  // of x, the residual, the norm's weight, B and D: 16-bit
  int64_t m = 0, n = 0, k = 0;      // n counts B's columns, so a gated D has n / 2
  Major b_major = Major::kK;        // kK: b is [k, n] with stride 1 along k, as in weight.t()
  bool vectors = true;              // x, the residual, the norm's weight and B begin at multiples of 16 bytes, and so do all their rows
  bool even_rows = true;            // rows of x are evenly spaced, and so are those of the residual
  bool gated = false;               // D = act(gate) * up over 8-column blocks of B (pack_gate_up)
  bool has_residual = false;        // residual += x, rounded, and the norm is of the sum
  bool b_is_constant = false;       // no launch that is still running writes B
  bool batch_invariant = false;     // two launches, since one is of few rows alone and adds up k in an order of its own
};

struct NormGemmOperands {
  void const* x = nullptr;
  int64_t ldx = 0;  // in elements, as all leading dimensions
  void* residual = nullptr;
  int64_t ld_residual = 0;
  void const* norm_weight = nullptr;  // [k], or null: ones, without an offset
  float eps = 0.0f, weight_offset = 0.0f;
  void const* b = nullptr;  // [n, k]
  int64_t ldb = 0;
  void const* bias = nullptr;  // [n], or null
  DataType bias_type = DataType::kBF16;
  Activation activation = Activation::kNone;
  void* d = nullptr;  // [m, n], row-major (gated: n / 2)
  int64_t ldd = 0;
};

enum class Launches : int32_t { kAny = 0, kOne = 1, kTwo = 2 };

struct NormGemmPlan {
  KernelInfo const* kernel = nullptr;  // null: two launches
  int32_t ctas = 0;
  int32_t smem_bytes = 0;      // of a CTA
  size_t workspace_bytes = 0;  // need not be initialised; 8-byte aligned
  PlanSource source = PlanSource::kAnalytic;
  char reason[200] = {0};
};

struct NormGemmPlanOptions {
  char const* kernel = nullptr;        // force this kernel by name
  Launches launches = Launches::kAny;  // kTwo: no kernel; kOne: the best kernel, whether or not two launches are expected to be faster
  bool only_runnable = true;           // false: also kernels that are not in this build (plans read without a GPU)
};

/// Chooses between one launch and two, and the kernel of one. Pure and thread-safe.
/// @return kInvalidArgument (sizes, types, or one launch is forced and no kernel, or not the one by name, computes the problem),
/// kUnknownKernel, kNotCompiled.
Status plan_norm_gemm(NormGemmProblem const& problem, DeviceProperties const& device, NormGemmPlanOptions const& options,
                      NormGemmPlan* plan);

/// Launches a plan with a kernel. `workspace` holds plan.workspace_bytes bytes of any content, and belongs to this launch alone.
/// programmatic: launched with programmatic stream serialization (compute capability 9.0 on).
Status run_norm_gemm(NormGemmPlan const& plan, NormGemmProblem const& problem, NormGemmOperands const& operands,
                     DeviceProperties const& device, void* workspace, size_t workspace_bytes, bool programmatic, Stream stream);

}  // namespace minfer
