// The sum of few rows over the GPUs of a host, what is added to it, and its RMS norm, in one launch (minfer/all_reduce.h).
//
// Packets: reduce_packets.cuh. Statistics of a row, and the order in which its threads' partial sums are added up: fused/row_group.cuh,
// that of the norm's own kernels.
//
// Walk: a row has a CTA, or the CTAs of a cluster where a single SM would send too many packets; every rank computes all rows. A thread has
// up to kVectors vectors of 8 numbers, which stay in its registers:
//   send         its vectors of x, all of them, to every other rank
//   beside       requests its vectors of the residual and of the norm's weight, which come while packets are on their way (kRequestsEarly)
//   receive      polls the other ranks' packets, those of kTogether vectors at once, and adds them and the residual up in fp32; stores the
//                sum, rounded. Further statistics are of the rounded numbers
//   norm         one exchange among the row's threads, and the results
// Progress: CTAs, or clusters, are started in the order of their numbers, on every rank, in equal grids. One waits only for that of its
// number on the other ranks, which has sent before it waits: a launch ends however few of its CTAs are resident together.
// Dependent launch: the next kernels' weights are on their way while this one waits for the other GPUs. The norm's weight is prefetched
// into L2 before the preceding kernel has ended.
// Limits: rows of multiples of 8 numbers, up to kMostReduceNormWidth.
#include <algorithm>
#include <bit>

#include "common/kernel_launch.h"
#include "distributed/reduce_packets.cuh"
#include "fused/row_group.cuh"
#include "fused/row_operation.cuh"

namespace minfer {

namespace distributed {
namespace {

using fused::RowParams;

struct ReduceNormParams {
  // residual: where the sum is stored, and with `adds` what is added to it. x and residual have no gaps between rows, y has none either.
  RowParams row;
  ReduceBuffers buffers;
  bool adds;
};

/// Vectors that are received together. Their packets, of eight registers for a vector of a rank, lie beside what a thread keeps of its row.
template <int kRanks, int kVectors>
constexpr int kTogether = std::min(kVectors, int(std::bit_floor(unsigned(std::max(1, (kVectors > 2 ? 4 : 6) / (kRanks - 1))))));

/// Whether residual and weight are requested before packets are polled, and lie in registers meanwhile. Where that is too much for the
/// registers of a thread, the residual is requested with the packets that it is added to, and the weight before the row's exchange.
template <int kRanks, int kVectors>
constexpr bool kRequestsEarly = kVectors == 1 || kVectors * kRanks <= 6;

template <DataType kType, int kRanks, int kVectors>
__global__ void __launch_bounds__(kMaxRowThreads, 1) all_reduce_rms_norm_kernel(__grid_constant__ ReduceNormParams const params) {
  using T = fused::RowType<kType>;
  using Vector = fused::RowVector<T>;
  static_assert(kVectorElements == fused::kVectorElements);
  __shared__ fused::RowStorage storage;
  RowParams const& row = params.row;
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  fused::RowGroup group(row, storage);
  uint32_t const step = group.column_step() / kVectorElements, own = group.column() / kVectorElements;  // in vectors
  uint32_t const width = group.row() < row.rows ? row.width / kVectorElements : 0;
  int const count = own >= width ? 0 : int(min((width - own + step - 1) / step, uint32_t(kVectors)));  // that the thread has of the row
  int64_t const first = int64_t(group.row()) * (row.width / kVectorElements) + own;                    // of the sum
  auto const* const weights = static_cast<uint4 const*>(row.weight) + own;
#if __CUDA_ARCH__ >= 900
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    constexpr uint32_t kOfLine = 128 / sizeof(uint4);
    if (j < count && threadIdx.x % kOfLine == 0) asm volatile("prefetch.global.L2 [%0];" ::"l"(weights + j * step));
  }
  wait_for_predecessor();
#endif
  ReduceEpoch<kRanks> const epoch(params.buffers);
  auto const* const x = static_cast<uint4 const*>(row.x.data) + first;
  auto* const sum_at = static_cast<uint4*>(row.residual.data) + first;
  constexpr bool kEarly = kRequestsEarly<kRanks, kVectors>;
  uint4 const zeros = make_uint4(0, 0, 0, 0);
  uint4 sum[kVectors], residual[kVectors], weight[kVectors];
  auto const load_residual = [&](int j) { residual[j] = j < count && params.adds ? load_operand(sum_at + j * step) : zeros; };
  auto const load_weight = [&](int j) { weight[j] = j < count ? load_operand(weights + j * step) : zeros; };
#pragma unroll
  for (int j = 0; j < kVectors; ++j) sum[j] = j < count ? load_operand(x + j * step) : zeros;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    if (j < count) epoch.send(first + j * step, sum[j]);
  }
  if constexpr (kEarly) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) load_residual(j), load_weight(j);
  }

  constexpr int kAtOnce = kTogether<kRanks, kVectors>;
  fused::Total squares;
#pragma unroll
  for (int begin = 0; begin < kVectors; begin += kAtOnce) {
    if constexpr (!kEarly) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) load_residual(begin + i);
    }
    typename ReduceEpoch<kRanks>::Found found[kAtOnce] = {};
    epoch.receive(found, first + begin * step, step, count - begin);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int const j = begin + i;
      float numbers[kVectorElements] = {};
      epoch.template add_all<kType>(numbers, found[i], sum[j]);
      if (params.adds) add<kType>(numbers, residual[j]);
      sum[j] = rounded<kType>(numbers);
      if (j < count) sum_at[j * step] = sum[j];
      fused::unpack(Vector{{sum[j]}}, numbers);
#pragma unroll
      for (int k = 0; k < kVectorElements; ++k) squares.v[0] = fmaf(numbers[k], numbers[k], squares.v[0]);
    }
  }
  if constexpr (!kEarly) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) load_weight(j);
  }
  group.reduce(&squares);
  // As the norm's own kernels have it (fused/row_whole.cuh).
  fused::RowSummary const summary{0.0f, rsqrtf(__fdividef(squares.v[0], float(row.width)) + row.eps)};
  auto* const y = static_cast<uint4*>(row.y.data) + first;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    float numbers[kVectorElements];
    fused::Beside beside;
    fused::unpack(Vector{{sum[j]}}, numbers);
    fused::unpack_weight(row, Vector{{weight[j]}}, beside.weight);
    fused::finish<RowOperation::kRmsNorm, false>(row, summary, beside, numbers);
    if (j < count) y[j * step] = rounded<kType>(numbers);
  }
  group.finish();
  epoch.end();
}

// ---- the launch ----------------------------------------------------------------------------------------------------------------------

/// Of a thread that has a row of kMostReduceNormWidth in a CTA.
constexpr int kMostVectors = 4;
static_assert(kMostReduceNormWidth <= int64_t(kMostVectors) * kMaxRowThreads * kVectorElements);

int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How rows lie in threads, and the most vectors that a thread has.
struct RowShape {
  RowLaunch launch;
  int vectors = 1;
};

/// In the batch-invariant mode as the norm's own kernels have rows of the width: what is too much for this launch is left to these.
Status plan_batch_invariant(AllReduceRmsNorm const& call, DeviceProperties const& device, RowShape* shape) {
  RowProblem problem;
  problem.type = call.type;
  problem.rows = call.rows;
  problem.width = call.width;
  problem.batch_invariant = true;
  RowPlan plan;
  if (Status const status = plan_rows(problem, device, nullptr, &plan); !status.ok()) return status;
  shape->launch = plan.launch;
  shape->vectors = plan.kernel->tile_n / kVectorElements;
  return Status::success();
}

/// Else a row has a cluster where a CTA would send more than 32 KiB of packets, as long as rows are so few that SMs are left. The
/// border is an estimate, not measured.
RowShape plan(AllReduceRmsNorm const& call, DeviceProperties const& device) {
  constexpr int64_t kVectorsSent = (32 << 10) / (kHalves * kPacketBytes), kLeastThreads = 64;
  int64_t const vectors = call.width / kVectorElements, sent = vectors * (call.ranks - 1);
  int64_t const most_ctas = device.compute_major >= 9 ? std::min<int64_t>(8, device.sm_count / call.rows) : 1;
  RowShape shape;
  int32_t& cluster = shape.launch.cluster;
  while (2 * cluster <= most_ctas && sent > kVectorsSent * cluster && vectors >= 2 * kLeastThreads * cluster) cluster *= 2;
  int64_t const of_cta = ceil_divide(vectors, cluster);
  while (of_cta > int64_t(kMaxRowThreads) * shape.vectors) shape.vectors *= 2;
  int64_t const threads = ceil_divide(ceil_divide(of_cta, shape.vectors), 32) * 32;
  shape.launch.threads = int32_t(cluster > 1 ? std::max(threads, kLeastThreads) : threads);
  return shape;
}

template <DataType kType, int kRanks>
Status launch_kernel(ReduceNormParams const& params, int vectors, LaunchShape const& shape) {
  char const* what = "launch of all_reduce_rms_norm";
  switch (vectors) {
    case 1: return launch(shape, what, &all_reduce_rms_norm_kernel<kType, kRanks, 1>, params);
    case 2: return launch(shape, what, &all_reduce_rms_norm_kernel<kType, kRanks, 2>, params);
    default: return launch(shape, what, &all_reduce_rms_norm_kernel<kType, kRanks, kMostVectors>, params);
  }
}

template <DataType kType>
Status launch_all_reduce_rms_norm(AllReduceRmsNorm const& call, DeviceProperties const& device, LaunchShape shape) {
  RowShape rows;
  if (call.batch_invariant) {
    if (Status const status = plan_batch_invariant(call, device, &rows); !status.ok()) return status;
  } else {
    rows = plan(call, device);
  }
  if (rows.vectors > kMostVectors) {
    return Status::failure(StatusCode::kNotSupported, "rows of %lld numbers have more than %d vectors a thread", (long long)call.width,
                           kMostVectors);
  }
  ReduceNormParams params{};
  RowParams& row = params.row;
  row.x.data = const_cast<void*>(call.x);
  row.y.data = call.out;
  row.residual.data = call.sum;
  row.weight = call.weight;
  row.rows = uint32_t(call.rows);
  row.width = uint32_t(call.width);
  row.threads = uint32_t(rows.launch.threads);
  row.rows_per_cta = uint32_t(rows.launch.rows_per_cta);
  row.cluster = uint32_t(rows.launch.cluster);
  row.eps = call.eps;
  row.weight_offset = call.weight_offset;
  params.adds = call.adds;
  params.buffers = ReduceBuffers::of(call.buffers, call.ranks, call.rank, call.most);
  shape.threads = row.threads * row.rows_per_cta;
  shape.grid = dim3((row.rows + row.rows_per_cta - 1) / row.rows_per_cta * row.cluster);
  shape.cluster = dim3(row.cluster);
  return for_ranks(call.ranks, [&](auto ranks) { return launch_kernel<kType, decltype(ranks)::value>(params, rows.vectors, shape); });
}

}  // namespace
}  // namespace distributed

Status all_reduce_rms_norm(AllReduceRmsNorm const& call, DeviceProperties const& device, bool programmatic, Stream stream) {
  if (call.rows == 0) return Status::success();
  bool const right = call.rows > 0 && call.width > 0 && call.width % distributed::kVectorElements == 0;
  if (!right || call.width > kMostReduceNormWidth || call.rows > call.most / call.width) {
    return Status::failure(StatusCode::kNotSupported,
                           "%lld rows of %lld numbers; rows must be of a multiple of 8 and at most %lld numbers, and all of at most %lld",
                           (long long)call.rows, (long long)call.width, (long long)kMostReduceNormWidth, (long long)call.most);
  }
  LaunchShape shape;
  shape.programmatic = programmatic;
  shape.stream = stream;
  switch (call.type) {
    case DataType::kF16: return distributed::launch_all_reduce_rms_norm<DataType::kF16>(call, device, shape);
    case DataType::kBF16: return distributed::launch_all_reduce_rms_norm<DataType::kBF16>(call, device, shape);
    default: return Status::failure(StatusCode::kInvalidArgument, "numbers of type %s", name_of(call.type));
  }
}

}  // namespace minfer
