// The dense GEMM on CUDA tensors. A call goes through check_call(), then run(): describe the operands as a GemmProblem and GemmOperands,
// plan, allocate the workspace, launch.
#include "gemm.h"

#include <array>

#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"
#include "output_codes.h"

namespace minfer::torch_binding {

namespace {

/// A or B as the kernels read it: [batch, rows, columns] with unit stride along rows or along columns.
struct Matrix {
  Tensor tensor;            // keeps the memory; the operand itself or a copy of it
  bool transposed = false;  // the last two modes of the tensor are [columns, rows]
  int64_t rows = 0, columns = 0, batch = 1;
  bool batched = false;          // the tensor has a batch mode
  bool rows_contiguous = false;  // unit stride along rows (column-major)
  int64_t leading = 0;           // stride of the other mode, in elements
  int64_t batch_stride = 0;
  int32_t alignment = 16;  // in bytes, of the base and the strides

  bool empty() const { return rows == 0 || columns == 0 || batch == 0; }
  int64_t row_mode() const { return (batched ? 1 : 0) + (transposed ? 1 : 0); }
  int64_t column_mode() const { return (batched ? 1 : 0) + (transposed ? 0 : 1); }
};

/// Describes a 2-D or 3-D tensor, or its transpose. A layout that no kernel addresses (no unit stride, overlapping rows) is copied.
Matrix describe(char const* op, char const* name, Tensor const& tensor, bool transposed = false) {
  Matrix x;
  x.tensor = tensor;
  x.transposed = transposed;
  x.batched = tensor.dim() == 3;
  x.rows = tensor.size(x.row_mode());
  x.columns = tensor.size(x.column_mode());
  x.batch = x.batched ? tensor.size(0) : 1;
  int64_t const bytes = tensor.element_size();
  if (x.empty()) {
    x.leading = unused_stride(x.columns, bytes);
    return x;
  }
  int64_t const row_stride = tensor.stride(x.row_mode()), column_stride = tensor.stride(x.column_mode());
  bool const by_rows = (column_stride == 1 || x.columns == 1) && (x.rows == 1 || row_stride >= x.columns);
  bool const by_columns = (row_stride == 1 || x.rows == 1) && (x.columns == 1 || column_stride >= x.rows);
  x.batch_stride = x.batch > 1 ? tensor.stride(0) : 0;
  bool const repeated = x.batch > 1 && x.batch_stride == 0;  // TMA has no stride 0
  if ((!by_rows && !by_columns) || repeated) return describe(op, name, copy_of(op, name, tensor), transposed);
  x.rows_contiguous = !by_rows;
  x.leading = by_rows ? row_stride : column_stride;
  if ((by_rows ? x.rows : x.columns) == 1) x.leading = unused_stride(by_rows ? x.columns : x.rows, bytes);
  x.alignment = common_alignment({address_of(tensor.data_ptr()), uint64_t(x.leading * bytes), uint64_t(x.batch_stride * bytes)});
  if (x.batch == 1) x.batch_stride = unused_stride((by_rows ? x.rows : x.columns) * x.leading, bytes);
  return x;
}

/// A single row has unit stride along either mode, and so has a single column: they, and a single line of the other mode whose elements
/// follow each other, are described in the way that the requested kernel reads.
void choose_major(Matrix& x, bool rows_contiguous) {
  if (x.rows_contiguous == rows_contiguous || x.empty()) return;
  int64_t const lines = rows_contiguous ? x.columns : x.rows, length = rows_contiguous ? x.rows : x.columns;
  int64_t const unit = x.tensor.stride(rows_contiguous ? x.row_mode() : x.column_mode());
  if (length != 1 && (lines != 1 || unit != 1)) return;
  int64_t const bytes = x.tensor.element_size();
  x.rows_contiguous = rows_contiguous;
  x.leading = lines == 1 ? unused_stride(length, bytes) : x.tensor.stride(rows_contiguous ? x.column_mode() : x.row_mode());
  x.alignment =
      common_alignment({address_of(x.tensor.data_ptr()), uint64_t(x.leading * bytes), uint64_t(x.batch > 1 ? x.batch_stride * bytes : 0)});
}

struct Sizes {
  int64_t m, n, k, batch;
  bool batched;

  int64_t modes() const { return batched ? 3 : 2; }
  /// The shape of an output of so many columns; the first modes() numbers count.
  std::array<int64_t, 3> output(int64_t columns) const {
    return batched ? std::array<int64_t, 3>{batch, m, columns} : std::array<int64_t, 3>{m, columns, 0};
  }
};

struct Call {
  char const* op;
  Tensor const &a, &b;
  std::optional<Tensor> const &c, &bias;
  std::optional<std::string> const& kernel;
  OutputCodes codes;
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
  call.alpha = in_float32(op, "alpha", alpha);
  call.beta = in_float32(op, "beta", beta);
  call.activation = parse_activation(op, activation);
  if (call.beta != 0.0f && !call.c) fail(op, ": c must be given when beta is not 0, got beta = ", beta);
  if (call.c) check_addend(call);
  if (call.bias) check_bias(op, *call.bias, call.sizes.n, {"a", call.a});
  check_output_codes(op, call.codes, {"a", call.a});
  if (call.kernel) parse_override(op, *call.kernel);
}

/// A call as the kernels take it, and the tensors whose memory the operands point to.
struct KernelCall {
  GemmProblem problem;
  GemmOperands operands;
  Matrix a, b;
  Tensor bias, scale;
  int64_t planes = 1;  // GEMMs to launch, one for each plane of a batch that no single GEMM can take
};

/// Rows of `out` are contiguous. One that has more modes than the call is contiguous as a whole.
void set_output(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  int64_t const m = call.sizes.m, bytes = out.element_size();
  bool const batched = call.sizes.batched;
  o.d = out.data_ptr();
  o.ldd = m > 1 ? out.stride(out.dim() - 2) : unused_stride(call.columns(), bytes);
  o.d_batch_stride = batched && call.sizes.batch > 1 ? out.stride(0) : unused_stride(m * o.ldd, bytes);
  x->problem.d_fp8 = call.codes.given();
  x->problem.d_type = data_type((x->problem.d_fp8 ? call.a : out).scalar_type());
  x->problem.d_alignment = common_alignment({address_of(o.d), uint64_t(o.ldd * bytes), uint64_t(o.d_batch_stride * bytes)});
  if (x->problem.d_fp8) {
    x->scale = contiguous(call.op, "scale", *call.codes.scale);
    o.d_scale = static_cast<float const*>(x->scale.data_ptr());
  }
}

/// C, which may be broadcast. TMA reads a full matrix of out's 16-bit type; c_alignment 0 says that it does not.
void set_addend(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  Tensor const& c = *call.c;
  Sizes const& s = call.sizes;
  int64_t const extents[3] = {s.batch, s.m, call.columns()}, bytes = c.element_size();
  int64_t strides[3] = {0, 0, 0};
  for (int64_t i = 0; i < c.dim(); ++i) {
    if (c.size(i) != 1) strides[3 - c.dim() + i] = c.stride(i);
  }
  bool full = true;
  for (int mode = 0; mode < 3; ++mode) full = full && (extents[mode] == 1 || strides[mode] != 0);
  full = full && (strides[2] == 1 || extents[2] == 1) && c.scalar_type() == out.scalar_type() && out.scalar_type() != ScalarType::Float;
  if (full && s.m == 1) strides[1] = unused_stride(extents[2], bytes);
  if (full && s.batch == 1) strides[0] = unused_stride(s.m * strides[1], bytes);
  full = full && strides[1] >= extents[2];
  o.c = c.data_ptr();
  o.c_type = data_type(c.scalar_type());
  o.c_batch_stride = strides[0];
  o.c_stride_m = strides[1];
  o.c_stride_n = strides[2];
  x->problem.has_c = true;
  int32_t const alignment = common_alignment({address_of(o.c), uint64_t(strides[1] * bytes), uint64_t(strides[0] * bytes)});
  x->problem.c_alignment = full && alignment == 16 ? 16 : 0;
}

/// alpha, beta, C, bias and the activation.
void set_epilogue(Call const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  o.alpha = call.alpha;
  o.beta = call.beta;
  o.activation = call.activation;
  x->problem.gated = call.gated;
  x->problem.c_alignment = 0;
  if (call.c && call.beta != 0.0f) set_addend(call, out, x);
  if (call.bias) {
    x->bias = call.bias->stride(0) == 1 || call.sizes.n == 1 ? *call.bias : copy_of(call.op, "bias", *call.bias);
    o.bias = x->bias.data_ptr();
    o.bias_type = data_type(x->bias.scalar_type());
  }
}

/// Where one of A and B has a batch mode and the other has none: evenly spaced rows of A fold into m, otherwise each plane is a GEMM of its
/// own.
void fold_batch(KernelCall* x) {
  GemmProblem& p = x->problem;
  GemmOperands const& o = x->operands;
  Matrix const& a = x->a;
  if (a.batch == x->b.batch) return;
  bool const c_folds = !p.has_c || o.c_batch_stride == p.m * o.c_stride_m;
  bool const folds = a.batched && !a.rows_contiguous && a.batch_stride == p.m * a.leading && o.d_batch_stride == p.m * o.ldd && c_folds;
  if (folds) {
    p.m *= p.batch;
  } else {
    x->planes = p.batch;
  }
  p.batch = 1;
}

/// A and B, and the sizes, once the output and C have been described.
void set_inputs(Call const& call, std::optional<KernelOverride> const& override, KernelCall* x) {
  GemmProblem& p = x->problem;
  GemmOperands& o = x->operands;
  Sizes const& s = call.sizes;
  p.m = s.m;
  p.n = s.n;
  p.k = call.alpha == 0.0f ? 0 : s.k;  // BLAS: alpha = 0 means that A and B are not read
  p.batch = s.batch;
  Matrix &a = x->a, &b = x->b;
  a = describe(call.op, "a", call.a);
  b = describe(call.op, "b", call.b, call.b_transposed);
  if (s.batched) fold_batch(x);
  if (override) {
    if (KernelInfo const* kernel = find_kernel(override->name.c_str())) {
      if (p.m == a.rows) choose_major(a, kernel->a_major == Major::kMN);  // rows of all planes that were folded lie as they do
      choose_major(b, kernel->b_major == Major::kK);
    }
  }
  p.ab_type = data_type(call.a.scalar_type());
  p.a_major = a.rows_contiguous ? Major::kMN : Major::kK;
  p.b_major = b.rows_contiguous ? Major::kK : Major::kMN;
  p.a_alignment = a.alignment;
  p.b_alignment = b.alignment;
  o.a = a.tensor.data_ptr();
  o.lda = a.leading;
  o.a_batch_stride = a.batch_stride;
  o.b = b.tensor.data_ptr();
  o.ldb = b.leading;
  o.b_batch_stride = b.batch_stride;
}

/// One launch a plane. An operand without a batch mode is the same for all of them.
void launch(Call const& call, KernelCall const& x, GemmPlan const& plan, Workspace const& workspace, OnDevice const& on) {
  GemmProblem const& p = x.problem;
  GemmOperands o = x.operands;
  int64_t const a_plane = x.a.batched ? o.a_batch_stride * x.a.tensor.element_size() : 0;
  int64_t const b_plane = x.b.batched ? o.b_batch_stride * x.b.tensor.element_size() : 0;
  int64_t const c_plane = p.has_c ? o.c_batch_stride * call.c->element_size() : 0;
  int64_t const d_plane = o.d_batch_stride * d_element_bytes(p);
  for (int64_t plane = 0; plane < x.planes; ++plane) {
    Status const status = run_gemm(plan, p, o, on.properties(), workspace.data(), workspace.bytes(), on.stream());
    if (!status.ok()) fail(call.op, ": ", plan.kernel->name, " on m = ", p.m, ", n = ", p.n, ", k = ", p.k, ": ", status.message);
    o.a = static_cast<char const*>(o.a) + a_plane;
    o.b = static_cast<char const*>(o.b) + b_plane;
    if (p.has_c) o.c = static_cast<char const*>(o.c) + c_plane;
    o.d = static_cast<char*>(o.d) + d_plane;
  }
}

/// Runs the call into `out` [batch, m, columns] or [m, columns], whose rows are contiguous. `before` is called in front of the launch.
template <class Before = Nothing>
void run(Call const& call, Tensor const& out, OnDevice const& on, Before const& before = {}) {
  Sizes const& s = call.sizes;
  std::optional<KernelOverride> override;
  if (call.kernel) override = parse_override(call.op, *call.kernel);
  if (s.batch == 0 || s.m == 0 || s.n == 0) {
    if (override) check_kernel_name(call.op, "gemm", override->name);
    before();
    return;
  }
  KernelCall x;
  set_output(call, out, &x);
  set_epilogue(call, out, &x);
  set_inputs(call, override, &x);
  GemmPlan requested;
  GemmPlan const& plan = override ? plan_as_requested(call.op, x.problem, *override, on, &requested) : cached_plan(call.op, x.problem, on);
  Workspace const workspace(call.op, out, plan.workspace_bytes, plan.kernel->name, " on a ", call.a, " and b ", call.b);
  before();
  launch(call, x, plan, workspace, on);
}

ScalarType check_output_type(Call const& call, std::optional<ScalarType> out_dtype, ScalarType otherwise) {
  ScalarType const of_a = call.a.scalar_type(), type = out_dtype.value_or(otherwise), codes = call.codes.type(type);
  if (out_dtype && *out_dtype != codes) fail(call.op, ": out_dtype must be ", codes, " for ", *call.codes.quant, ", got ", *out_dtype);
  if (!call.codes.given() && type != of_a && type != ScalarType::Float) {
    fail(call.op, ": out_dtype must be ", of_a, " or Float, got ", type);
  }
  return codes;
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

Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha, double beta,
            std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& quant,
            std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  Call call{"minfer::gemm", a, b, c, bias, kernel, {quant, scale}};
  check_call(call, alpha, beta, activation);
  ScalarType const type = check_output_type(call, out_dtype, a.scalar_type());
  return run(call, type, OnDevice(call.op, a));
}

Tensor gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> const& c, std::optional<Tensor> const& bias, double alpha,
                double beta, std::string const& activation, std::optional<ScalarType> out_dtype, std::optional<std::string> const& quant,
                std::optional<Tensor> const& scale, std::optional<std::string> const& kernel, Tensor const& out) {
  Call call{"minfer::gemm", a, b, c, bias, kernel, {quant, scale}};
  char const* op = call.op;
  check_call(call, alpha, beta, activation);
  ScalarType const type = check_output_type(call, out_dtype, out.scalar_type());
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
  if (scale) check_no_overlap(op, out, "scale", *scale);
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
                  std::optional<std::string> const& quant, std::optional<Tensor> const& scale, std::optional<std::string> const& kernel) {
  std::optional<Tensor> const no_c;
  Call call{"minfer::gemm_gated", a, b, no_c, bias, kernel, {quant, scale}};
  check_call(call, 1.0, 0.0, activation);
  if (call.sizes.n % 16 != 0) {
    fail(call.op, ": b must have a multiple of 16 columns (pack_gate_up: blocks of 8 gate and 8 up columns), got b ", b);
  }
  call.gated = true;
  return run(call, call.codes.type(a.scalar_type()), OnDevice(call.op, a));
}

constexpr Operator kOperators[] = {
    // D = activation(alpha * A.B + beta * C + bias); with quant = 'fp8_tensor' the e4m3 codes of D / scale
    {"gemm(Tensor a, Tensor b, *, Tensor? c=None, Tensor? bias=None, float alpha=1.0, float beta=0.0, str activation='none', "
     "ScalarType? out_dtype=None, str? quant=None, Tensor? scale=None, str? kernel=None) -> Tensor",
     boxed<&gemm>, boxed<&gemm_out>},
    // D = activation(gate) * up of A.B + bias, where 8 columns of B are gate columns and the next 8 are up columns
    {"gemm_gated(Tensor a, Tensor b, *, Tensor? bias=None, str activation='silu', str? quant=None, Tensor? scale=None, str? kernel=None) "
     "-> Tensor",
     boxed<&gemm_gated>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) { implement(m, kOperators); }

}  // namespace

Tensor product_in_float(char const* op, Tensor const& x, Tensor const& w, OnDevice const& on) {
  std::optional<Tensor> const none;
  std::optional<std::string> const any;
  Call call{op, x, w, none, none, any, {any, none}};
  call.b_transposed = true;
  check_operands(call);
  return run(call, ScalarType::Float, on);
}

void multiply(Product const& product, Tensor const& out, OnDevice const& on, std::function<void()> const& before) {
  std::optional<Tensor> const none;
  std::optional<std::string> const no_codes;
  Call call{product.op, product.a, product.b, none, product.bias, product.kernel, {no_codes, none}};
  call.activation = product.activation;
  call.gated = product.gated;
  call.sizes = {product.a.size(0), product.b.size(1), product.a.size(1), 1, false};
  run(call, out, on, before);
}

}  // namespace minfer::torch_binding
