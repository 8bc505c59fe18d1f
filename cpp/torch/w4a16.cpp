// torch.ops.minfer.w4a16_* and w8a16_* on CUDA tensors.
#include "minfer/w4a16.h"

#include <cmath>

#include "bindings.h"
#include "gemm/launch.h"
#include "gemm_planning.h"
#include "minfer/gemm.h"
#include "packed_weight.h"

namespace minfer::torch_binding {

namespace {

/// A quantised weight, checked: qweight [n / 64, k / 64, 512 (8-bit: 1024)], scales and zeros [groups, n].
struct Weight {
  WeightFormat format;
  Tensor packed, scales;
  std::optional<Tensor> zeros;
  int64_t n = 0, k = 0, group_size = 0;  // group_size 0: all of k
  double alpha = 1.0;

  int64_t ld_scales() const { return scales.size(0) > 1 ? scales.stride(0) : round_up(n, 16); }
  int64_t ld_zeros() const { return zeros->size(0) > 1 ? zeros->stride(0) : round_up(n, 16); }
  QuantizedWeight described() const {
    QuantizedWeight w;
    w.format = format;
    w.packed = packed.data_ptr();
    w.scales = scales.data_ptr();
    w.ld_scales = ld_scales();
    if (zeros) {
      w.zeros = zeros->data_ptr();
      w.ld_zeros = ld_zeros();
    }
    w.group_size = group_size;
    w.n = n;
    w.k = k;
    w.alpha = float(alpha);
    return w;
  }
};

Weight check_weight(char const* op, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                    double alpha, WeightFormat format, int64_t n, int64_t k) {
  Weight w;
  w.format = format;
  w.n = n;
  w.k = k;
  w.alpha = alpha;
  check_group_size(op, format, group_size);
  check(std::isfinite(alpha), op, ": alpha must be finite, got ", alpha);
  check(k % 8 == 0, op, ": k must be a multiple of 8, got ", k);
  check(n % 8 == 0, op, ": scales must have n = ", n, " columns, a multiple of 8, got ", shape_of(scales));
  w.group_size = planned_group(group_size, k);
  int64_t const groups = groups_of(group_size, k);
  std::vector<int64_t> const packed = packed_shape(format, n, k);
  check(sizes_of(qweight) == packed, op, ": qweight must be [ceil(n / 64), ceil(k / 64), ", packed[2], "] = [", packed[0], ", ", packed[1],
        ", ", packed[2], "] (", bits_of(format) == 4 ? "w4a16_pack" : "w8a16_pack", "), got ", shape_of(qweight));
  check(qweight.scalar_type() == ScalarType::Int, op, ": qweight must be Int, got ", dtype_name(qweight.scalar_type()));
  check(scales.dim() == 2 && scales.size(0) == groups && scales.size(1) == n, op, ": scales must be [groups, n] = [", groups, ", ", n,
        "] for k = ", k, " and group_size = ", group_size, ", got ", shape_of(scales));
  check_same_device(op, "scales", scales, qweight.get_device_index());
  if (zeros) {
    check(has_zero_points(format), op, ": zeros must be None for ", name_of(format), ", got ", shape_of(*zeros));
    check(zeros->dim() == 2 && zeros->size(0) == groups && zeros->size(1) == n, op, ": zeros must be [groups, n] = [", groups, ", ", n,
          "], got ", shape_of(*zeros));
    check(zeros->scalar_type() == scales.scalar_type(), op, ": zeros must be ", dtype_name(scales.scalar_type()), ", got ",
          dtype_name(zeros->scalar_type()));
    check_same_device(op, "zeros", *zeros, qweight.get_device_index());
  }
  torch::stable::accelerator::DeviceGuard const guard(qweight.get_device_index());
  w.packed = torch::stable::contiguous(qweight);
  check(reinterpret_cast<uintptr_t>(w.packed.data_ptr()) % 16 == 0, op, ": qweight must be 16-byte aligned");
  w.scales = aligned_rows(scales);
  if (zeros) w.zeros = aligned_rows(*zeros);
  return w;
}

/// [m, columns] of a tensor whose leading modes can be walked as one; a copy where they cannot.
struct Rows {
  Tensor tensor;
  int64_t m = 1, stride = 0;
};
Rows flatten_rows(Tensor const& x) {
  Rows r;
  int64_t const last = x.dim() - 1;
  for (int64_t i = 0; i < last; ++i) r.m *= x.size(i);
  int64_t expected = -1;
  bool walks = x.stride(last) == 1 || x.size(last) == 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (x.size(i) == 1) continue;
    if (expected < 0) {
      r.stride = x.stride(i);
    } else {
      walks = walks && x.stride(i) == expected;
    }
    expected = x.stride(i) * x.size(i);
  }
  if (expected < 0) r.stride = round_up(x.size(last), 8);
  bool const aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && r.stride % 8 == 0 && (r.m <= 1 || r.stride >= x.size(last));
  if (r.m == 0 || x.size(last) == 0 || (walks && aligned)) {
    r.tensor = x;
    if (r.m == 0 || x.size(last) == 0) r.stride = round_up(std::max<int64_t>(x.size(last), 1), 8);
    return r;
  }
  std::vector<int64_t> const shape = {r.m, x.size(last)};
  r.tensor = torch::stable::clone(torch::stable::contiguous(x));  // fresh memory is aligned
  r.stride = x.size(last);
  return r;
}

struct Call {
  char const* op;
  Tensor a, qweight, scales;
  std::optional<Tensor> zeros, perm, c, bias;
  int64_t group_size;
  double alpha;
  std::string activation;
  WeightFormat format;
  bool gated = false;
  std::optional<std::string> kernel;
};

std::vector<int64_t> output_shape(Call const& call) {
  check(call.scales.dim() == 2, call.op, ": scales must be [groups, n], got ", shape_of(call.scales));
  check(call.a.dim() >= 1, call.op, ": a must be [..., k], got a ", shape_of(call.a));
  std::vector<int64_t> shape = sizes_of(call.a);
  shape.back() = call.gated ? call.scales.size(1) / 2 : call.scales.size(1);
  return shape;
}

void check_call(Call const& call) {
  char const* op = call.op;
  Tensor const& a = call.a;
  check(is_16bit_float(a.scalar_type()), op, ": a must be float16 or bfloat16, got ", dtype_name(a.scalar_type()));
  check_scale_type(op, "scales", call.scales, call.format, a.scalar_type());
  int32_t const device = a.get_device_index();
  check_same_device(op, "qweight", call.qweight, device);
  int64_t const n = call.scales.size(1), k = a.size(a.dim() - 1);
  check(!call.gated || n % 16 == 0, op, ": scales must have a multiple of 16 columns (blocks of 8 gate and 8 up rows), got ",
        shape_of(call.scales));
  if (call.bias) check_bias(op, *call.bias, n, a.scalar_type(), device);
  if (call.perm) {
    check(call.perm->dim() == 1 && call.perm->size(0) == k, op, ": perm must be [k] = [", k, "], got ", shape_of(*call.perm));
    check(call.perm->scalar_type() == ScalarType::Int, op, ": perm must be Int, got ", dtype_name(call.perm->scalar_type()));
    check_same_device(op, "perm", *call.perm, device);
  }
  if (call.c) {
    Tensor const& c = *call.c;
    std::vector<int64_t> const shape = output_shape(call);
    check(c.dim() <= int64_t(shape.size()), op, ": c must broadcast to the output, got c ", shape_of(c));
    for (int64_t i = 0; i < c.dim(); ++i) {
      check(c.size(i) == 1 || c.size(i) == shape[shape.size() - size_t(c.dim()) + size_t(i)], op,
            ": c must broadcast to the output, got c ", shape_of(c));
    }
    check(c.scalar_type() == a.scalar_type() || c.scalar_type() == ScalarType::Float, op, ": c must be ", dtype_name(a.scalar_type()),
          " or Float, got ", dtype_name(c.scalar_type()));
    check_same_device(op, "c", c, device);
  }
}

/// Runs the call into `out`, contiguous.
void run(Call const& call, Tensor const& out) {
  char const* op = call.op;
  int64_t const k = call.a.size(call.a.dim() - 1), n = call.scales.size(1), n_out = call.gated ? n / 2 : n;
  int32_t const device = call.a.get_device_index();
  Activation const activation = parse_activation(op, call.activation);
  Weight const w = check_weight(op, call.qweight, call.scales, call.zeros, call.group_size, call.alpha, call.format, n, k);
  torch::stable::accelerator::DeviceGuard const guard(device);
  Rows a = flatten_rows(call.a);
  if (a.m == 0 || n == 0) return;
  Stream const stream = current_stream(device);

  GemmProblem problem;
  GemmOperands operands;
  problem.m = a.m;
  problem.n = n;
  problem.k = k;
  problem.ab_type = problem.d_type = data_type(call.a.scalar_type());
  problem.gated = call.gated;
  if (k > 0) {  // without k only the epilogue is left, which the dense kernels compute
    problem.b_format = w.format;
    problem.group_size = int32_t(w.group_size);
    problem.has_zeros = w.zeros.has_value();
    operands.b = w.packed.data_ptr();
    operands.b_scales = w.scales.data_ptr();
    operands.ld_scales = w.ld_scales();
    if (w.zeros) {
      operands.b_zeros = w.zeros->data_ptr();
      operands.ld_zeros = w.ld_zeros();
    }
    operands.alpha = float(call.alpha);
    if (call.perm) {
      Tensor const perm = torch::stable::contiguous(*call.perm);
      std::vector<int64_t> const shape = {a.m, k};
      Tensor gathered = torch::stable::new_empty(call.a, shape);
      Status const status =
          gather_columns(a.tensor.data_ptr(), a.stride, static_cast<int32_t const*>(perm.data_ptr()), a.m, k, gathered.data_ptr(),
                         device_properties(device).compute_capability() >= 90 && gemm::programmatic_launch_enabled(), stream);
      check(status.ok(), op, ": ", status.message);
      a.tensor = gathered;
      a.stride = k;
    }
  }
  operands.a = a.tensor.data_ptr();
  operands.lda = a.stride;
  operands.a_batch_stride = round_up(a.m * a.stride, 8);
  operands.ldb = round_up(std::max<int64_t>(k, 1), 8);
  operands.d = out.data_ptr();
  operands.ldd = n_out;
  operands.d_batch_stride = round_up(a.m * n_out, 8);
  problem.d_alignment = common_alignment({uint64_t(reinterpret_cast<uintptr_t>(operands.d)), uint64_t(n_out * 2)});
  operands.activation = activation;

  Tensor c_holder, bias_holder;
  problem.c_alignment = 0;
  if (call.c) {
    operands.beta = 1.0f;
    problem.has_c = true;
    if (call.c->dim() <= 1) {
      c_holder = *call.c;
      operands.c_stride_n = c_holder.dim() == 1 && c_holder.size(0) != 1 ? c_holder.stride(0) : 0;
    } else {
      std::vector<int64_t> const wanted = output_shape(call);
      c_holder = *call.c;
      if (sizes_of(c_holder) != wanted || flatten_rows(c_holder).tensor.data_ptr() != c_holder.data_ptr()) {
        c_holder = torch::stable::new_empty(out, wanted, call.c->scalar_type());
        torch::stable::copy_(c_holder, *call.c);
      }
      Rows const rows = flatten_rows(c_holder);
      operands.c_stride_m = rows.stride;
      operands.c_stride_n = 1;
      operands.c_batch_stride = round_up(a.m * rows.stride, 8);
      bool const full = c_holder.scalar_type() == out.scalar_type() && rows.stride % 8 == 0;
      problem.c_alignment = full && reinterpret_cast<uintptr_t>(c_holder.data_ptr()) % 16 == 0 ? 16 : 0;
    }
    operands.c = c_holder.data_ptr();
    operands.c_type = data_type(c_holder.scalar_type());
  }
  if (call.bias) {
    bias_holder = unit_rows(*call.bias);
    operands.bias = bias_holder.data_ptr();
    operands.bias_type = data_type(bias_holder.scalar_type());
  }

  // Many tokens: the weight written out in 16 bits and a dense GEMM, where that is predicted to be faster, or where no kernel reads the format.
  Tensor dense;
  GemmPlan forced;
  GemmPlan const* plan = nullptr;
  auto const dequantize = [&] {
    std::vector<int64_t> const shape = {n, k};
    dense = torch::stable::new_empty(call.a, shape);
    QuantizedWeight weight = w.described();
    weight.alpha = 1.0f;  // alpha stays with the accumulators: a small one would take the weights below fp16's range
    Status const status = dequantize_weight(weight, problem.ab_type, dense.data_ptr(), stream);
    check(status.ok(), op, ": ", status.message);
    problem = dequantized(problem);
    operands.b = dense.data_ptr();
    operands.ldb = k;
  };
  bool const dequantize_asked = call.kernel && *call.kernel == kDequantizeFirst;
  if (dequantize_asked && k > 0) {
    dequantize();
  } else if (call.kernel && !dequantize_asked) {
    KernelOverride const override = parse_override(op, *call.kernel);
    GemmPlanOptions options;
    options.kernel = override.name.c_str();
    if (override.launch) options.launch = &*override.launch;
    GemmProblem asked = problem;
    asked.b_format = w.format;  // without k too: a name is checked before it is refused
    Status const status = plan_gemm(asked, device_properties(device), options, &forced);
    check(status.ok(), op, ": ", status.message);
    check(k > 0, op, ": kernel ", override.name, " cannot compute this problem: it needs k > 0");
    plan = &forced;
  } else if (k > 0 && cached_dequantize_first(op, problem, device)) {
    dequantize();
  }
  if (plan == nullptr) plan = &cached_plan(op, problem, device);
  Tensor workspace;
  if (plan->workspace_bytes > 0) {
    std::vector<int64_t> const bytes = {int64_t(plan->workspace_bytes)};
    workspace = torch::stable::new_empty(out, bytes, ScalarType::Byte);
  }
  Status const status = run_gemm(*plan, problem, operands, device_properties(device),
                                 plan->workspace_bytes > 0 ? workspace.data_ptr() : nullptr, plan->workspace_bytes, stream);
  check(status.ok(), op, ": ", plan->kernel->name, " on m = ", problem.m, ", n = ", problem.n, ", k = ", problem.k, ": ", status.message);
}

Tensor gemm_quantized(Call const& call) {
  std::vector<int64_t> const shape = output_shape(call);
  check_call(call);
  Tensor out = torch::stable::new_empty(call.a, shape);
  run(call, out);
  return out;
}

Tensor gemm_quantized_out(Call const& call, Tensor out) {
  std::vector<int64_t> const shape = output_shape(call);
  check_call(call);
  char const* op = call.op;
  check(out.scalar_type() == call.a.scalar_type(), op, ": out must be ", dtype_name(call.a.scalar_type()), ", got ",
        dtype_name(out.scalar_type()));
  check(sizes_of(out) == shape, op, ": out must be [..., n] = a's shape with n = ", shape.back(), ", got ", shape_of(out));
  check_same_device(op, "out", out, call.a.get_device_index());
  if (out.is_contiguous()) {
    run(call, out);
  } else {
    Tensor staged = torch::stable::new_empty(call.a, shape);
    run(call, staged);
    torch::stable::copy_(out, staged);
  }
  return out;
}

Tensor pack(char const* op, WeightFormat format, Tensor const& codes) {
  check(codes.dim() == 2, op, ": codes must be [n, k], got ", shape_of(codes));
  check(codes.scalar_type() == ScalarType::Byte, op, ": codes must be Byte, got ", dtype_name(codes.scalar_type()));
  int64_t const n = codes.size(0), k = codes.size(1);
  check(n % 8 == 0, op, ": codes must have n rows, a multiple of 8, got ", shape_of(codes));
  check(k % 8 == 0, op, ": codes must have k columns, a multiple of 8, got ", shape_of(codes));
  std::vector<int64_t> const shape = packed_shape(format, n, k);
  torch::stable::accelerator::DeviceGuard const guard(codes.get_device_index());
  Tensor const rows = unit_rows(codes);
  Tensor packed = torch::stable::new_empty(codes, shape, ScalarType::Int);
  Status const status = pack_weight(format, static_cast<uint8_t const*>(rows.data_ptr()), n, k, n > 1 ? rows.stride(0) : k,
                                    packed.data_ptr(), current_stream(codes.get_device_index()));
  check(status.ok(), op, ": ", status.message);
  return packed;
}

Tensor dequantize(char const* op, Tensor const& qweight, Tensor const& scales, std::optional<Tensor> const& zeros, int64_t group_size,
                  double alpha, int64_t n, int64_t k, WeightFormat format, std::optional<ScalarType> out_dtype) {
  bool const wide = scale_bytes_of(format) == 2;
  if (wide) {
    check(is_16bit_float(scales.scalar_type()), op, ": scales must be float16 or bfloat16, got ", dtype_name(scales.scalar_type()));
  } else {
    check(scales.scalar_type() == ScalarType::Byte, op, ": scales must be Byte for ", name_of(format), ", got ",
          dtype_name(scales.scalar_type()));
  }
  ScalarType const type = out_dtype ? *out_dtype : wide ? scales.scalar_type() : ScalarType::BFloat16;
  check(is_16bit_float(type), op, ": out_dtype must be float16 or bfloat16, got ", dtype_name(type));
  check(!wide || type == scales.scalar_type(), op, ": out_dtype must be scales' dtype ", dtype_name(scales.scalar_type()), ", got ",
        dtype_name(type));
  check(scales.dim() == 2 && n >= 0 && k >= 0, op, ": n and k must not be negative, got ", n, " and ", k);
  check(scales.size(1) == n, op, ": scales must be [groups, n] with n = ", n, ", got ", shape_of(scales));
  Weight const w = check_weight(op, qweight, scales, zeros, group_size, alpha, format, n, k);
  torch::stable::accelerator::DeviceGuard const guard(qweight.get_device_index());
  std::vector<int64_t> const shape = {n, k};
  Tensor out = torch::stable::new_empty(scales, shape, type);
  Status const status = dequantize_weight(w.described(), data_type(type), out.data_ptr(), current_stream(qweight.get_device_index()));
  check(status.ok(), op, ": ", status.message);
  return out;
}

}  // namespace

Tensor w4a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                  std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                  std::string w4_format, std::optional<std::string> kernel) {
  char const* op = "minfer::w4a16_gemm";
  WeightFormat const format = parse_format(op, 4, w4_format);
  return gemm_quantized({op, a, qweight, scales, zeros, perm, c, bias, group_size, alpha, activation, format, false, kernel});
}

Tensor w4a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                      std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                      std::string w4_format, std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::w4a16_gemm";
  WeightFormat const format = parse_format(op, 4, w4_format);
  return gemm_quantized_out({op, a, qweight, scales, zeros, perm, c, bias, group_size, alpha, activation, format, false, kernel}, out);
}

Tensor w4a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                        std::optional<Tensor> perm, std::optional<Tensor> bias, std::string activation, std::string w4_format,
                        std::optional<std::string> kernel) {
  char const* op = "minfer::w4a16_gemm_gated";
  WeightFormat const format = parse_format(op, 4, w4_format);
  return gemm_quantized({op, a, qweight, scales, zeros, perm, std::nullopt, bias, group_size, alpha, activation, format, true, kernel});
}

Tensor w4a16_pack(Tensor codes, std::string w4_format) {
  char const* op = "minfer::w4a16_pack";
  return pack(op, parse_format(op, 4, w4_format), codes);
}

Tensor w8a16_gemm(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                  std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                  std::string w8_format, std::optional<std::string> kernel) {
  char const* op = "minfer::w8a16_gemm";
  WeightFormat const format = parse_format(op, 8, w8_format);
  return gemm_quantized({op, a, qweight, scales, zeros, perm, c, bias, group_size, alpha, activation, format, false, kernel});
}

Tensor w8a16_gemm_out(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                      std::optional<Tensor> perm, std::optional<Tensor> c, std::optional<Tensor> bias, std::string activation,
                      std::string w8_format, std::optional<std::string> kernel, Tensor out) {
  char const* op = "minfer::w8a16_gemm";
  WeightFormat const format = parse_format(op, 8, w8_format);
  return gemm_quantized_out({op, a, qweight, scales, zeros, perm, c, bias, group_size, alpha, activation, format, false, kernel}, out);
}

Tensor w8a16_gemm_gated(Tensor a, Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha,
                        std::optional<Tensor> perm, std::optional<Tensor> bias, std::string activation, std::string w8_format,
                        std::optional<std::string> kernel) {
  char const* op = "minfer::w8a16_gemm_gated";
  WeightFormat const format = parse_format(op, 8, w8_format);
  return gemm_quantized({op, a, qweight, scales, zeros, perm, std::nullopt, bias, group_size, alpha, activation, format, true, kernel});
}

Tensor w8a16_pack(Tensor codes) { return pack("minfer::w8a16_pack", WeightFormat::kInt8, codes); }

Tensor w4a16_dequantize(Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha, int64_t n, int64_t k,
                        std::string w4_format, std::optional<ScalarType> out_dtype) {
  char const* op = "minfer::w4a16_dequantize";
  return dequantize(op, qweight, scales, zeros, group_size, alpha, n, k, parse_format(op, 4, w4_format), out_dtype);
}

Tensor w8a16_dequantize(Tensor qweight, Tensor scales, std::optional<Tensor> zeros, int64_t group_size, double alpha, int64_t n, int64_t k,
                        std::string w8_format) {
  char const* op = "minfer::w8a16_dequantize";
  return dequantize(op, qweight, scales, zeros, group_size, alpha, n, k, parse_format(op, 8, w8_format), std::nullopt);
}

}  // namespace minfer::torch_binding
