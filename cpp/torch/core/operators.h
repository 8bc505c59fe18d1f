// An operator is a row of its family's table: its schema, followed by the function that implements it. The compiler compares the two.
//
//   constexpr Operator kOperators[] = {
//       {"moe_combine(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor", boxed<&moe_combine>},
//   };
//   STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
//   STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }
//
// Options that several operators share can be one parameter of each: ArgumentGroup (schema.h).
//
// The implementations for CPU tensors (ATen compositions) and for fake tensors are Python's, in the same namespace
// (python/minfer/_core/namespace.py).
#pragma once

#include <span>
#include <type_traits>

#include "core/boxing.h"
#include "core/schema.h"

/// Of torch.ops; a build for the kernels hub has one of its own, so that it may be loaded beside others.
#ifndef MINFER_NAMESPACE
#define MINFER_NAMESPACE minfer
#endif

namespace minfer::torch_binding {

/// The type of the function that writes its result into a last argument `out`.
template <class Signature>
struct WithOut;
template <class Result, class... Parameters>
struct WithOut<Result (*)(Parameters...)> {
  using Signature = Result (*)(Parameters..., Tensor const& out);
};

struct Operator {
  char const* schema;
  BoxedFunction* function;
  BoxedFunction* out_function = nullptr;  // of the overload "out", where there is one: the same arguments, followed by `out`

  template <auto function_>
  constexpr Operator(char const* text, Boxed<function_>) : schema(text), function(&Boxed<function_>::call) {
    match(text, function_);
  }
  /// Two operators, "gemm" and "gemm.out".
  template <auto function_, auto out_>
  constexpr Operator(char const* text, Boxed<function_> form, Boxed<out_>) : Operator(text, form) {
    static_assert(std::is_same_v<decltype(out_), typename WithOut<decltype(function_)>::Signature>);
    out_function = &Boxed<out_>::call;
  }
};

/// Registers the schemas.
void define(torch::stable::detail::StableLibrary& library, std::span<Operator const> operators);
/// Registers the functions, for the library's dispatch key.
void implement(torch::stable::detail::StableLibrary& library, std::span<Operator const> operators);

}  // namespace minfer::torch_binding
