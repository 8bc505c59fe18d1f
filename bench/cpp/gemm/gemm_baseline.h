// What a GEMM is measured against. Built only where cuBLAS's headers and libraries were found (MINFER_BENCH_CUBLAS).
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "gemm/gemm_case.h"

namespace minfer::bench {

class Baseline {
 public:
  virtual ~Baseline() = default;
  virtual char const* name() const = 0;

  /// Readies the baseline for a case; empty, or the reason why it cannot compute it.
  virtual std::string prepare(GemmCase const& c, std::vector<GemmOperands> const& sets) = 0;

  /// Capturable.
  virtual void launch(GemmOperands const& operands, cudaStream_t stream) = 0;
};

/// "cublas" (cublasGemmEx and its strided-batched form) or "cublaslt" (best of its top 32 heuristics).
/// @throws std::invalid_argument for another name, std::runtime_error in a build without cuBLAS
std::unique_ptr<Baseline> make_baseline(std::string const& name);

/// Whether this build has them.
bool has_cublas();

}  // namespace minfer::bench
