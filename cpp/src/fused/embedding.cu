// Rows of a table by their ids (minfer/fused.h).
//
// Walk: row_parts.cuh. An id is read by every thread of its row, once. A thread requests all its vectors before it stores the first. A row
// that the table does not have is zeros, and nothing is read for it.
#include "common/aligned_vector.cuh"
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "fused/row_parts.cuh"
#include "fused/row_vector.cuh"

namespace minfer {

namespace fused {
namespace {

struct EmbeddingParams {
  Embedding embedding;
  RowParts walk;
  bool aligned;
};

template <class T>
__global__ void __launch_bounds__(kPartThreads) embedding_kernel(__grid_constant__ EmbeddingParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  Embedding const& e = params.embedding;
  uint32_t const row = params.walk.row();
  T* to = static_cast<T*>(e.out) + row * e.out_stride;
  uint32_t const step = blockDim.x * kVectorElements;
  uint32_t first_column = params.walk.column(0);
#if __CUDA_ARCH__ >= 900
  // The addresses are there when the predecessor ends.
  make_opaque(to);
  make_opaque(first_column);
  wait_for_predecessor();
#endif
  int64_t const id =
      e.ids_64bit ? load_operand(static_cast<int64_t const*>(e.ids) + row) : load_operand(static_cast<int32_t const*>(e.ids) + row);
  bool const known = id >= 0 && id < e.vocabulary;
  T const* const from = static_cast<T const*>(e.weight) + (known ? id : 0) * e.weight_stride;
  auto const count = [&](uint32_t at) { return at < e.width ? int(min(uint32_t(e.width) - at, uint32_t(kVectorElements))) : 0; };
  RowVector<T> x[kPartVectors];
#pragma unroll
  for (int j = 0; j < kPartVectors; ++j) {
    uint32_t const at = first_column + j * step;
    x[j] = load_vector<false>(from, at, known ? count(at) : 0, params.aligned);
  }
#pragma unroll
  for (int j = 0; j < kPartVectors; ++j) {
    uint32_t const at = first_column + j * step;
    if (e.scaled) {
      float v[kVectorElements];
      unpack(x[j], v);
#pragma unroll
      for (int i = 0; i < kVectorElements; ++i) v[i] *= e.scale;
      x[j] = pack<T>(v);
    }
    store_vector(x[j], to, at, count(at), params.aligned);
  }
}

template <class T>
Status launch_embedding(Embedding const& embedding, bool programmatic, Stream stream) {
  EmbeddingParams params{embedding, {}, false};
  LaunchShape shape;
  if (!RowParts::of(embedding.count, embedding.width, &params.walk, &shape)) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows of %lld are more than a launch covers", (long long)embedding.count,
                           (long long)embedding.width);
  }
  params.aligned = embedding.width % kVectorElements == 0 && begin_vectors(embedding.weight, sizeof(T), {embedding.weight_stride}) &&
                   begin_vectors(embedding.out, sizeof(T), {embedding.out_stride});
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of embedding", &embedding_kernel<T>, params);
}

}  // namespace
}  // namespace fused

Status embed(Embedding const& embedding, bool programmatic, Stream stream) {
  if (embedding.count == 0 || embedding.width == 0) return Status::success();
  switch (embedding.type) {
    case DataType::kF16: return fused::launch_embedding<__half>(embedding, programmatic, stream);
    case DataType::kBF16: return fused::launch_embedding<__nv_bfloat16>(embedding, programmatic, stream);
    case DataType::kF32: return fused::launch_embedding<float>(embedding, programmatic, stream);
    default: return Status::failure(StatusCode::kInvalidArgument, "a table of type %s", name_of(embedding.type));
  }
}

}  // namespace minfer
