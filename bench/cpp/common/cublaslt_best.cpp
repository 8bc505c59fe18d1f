// The search in two rounds: every heuristic by two replays of a captured rotation, then the fastest few by interleaved medians.
#include "common/cublaslt_best.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void check(cudaError_t error, char const* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

void check(cublasStatus_t status, char const* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw std::runtime_error(std::string(what) + ": " + cublasLtGetStatusString(status));
}

cudaDataType_t cuda_type(int32_t type) {
  return type == 0 ? CUDA_R_16F : type == 1 ? CUDA_R_16BF : type == 3 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
}

// Handles and descriptors are freed when the owner goes, also when its constructor throws half way.
template <typename T, cublasStatus_t (*kDestroy)(T)>
struct Owned {
  T value = nullptr;
  Owned() = default;
  Owned(Owned const&) = delete;
  Owned& operator=(Owned const&) = delete;
  ~Owned() {
    if (value != nullptr) kDestroy(value);
  }
};

template <typename T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, T const& value) {
  check(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
}

cublasLtEpilogue_t epilogue_of(cublaslt_problem const& p) {
  switch (p.activation) {
    case 0: return p.has_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    case 1: return p.has_bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
    case 3: return p.has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    default: throw std::runtime_error("cuBLASLt has no epilogue for this activation");
  }
}

}  // namespace

struct cublaslt_best {
  cublaslt_problem problem;
  void* workspace;
  size_t workspace_bytes;
  Owned<cublasLtHandle_t, cublasLtDestroy> handle;
  Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy> desc;
  Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy> layout_a, layout_b, layout_c, layout_d;
  cublasLtMatmulAlgo_t algorithm;
  int32_t offered = 0, runnable = 0, winner = 0;

  cublaslt_best(cublaslt_problem const& p, void* space, size_t bytes) : problem(p), workspace(space), workspace_bytes(bytes) {
    check(cublasLtCreate(&handle.value), "cublasLtCreate");
    // Row-major D = A.B is column-major D^T = B^T.A^T: B comes first, and a K-major operand of ours is a column-major [k, rows] matrix.
    check(cublasLtMatmulDescCreate(&desc.value, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(desc.value, CUBLASLT_MATMUL_DESC_TRANSA, p.b_major == 0 ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc.value, CUBLASLT_MATMUL_DESC_TRANSB, p.a_major == 0 ? CUBLAS_OP_N : CUBLAS_OP_T);
    set(desc.value, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.has_bias) set(desc.value, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(cuda_type(p.ab_type == 3 ? p.d_type : p.ab_type)));
    bool const b_k = p.b_major == 0, a_k = p.a_major == 0;
    make_layout(&layout_b.value, p.ab_type, b_k ? p.k : p.n, b_k ? p.n : p.k, p.ldb, p.b_batch_stride);
    make_layout(&layout_a.value, p.ab_type, a_k ? p.k : p.m, a_k ? p.m : p.k, p.lda, p.a_batch_stride);
    make_layout(&layout_c.value, p.d_type, p.n, p.m, p.ldc, p.c_batch_stride);
    make_layout(&layout_d.value, p.d_type, p.n, p.m, p.ldd, p.d_batch_stride);
  }

  void make_layout(cublasLtMatrixLayout_t* layout, int32_t type, int64_t rows, int64_t columns, int64_t ld, int64_t batch_stride) {
    check(cublasLtMatrixLayoutCreate(layout, cuda_type(type), uint64_t(rows), uint64_t(columns), ld), "cublasLtMatrixLayoutCreate");
    if (problem.batch == 1) return;
    int32_t const batch = int32_t(problem.batch);
    check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)), "batch count");
    check(cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride, sizeof(batch_stride)),
          "batch stride");
  }

  cublasStatus_t launch(cublaslt_operands const& o, cublasLtMatmulAlgo_t const& with, cudaStream_t stream) {
    if (problem.has_bias) set(desc.value, CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias);
    void const* c = problem.beta != 0 ? o.c : o.d;
    return cublasLtMatmul(handle.value, desc.value, &problem.alpha, o.b, layout_b.value, o.a, layout_a.value, &problem.beta, c,
                          problem.beta != 0 ? layout_c.value : layout_d.value, o.d, layout_d.value, &with, workspace, workspace_bytes,
                          stream);
  }

  std::vector<cublasLtMatmulHeuristicResult_t> heuristics(int32_t requested) {
    Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy> preference;
    check(cublasLtMatmulPreferenceCreate(&preference.value), "cublasLtMatmulPreferenceCreate");
    check(cublasLtMatmulPreferenceSetAttribute(preference.value, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                               sizeof(workspace_bytes)),
          "workspace preference");
    std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(requested));
    check(cublasLtMatmulAlgoGetHeuristic(handle.value, desc.value, layout_b.value, layout_a.value, layout_c.value, layout_d.value,
                                         preference.value, requested, results.data(), &offered),
          "cublasLtMatmulAlgoGetHeuristic");
    results.resize(size_t(offered));
    return results;
  }

  void search(cublaslt_operands const* operands, int32_t sets, int32_t requested);
};

namespace {

// A rotation over the sets with one algorithm, captured and timed.
class Candidate {
 public:
  Candidate(cublaslt_best& best, cublasLtMatmulAlgo_t const& algorithm, cublaslt_operands const* operands, int32_t sets, int32_t launches,
            cudaStream_t stream)
      : launches_(launches), stream_(stream) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    for (int32_t i = 0; i < launches && status == CUBLAS_STATUS_SUCCESS; ++i) status = best.launch(operands[i % sets], algorithm, stream);
    cudaGraph_t graph = nullptr;
    cudaError_t const captured = cudaStreamEndCapture(stream, &graph);
    cudaError_t const instantiated =
        captured == cudaSuccess && status == CUBLAS_STATUS_SUCCESS ? cudaGraphInstantiate(&executable_, graph, 0) : captured;
    if (graph != nullptr) cudaGraphDestroy(graph);
    check(status, "cublasLtMatmul");
    check(instantiated, "cudaGraphInstantiate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  Candidate(Candidate const&) = delete;
  Candidate& operator=(Candidate const&) = delete;
  ~Candidate() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }

  double replay_us() {
    check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
    check(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream_), "cudaEventRecord");
    check(cudaEventSynchronize(end_), "cublaslt_best: a heuristic's kernel");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return double(ms) * 1000 / launches_;
  }

 private:
  int32_t launches_;
  cudaStream_t stream_;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

struct OwnedStream {
  cudaStream_t value = nullptr;
  OwnedStream() { check(cudaStreamCreateWithFlags(&value, cudaStreamNonBlocking), "cudaStreamCreate"); }
  OwnedStream(OwnedStream const&) = delete;
  OwnedStream& operator=(OwnedStream const&) = delete;
  ~OwnedStream() { cudaStreamDestroy(value); }
};

constexpr int32_t kFinalists = 4, kFinalRounds = 7;
constexpr double kScreenUs = 300, kFinalUs = 600;  // work in the screening replays, and in one final replay
constexpr double kHopeless = 1.3;                  // a heuristic this far behind is not timed again

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + std::ptrdiff_t(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

void cublaslt_best::search(cublaslt_operands const* operands, int32_t sets, int32_t requested) {
  std::vector<cublasLtMatmulHeuristicResult_t> const results = heuristics(requested);
  check(cudaDeviceSynchronize(), "cublaslt_best: before the search");
  OwnedStream stream;
  struct Screened {
    double us;
    int32_t rank;
  };
  std::vector<Screened> screened;
  double fastest = std::numeric_limits<double>::infinity();
  for (int32_t rank = 0; rank < offered; ++rank) {
    cublasLtMatmulHeuristicResult_t const& result = results[size_t(rank)];
    if (result.state != CUBLAS_STATUS_SUCCESS || result.workspaceSize > workspace_bytes) continue;
    if (launch(operands[0], result.algo, stream.value) != CUBLAS_STATUS_SUCCESS) continue;
    check(cudaStreamSynchronize(stream.value), "cublaslt_best: a heuristic's first launch");
    Candidate candidate(*this, result.algo, operands, sets, sets, stream.value);
    candidate.replay_us();
    double us = candidate.replay_us();
    fastest = std::min(fastest, us);
    for (double spent = us * sets; spent < kScreenUs && us < kHopeless * fastest; spent += us * sets)
      us = std::min(us, candidate.replay_us());
    screened.push_back({us, rank});
  }
  runnable = int32_t(screened.size());
  if (runnable == 0) throw std::runtime_error("cuBLASLt offers no algorithm that can run this problem");
  std::stable_sort(screened.begin(), screened.end(), [](Screened const& x, Screened const& y) { return x.us < y.us; });
  screened.resize(size_t(std::min(runnable, kFinalists)));

  std::vector<std::vector<double>> samples(screened.size());
  {
    std::vector<std::unique_ptr<Candidate>> finalists;
    for (Screened const& s : screened) {
      int32_t const rotations = std::max(1, int32_t(kFinalUs / (std::max(s.us, 0.5) * sets)));
      finalists.push_back(std::make_unique<Candidate>(*this, results[size_t(s.rank)].algo, operands, sets, sets * rotations, stream.value));
    }
    for (int round = 0; round < kFinalRounds; ++round)
      for (size_t i = 0; i < finalists.size(); ++i) samples[i].push_back(finalists[i]->replay_us());
  }
  size_t first = 0;
  for (size_t i = 1; i < samples.size(); ++i)
    if (median(samples[i]) < median(samples[first])) first = i;
  winner = screened[first].rank;
  algorithm = results[size_t(winner)].algo;
}

extern "C" {

cublaslt_best* cublaslt_best_create(cublaslt_problem const* problem, cublaslt_operands const* operands, int32_t sets, int32_t requested,
                                    void* workspace, size_t workspace_bytes, char* message, size_t message_bytes) {
  cublaslt_best* best = nullptr;
  try {
    best = new cublaslt_best(*problem, workspace, workspace_bytes);
    best->search(operands, sets, requested);
    return best;
  } catch (std::exception const& error) {
    std::snprintf(message, message_bytes, "%s", error.what());
    delete best;
    return nullptr;
  }
}

int32_t cublaslt_best_run(cublaslt_best* best, cublaslt_operands const* operands, void* stream, char* message, size_t message_bytes) {
  try {
    check(best->launch(*operands, best->algorithm, static_cast<cudaStream_t>(stream)), "cublasLtMatmul");
    return 0;
  } catch (std::exception const& error) {
    std::snprintf(message, message_bytes, "%s", error.what());
    return 1;
  }
}

void cublaslt_best_info(cublaslt_best const* best, int32_t* offered, int32_t* runnable, int32_t* winner) {
  *offered = best->offered;
  *runnable = best->runnable;
  *winner = best->winner;
}

void cublaslt_best_destroy(cublaslt_best* best) { delete best; }

}  // extern "C"
