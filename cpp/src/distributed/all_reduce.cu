// The sum of few numbers over the GPUs of a host (minfer/all_reduce.h).
//
// Packets: reduce_packets.cuh.
//
// Walk: a thread sends a vector of 8 numbers to the same place of every other rank's buffer, then waits for the other ranks' in its own.
// CTAs are started in the order of their numbers, on every rank, and a CTA waits only for the CTAs of its number, which have sent before
// they wait: a launch ends however few of its CTAs are resident together.
// Dependent launch: the next kernels' weights are on their way while this one waits for the other GPUs.
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "distributed/reduce_packets.cuh"

namespace minfer {

namespace distributed {
namespace {

constexpr int kMostThreads = 256, kFewThreads = 128, kCtasPerSm = 2;

struct ReduceParams {
  void const* x;
  void* out;
  int64_t vectors;  // of this sum
  ReduceBuffers buffers;
};

/// CTAs that an SM's registers must suffice for; 0: the compiler decides. Of seven ranks it would spill packets for the sake of more CTAs
/// than are launched (sm_80).
constexpr int ctas_with_registers(int ranks) { return ranks > 4 ? kCtasPerSm : 0; }

template <DataType kType, int kRanks>
__global__ void __launch_bounds__(kMostThreads, ctas_with_registers(kRanks))
    all_reduce_kernel(__grid_constant__ ReduceParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
  wait_for_predecessor();
#endif
  ReduceEpoch<kRanks> const epoch(params.buffers);
  int64_t const step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t v = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; v < params.vectors; v += step) {
    uint4 const own = load_operand(static_cast<uint4 const*>(params.x) + v);
    epoch.send(v, own);
    typename ReduceEpoch<kRanks>::Found found[1] = {};
    epoch.receive(found, v, 0, 1);
    float sums[kVectorElements] = {};
    epoch.template add_all<kType>(sums, found[0], own);
    static_cast<uint4*>(params.out)[v] = rounded<kType>(sums);
  }
  epoch.end();
}

template <DataType kType>
Status launch_all_reduce(AllReduce const& arguments, DeviceProperties const& device, LaunchShape shape) {
  ReduceParams params{};
  params.x = arguments.x;
  params.out = arguments.out;
  params.vectors = arguments.count / kVectorElements;
  params.buffers = ReduceBuffers::of(arguments.buffers, arguments.ranks, arguments.rank, arguments.most);
  shape.threads = params.vectors <= int64_t(kFewThreads) * device.sm_count ? kFewThreads : kMostThreads;
  int64_t const ctas = (params.vectors + shape.threads - 1) / shape.threads, most = int64_t(kCtasPerSm) * device.sm_count;
  shape.grid = dim3(unsigned(ctas < most ? ctas : most));
  return for_ranks(arguments.ranks, [&](auto ranks) {
    return launch(shape, "launch of all_reduce", &all_reduce_kernel<kType, decltype(ranks)::value>, params);
  });
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
