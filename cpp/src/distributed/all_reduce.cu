// The sum of few numbers over the GPUs of a host (minfer/all_reduce.h).
//
// Walk: a thread sends a vector of 8 numbers to the same place of every other rank's buffer, then waits for the other ranks' in its own.
// CTAs are started in the order of their numbers, on every rank, and a CTA waits only for the CTAs of its number, which have sent before
// they wait: a launch ends however few of its CTAs are resident together.
// Dependent launch: the next kernels' weights are on their way while this one waits for the other GPUs.
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "distributed/epoch.cuh"
#include "distributed/reduce_packets.cuh"
#include "distributed/vector_sum.cuh"
#include "minfer/all_reduce.h"

namespace minfer {

namespace distributed {
namespace {

constexpr int kMostThreads = 256, kFewThreads = 128, kCtasPerSm = 2;

struct ReduceParams {
  void const* x;
  void* out;
  int64_t vectors, most;  // vectors: of this sum, and those that buffers are for
  int32_t rank;
  char* buffers[kMostReduceRanks];
};

/// Waits until both packets of every other rank's vector are here, which are polled together. packets(rank): the first; the second is
/// `apart` behind it.
template <int kRanks, class Packets>
__device__ __forceinline__ void receive(ReducePacket (&found)[kRanks][kHalves], Packets const& packets, int64_t apart, int own,
                                        uint32_t flag) {
  for (Patience patience;; patience.poll()) {
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == own) continue;
      found[rank][0] = poll(packets(rank));
      found[rank][1] = poll(packets(rank) + apart);
    }
    bool all = true;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      all = all && (rank == own || (has_come(found[rank][0], flag) && has_come(found[rank][1], flag)));
    }
    if (all) return;
  }
}

template <DataType kType, int kRanks>
__global__ void __launch_bounds__(kMostThreads) all_reduce_kernel(__grid_constant__ ReduceParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  auto* const header = reinterpret_cast<ExchangeHeader*>(params.buffers[params.rank]);
  uint64_t const epoch = begin_epoch(header);
  uint32_t const flag = flag_of(epoch);
  auto const packets = [&](int buffer, int rank) {
    int64_t const place = (int64_t(epoch % kEpochs) * kRanks + rank) * kHalves * params.most;
    return reinterpret_cast<ReducePacket*>(params.buffers[buffer] + sizeof(ExchangeHeader)) + place;
  };
  int64_t const step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; v < params.vectors; v += step) {
    uint4 const own = load_operand(static_cast<uint4 const*>(params.x) + v);
#pragma unroll
    for (int i = 1; i < kRanks; ++i) {
      int const to = params.rank + i < kRanks ? params.rank + i : params.rank + i - kRanks;
      ReducePacket* const place = packets(to, params.rank) + v;
      send(place, own.x, own.y, flag);
      send(place + params.most, own.z, own.w, flag);
    }
    ReducePacket found[kRanks][kHalves] = {};
    receive<kRanks>(found, [&](int rank) { return packets(params.rank, rank) + v; }, params.most, params.rank, flag);
    float sums[kVectorElements] = {};
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
      auto const& [low, high] = found[rank];
      bool const here = rank == params.rank;
      add<kType>(sums, here ? own : make_uint4(uint32_t(low.first), uint32_t(low.second), uint32_t(high.first), uint32_t(high.second)));
    }
    static_cast<uint4*>(params.out)[v] = rounded<kType>(sums);
  }
  end_epoch(header, epoch);
}

template <DataType kType>
Status launch_all_reduce(AllReduce const& arguments, DeviceProperties const& device, LaunchShape shape) {
  ReduceParams params{};
  params.x = arguments.x;
  params.out = arguments.out;
  params.vectors = arguments.count / kVectorElements;
  params.most = (arguments.most + kVectorElements - 1) / kVectorElements;
  params.rank = arguments.rank;
  for (int i = 0; i < arguments.ranks; ++i) params.buffers[i] = static_cast<char*>(arguments.buffers[i]);
  shape.threads = params.vectors <= int64_t(kFewThreads) * device.sm_count ? kFewThreads : kMostThreads;
  int64_t const ctas = (params.vectors + shape.threads - 1) / shape.threads, most = int64_t(kCtasPerSm) * device.sm_count;
  shape.grid = dim3(unsigned(ctas < most ? ctas : most));
  char const* what = "launch of all_reduce";
  switch (arguments.ranks) {
    case 2: return launch(shape, what, &all_reduce_kernel<kType, 2>, params);
    case 3: return launch(shape, what, &all_reduce_kernel<kType, 3>, params);
    case 4: return launch(shape, what, &all_reduce_kernel<kType, 4>, params);
    case 5: return launch(shape, what, &all_reduce_kernel<kType, 5>, params);
    case 6: return launch(shape, what, &all_reduce_kernel<kType, 6>, params);
    case 7: return launch(shape, what, &all_reduce_kernel<kType, 7>, params);
    case 8: return launch(shape, what, &all_reduce_kernel<kType, 8>, params);
    default:
      return Status::failure(StatusCode::kNotSupported, "%d ranks; there are kernels for 2 to %d", arguments.ranks, kMostReduceRanks);
  }
}

}  // namespace
}  // namespace distributed

Status all_reduce(AllReduce const& arguments, DeviceProperties const& device, bool programmatic, Stream stream) {
  if (arguments.count == 0) return Status::success();
  LaunchShape shape;
  shape.programmatic = programmatic;
  shape.stream = stream;
  switch (arguments.type) {
    case DataType::kF16: return distributed::launch_all_reduce<DataType::kF16>(arguments, device, shape);
    case DataType::kBF16: return distributed::launch_all_reduce<DataType::kBF16>(arguments, device, shape);
    default: return Status::failure(StatusCode::kInvalidArgument, "numbers of type %s", name_of(arguments.type));
  }
}

}  // namespace minfer
