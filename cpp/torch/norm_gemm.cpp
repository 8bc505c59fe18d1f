// RMS norm and dense GEMM on CUDA tensors: one launch or two, as plan_norm_gemm decides. The checks are those of
// python/minfer/checks/norm_gemm.py, in the same order.
#include "minfer/norm_gemm.h"

#include <cstring>

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/json.h"
#include "core/operators.h"
#include "core/parse.h"
#include "core/torch_calls.h"
#include "fused.h"
#include "gemm.h"
#include "gemm_planning.h"
#include "row_tensors.h"

namespace minfer::torch_binding {

namespace {

using OptionalTensor = std::optional<Tensor>;
using OptionalText = std::optional<std::string>;

/// The `kernel=` that forces two launches with the GEMM that is planned, and the one that forces one launch of the kernel that is.
constexpr char const *kTwoLaunches = "two_launches", *kOneLaunch = "one_launch";

/// What a call's `kernel` asks for: a kernel of norm_gemm or one launch, or two launches with a GEMM's override or with none.
struct Request {
  Launches launches = Launches::kAny;
  std::string kernel;  // of norm_gemm
  OptionalText gemm;
};

Request parse_request(char const* op, OptionalText const& kernel) {
  Request request;
  if (!kernel) return request;
  KernelInfo const* const info = find_kernel(kernel->c_str());
  if (*kernel == kTwoLaunches || *kernel == kOneLaunch) {
    request.launches = *kernel == kTwoLaunches ? Launches::kTwo : Launches::kOne;
  } else if (info != nullptr && std::strcmp(info->family, "norm_gemm") == 0) {
    request.kernel = *kernel;
  } else {
    KernelInfo const* const gemm = find_kernel(parse_override(op, *kernel).name.c_str());
    if (gemm == nullptr || std::strcmp(gemm->family, "gemm") != 0) {
      fail(op, ": kernel must be one_launch, two_launches, or a kernel of norm_gemm or gemm, got '", *kernel, "'");
    }
    request.launches = Launches::kTwo;
    request.gemm = kernel;
  }
  return request;
}

struct Call {
  Norm norm;
  Tensor const& b;
  OptionalTensor const& bias;
  Activation activation;
  bool gated, constant_weights;
  Request request;

  char const* op() const { return norm.op; }
  int64_t n() const { return b.size(1); }
  int64_t columns() const { return gated ? n() / 2 : n(); }
};

Call check_call(char const* op, Tensor const& x, OptionalTensor const& norm_weight, Tensor const& b, double eps,
                OptionalTensor const& residual, double weight_offset, OptionalTensor const& bias, std::string const& activation, bool gated,
                bool constant_weights, OptionalText const& kernel) {
  Call call{check_norm(op, x, norm_weight, eps, weight_offset, residual), b, bias, Activation::kNone, gated, constant_weights, {}};
  int64_t const k = call.norm.width();
  if (b.dim() != 2) fail(op, ": b must be [k, n], got b ", b);
  if (b.scalar_type() != x.scalar_type()) fail(op, ": b must have x's dtype ", x.scalar_type(), ", got ", b.scalar_type());
  check_same_device(op, "b", b, {"x", x});
  if (b.size(0) != k) fail(op, ": b must have k = ", k, " rows to match x ", x, ", got b ", b);
  if (gated && b.size(1) % 16 != 0) {
    fail(op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ", b);
  }
  if (bias) check_bias(op, *bias, call.n(), {"x", x});
  call.activation = parse_activation(op, activation);
  call.request = parse_request(op, kernel);
  check_apart_from_residual(call.norm, "b", b);
  check_apart_from_residual(call.norm, "bias", bias);
  return call;
}

/// Whether all rows begin at multiples of 16 bytes.
bool has_vector_rows(RowTensor const& rows, int64_t element_bytes) {
  return address_of(rows.data) % 16 == 0 && rows.outer_stride * element_bytes % 16 == 0;
}

/// A call as plan_norm_gemm and its kernels take it. The walk keeps x and the residual, or copies of them, which it stores back.
struct OneLaunch {
  RowWalk walk;
  Tensor weight, bias;
  NormGemmProblem problem;
  NormGemmOperands operands;

  explicit OneLaunch(Call const& call) : walk(call.op(), "x", call.norm.x) {
    Norm const& norm = call.norm;
    int64_t const bytes = norm.x.element_size();
    problem.type = data_type(norm.x.scalar_type());
    problem.m = norm.rows();
    problem.n = call.n();
    problem.k = norm.width();
    problem.gated = call.gated;
    problem.has_residual = norm.residual.has_value();
    problem.b_is_constant = call.constant_weights;
    problem.batch_invariant = batch_invariant();
    RowTensor residual;
    if (norm.residual) residual = walk.write("residual", *norm.residual, true);
    RowTensor const x = walk.x();
    if (norm.weight) weight = contiguous(call.op(), "norm_weight", *norm.weight);
    Tensor const& b = call.b;
    bool const one_column = problem.n == 1;
    int64_t const ldb = one_column ? problem.k : b.stride(1);
    problem.b_major = b.stride(0) == 1 && (one_column || ldb >= problem.k) ? Major::kK : Major::kMN;
    problem.even_rows = walk.inner() == 1;
    problem.vectors = has_vector_rows(x, bytes) && has_vector_rows(residual, bytes) && address_of(b.data_ptr()) % 16 == 0 &&
                      (one_column || ldb * bytes % 16 == 0) && (!norm.weight || weight.is_aligned(16));
    operands.x = x.data;
    operands.ldx = x.outer_stride;
    operands.residual = residual.data;
    operands.ld_residual = residual.outer_stride;
    operands.norm_weight = norm.weight ? weight.data_ptr() : nullptr;
    operands.eps = norm.eps;
    operands.weight_offset = norm.weight_offset;
    operands.b = b.data_ptr();
    operands.ldb = ldb;
    operands.activation = call.activation;
    if (call.bias) {
      bias = contiguous(call.op(), "bias", *call.bias);
      operands.bias = bias.data_ptr();
      operands.bias_type = data_type(bias.scalar_type());
    }
  }
};

/// Whether any kernel could be chosen: what a call of many tokens need not be described for.
bool may_be_one_launch(Call const& call) {
  constexpr int64_t kMostTokens = 16;
  if (call.request.launches == Launches::kOne || !call.request.kernel.empty()) return true;
  return call.request.launches == Launches::kAny && call.norm.rows() <= kMostTokens;
}

/// False where the plan has two launches.
bool run_in_one_launch(Call const& call, Tensor const& out, OnDevice const& on) {
  char const* op = call.op();
  OneLaunch one(call);
  NormGemmPlanOptions options;
  options.launches = call.request.launches;
  if (!call.request.kernel.empty()) options.kernel = call.request.kernel.c_str();
  NormGemmPlan plan;
  if (Status const status = plan_norm_gemm(one.problem, on.properties(), options, &plan); !status.ok()) {
    fail(op, ": x ", call.norm.x, ", b ", call.b, ": ", status.message);
  }
  if (plan.kernel == nullptr) return false;
  Workspace const workspace(op, out, plan.workspace_bytes, plan.kernel->name, " on x ", call.norm.x);
  one.operands.d = out.data_ptr();
  one.operands.ldd = call.columns();
  Status const status =
      run_norm_gemm(plan, one.problem, one.operands, on.properties(), workspace.data(), workspace.bytes(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": ", plan.kernel->name, " on x ", call.norm.x, ", b ", call.b, ": ", status.message);
  one.walk.store();
  return true;
}

void run_in_two_launches(Call const& call, Tensor const& out, OnDevice const& on) {
  Norm const& norm = call.norm;
  Tensor const a = allocate(call.op(), norm.x, {norm.rows(), norm.width()}, norm.x.scalar_type(), "the norm of x ", norm.x);
  multiply({call.op(), a, call.b, call.bias, call.activation, call.gated, call.constant_weights, call.request.gemm}, out, on,
           [&] { normalize(norm, a, on); });
}

Tensor run(Call const& call) {
  Tensor const& x = call.norm.x;
  OnDevice const on(call.op(), x);
  ShapeArray shape(x.sizes());
  shape.back() = call.columns();
  Tensor const out = allocate(call.op(), x, shape, x.scalar_type(), "the output of x ", x, " and b ", call.b);
  if (!may_be_one_launch(call) || !run_in_one_launch(call, out, on)) run_in_two_launches(call, out, on);
  return out;
}

Tensor rms_norm_gemm(Tensor const& x, OptionalTensor const& norm_weight, Tensor const& b, double eps, OptionalTensor const& residual,
                     double weight_offset, OptionalTensor const& bias, std::string const& activation, bool constant_weights,
                     OptionalText const& kernel) {
  return run(check_call("minfer::rms_norm_gemm", x, norm_weight, b, eps, residual, weight_offset, bias, activation, false, constant_weights,
                        kernel));
}

Tensor rms_norm_gemm_gated(Tensor const& x, OptionalTensor const& norm_weight, Tensor const& b, double eps, OptionalTensor const& residual,
                           double weight_offset, OptionalTensor const& bias, std::string const& activation, bool constant_weights,
                           OptionalText const& kernel) {
  return run(check_call("minfer::rms_norm_gemm_gated", x, norm_weight, b, eps, residual, weight_offset, bias, activation, true,
                        constant_weights, kernel));
}

constexpr Operator kOperators[] = {
    // D = activation(rms_norm(x).B + bias), with a residual of residual += x
    {"rms_norm_gemm(Tensor x, Tensor? norm_weight, Tensor b, float eps=1e-06, *, Tensor(a!)? residual=None, float weight_offset=0.0, "
     "Tensor? bias=None, str activation='none', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm>},
    {"rms_norm_gemm_gated(Tensor x, Tensor? norm_weight, Tensor b, float eps=1e-06, *, Tensor(a!)? residual=None, "
     "float weight_offset=0.0, Tensor? bias=None, str activation='silu', bool constant_weights=False, str? kernel=None) -> Tensor",
     boxed<&rms_norm_gemm_gated>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }

/// What a call would do, for `minfer.plan`; contiguous operands. ctas 0: two launches.
std::string plan_json(std::vector<int64_t> const& sizes, std::string const& type, bool gated, bool residual, bool constant_weights,
                      OptionalText const& kernel, bool only_runnable, int64_t device) {
  char const* op = "minfer::_plan_norm_gemm";
  if (sizes.size() != 3) fail(op, ": sizes must be [m, n, k], got ", sizes.size(), " values");
  NormGemmProblem problem;
  problem.type = parse_16bit_type(op, type);
  problem.m = sizes[0];
  problem.n = sizes[1];
  problem.k = sizes[2];
  problem.vectors = problem.k % 8 == 0;
  problem.gated = gated;
  problem.has_residual = residual;
  problem.b_is_constant = constant_weights;
  problem.batch_invariant = batch_invariant();
  Request const request = parse_request(op, kernel);
  NormGemmPlanOptions options;
  options.launches = request.launches;
  if (!request.kernel.empty()) options.kernel = request.kernel.c_str();
  options.only_runnable = only_runnable;
  NormGemmPlan plan;
  Status const status = plan_norm_gemm(problem, device_properties(op, device), options, &plan);
  if (!status.ok()) fail(op, ": ", status.message);
  Json json;
  json.open('{').key("launches").value(int64_t(plan.kernel != nullptr ? 1 : 2));
  json.key("kernel").value(plan.kernel != nullptr ? plan.kernel->name : "");
  json.key("ctas").value(int64_t(plan.ctas)).key("smem_bytes").value(int64_t(plan.smem_bytes));
  json.key("workspace_bytes").value(int64_t(plan.workspace_bytes)).key("source").value(name_of(plan.source));
  json.key("reason").value(plan.reason).close('}');
  return json.text();
}

constexpr Operator kPlans[] = {
    {"_plan_norm_gemm(int[] sizes, str type, bool gated, bool residual, bool constant_weights, str? kernel, bool only_runnable, "
     "int device) -> str",
     boxed<&plan_json>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kPlans); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kPlans); }

}  // namespace

}  // namespace minfer::torch_binding
