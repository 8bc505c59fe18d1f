// Dense GEMMs on CUDA tensors. A call goes through check_call(), then run(): describe the operands as a GemmProblem and GemmOperands, plan,
// allocate the workspace, launch.
#include "gemm_call.h"

#include "core/batch_invariance.h"
#include "core/checks.h"
#include "core/operators.h"
#include "core/readable.h"
#include "core/torch_calls.h"
#include "gemm_planning.h"

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

void check_addend(GemmCall const& call) {
  Tensor const& c = *call.c;
  Sizes const& s = call.sizes;
  if (c.dim() > s.modes()) fail(call.op, ": c must broadcast to the output, got c ", c);
  int64_t const extents[3] = {s.batch, s.m, s.n};
  for (int64_t i = 0; i < c.dim(); ++i) {
    if (c.size(i) == 1 || c.size(i) == extents[3 - c.dim() + i]) continue;
    fail(call.op, ": c must broadcast to ", Listed{{extents + (3 - s.modes()), size_t(s.modes())}}, ", got c ", c);
  }
  if (c.scalar_type() != call.narrow() && c.scalar_type() != ScalarType::Float) {
    fail(call.op, ": c must be ", call.narrow(), " or Float, got ", c.scalar_type());
  }
  check_same_device(call.op, "c", c, {"a", call.a});
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
void set_output(GemmCall const& call, Tensor const& out, KernelCall* x) {
  GemmOperands& o = x->operands;
  int64_t const m = call.sizes.m, bytes = out.element_size();
  bool const batched = call.sizes.batched;
  o.d = out.data_ptr();
  o.ldd = m > 1 ? out.stride(out.dim() - 2) : unused_stride(call.columns(), bytes);
  o.d_batch_stride = batched && call.sizes.batch > 1 ? out.stride(0) : unused_stride(m * o.ldd, bytes);
  x->problem.d_fp8 = call.codes.given();
  x->problem.d_int32 = call.scaled != nullptr && call.scaled->int32;
  x->problem.d_type = data_type(x->problem.d_fp8 || x->problem.d_int32 ? call.narrow() : out.scalar_type());
  x->problem.d_alignment = common_alignment({address_of(o.d), uint64_t(o.ldd * bytes), uint64_t(o.d_batch_stride * bytes)});
  if (x->problem.d_fp8) {
    x->scale = contiguous(call.op, "scale", *call.codes.scale);
    o.d_scale = static_cast<float const*>(x->scale.data_ptr());
  }
}

/// C, which may be broadcast. TMA reads a full matrix of out's 16-bit type; c_alignment 0 says that it does not.
void set_addend(GemmCall const& call, Tensor const& out, KernelCall* x) {
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
void set_epilogue(GemmCall const& call, Tensor const& out, KernelCall* x) {
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

/// A copy of A, or of B, whose k is filled up with zeros to a multiple of 16, and lies along rows of so many bytes.
Tensor filled_up(char const* op, char const* name, Tensor const& x, int64_t k_mode, int64_t stride) {
  int64_t const lines = x.size(1 - k_mode);
  Tensor const memory = allocate(op, x, {lines * stride}, x.scalar_type(), "a copy of ", name, ' ', x);
  fill_with_zeros(op, name, memory);
  bool const first = k_mode == 0;
  int64_t const strides[2] = {first ? 1 : stride, first ? stride : 1};
  int64_t const shape[2] = {first ? stride : lines, first ? lines : stride};
  copy_into(op, name, view_of(op, name, memory, x.sizes(), {strides, 2}), x);
  return view_of(op, name, memory, {shape, 2}, {strides, 2});
}

/// Scales, and operands of 8 bits as their kernels read them: along k, at multiples of 16 bytes. whole_vectors: and in whole ones.
void set_scaled_inputs(GemmCall const& call, bool whole_vectors, KernelCall* x) {
  ScaledOperands const& s = *call.scaled;
  GemmProblem& p = x->problem;
  p.block_scaled = s.a.blocks || s.b.blocks;
  p.fast_accum = s.fast_accum;
  p.ab_type = data_type(s.type);
  x->operands.a_scale = s.a;
  x->operands.b_scale = s.b;
  if (p.k == 0) {  // none of it is read: any kernel does
    p.ab_type = data_type(call.narrow());
    p.block_scaled = p.fast_accum = false;
    return;
  }
  if (s.a_zero.defined()) {
    x->operands.a_zero = static_cast<int32_t const*>(s.a_zero.data_ptr());
    x->operands.a_zero_stride = s.a_zero_stride;
    x->operands.b_sums = static_cast<int32_t const*>(s.b_sums.data_ptr());
  }
  int64_t const stride = round_up(p.k, 16);
  if (whole_vectors && p.k != stride) {
    x->a = describe(call.op, "a", filled_up(call.op, "a", call.a, 1, stride));
    x->b = describe(call.op, "b", filled_up(call.op, "b", call.b, 0, stride));
    choose_major(x->b, true);  // a single column
    p.k = stride;
    return;
  }
  auto along_k = [](Matrix& m, bool is_b) {
    choose_major(m, is_b);
    return m.rows_contiguous == is_b && m.alignment >= 16;
  };
  if (!along_k(x->a, false)) x->a = describe(call.op, "a", copy_with_strides(call.op, "a", call.a, {stride, 1}, p.m * stride));
  if (!along_k(x->b, true)) {
    x->b = describe(call.op, "b", copy_with_strides(call.op, "b", call.b, {1, stride}, p.n * stride));
    choose_major(x->b, true);  // a single column
  }
}

/// A and B, and the sizes, once the output and C have been described.
void set_inputs(GemmCall const& call, std::optional<KernelOverride> const& override, OnDevice const& on, KernelCall* x) {
  GemmProblem& p = x->problem;
  GemmOperands& o = x->operands;
  Sizes const& s = call.sizes;
  p.m = s.m;
  p.n = s.n;
  p.k = call.alpha == 0.0f ? 0 : s.k;  // BLAS: alpha = 0 means that A and B are not read
  p.batch = s.batch;
  p.batch_invariant = batch_invariant();
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
  if (call.scaled != nullptr) {
    KernelInfo const* const kernel = override ? find_kernel(override->name.c_str()) : nullptr;
    bool const portable = kernel != nullptr ? kernel->arch < 90 : on.properties().compute_capability() != 90;
    set_scaled_inputs(call, portable, x);
  } else {
    p.ab_type = data_type(call.a.scalar_type());
  }
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
  o.b_is_constant = call.constant_weights && o.b == call.b.data_ptr();  // not a copy
}

/// One launch a plane. An operand without a batch mode is the same for all of them.
void launch(GemmCall const& call, KernelCall const& x, GemmPlan const& plan, Workspace const& workspace, OnDevice const& on) {
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

}  // namespace

void check_operands(GemmCall& call) {
  char const* op = call.op;
  Tensor const &a = call.a, &b = call.b;
  if (a.dim() != 2 && a.dim() != 3) fail(op, ": a must be [m, k] or [batch, m, k], got a ", a);
  if (b.dim() != 2 && b.dim() != 3) fail(op, ": b must be [k, n] or [batch, k, n], got b ", b);
  if (call.scaled == nullptr) {
    check_16bit(op, "a", a);
  } else if (a.scalar_type() != call.scaled->type) {
    fail(op, ": a must be ", call.scaled->type, ", got ", a.scalar_type());
  }
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

/// All arguments but the output.
void check_call(GemmCall& call, double alpha, double beta, std::string const& activation) {
  char const* op = call.op;
  check_operands(call);
  call.alpha = in_float32(op, "alpha", alpha);
  call.beta = in_float32(op, "beta", beta);
  call.activation = parse_activation(op, activation);
  if (call.beta != 0.0f && !call.c) fail(op, ": c must be given when beta is not 0, got beta = ", beta);
  if (call.c) check_addend(call);
  if (call.bias) check_bias(op, *call.bias, call.sizes.n, call.narrow(), {"a", call.a});
  check_output_codes(op, call.codes, {"a", call.a});
  if (call.kernel) parse_override(op, *call.kernel);
}

void run(GemmCall const& call, Tensor const& out, OnDevice const& on, std::function<void()> const& before) {
  Sizes const& s = call.sizes;
  std::optional<KernelOverride> override;
  if (call.kernel) override = parse_override(call.op, *call.kernel);
  bool const empty = s.batch == 0 || s.m == 0 || s.n == 0;
  bool const no_sums = call.scaled != nullptr && call.scaled->int32 && s.k == 0;  // they are zeros, which no kernel makes
  if (empty || no_sums) {
    if (override) check_kernel_name(call.op, call.scaled != nullptr ? "scaled_gemm" : "gemm", override->name);
    if (before) before();
    if (!empty) fill_with_zeros(call.op, "out", out);
    return;
  }
  KernelCall x;
  set_output(call, out, &x);
  set_epilogue(call, out, &x);
  set_inputs(call, override, on, &x);
  GemmPlan requested;
  GemmPlan const& plan = override ? plan_as_requested(call.op, x.problem, *override, on, &requested) : cached_plan(call.op, x.problem, on);
  Workspace const workspace(call.op, out, plan.workspace_bytes, plan.kernel->name, " on a ", call.a, " and b ", call.b);
  if (before) before();
  launch(call, x, plan, workspace, on);
}

void check_output(GemmCall const& call, Tensor const& out, ScalarType type) {
  char const* op = call.op;
  if (out.scalar_type() != type) fail(op, ": out must be ", type, ", got ", out.scalar_type());
  auto const wanted = call.sizes.output(call.columns());
  Shape const shape(wanted.data(), size_t(call.sizes.modes()));
  if (!same(out.sizes(), shape)) fail(op, ": out must be ", Listed{shape}, ", got ", out);
  check_same_device(op, "out", out, {"a", call.a});
  check_apart(op, out);
  check_no_overlap(op, out, "a", call.a);
  check_no_overlap(op, out, "b", call.b);
  if (call.bias) check_no_overlap(op, out, "bias", *call.bias);
  if (call.codes.scale) check_no_overlap(op, out, call.codes.scale_name, *call.codes.scale);
  if (call.c && call.beta != 0.0f && !is_same_view(out, *call.c)) check_no_overlap(op, out, "c", *call.c);
}

Tensor run(GemmCall const& call, ScalarType type, OnDevice const& on) {
  auto const extents = call.sizes.output(call.columns());
  Shape const shape(extents.data(), size_t(call.sizes.modes()));
  Tensor const out = allocate(call.op, call.a, shape, type, "the output of a ", call.a, " and b ", call.b);
  run(call, out, on);
  return out;
}

void run_into(GemmCall const& call, Tensor const& out, OnDevice const& on) {
  int64_t const last = out.dim() - 1, columns = call.columns();
  bool const rows_contiguous = (out.stride(last) == 1 || columns <= 1) && (call.sizes.m <= 1 || out.stride(last - 1) >= columns);
  if (rows_contiguous) {
    run(call, out, on);
  } else {
    copy_into(call.op, "out", out, run(call, out.scalar_type(), on));
  }
}

}  // namespace minfer::torch_binding
