// Cost models whose constants have names, as texts, so that a fit in Python evaluates the planners' own formulas. A model is lines
// "name,value"; constants that it does not name have their defaults. Models of one text have an empty line between any two.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/checks.h"
#include "core/parse.h"

namespace minfer::torch_binding {

/// The defaults, to the last bit.
template <class Model, class Constants>
std::string model_text(Constants const& constants) {
  std::string text;
  Model const model;
  for (auto const& constant : constants) {
    char value[32];
    std::snprintf(value, sizeof(value), "%.17g", model.*constant.value);
    text += std::string(constant.name) + "," + value + "\n";
  }
  return text;
}

template <class Model, class Constants>
Model read_cost_model(char const* op, std::string const& text, Constants const& constants) {
  Model model;
  for (std::string const& line : split(text, '\n')) {
    if (line.empty()) continue;
    size_t const comma = line.find(',');
    std::string const name = line.substr(0, comma);
    auto const* found = std::begin(constants);
    while (found != std::end(constants) && name != found->name) ++found;
    if (found == std::end(constants)) fail(op, ": the model has no constant '", name, "'");
    std::string const value = comma == std::string::npos ? "" : line.substr(comma + 1);
    char* end = nullptr;
    model.*(found->value) = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != 0 || !std::isfinite(model.*(found->value))) fail(op, ": ", name, " must be a number, got '", value, "'");
  }
  return model;
}

template <class Model, class Constants>
std::vector<Model> read_cost_models(char const* op, std::string const& text, Constants const& constants) {
  std::vector<Model> models;
  for (size_t begin = 0; begin < text.size();) {
    size_t const end = std::min(text.find("\n\n", begin), text.size());
    models.push_back(read_cost_model<Model>(op, text.substr(begin, end - begin), constants));
    begin = end + 2;
  }
  return models;
}

/// The numbers of an output of a prediction.
inline double* predictions(char const* op, char const* name, Tensor const& x, std::initializer_list<int64_t> shape) {
  bool fits = x.dim() == int64_t(shape.size()) && x.scalar_type() == ScalarType::Double && x.is_contiguous() && x.is_cpu();
  for (size_t i = 0; fits && i < shape.size(); ++i) fits = x.size(int64_t(i)) == shape.begin()[i];
  if (!fits) fail(op, ": ", name, " must be a contiguous float64 CPU tensor, us [models, candidates], floor_us [candidates], got ", x);
  return static_cast<double*>(x.data_ptr());
}

}  // namespace minfer::torch_binding
