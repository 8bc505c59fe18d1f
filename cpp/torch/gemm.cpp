// torch.ops.minfer.gemm, gemm.out and gemm_gated on CUDA tensors: check, describe, plan, allocate, run.
#include "gemm.h"

#include <array>
#include <cmath>

#include "bindings.h"
#include "core/checks.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

namespace {

/// One operand as the kernels see it: [batch, rows, columns] with one unit stride among rows and columns.
struct Matrix {
  Tensor tensor;  // keeps the memory; the operand itself or a copy of it
  bool transposed = false;
  int64_t rows = 0, columns = 0, batch = 1;
  bool batched = false;          // has a batch mode of its own
  bool rows_contiguous = false;  // unit stride along rows (column-major)
  int64_t leading = 0;           // stride of the other mode, elements
  int64_t batch_stride = 0;
  int32_t alignment = 16;  // bytes, of base and strides

  bool empty() const { return rows == 0 || columns == 0 || batch == 0; }
  int64_t row_mode() const { return (batched ? 1 : 0) + (transposed ? 1 : 0); }
  int64_t column_mode() const { return (batched ? 1 : 0) + (transposed ? 0 : 1); }
};

/// Describes a 2-D or 3-D tensor, or its transpose. A layout no kernel addresses (no unit stride, overlapping rows) is copied.
Matrix describe(char const* op, char const* name, Tensor const& tensor, bool transposed = false) {
  Matrix x;
  x.tensor = tensor;
  x.transposed = transposed;
  x.batched = tensor.dim() == 3;
  x.rows = tensor.size(x.row_mode());
  x.columns = tensor.size(x.column_mode());
  x.batch = x.batched ? tensor.size(0) : 1;
  if (x.empty()) {
    x.leading = round_up(std::max<int64_t>(x.columns, 1), 8);
    return x;
  }
  int64_t const row_stride = tensor.stride(x.row_mode()), column_stride = tensor.stride(x.column_mode());
  int64_t const bytes = tensor.element_size();
  bool const by_rows = (column_stride == 1 || x.columns == 1) && (x.rows == 1 || row_stride >= x.columns);
  bool const by_columns = (row_stride == 1 || x.rows == 1) && (x.columns == 1 || column_stride >= x.rows);
  x.batch_stride = x.batch > 1 ? tensor.stride(0) : 0;
  bool const repeated = x.batch > 1 && x.batch_stride == 0;  // a plane again and again cannot be a TMA mode
  if ((!by_rows && !by_columns) || repeated) return describe(op, name, copy_of(op, name, tensor), transposed);
  x.rows_contiguous = !by_rows;
  x.leading = by_rows ? row_stride : column_stride;
  if ((by_rows ? x.rows : x.columns) == 1) x.leading = round_up(by_rows ? x.columns : x.rows, 8);  // never stepped over, but must be legal
  x.alignment = common_alignment({address_of(tensor.data_ptr()), uint64_t(x.leading * bytes), uint64_t(x.batch_stride * bytes)});
  if (x.batch == 1) x.batch_stride = round_up((by_rows ? x.rows : x.columns) * x.leading, 8);
  return x;
}

/// Copies an operand whose base or strides TMA cannot address into one with 16-byte aligned rows (columns, where those are contiguous).
Matrix realigned(char const* op, char const* name, Matrix const& x) {
  if (x.alignment >= 16 || x.empty()) return x;
  int64_t const lines = x.rows_contiguous ? x.columns : x.rows, line = round_up(x.rows_contiguous ? x.rows : x.columns, 8);
  std::array<int64_t, 3> strides;
  strides[0] = lines * line;  // of the batch, if there is one
  strides[size_t(x.row_mode())] = x.rows_contiguous ? 1 : line;
  strides[size_t(x.column_mode())] = x.rows_contiguous ? line : 1;
  Tensor const copy = copy_with_strides(op, name, x.tensor, Shape(strides.data(), size_t(x.tensor.dim())), x.batch * lines * line);
  return describe(op, name, copy, x.transposed);
}

/// A single row or column has no direction of its own: describes it the other way round where a kernel asked for by name wants that.
void turn(Matrix& x, bool rows_contiguous) {
  if (x.rows_contiguous == rows_contiguous || (rows_contiguous ? x.rows : x.columns) != 1) return;
  x.rows_contiguous = rows_contiguous;
  x.leading = (rows_contiguous ? x.columns : x.rows) == 1 ? 8 : x.tensor.stride(rows_contiguous ? x.column_mode() : x.row_mode());
  x.alignment =
      common_alignment({address_of(x.tensor.data_ptr()), uint64_t(x.leading * 2), uint64_t(x.batch > 1 ? x.batch_stride * 2 : 0)});
}

struct Sizes {
  int64_t m, n, k, batch;
  bool batched;

  int64_t modes() const { return batched ? 3 : 2; }
  /// Of an output of so many columns; as many modes as modes().
  std::array<int64_t, 3> output(int64_t columns) const {
    return batched ? std::array<int64_t, 3>{batch, m, columns} : std::array<int64_t, 3>{m, columns, 0};
  }
};

struct Call {
  char const* op;
  Tensor const &a, &b;
  std::optional<Tensor> const &c, &bias;
  std::optional<std::string> const& kernel;
  float alpha = 1.0f, beta = 0.0f;
  Activation activation = Activation::kNone;
  bool gated = false, b_transposed = false;
  Sizes sizes{};

  int64_t columns() const { return gated ? sizes.n / 2 : sizes.n; }  // of the output
};

void check_operands(Call& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &b = call.b;
  if (a.dim() != 2 && a.dim() != 3) fail(op, ": a must be [m, k] or [batch, m, k], got a ", a);
  if (b.dim() != 2 && b.dim() != 3) fail(op, ": b must be [k, n] or [batch, k, n], got b ", b);
  check_16bit(op, "a", a);
  if (b.scalar_type() != a.scalar_type()) fail(op, ": b must have a's dtype ", a.scalar_type(), ", got ", b.scalar_type());
  check_same_device(op, "b", b, {"a", a});
  Sizes& s = call.sizes;
  s.batched = a.dim() == 3 || b.dim() == 3;
  s.m = a.size(a.dim() - 2);
  s.k = a.size(a.dim() - 1);
  s.n = b.size(b.dim() - (call.b_transposed ? 2 : 1));
  if (b.size(b.dim() - (call.b_transposed ? 1 : 2)) != s.k) fail(op, ": b must have k = ", s.k, " rows to match a ", a, ", got b ", b);
  s.batch = a.dim() == 3 ? a.size(0) : b.dim() == 3 ? b.size(0) : 1;
  if (a.dim() == 3 && b.dim() == 3 && a.size(0) != b.size(0)) {
    fail(op, ": a and b must have the same batch, got a ", a, " and b ", b);
  }
}

float check_scale(char const* op, char const* name, double value) {
  if (!std::isfinite(float(value))) fail(op, ": ", name, " must be finite in float32, got ", value);
  return float(value);
}

void check_addend(Call const& call) {
  Tensor const& c = *call.c;
  Sizes const& s = call.sizes;
  if (c.dim() > s.modes()) fail(call.op, ": c must broadcast to the output, got c ", c);
  int64_t const extents[3] = {s.batch, s.m, s.n};
  for (int64_t i = 0; i < c.dim(); ++i) {
    if (c.size(i) == 1 || c.size(i) == extents[3 - c.dim() + i]) continue;
    fail(call.op, ": c must broadcast to ", Listed{{extents + (3 - s.modes()), size_t(s.modes())}}, ", got c ", c);
  }
  if (c.scalar_type() != call.a.scalar_type() && c.scalar_type() != ScalarType::Float) {
    fail(call.op, ": c must be ", call.a.scalar_type(), " or Float, got ", c.scalar_type());
  }
  check_same_device(call.op, "c", c, {"a", call.a});
}

/// All arguments but the output.
void check_call(Call& call, double alpha, double beta, std::string const& activation) {
  char const* op = call.op;
  check_operands(call);
  call.alpha = check_scale(op, "alpha", alpha);
  call.beta = check_scale(op, "beta", beta);
  call.activation = parse_activation(op, activation);
  if (call.beta != 0.0f && !call.c) fail(op, ": c must be given when beta is not 0, got beta = ", beta);
  if (call.c) check_addend(call);
  if (call.bias) check_bias(op, *call.bias, call.sizes.n, {"a", call.a});
  if (call.kernel) parse_override(op, *call.kernel);
}

/// The operands' part of C; whether it is a full matrix of out's 16-bit type, which kernels can read by TMA.
bool describe_addend(Call const& call, Tensor const& out, GemmOperands* operands) {
  Tensor const& c = *call.c;
  Sizes const& s = call.sizes;
  int64_t const extents[3] = {s.batch, s.m, call.columns()};
  int64_t strides[3] = {0, 0, 0};
  for (int64_t i = 0; i < c.dim(); ++i) {
    if (c.size(i) != 1) strides[3 - c.dim() + i] = c.stride(i);
  }
  operands->c = c.data_ptr();
  operands->c_type = data_type(c.scalar_type());
  bool full = true;
  for (int mode = 0; mode < 3; ++mode) full = full && (extents[mode] == 1 || strides[mode] != 0);
  full = full && (strides[2] == 1 || extents[2] == 1) && c.scalar_type() == out.scalar_type() && out.scalar_type() != ScalarType::Float;
  if (full && s.m == 1) strides[1] = round_up(extents[2], 8);
  if (full && s.batch == 1) strides[0] = round_up(s.m * strides[1], 8);
  full = full && strides[1] >= extents[2];
  operands->c_batch_stride = strides[0];
  operands->c_stride_m = strides[1];
  operands->c_stride_n = strides[2];
  return full;
}

/// Runs the call into `out` [batch, m, columns] or [m, columns], whose rows are contiguous.
void run(Call const& call, Tensor const& out, OnDevice const& on) {
  char const* op = call.op;
  Sizes s = call.sizes;
  int64_t const columns = call.columns();
  if (s.batch == 0 || s.m == 0 || s.n == 0) {
    if (call.kernel) check_kernel_name(op, "gemm", parse_override(op, *call.kernel).name);
    return;
  }

  GemmProblem problem;
  GemmOperands operands;
  problem.ab_type = data_type(call.a.scalar_type());
  problem.d_type = data_type(out.scalar_type());
  problem.gated = call.gated;
  operands.alpha = call.alpha;
  operands.beta = call.beta;
  operands.activation = call.activation;

  int64_t const out_bytes = out.element_size();
  bool const out_batched = out.dim() == 3;
  operands.d = out.data_ptr();
  operands.ldd = s.m > 1 ? out.stride(out_batched ? 1 : 0) : round_up(columns, 8);
  operands.d_batch_stride = out_batched && s.batch > 1 ? out.stride(0) : round_up(s.m * operands.ldd, 8);

  bool c_full = false;
  if (call.c && call.beta != 0.0f) {
    problem.has_c = true;
    c_full = describe_addend(call, out, &operands);
  }
  Tensor bias;
  if (call.bias) {
    bias = call.bias->stride(0) == 1 || s.n == 1 ? *call.bias : copy_of(op, "bias", *call.bias);
    operands.bias = bias.data_ptr();
    operands.bias_type = data_type(bias.scalar_type());
  }

  // One side without a batch: rows of a fold into m when they are evenly spaced, otherwise each plane is a GEMM of its own.
  Matrix a = describe(op, "a", call.a), b = describe(op, "b", call.b, call.b_transposed);
  int64_t planes = 1;
  if (s.batched && a.batch != b.batch) {
    bool const c_folds = !problem.has_c || (operands.c_batch_stride == s.m * operands.c_stride_m);
    bool const folds =
        a.batched && !a.rows_contiguous && a.batch_stride == s.m * a.leading && operands.d_batch_stride == s.m * operands.ldd && c_folds;
    if (folds) {
      s.m *= s.batch;
    } else {
      planes = s.batch;
    }
    s.batch = 1;
  }

  if (!call.kernel && call.alpha != 0.0f && worth_realigning(s.m, s.n, s.k, s.batch * planes)) {
    a = realigned(op, "a", a);
    b = realigned(op, "b", b);
  }
  std::optional<KernelOverride> override;
  if (call.kernel) {
    override = parse_override(op, *call.kernel);
    if (KernelInfo const* kernel = find_kernel(override->name.c_str())) {
      turn(a, kernel->a_major == Major::kMN);
      turn(b, kernel->b_major == Major::kK);
    }
  }

  problem.m = s.m;
  problem.n = s.n;
  problem.k = call.alpha == 0.0f ? 0 : s.k;  // BLAS: alpha = 0 means that A and B are not read
  problem.batch = s.batch;
  problem.a_major = a.rows_contiguous ? Major::kMN : Major::kK;
  problem.b_major = b.rows_contiguous ? Major::kK : Major::kMN;
  problem.a_alignment = a.alignment;
  problem.b_alignment = b.alignment;
  problem.d_alignment =
      common_alignment({address_of(operands.d), uint64_t(operands.ldd * out_bytes), uint64_t(operands.d_batch_stride * out_bytes)});
  problem.c_alignment = 0;
  if (c_full) {
    problem.c_alignment = common_alignment(
        {address_of(operands.c), uint64_t(operands.c_stride_m * out_bytes), uint64_t(operands.c_batch_stride * out_bytes)});
    if (problem.c_alignment < 16) problem.c_alignment = 0;
  }
  operands.lda = a.leading;
  operands.a_batch_stride = a.batch_stride;
  operands.ldb = b.leading;
  operands.b_batch_stride = b.batch_stride;
  operands.a = a.tensor.data_ptr();
  operands.b = b.tensor.data_ptr();

  GemmPlan forced;
  GemmPlan const* plan;
  if (override) {
    GemmPlanOptions options;
    options.kernel = override->name.c_str();
    if (override->launch) options.launch = &*override->launch;
    Status const status = plan_gemm(problem, on.properties(), options, &forced);
    if (!status.ok()) fail(op, ": ", status.message);
    plan = &forced;
  } else {
    plan = &cached_plan(op, problem, on);
  }

  Workspace const workspace(op, out, plan->workspace_bytes, plan->kernel->name, " on a ", call.a, " and b ", call.b);
  int64_t const c_bytes = call.c ? call.c->element_size() : 0;
  int64_t const c_plane = problem.has_c ? operands.c_batch_stride : 0, d_plane = operands.d_batch_stride;
  for (int64_t plane = 0; plane < planes; ++plane) {
    Status const status = run_gemm(*plan, problem, operands, on.properties(), workspace.data(), workspace.bytes(), on.stream());
    if (!status.ok()) {
      fail(op, ": ", plan->kernel->name, " on m = ", problem.m, ", n = ", problem.n, ", k = ", problem.k, ": ", status.message);
    }
    if (a.batched) operands.a = static_cast<char const*>(operands.a) + a.batch_stride * a.tensor.element_size();
    if (b.batched) operands.b = static_cast<char const*>(operands.b) + b.batch_stride * b.tensor.element_size();
    if (operands.c != nullptr) operands.c = static_cast<char const*>(operands.c) + c_plane * c_bytes;
    operands.d = static_cast<char*>(operands.d) + d_plane * out_bytes;
  }
}

ScalarType check_output_type(char const* op, Tensor const& a, ScalarType type) {
  if (type != a.scalar_type() && type != ScalarType::Float) fail(op, ": out_dtype must be ", a.scalar_type(), " or Float, got ", type);
  return type;
}

Tensor allocate_output(Call const& call, ScalarType type) {
  auto const shape = call.sizes.output(call.columns());
  return allocate(call.op, call.a, Shape(shape.data(), size_t(call.sizes.modes())), type, "the output of a ", call.a, " and b ", call.b);
}

Tensor run(Call const& call, ScalarType type, OnDevice const& on) {
  Tensor const out = allocate_output(call, type);
  run(call, out, on);
  return out;
}

}  // namespace

Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha, double beta,
            std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& kernel) {
  Call call{"minfer::gemm", a, b, c, bias, kernel};
  check_call(call, alpha, beta, activation);
  ScalarType const type = check_output_type(call.op, a, out_dtype.value_or(a.scalar_type()));
  return run(call, type, OnDevice(call.op, a));
}

Tensor gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha,
                double beta, std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& kernel,
                Tensor const& out) {
  Call call{"minfer::gemm", a, b, c, bias, kernel};
  char const* op = call.op;
  check_call(call, alpha, beta, activation);
  ScalarType const type = check_output_type(op, a, out_dtype.value_or(out.scalar_type()));
  if (out.scalar_type() != type) fail(op, ": out must be ", type, ", got ", out.scalar_type());
  Sizes const& s = call.sizes;
  auto const wanted = s.output(s.n);
  Shape const shape(wanted.data(), size_t(s.modes()));
  if (!same(out.sizes(), shape)) fail(op, ": out must be ", Listed{shape}, ", got ", out);
  check_same_device(op, "out", out, {"a", a});
  check_apart(op, out);
  check_no_overlap(op, out, "a", a);
  check_no_overlap(op, out, "b", b);
  if (bias) check_no_overlap(op, out, "bias", *bias);
  if (c && call.beta != 0.0f && !is_same_view(out, *c)) check_no_overlap(op, out, "c", *c);
  OnDevice const on(op, a);
  int64_t const last = out.dim() - 1;
  bool const rows_contiguous = (out.stride(last) == 1 || s.n <= 1) && (s.m <= 1 || out.stride(last - 1) >= s.n);
  if (rows_contiguous) {
    run(call, out, on);
  } else {
    copy_into(op, "out", out, run(call, type, on));
  }
  return out;
}

Tensor gemm_gated(Tensor const& a, Tensor const& b, std::optional<Tensor> const& bias, std::string const& activation,
                  std::optional<std::string> const& kernel) {
  std::optional<Tensor> const no_c;
  Call call{"minfer::gemm_gated", a, b, no_c, bias, kernel};
  check_call(call, 1.0, 0.0, activation);
  if (call.sizes.n % 16 != 0) {
    fail(call.op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ", b);
  }
  call.gated = true;
  return run(call, a.scalar_type(), OnDevice(call.op, a));
}

Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on) {
  std::optional<Tensor> const none;
  std::optional<std::string> const any;
  Call call{op, x, w, none, none, any};
  call.b_transposed = true;
  check_operands(call);
  return run(call, ScalarType::Float, on);
}

}  // namespace minfer::torch_binding
