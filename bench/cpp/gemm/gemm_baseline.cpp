#include "gemm/gemm_baseline.h"

#include <stdexcept>

#if defined(MINFER_BENCH_CUBLAS) && __has_include(<cublas_v2.h>) && __has_include(<cublasLt.h>)
#define MINFER_BENCH_WITH_CUBLAS 1
#include <cublas_v2.h>

#include "common/cublaslt_best.h"
#else
#define MINFER_BENCH_WITH_CUBLAS 0
#endif

namespace minfer::bench {

bool has_cublas() { return MINFER_BENCH_WITH_CUBLAS != 0; }

#if MINFER_BENCH_WITH_CUBLAS

namespace {

constexpr size_t kWorkspaceBytes = size_t(64) << 20;  // cuBLAS asks for 32 MiB on Hopper; without one it allocates in capture

void check_cublas(cublasStatus_t status, char const* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": " + cublasGetStatusString(status));
}

class Workspace {
 public:
  Workspace() { check(cudaMalloc(&data_, kWorkspaceBytes), "cudaMalloc of the cuBLAS workspace"); }
  Workspace(Workspace const&) = delete;
  Workspace& operator=(Workspace const&) = delete;
  ~Workspace() { cudaFree(data_); }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

cudaDataType_t cuda_type(DataType type) { return type == DataType::kF16 ? CUDA_R_16F : type == DataType::kBF16 ? CUDA_R_16BF : CUDA_R_32F; }

// Row-major D = A.B is column-major D^T = B^T.A^T, so B comes first and m, n change places.
class Cublas : public Baseline {
 public:
  Cublas() {
    check_cublas(cublasCreate(&handle_), "cublasCreate");
    check_cublas(cublasSetWorkspace(handle_, workspace_.data(), kWorkspaceBytes), "cublasSetWorkspace");
  }
  ~Cublas() override { cublasDestroy(handle_); }

  char const* name() const override { return "cublas"; }

  std::string prepare(GemmCase const& c, std::vector<GemmOperands> const&) override {
    case_ = c;
    if (has_8_bits(c.problem)) return "cublasGemmEx has no operands of 8 bits with scales";
    if (c.problem.gated) return "cuBLAS has no gated epilogue";
    if (c.bias || c.activation != Activation::kNone) return "cublasGemmEx has no bias and no activation";
    return "";
  }

  void launch(GemmOperands const& o, cudaStream_t stream) override {
    GemmProblem const& p = case_.problem;
    check_cublas(cublasSetStream(handle_, stream), "cublasSetStream");
    check_cublas(cublasSetWorkspace(handle_, workspace_.data(), kWorkspaceBytes), "cublasSetWorkspace");  // a new stream drops it
    if (p.has_c) {
      // cuBLAS accumulates in place: C goes to D first, as in torch.addmm.
      size_t const bytes = size_t(p.batch * p.m * p.n) * size_t(size_of(p.d_type));
      check(cudaMemcpyAsync(o.d, o.c, bytes, cudaMemcpyDeviceToDevice, stream), "copy of C");
    }
    float const beta = p.has_c ? o.beta : 0.0f;
    cudaDataType_t const ab = cuda_type(p.ab_type), d = cuda_type(p.d_type);
    cublasOperation_t const op_b = p.b_major == Major::kK ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t const op_a = p.a_major == Major::kK ? CUBLAS_OP_N : CUBLAS_OP_T;
    int const n = int(p.n), m = int(p.m), k = int(p.k), ldb = int(o.ldb), lda = int(o.lda), ldd = int(o.ldd);
    if (p.batch == 1) {
      check_cublas(cublasGemmEx(handle_, op_b, op_a, n, m, k, &o.alpha, o.b, ab, ldb, o.a, ab, lda, &beta, o.d, d, ldd, CUBLAS_COMPUTE_32F,
                                CUBLAS_GEMM_DEFAULT),
                   "cublasGemmEx");
    } else {
      check_cublas(
          cublasGemmStridedBatchedEx(handle_, op_b, op_a, n, m, k, &o.alpha, o.b, ab, ldb, o.b_batch_stride, o.a, ab, lda, o.a_batch_stride,
                                     &beta, o.d, d, ldd, o.d_batch_stride, int(p.batch), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
          "cublasGemmStridedBatchedEx");
    }
  }

 private:
  Workspace workspace_;
  cublasHandle_t handle_ = nullptr;
  GemmCase case_;
};

class CublasLt : public Baseline {
 public:
  ~CublasLt() override { cublaslt_best_destroy(best_); }

  char const* name() const override { return "cublaslt"; }

  std::string prepare(GemmCase const& c, std::vector<GemmOperands> const& sets) override {
    cublaslt_best_destroy(best_);
    best_ = nullptr;
    if (c.problem.gated) return "cuBLASLt has no gated epilogue";
    GemmProblem const& p = c.problem;
    bool const narrow = has_8_bits(p);
    if (narrow && (p.ab_type != DataType::kE4M3 || c.scales != ScaleKind::kOne || p.fast_accum))
      return "of 8 bits it is asked for e4m3 with one scale each and without fast accumulation";
    GemmOperands const& o = sets.front();
    cublaslt_problem problem = {};
    problem.m = p.m, problem.n = p.n, problem.k = p.k, problem.batch = p.batch;
    problem.lda = o.lda, problem.ldb = o.ldb, problem.ldc = o.ldd, problem.ldd = o.ldd;
    problem.a_batch_stride = o.a_batch_stride, problem.b_batch_stride = o.b_batch_stride;
    problem.c_batch_stride = o.d_batch_stride, problem.d_batch_stride = o.d_batch_stride;
    problem.ab_type = int32_t(p.ab_type), problem.d_type = int32_t(p.d_type);
    problem.a_major = int32_t(p.a_major), problem.b_major = int32_t(p.b_major);
    problem.activation = int32_t(c.activation), problem.has_bias = c.bias;
    problem.alpha = narrow ? c.alpha * c.a_unit() * c.b_unit() : c.alpha;  // the scales of all sets are the same
    problem.beta = p.has_c ? c.beta : 0.0f;
    std::vector<cublaslt_operands> operands;
    for (GemmOperands const& set : sets) operands.push_back({set.a, set.b, set.c, set.bias, set.d});
    char message[256] = "";
    best_ = cublaslt_best_create(&problem, operands.data(), int32_t(operands.size()), 32, workspace_.data(), kWorkspaceBytes, message,
                                 sizeof(message));
    return best_ == nullptr ? message : "";
  }

  void launch(GemmOperands const& o, cudaStream_t stream) override {
    cublaslt_operands const operands{o.a, o.b, o.c, o.bias, o.d};
    char message[256] = "";
    if (cublaslt_best_run(best_, &operands, stream, message, sizeof(message)) != 0) throw std::runtime_error(message);
  }

 private:
  Workspace workspace_;
  cublaslt_best* best_ = nullptr;
};

}  // namespace

#endif

std::unique_ptr<Baseline> make_baseline(std::string const& name) {
  if (name != "cublas" && name != "cublaslt") throw std::invalid_argument("--baseline: cublas, cublaslt or none, got \"" + name + "\"");
#if MINFER_BENCH_WITH_CUBLAS
  if (name == "cublas") return std::make_unique<Cublas>();
  return std::make_unique<CublasLt>();
#else
  throw std::runtime_error("--baseline " + name +
                           ": this build has no cuBLAS; configure with -DMINFER_CUBLAS_ROOT=<folder with include/cublasLt.h and lib>");
#endif
}

}  // namespace minfer::bench
