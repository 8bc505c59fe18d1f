// Tokens to the GPUs that have their experts, and the experts' sums back (minfer/expert_exchange.h).
//
// Walk: a rank's places are cut into blocks, as many on every rank, and each CTA has a block: of its own rank's tokens, and of the other
// ranks' tokens in return_sums. It writes what is for the other ranks into their buffers, raises the block's flag there, which is the
// launch's epoch, and then waits for the flags of the block of its number in its own buffer. CTAs are started in the order of their
// numbers, and a CTA has said what others wait for before it waits: a launch ends however few of its CTAs are resident together.
//
//   send_tokens    a block's ids and weights go to all ranks, as numbers among the rank's own experts or -1; its rows to the ranks that
//                  have experts of theirs. 16 bytes a thread, four under way
//   return_sums    the other ranks' tokens: the sum of a token's pairs, if it has any here, goes to its rank. Then the own tokens: the
//                  own pairs' sum and what has come, in the order of the ranks. 16 bytes a thread, eight rows under way
//
// Dependent launch: what follows starts at once, and waits for the end of the launch.
#include "common/dependent_launch.cuh"
#include "common/fast_division.h"
#include "common/kernel_launch.h"
#include "distributed/epoch.cuh"
#include "distributed/vector_sum.cuh"
#include "minfer/expert_exchange.h"

namespace minfer {

namespace distributed {
namespace {

constexpr int kThreads = 256, kCtasPerSm = 4, kRowsTogether = 4, kPairsTogether = 8;

enum Launch : int { kSend, kReturn };

/// What both launches have of a call.
struct Places {
  char* buffers[kMostExchangeRanks];
  int32_t ranks, rank;
  int32_t capacity, block;  // places of a rank, and of a CTA
  int32_t tokens, top_k, experts;
  int32_t const* ids;
  FastDivisor vectors;  // of a row, 16 bytes each
  ExpertExchangeLayout layout;

  __device__ __forceinline__ int32_t first() const { return int32_t(blockIdx.x) * block; }
  /// Of this CTA: its places, and those that have tokens.
  __device__ __forceinline__ int32_t places() const { return min(block, capacity - first()); }
  __device__ __forceinline__ int32_t own_tokens() const { return max(0, min(block, tokens - first())); }
  /// The rank that has the expert, or -1.
  __device__ __forceinline__ int32_t owner(int32_t id) const { return uint32_t(id) < uint32_t(ranks * experts) ? id / experts : -1; }
  /// A part of a rank's buffer at a token of rank `from`.
  template <class T>
  __device__ __forceinline__ T* at(int32_t buffer, size_t part, int32_t from, int32_t token, int64_t width) const {
    return reinterpret_cast<T*>(buffers[buffer] + part) + (int64_t(from) * capacity + token) * width;
  }
  __device__ __forceinline__ ExchangeHeader* header(Launch launch) const {
    return reinterpret_cast<ExchangeHeader*>(buffers[rank]) + launch;
  }
  /// What rank `from` says to rank `buffer` of this CTA's block.
  __device__ __forceinline__ uint64_t* flag(int32_t buffer, Launch launch, int32_t from) const {
    return reinterpret_cast<uint64_t*>(buffers[buffer] + kFlagsBegin) + (int64_t(launch) * ranks + from) * kMostBlocks + blockIdx.x;
  }

  /// Tells the other ranks that what this CTA's threads have written for them is there. All threads.
  __device__ __forceinline__ void raise_flags(Launch launch, uint64_t epoch) const {
    __syncthreads();
    int32_t const to = int32_t(threadIdx.x);
    if (to >= ranks || to == rank) return;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag(to, launch, rank)), "l"(epoch) : "memory");
  }
  /// Waits for what the other ranks have for this CTA's block. All threads.
  __device__ __forceinline__ void wait_for_flags(Launch launch, uint64_t epoch) const {
    int32_t const from = int32_t(threadIdx.x);
    if (from < ranks && from != rank) {
      for (Patience patience;; patience.poll()) {
        uint64_t seen;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag(rank, launch, from)) : "memory");
        if (seen >= epoch) break;
      }
    }
    __syncthreads();
  }
};

struct SendParams {
  Places call;
  uint4 const* x;
  float const* weights;
  int64_t ldx;  // vectors
};

/// Bits of the ranks that have experts of this CTA's tokens.
__device__ __forceinline__ uint32_t ranks_of(Places const& call, int32_t token) {
  uint32_t found = 0;
  for (int32_t j = 0; j < call.top_k; ++j) {
    int32_t const owner = call.owner(load_operand(call.ids + int64_t(token) * call.top_k + j));
    if (owner >= 0) found |= 1u << owner;
  }
  return found;
}

__global__ void __launch_bounds__(kThreads, kCtasPerSm) send_tokens_kernel(__grid_constant__ SendParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  extern __shared__ uint32_t needed[];  // of each token of the block, bits of ranks
  Places const& call = params.call;
  uint64_t const epoch = begin_epoch(call.header(kSend));
  int32_t const first = call.first(), places = call.places(), tokens = call.own_tokens(), top_k = call.top_k;
  for (int32_t t = int32_t(threadIdx.x); t < tokens; t += kThreads) needed[t] = ranks_of(call, first + t);
  __syncthreads();

  int32_t const vectors = call.vectors.divisor(), total = tokens * vectors;
  for (int32_t begin = int32_t(threadIdx.x); begin < total; begin += kThreads * kRowsTogether) {
    uint4 row[kRowsTogether];
#pragma unroll
    for (int i = 0; i < kRowsTogether; ++i) {
      int32_t const at = begin + i * kThreads, t = call.vectors.quotient(at);
      if (at < total && needed[t] != 0) row[i] = load_operand(params.x + (first + t) * params.ldx + (at - t * vectors));
    }
#pragma unroll
    for (int i = 0; i < kRowsTogether; ++i) {
      int32_t const at = begin + i * kThreads, t = call.vectors.quotient(at);
      if (at >= total) break;
      for (int32_t to = 0; to < call.ranks; ++to) {
        if (needed[t] >> to & 1u) call.at<uint4>(to, call.layout.rows, call.rank, first + t, vectors)[at - t * vectors] = row[i];
      }
    }
  }
  for (int32_t i = int32_t(threadIdx.x); i < places * top_k; i += kThreads) {
    bool const inside = i < tokens * top_k;
    int64_t const from = int64_t(first) * top_k + i;
    int32_t const id = inside ? load_operand(call.ids + from) : -1, owner = call.owner(id);
    float const weight = inside ? load_operand(params.weights + from) : 0.0f;
    for (int32_t to = 0; to < call.ranks; ++to) {
      call.at<int32_t>(to, call.layout.ids, call.rank, first, top_k)[i] = owner == to ? id - to * call.experts : -1;
      call.at<float>(to, call.layout.weights, call.rank, first, top_k)[i] = weight;
    }
  }
  call.raise_flags(kSend, epoch);
  call.wait_for_flags(kSend, epoch);
  end_epoch(call.header(kSend), epoch);
}

struct ReturnParams {
  Places call;
  uint4 const* y;
  int32_t const* inverse;
  uint4* out;
  int32_t rows, pairs;  // of y; of a place, columns of inverse
};

/// The rounded sum of the pairs of a place here, of vector v of the columns; false where there is none.
template <DataType kType>
__device__ __forceinline__ bool sum_pairs(ReturnParams const& params, int64_t place, int32_t v, uint4* sum) {
  Places const& call = params.call;
  int32_t const vectors = call.vectors.divisor();
  int32_t const* const inverse = params.inverse + place * params.pairs;
  float sums[kVectorElements] = {};
  bool any = false;
#pragma unroll 1
  for (int32_t first = 0; first < params.pairs; first += kPairsTogether) {
    int32_t row[kPairsTogether];
    uint4 part[kPairsTogether];
#pragma unroll
    for (int j = 0; j < kPairsTogether; ++j) row[j] = first + j < params.pairs ? load_operand(inverse + first + j) : -1;
#pragma unroll
    for (int j = 0; j < kPairsTogether; ++j) {
      if (uint32_t(row[j]) < uint32_t(params.rows)) part[j] = load_operand(params.y + int64_t(row[j]) * vectors + v);
    }
#pragma unroll
    for (int j = 0; j < kPairsTogether; ++j) {
      if (uint32_t(row[j]) >= uint32_t(params.rows)) continue;
      add<kType>(sums, part[j]);
      any = true;
    }
  }
  *sum = rounded<kType>(sums);
  return any;
}

/// kRanks: at least as many as there are.
template <DataType kType, int kRanks>
__global__ void __launch_bounds__(kThreads, kRanks <= 4 ? 3 : 2) return_sums_kernel(__grid_constant__ ReturnParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  extern __shared__ uint32_t needed[];
  Places const& call = params.call;
  uint64_t const epoch = begin_epoch(call.header(kReturn));
  int32_t const first = call.first(), places = call.places(), tokens = call.own_tokens();
  int32_t const vectors = call.vectors.divisor();
  for (int32_t t = int32_t(threadIdx.x); t < tokens; t += kThreads) needed[t] = ranks_of(call, first + t);

  for (int32_t i = 1; i < call.ranks; ++i) {
    int32_t const to = call.rank + i < call.ranks ? call.rank + i : call.rank + i - call.ranks;
    for (int32_t at = int32_t(threadIdx.x); at < places * vectors; at += kThreads) {
      int32_t const t = call.vectors.quotient(at), v = at - t * vectors;
      uint4 sum;
      if (!sum_pairs<kType>(params, int64_t(to) * call.capacity + first + t, v, &sum)) continue;
      call.at<uint4>(to, call.layout.sums, call.rank, first + t, vectors)[v] = sum;
    }
  }
  call.raise_flags(kReturn, epoch);
  call.wait_for_flags(kReturn, epoch);
  for (int32_t at = int32_t(threadIdx.x); at < tokens * vectors; at += kThreads) {
    int32_t const t = call.vectors.quotient(at), v = at - t * vectors;
    uint4 own;
    sum_pairs<kType>(params, int64_t(call.rank) * call.capacity + first + t, v, &own);
    uint4 parts[kRanks];
#pragma unroll
    for (int from = 0; from < kRanks; ++from) {
      parts[from] = make_uint4(0, 0, 0, 0);
      if (from != call.rank && (needed[t] >> from & 1u) != 0) {
        parts[from] = call.at<uint4>(call.rank, call.layout.sums, from, first + t, vectors)[v];
      }
    }
    float sums[kVectorElements] = {};
#pragma unroll
    for (int from = 0; from < kRanks; ++from) {
      uint4 part = parts[from];
      if (from == call.rank) part = own;
      add<kType>(sums, part);
    }
    params.out[int64_t(first + t) * vectors + v] = rounded<kType>(sums);
  }
  end_epoch(call.header(kReturn), epoch);
}

template <DataType kType>
Status launch_return(int32_t ranks, LaunchShape const& shape, ReturnParams const& params) {
  char const* what = "launch of return_sums";
  if (ranks <= 2) return launch(shape, what, &return_sums_kernel<kType, 2>, params);
  if (ranks <= 4) return launch(shape, what, &return_sums_kernel<kType, 4>, params);
  return launch(shape, what, &return_sums_kernel<kType, kMostExchangeRanks>, params);
}

Status describe(ExpertExchange const& exchange, Places* call, LaunchShape* shape) {
  int64_t const vectors = exchange.hidden / kVectorElements, places = int64_t(exchange.ranks) * exchange.capacity;
  int64_t const block = (exchange.capacity + kMostBlocks - 1) / kMostBlocks;
  if (exchange.ranks < 2 || exchange.ranks > kMostExchangeRanks || exchange.rank < 0 || exchange.rank >= exchange.ranks) {
    return Status::failure(StatusCode::kInvalidArgument, "rank %d of %d; there are kernels for 2 to %d", exchange.rank, exchange.ranks,
                           kMostExchangeRanks);
  }
  if (exchange.hidden < kVectorElements || exchange.hidden % kVectorElements != 0 || exchange.top_k < 1 || exchange.experts < 1 ||
      exchange.capacity < 1 || exchange.capacity > exchange.most || exchange.tokens < 0 || exchange.tokens > exchange.capacity) {
    return Status::failure(StatusCode::kInvalidArgument, "%lld tokens of %lld numbers in %lld of %lld places, top %lld of %lld experts",
                           (long long)exchange.tokens, (long long)exchange.hidden, (long long)exchange.capacity, (long long)exchange.most,
                           (long long)exchange.top_k, (long long)exchange.experts);
  }
  constexpr int64_t kMost = (int64_t(1) << 31) - kThreads * kRowsTogether;
  if (places * exchange.top_k >= kMost || block * vectors >= kMost || block * exchange.top_k >= kMost ||
      exchange.ranks * exchange.experts >= kMost) {
    return Status::failure(StatusCode::kNotSupported, "more than 2^31 pairs, or experts, or vectors of a CTA");
  }
  for (int i = 0; i < exchange.ranks; ++i) call->buffers[i] = static_cast<char*>(exchange.buffers[i]);
  call->ranks = exchange.ranks;
  call->rank = exchange.rank;
  call->capacity = int32_t(exchange.capacity);
  call->block = int32_t(block);
  call->tokens = int32_t(exchange.tokens);
  call->top_k = int32_t(exchange.top_k);
  call->experts = int32_t(exchange.experts);
  call->ids = exchange.ids;
  call->vectors = FastDivisor(vectors);
  call->layout = expert_exchange_layout(exchange.ranks, exchange.most, exchange.hidden, exchange.top_k);
  shape->grid = dim3(unsigned((exchange.capacity + block - 1) / block));
  shape->threads = kThreads;
  shape->smem_bytes = size_t(block) * sizeof(uint32_t);
  return Status::success();
}

}  // namespace
}  // namespace distributed

Status send_tokens(ExpertExchange const& exchange, void const* x, int64_t ldx, float const* weights, bool programmatic, Stream stream) {
  using namespace distributed;
  SendParams params{};
  LaunchShape shape;
  if (Status const status = describe(exchange, &params.call, &shape); !status.ok()) return status;
  params.x = static_cast<uint4 const*>(x);
  params.weights = weights;
  params.ldx = ldx / kVectorElements;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of send_tokens", &send_tokens_kernel, params);
}

Status return_sums(ExpertExchange const& exchange, void const* y, int64_t rows, int32_t const* inverse, int64_t pairs, void* out,
                   bool programmatic, Stream stream) {
  using namespace distributed;
  ReturnParams params{};
  LaunchShape shape;
  if (Status const status = describe(exchange, &params.call, &shape); !status.ok()) return status;
  constexpr int64_t kMost = int64_t(1) << 31;
  if (rows < 0 || rows >= kMost || pairs < 0 || exchange.ranks * exchange.capacity * pairs >= kMost) {
    return Status::failure(StatusCode::kNotSupported, "%lld rows, %lld pairs of a token", (long long)rows, (long long)pairs);
  }
  params.y = static_cast<uint4 const*>(y);
  params.inverse = inverse;
  params.out = static_cast<uint4*>(out);
  params.rows = int32_t(rows);
  params.pairs = int32_t(pairs);
  shape.programmatic = programmatic;
  shape.stream = stream;
  switch (exchange.type) {
    case DataType::kF16: return launch_return<DataType::kF16>(exchange.ranks, shape, params);
    case DataType::kBF16: return launch_return<DataType::kBF16>(exchange.ranks, shape, params);
    default: return Status::failure(StatusCode::kInvalidArgument, "numbers of type %s", name_of(exchange.type));
  }
}

}  // namespace minfer
