// The answer of an entry point in a build without CUDA.
#pragma once

#include "minfer/status.h"

namespace minfer {

inline Status without_cuda() { return Status::failure(StatusCode::kNotCompiled, "this build has no CUDA code"); }

}  // namespace minfer
