// An operator is a row of its family's table: its schema, followed by the function that implements it. The compiler compares the two.
//
//   constexpr Operator kOperators[] = {
//       {"moe_combine(Tensor y, Tensor inverse, Tensor? weights=None) -> Tensor", boxed<&moe_combine>},
//   };
//   STABLE_TORCH_LIBRARY_FRAGMENT(minfer, m) { define(m, kOperators); }
//   STABLE_TORCH_LIBRARY_IMPL(minfer, CUDA, m) { implement(m, kOperators); }
//
// The implementations for CPU tensors (ATen compositions) and for fake tensors are Python's.
#pragma once

#include <span>
#include <string_view>

#include "core/boxing.h"

namespace minfer::torch_binding {

template <class T>
constexpr bool kIsOptional = false;
template <class T>
constexpr bool kIsOptional<std::optional<T>> = true;
template <class T>
constexpr bool kIsList = false;
template <class T>
constexpr bool kIsList<std::vector<T>> = true;

/// Whether a type of the schema language, "Tensor(a!)?", is what a parameter of type T takes.
template <class T>
constexpr bool is_schema_of(std::string_view type) {
  if constexpr (kIsOptional<T>) {
    return type.ends_with("?") && is_schema_of<typename T::value_type>(type.substr(0, type.size() - 1));
  } else if constexpr (kIsList<T>) {
    return type.ends_with("[]") && is_schema_of<typename T::value_type>(type.substr(0, type.size() - 2));
  } else if constexpr (std::is_same_v<T, Tensor>) {
    return type == "Tensor" || (type.starts_with("Tensor(") && type.ends_with("!)"));  // with "!" it is written
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return type == "int";
  } else if constexpr (std::is_same_v<T, double>) {
    return type == "float";
  } else if constexpr (std::is_same_v<T, bool>) {
    return type == "bool";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return type == "str";
  } else {
    static_assert(std::is_same_v<T, ScalarType>, "no type of the schema language is known for this parameter");
    return type == "ScalarType";
  }
}

/// Compares the first entry of a schema's list of arguments or results with a type, and takes it off the list.
template <class T>
constexpr void match_first(std::string_view* list) {
  auto const take = [&] {
    size_t const end = std::min(list->find(", "), list->size());
    std::string_view const entry = list->substr(0, end);
    list->remove_prefix(std::min(end + 2, list->size()));
    return entry;
  };
  std::string_view entry = take();
  if (entry == "*") entry = take();  // keyword arguments follow
  if (!is_schema_of<std::decay_t<T>>(entry.substr(0, entry.find(' ')))) throw "the schema and the function differ in a type";
}

template <class Result>
struct Results {
  static constexpr void match(std::string_view* list) { match_first<Result>(list); }
};
template <class... Each>
struct Results<std::tuple<Each...>> {
  static constexpr void match(std::string_view* list) {
    list->remove_prefix(1);  // "(Tensor, Tensor)"
    list->remove_suffix(1);
    (match_first<Each>(list), ...);
  }
};
template <>
struct Results<void> {
  static constexpr void match(std::string_view* list) {
    if (*list == "()") *list = "";
  }
};

/// Where the list of a schema's arguments ends. The text behind it begins with kResult.
constexpr std::string_view kResult = ") -> ";
constexpr size_t end_of_arguments(std::string_view schema) {
  size_t const end = schema.find(kResult);
  if (end == std::string_view::npos) throw "the schema has no result";
  return end;
}

/// Does not compile for a schema whose arguments or results differ from the function's in number, order or type.
template <class Result, class... Parameters>
constexpr void match(std::string_view schema, Result (*)(Parameters...)) {
  size_t const end = end_of_arguments(schema), begin = schema.find('(') + 1;
  std::string_view arguments = schema.substr(begin, end - begin), results = schema.substr(end + kResult.size());
  (match_first<Parameters>(&arguments), ...);
  if (!arguments.empty()) throw "the schema has more arguments than the function";
  Results<Result>::match(&results);
  if (!results.empty()) throw "the schema has more results than the function";
}

/// The type of the function that writes a functional form's result into `out`.
template <class Signature>
struct WithOut;
template <class Result, class... Parameters>
struct WithOut<Result (*)(Parameters...)> {
  using Signature = Result (*)(Parameters..., Tensor const& out);
};

struct Operator {
  char const* schema;
  BoxedFunction* function;
  BoxedFunction* out_function = nullptr;  // of the overload "out", which has the same arguments and, behind them, `out`; or null

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
