/* cuBLASLt at its best: the top heuristics for a problem, each timed on rotated operands, the fastest kept.
   C interface, so that the C++ benchmarks link it and the Python suites load it with ctypes (bench/peers/cublaslt.py mirrors the structs).
   Row-major D [m, n] = activation(alpha * A [m, k] . B + beta * C + bias); B is described as [n, k], as in minfer/gemm.h. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#define CUBLASLT_BEST_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Types and majors by minfer's enumerators: type 0 f16, 1 bf16, 2 f32, 3 e4m3 (A and B along k, their scales in alpha); major 0 k, 1 m or
   n; activation 0 none, 1 relu, 3 gelu_tanh (cuBLASLt has no exact gelu and no silu: create() says so). Leading dimensions and strides in
   elements. */
typedef struct {
  int64_t m, n, k, batch;
  int64_t lda, ldb, ldc, ldd;
  int64_t a_batch_stride, b_batch_stride, c_batch_stride, d_batch_stride;
  int32_t ab_type, d_type;
  int32_t a_major, b_major;
  int32_t activation;
  int32_t has_bias; /* elements of ab_type, of e4m3 of d_type */
  float alpha, beta;
} cublaslt_problem;

typedef struct {
  void const* a;
  void const* b;
  void const* c; /* of d_type; not read when beta is 0 */
  void const* bias;
  void* d;
} cublaslt_operands;

typedef struct cublaslt_best cublaslt_best;

/* Times up to `requested` heuristics over `sets` sets of operands and keeps the fastest. Synchronises the device.
   The workspace belongs to the caller and must live as long as the handle. Null and a message on failure. */
CUBLASLT_BEST_API cublaslt_best* cublaslt_best_create(cublaslt_problem const* problem, cublaslt_operands const* operands, int32_t sets,
                                                      int32_t requested, void* workspace, size_t workspace_bytes, char* message,
                                                      size_t message_bytes);

/* Launches on the stream (capturable). 0, or a message on failure. */
CUBLASLT_BEST_API int32_t cublaslt_best_run(cublaslt_best* best, cublaslt_operands const* operands, void* stream, char* message,
                                            size_t message_bytes);

/* How many heuristics were offered and could run, and the rank of the winner among the offered (0: cuBLASLt's own first choice). */
CUBLASLT_BEST_API void cublaslt_best_info(cublaslt_best const* best, int32_t* offered, int32_t* runnable, int32_t* winner);

CUBLASLT_BEST_API void cublaslt_best_destroy(cublaslt_best* best);

#ifdef __cplusplus
}
#endif
