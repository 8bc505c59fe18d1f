#include "core/operators.h"

namespace minfer::torch_binding {

namespace {

/// "gemm" of "gemm(Tensor a, ..) -> Tensor".
std::string name_of(std::string_view schema) { return std::string(schema.substr(0, schema.find('('))); }

/// "gemm.out(Tensor a, .., Tensor(a!) out) -> Tensor(a!)" of "gemm(Tensor a, ..) -> Tensor". `out` is a keyword: where the others are all
/// positional, a star comes before it.
std::string out_schema(std::string_view schema) {
  std::string const name = name_of(schema);
  std::string const arguments(schema.substr(name.size(), end_of_arguments(schema) - name.size()));
  char const* const before = arguments.find("*,") == std::string::npos ? ", *, " : ", ";
  return name + ".out" + arguments + before + "Tensor(a!) out) -> Tensor(a!)";
}

}  // namespace

void define(torch::stable::detail::StableLibrary& library, std::span<Operator const> operators) {
  for (Operator const& each : operators) {
    library.def(each.schema);
    if (each.out_function != nullptr) library.def(out_schema(each.schema).c_str());
  }
}

void implement(torch::stable::detail::StableLibrary& library, std::span<Operator const> operators) {
  for (Operator const& each : operators) {
    std::string const name = name_of(each.schema);
    library.impl(name.c_str(), each.function);
    if (each.out_function != nullptr) library.impl((name + ".out").c_str(), each.out_function);
  }
}

}  // namespace minfer::torch_binding
