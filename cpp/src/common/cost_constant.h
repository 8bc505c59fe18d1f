// A constant of a cost model with its name, by which fits set it (minfer::_predict_attention and its like).
#pragma once

namespace minfer {

template <class Model>
struct CostConstant {
  char const* name;
  double Model::*value;
};

/// The entry of member `name` of the CostModel in scope.
#define MINFER_COST_CONSTANT(name) \
  CostConstant<CostModel> { #name, &CostModel::name }

}  // namespace minfer
