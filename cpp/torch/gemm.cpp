// torch.ops.minfer.gemm, gemm.out and gemm_gated on CUDA tensors: check, describe, plan, allocate, run.
#include <cmath>

#include "bindings.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"

namespace minfer::torch_binding {

namespace {

/// One operand as the kernels see it: [batch, rows, columns] with one unit stride among rows and columns.
struct Matrix {
  Tensor tensor;  // keeps the memory; the operand itself or a copy of it
  int64_t rows = 0, columns = 0, batch = 1;
  bool batched = false;          // has a batch mode of its own
  bool rows_contiguous = false;  // unit stride along rows (column-major)
  int64_t leading = 0;           // stride of the other mode, elements
  int64_t batch_stride = 0;
  int32_t alignment = 16;  // bytes, of base and strides

  char const* data() const { return static_cast<char const*>(tensor.data_ptr()); }
};

/// Describes a 2-D or 3-D tensor. A layout no kernel addresses (no unit stride, overlapping rows) is copied.
Matrix describe(Tensor const& tensor) {
  Matrix x;
  x.batched = tensor.dim() == 3;
  int64_t const r = x.batched ? 1 : 0, c = r + 1;
  x.rows = tensor.size(r);
  x.columns = tensor.size(c);
  x.batch = x.batched ? tensor.size(0) : 1;
  int64_t const row_stride = tensor.stride(r), column_stride = tensor.stride(c);
  int64_t const bytes = int64_t(tensor.element_size());
  if (x.rows == 0 || x.columns == 0 || x.batch == 0) {
    x.tensor = tensor;
    x.leading = round_up(std::max<int64_t>(x.columns, 1), 8);
    return x;
  }
  bool const by_rows = (column_stride == 1 || x.columns == 1) && (x.rows == 1 || row_stride >= x.columns);
  bool const by_columns = (row_stride == 1 || x.rows == 1) && (x.columns == 1 || column_stride >= x.rows);
  if (!by_rows && !by_columns) return describe(torch::stable::contiguous(tensor));
  x.tensor = tensor;
  x.rows_contiguous = !by_rows;
  x.leading = by_rows ? row_stride : column_stride;
  if ((by_rows ? x.rows : x.columns) == 1) x.leading = round_up(by_rows ? x.columns : x.rows, 8);  // never stepped over, but must be legal
  x.batch_stride = x.batch > 1 ? tensor.stride(0) : 0;
  // A repeated plane (stride 0) cannot be a TMA mode.
  if (x.batch > 1 && x.batch_stride == 0) return describe(torch::stable::contiguous(tensor));
  x.alignment = common_alignment(
      {uint64_t(reinterpret_cast<uintptr_t>(tensor.data_ptr())), uint64_t(x.leading * bytes), uint64_t(x.batch_stride * bytes)});
  if (x.batch == 1) x.batch_stride = round_up((by_rows ? x.rows : x.columns) * x.leading, 8);
  return x;
}

/// Copies an operand whose base or strides TMA cannot address into one with 16-byte aligned rows (columns, where those are contiguous).
Matrix realigned(Matrix const& x) {
  if (x.alignment >= 16 || x.rows == 0 || x.columns == 0 || x.batch == 0) return x;
  int64_t const lines = x.rows_contiguous ? x.columns : x.rows, extent = x.rows_contiguous ? x.rows : x.columns;
  std::vector<int64_t> shape = {lines, round_up(extent, 8)};
  if (x.batched) shape.insert(shape.begin(), x.tensor.size(0));
  int64_t const last = int64_t(shape.size()) - 1;
  Tensor padded = torch::stable::new_empty(x.tensor, shape);
  Tensor view = torch::stable::narrow(padded, last, 0, extent);
  if (x.rows_contiguous) view = torch::stable::transpose(view, last - 1, last);
  torch::stable::copy_(view, x.tensor);
  return describe(view);
}

/// A single row or column has no direction of its own: describes it the other way round where a kernel asked for by name wants that.
void turn(Matrix& x, bool rows_contiguous) {
  if (x.rows_contiguous == rows_contiguous || (rows_contiguous ? x.rows : x.columns) != 1) return;
  x.rows_contiguous = rows_contiguous;
  x.leading = (rows_contiguous ? x.columns : x.rows) == 1 ? 8 : x.tensor.stride(x.tensor.dim() - (rows_contiguous ? 1 : 2));
  x.alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(x.tensor.data_ptr())), uint64_t(x.leading * 2),
                                  uint64_t(x.batch > 1 ? x.batch_stride * 2 : 0)});
}

struct Sizes {
  int64_t m, n, k, batch;
  bool batched;
};

Sizes check_operands(char const* op, Tensor const& a, Tensor const& b) {
  check(a.dim() == 2 || a.dim() == 3, op, ": a must be [m, k] or [batch, m, k], got a ", shape_of(a));
  check(b.dim() == 2 || b.dim() == 3, op, ": b must be [k, n] or [batch, k, n], got b ", shape_of(b));
  check(is_16bit_float(a.scalar_type()), op, ": a must be float16 or bfloat16, got ", dtype_name(a.scalar_type()));
  check(b.scalar_type() == a.scalar_type(), op, ": b must have a's dtype ", dtype_name(a.scalar_type()), ", got ",
        dtype_name(b.scalar_type()));
  check(b.is_cuda() && b.get_device_index() == a.get_device_index(), op, ": b must be on a's device cuda:", a.get_device_index(), ", got ",
        b.is_cuda() ? "cuda:" + std::to_string(b.get_device_index()) : std::string("another kind of device"));
  Sizes s;
  s.batched = a.dim() == 3 || b.dim() == 3;
  s.m = a.size(a.dim() - 2);
  s.k = a.size(a.dim() - 1);
  s.n = b.size(b.dim() - 1);
  check(b.size(b.dim() - 2) == s.k, op, ": b must have k = ", s.k, " rows to match a ", shape_of(a), ", got b ", shape_of(b));
  s.batch = a.dim() == 3 ? a.size(0) : (b.dim() == 3 ? b.size(0) : 1);
  check(a.dim() != 3 || b.dim() != 3 || a.size(0) == b.size(0), op, ": a and b must have the same batch, got a ", shape_of(a), " and b ",
        shape_of(b));
  return s;
}

float check_scale(char const* op, char const* name, double value) {
  check(std::isfinite(value) && std::isfinite(float(value)), op, ": ", name, " must be finite in float32, got ", value);
  return float(value);
}

struct Call {
  char const* op;
  Sizes sizes;
  Matrix a, b;
  std::optional<Tensor> c, bias;
  float alpha = 1.0f, beta = 0.0f;
  Activation activation = Activation::kNone;
  bool gated = false;
  std::optional<std::string> kernel;
};

/// Runs the call into `out` [batch, m, n_out] or [m, n_out], whose rows are contiguous.
void run(Call& call, Tensor const& out) {
  Sizes s = call.sizes;
  int32_t const device = call.a.tensor.get_device_index();
  int64_t const n_out = call.gated ? s.n / 2 : s.n;
  if (s.batch == 0 || s.m == 0 || s.n == 0) return;

  GemmProblem problem;
  GemmOperands operands;
  problem.ab_type = data_type(call.a.tensor.scalar_type());
  problem.d_type = data_type(out.scalar_type());
  problem.gated = call.gated;
  operands.alpha = call.alpha;
  operands.beta = call.beta;
  operands.activation = call.activation;

  int64_t const out_bytes = int64_t(out.element_size());
  bool const out_batched = out.dim() == 3;
  operands.d = out.data_ptr();
  operands.ldd = s.m > 1 ? out.stride(out_batched ? 1 : 0) : round_up(n_out, 8);
  operands.d_batch_stride = out_batched && s.batch > 1 ? out.stride(0) : round_up(s.m * operands.ldd, 8);

  std::optional<Tensor> c_holder;
  bool c_full = false;
  if (call.c && call.beta != 0.0f) {
    Tensor const& c = *call.c;
    int64_t const extents[3] = {s.batch, s.m, n_out};
    int64_t strides[3] = {0, 0, 0};
    for (int64_t i = 0; i < c.dim(); ++i) {
      int64_t const mode = 3 - c.dim() + i;
      if (c.size(i) != 1) strides[mode] = c.stride(i);
    }
    problem.has_c = true;
    operands.c = c.data_ptr();
    operands.c_type = data_type(c.scalar_type());
    c_full = true;
    for (int mode = 0; mode < 3; ++mode) c_full = c_full && (extents[mode] == 1 || strides[mode] != 0);
    c_full = c_full && (strides[2] == 1 || n_out == 1) && c.scalar_type() == out.scalar_type() && out.scalar_type() != ScalarType::Float;
    if (c_full && s.m == 1) strides[1] = round_up(n_out, 8);
    if (c_full && s.batch == 1) strides[0] = round_up(s.m * strides[1], 8);
    c_full = c_full && strides[1] >= n_out;
    operands.c_batch_stride = strides[0];
    operands.c_stride_m = strides[1];
    operands.c_stride_n = strides[2];
  }
  if (call.bias) {
    Tensor const bias = call.bias->stride(0) == 1 || s.n == 1 ? *call.bias : torch::stable::contiguous(*call.bias);
    call.bias = bias;
    operands.bias = bias.data_ptr();
    operands.bias_type = data_type(bias.scalar_type());
  }

  // One side without a batch: rows of a fold into m when they are evenly spaced, otherwise each plane is a GEMM of its own.
  int64_t planes = 1;
  Matrix& a = call.a;
  Matrix& b = call.b;
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
    a = realigned(a);
    b = realigned(b);
  }
  std::optional<KernelOverride> override;
  if (call.kernel) {
    override = parse_override(call.op, *call.kernel);
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
  problem.d_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(operands.d)), uint64_t(operands.ldd * out_bytes),
                                          uint64_t(operands.d_batch_stride * out_bytes)});
  problem.c_alignment = 0;
  if (problem.has_c && c_full) {
    problem.c_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(operands.c)), uint64_t(operands.c_stride_m * out_bytes),
                                            uint64_t(operands.c_batch_stride * out_bytes)});
    if (problem.c_alignment < 16) problem.c_alignment = 0;
  }
  operands.lda = a.leading;
  operands.a_batch_stride = a.batch_stride;
  operands.ldb = b.leading;
  operands.b_batch_stride = b.batch_stride;
  operands.a = a.data();
  operands.b = b.data();

  torch::stable::accelerator::DeviceGuard const guard(device);
  GemmPlan forced;
  GemmPlan const* plan;
  if (override) {
    GemmPlanOptions options;
    options.kernel = override->name.c_str();
    if (override->launch) options.launch = &*override->launch;
    Status const status = plan_gemm(problem, device_properties(device), options, &forced);
    check(status.ok(), call.op, ": ", status.message);
    plan = &forced;
  } else {
    plan = &cached_plan(call.op, problem, device);
  }

  Tensor workspace;
  if (plan->workspace_bytes > 0) {
    std::vector<int64_t> const bytes = {int64_t(plan->workspace_bytes)};
    workspace = torch::stable::new_empty(out, bytes, ScalarType::Byte);
  }
  Stream const stream = current_stream(device);
  int64_t const ab_bytes = 2;
  int64_t const c_bytes = call.c ? int64_t(call.c->element_size()) : 0;
  int64_t const c_plane = problem.has_c ? operands.c_batch_stride : 0, d_plane = operands.d_batch_stride;
  for (int64_t plane = 0; plane < planes; ++plane) {
    Status const status = run_gemm(*plan, problem, operands, device_properties(device),
                                   plan->workspace_bytes > 0 ? workspace.data_ptr() : nullptr, plan->workspace_bytes, stream);
    check(status.ok(), call.op, ": ", plan->kernel->name, " on m = ", problem.m, ", n = ", problem.n, ", k = ", problem.k, ": ",
          status.message);
    if (a.batched) operands.a = static_cast<char const*>(operands.a) + a.batch_stride * ab_bytes;
    if (b.batched) operands.b = static_cast<char const*>(operands.b) + b.batch_stride * ab_bytes;
    if (operands.c != nullptr) operands.c = static_cast<char const*>(operands.c) + c_plane * c_bytes;
    operands.d = static_cast<char*>(operands.d) + d_plane * out_bytes;
  }
}

Call prepare(char const* op, Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias,
             double alpha, double beta, std::string const& activation, std::optional<std::string> const& kernel) {
  Call call;
  call.op = op;
  call.sizes = check_operands(op, a, b);
  Sizes const& s = call.sizes;
  int32_t const device = a.get_device_index();
  call.alpha = check_scale(op, "alpha", alpha);
  call.beta = check_scale(op, "beta", beta);
  call.activation = parse_activation(op, activation);
  check(call.beta == 0.0f || c.has_value(), op, ": c must be given when beta is not 0, got beta = ", beta);
  if (c) {
    check(c->dim() <= (s.batched ? 3 : 2), op, ": c must broadcast to the output, got c ", shape_of(*c));
    int64_t const extents[3] = {s.batch, s.m, s.n};
    for (int64_t i = 0; i < c->dim(); ++i) {
      check(c->size(i) == 1 || c->size(i) == extents[3 - c->dim() + i], op, ": c must broadcast to [",
            s.batched ? std::to_string(s.batch) + ", " : std::string(), s.m, ", ", s.n, "], got c ", shape_of(*c));
    }
    check(c->scalar_type() == a.scalar_type() || c->scalar_type() == ScalarType::Float, op, ": c must be ", dtype_name(a.scalar_type()),
          " or Float, got ", dtype_name(c->scalar_type()));
    check_same_device(op, "c", *c, device);
  }
  if (bias) check_bias(op, *bias, s.n, a.scalar_type(), device);
  if (kernel) parse_override(op, *kernel);
  torch::stable::accelerator::DeviceGuard const guard(device);
  call.a = describe(a);
  call.b = describe(b);
  call.c = c;
  call.bias = bias;
  call.kernel = kernel;
  return call;
}

ScalarType output_type(char const* op, Tensor const& a, std::optional<ScalarType> out_dtype) {
  ScalarType const type = out_dtype.value_or(a.scalar_type());
  check(type == a.scalar_type() || type == ScalarType::Float, op, ": out_dtype must be ", dtype_name(a.scalar_type()), " or Float, got ",
        dtype_name(type));
  return type;
}

Tensor empty_output(Tensor const& a, Sizes const& s, int64_t n_out, ScalarType type) {
  std::vector<int64_t> shape = {s.m, n_out};
  if (s.batched) shape.insert(shape.begin(), s.batch);
  return torch::stable::new_empty(a, shape, type);
}

}  // namespace

Tensor gemm(Tensor a, Tensor b, std::optional<Tensor> c, std::optional<Tensor> bias, double alpha, double beta, std::string activation,
            std::optional<ScalarType> out_dtype, std::optional<std::string> kernel) {
  char const* op = "minfer::gemm";
  Call call = prepare(op, a, b, c, bias, alpha, beta, activation, kernel);
  Tensor out = empty_output(a, call.sizes, call.sizes.n, output_type(op, a, out_dtype));
  run(call, out);
  return out;
}

Tensor gemm_out(Tensor a, Tensor b, std::optional<Tensor> c, std::optional<Tensor> bias, double alpha, double beta, std::string activation,
                std::optional<ScalarType> out_dtype, std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::gemm";
  Call call = prepare(op, a, b, c, bias, alpha, beta, activation, kernel);
  Sizes const& s = call.sizes;
  ScalarType const type = output_type(op, a, out_dtype ? out_dtype : std::optional<ScalarType>(out.scalar_type()));
  check(out.scalar_type() == type, op, ": out must be ", dtype_name(type), ", got ", dtype_name(out.scalar_type()));
  int64_t const last = out.dim() - 1;
  check(out.dim() == (s.batched ? 3 : 2) && out.size(last) == s.n && out.size(last - 1) == s.m && (!s.batched || out.size(0) == s.batch),
        op, ": out must be [", s.batched ? std::to_string(s.batch) + ", " : std::string(), s.m, ", ", s.n, "], got ", shape_of(out));
  check_same_device(op, "out", out, a.get_device_index());
  bool const rows_contiguous =
      (out.stride(last) == 1 || s.n <= 1) && (s.m <= 1 || out.stride(last - 1) >= s.n) && (!s.batched || s.batch <= 1 || out.stride(0) > 0);
  if (rows_contiguous) {
    run(call, out);
  } else {
    Tensor staged = empty_output(a, s, s.n, type);
    run(call, staged);
    torch::stable::copy_(out, staged);
  }
  return out;
}

Tensor gemm_gated(Tensor a, Tensor b, std::optional<Tensor> bias, std::string activation, std::optional<std::string> kernel) {
  char const* op = "minfer::gemm_gated";
  Call call = prepare(op, a, b, std::nullopt, bias, 1.0, 0.0, activation, kernel);
  check(call.sizes.n % 16 == 0, op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ",
        shape_of(b));
  call.gated = true;
  Tensor out = empty_output(a, call.sizes, call.sizes.n / 2, a.scalar_type());
  run(call, out);
  return out;
}

}  // namespace minfer::torch_binding
