// Products of a matrix and a vector for sm_80 onward, in one launch: operands at any address and with any stride. An MMA would multiply 15
// rows that are not there, and its fragments would take a trip through shared memory; here every element of the matrix is loaded once,
// into registers, and multiplied there.
//
// The vector is a row of A (kTileM = 1) or a column of B (kTileN = 1), the matrix the other operand; a problem with more rows or columns
// than one is as many such products. A tile is kOutputs outputs, all of whose k are shared out among the threads of a CTA.
// Matrix contiguous along k: a thread loads aligned words, each of two elements of a line, and the three elements of the vector that a
// line which begins in the middle of a word and one that does not need between them. Words that lie in the operand by half are loaded by
// elements. Contiguous along the outputs: a lane has an output, and the warps take turns at k.
// Sums: fp32 in registers, then over the lanes and over the warps in a fixed order; kReducers threads hold the tile, four outputs each.
// Tile walk: as gemm_unaligned_sm80.cuh, whose launches divide k where the plan says so.
#pragma once

#include <cstdint>

#include "gemm/gemm_unaligned_sm80.cuh"

namespace minfer::gemm {

template <class Config>
struct MainloopVectorSm80 {
  using Number = Float16<Config::kType>;
  static constexpr int kThreads = Config::kThreads, kWarps = kThreads / 32, kTileK = Config::kTileK;
  static constexpr bool kCopiesAhead = false;
  static constexpr bool kRow = Config::kTileM == 1;                                         // the vector is a row of A
  static constexpr bool kAlongK = (kRow ? Config::kMajorB : Config::kMajorA) == Major::kK;  // the matrix
  static constexpr int kOutputs = kRow ? Config::kTileN : Config::kTileM;
  static constexpr int kValues = 4, kReducers = kOutputs / kValues;  // outputs of a thread, in as many threads
  static_assert((kRow || Config::kTileN == 1) && kOutputs == (kAlongK ? 16 : 32) && kTileK == 2 * kThreads && !Config::kSwap);

  struct Operand {
    uint64_t base;
    int64_t line_bytes, batch_bytes;
    int32_t extent;  // rows of A, or columns of B
  };
  struct Params {
    Operand a, b;
    int32_t k;
  };
  template <class Epilogue, class Scheduler>
  struct SharedStorage {
    alignas(16) float sums[kWarps][kOutputs];
    [[no_unique_address]] typename Epilogue::TensorStorage staging;
    [[no_unique_address]] typename Scheduler::SharedStorage scheduler;
    [[no_unique_address]] typename Epilogue::PipelineStorage epilogue;
  };

  /// Outputs 4 thread .. 4 thread + 3 of the tile in the first kReducers threads.
  struct Accumulator {
    float d[kValues];
    CUTLASS_DEVICE float& operator()(int i) { return d[i]; }
    CUTLASS_DEVICE float const& operator()(int i) const { return d[i]; }
  };
  static CUTLASS_DEVICE Accumulator make_accumulator() { return {{0.0f, 0.0f, 0.0f, 0.0f}}; }

  struct Inputs {};
  template <class Storage, class WorkItems>
  static CUTLASS_DEVICE Inputs load_init(Params const&, Storage&, WorkItems const&, int) {
    return {};
  }

  /// Waits for the preceding kernel where the launch may depend on it.
  template <class Storage, class Tile>
  static CUTLASS_DEVICE void mma(Params const& params, Storage& storage, Inputs const&, Accumulator& accumulator, int k_begin, int k_count,
                                 Tile const& tile, int thread) {
    Operand const& vector = kRow ? params.a : params.b;
    Operand const& matrix = kRow ? params.b : params.a;
    constexpr bool kVectorAlongK = (kRow ? Config::kMajorA : Config::kMajorB) == Major::kK;
    int64_t const begin = int64_t(k_begin) * kTileK, rest = params.k - begin, most = int64_t(k_count) * kTileK;
    int const k = int(rest < most ? rest : most);  // of this work item
    int const line = kRow ? tile.m : tile.n, first = (kRow ? tile.n : tile.m) * kOutputs;
    int64_t const step = kVectorAlongK ? 2 : vector.line_bytes;  // bytes from one k to the next
    uint64_t const x = vector.base + uint64_t(tile.l * vector.batch_bytes + line * (kVectorAlongK ? vector.line_bytes : 2) + begin * step);
    uint64_t const a = matrix.base + uint64_t(tile.l * matrix.batch_bytes + (kAlongK ? first * matrix.line_bytes + 2 * begin
                                                                                     : begin * matrix.line_bytes + 2 * int64_t(first)));
    int const warp = int(unsigned(thread) / 32), lane = int(unsigned(thread) % 32), outputs = matrix.extent - first;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    wait_for_predecessor();
#endif
    __syncthreads();  // the sums of the previous item have been read
    if constexpr (kAlongK) {
      float const sum = along_k(a, matrix.line_bytes, x, step, k, outputs, thread);
      if (lane % 2 == 0) storage.sums[warp][lane / 2] = sum;
    } else {
      storage.sums[warp][lane] = along_outputs(a + 2 * uint32_t(lane < outputs ? lane : 0), matrix.line_bytes, x, step, k, warp);
    }
    __syncthreads();
    if (thread < kReducers) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        float4 const part = *reinterpret_cast<float4 const*>(&storage.sums[w][kValues * thread]);
        accumulator.d[0] += part.x;
        accumulator.d[1] += part.y;
        accumulator.d[2] += part.z;
        accumulator.d[3] += part.w;
      }
    }
  }

  template <class Storage>
  static CUTLASS_DEVICE auto& staging(Storage& storage) {
    return storage.staging;
  }

 private:
  static CUTLASS_DEVICE uint32_t element(uint64_t address) { return *reinterpret_cast<uint16_t const*>(address); }
  static CUTLASS_DEVICE float number(uint32_t bits) { return Number::to_float(Number::of_bits(uint16_t(bits))); }

  /// The sum over a warp's k of output lane / 2.
  static CUTLASS_DEVICE float along_k(uint64_t a, int64_t line_bytes, uint64_t x, int64_t step, int k, int outputs, int thread) {
    float sums[kOutputs] = {};
    // Word j of a line has elements 2 j and 2 j + 1 or, where the line begins in the middle of a word, 2 j - 1 and 2 j: so do all lines of
    // even, and all of odd number.
    int const odd[2] = {int(a >> 1) & 1, int((a + uint64_t(line_bytes)) >> 1) & 1};
    uint64_t const starts[2] = {a - 2 * odd[0], a + uint64_t(line_bytes) - 2 * odd[1]};
#pragma unroll 1
    for (int j = thread; j <= k / 2; j += kThreads) {
      float v[3];
      uint64_t from = x + uint64_t((2 * j - 1) * step);
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        int const e = 2 * j - 1 + i;
        v[i] = e >= 0 && e < k ? number(element(from)) : 0.0f;
        from += uint64_t(step);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const e = 2 * j - odd[h];
        bool const inside = e >= 0 && e + 1 < k, first = e == -1 && k > 0, last = e >= 0 && e + 1 == k;
        uint32_t words[kOutputs / 2];
        uint64_t at = starts[h] + 4 * uint64_t(j);
#pragma unroll
        for (int r = 0; r < kOutputs / 2; ++r) {
          words[r] = inside && 2 * r + h < outputs ? *reinterpret_cast<uint32_t const*>(at) : 0;
          at += 2 * uint64_t(line_bytes);
        }
        if (first || last) {  // half of the word is the operand's
          at = starts[h] + 4 * uint64_t(j) + (first ? 2 : 0);
#pragma unroll
          for (int r = 0; r < kOutputs / 2; ++r) {
            if (2 * r + h < outputs) words[r] = element(at) << (first ? 16 : 0);
            at += 2 * uint64_t(line_bytes);
          }
        }
        float const low = odd[h] != 0 ? v[0] : v[1], high = odd[h] != 0 ? v[1] : v[2];
#pragma unroll
        for (int r = 0; r < kOutputs / 2; ++r) {
          sums[2 * r + h] = fmaf(number(words[r]), low, sums[2 * r + h]);
          sums[2 * r + h] = fmaf(number(words[r] >> 16), high, sums[2 * r + h]);
        }
      }
    }
    return sum_over_lanes<kOutputs / 2>(sums, thread);
  }

  /// Each exchange halves the outputs of a lane: bits 4 to 1 of its number say which one is left.
  template <int kHalf>
  static CUTLASS_DEVICE float sum_over_lanes(float (&sums)[kOutputs], int thread) {
    bool const upper = (thread & (2 * kHalf)) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      float const below = sums[i], above = sums[i + kHalf];
      sums[i] = (upper ? above : below) + __shfl_xor_sync(0xffffffffu, upper ? below : above, 2 * kHalf);
    }
    if constexpr (kHalf > 1) {
      return sum_over_lanes<kHalf / 2>(sums, thread);
    } else {
      return sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 1);
    }
  }

  /// The sum over a warp's k of the output whose element of the first k is at `a`.
  static CUTLASS_DEVICE float along_outputs(uint64_t a, int64_t line_bytes, uint64_t x, int64_t step, int k, int warp) {
    constexpr int kTogether = 16;
    float sum = 0.0f;
    a += uint64_t(warp * line_bytes);
    x += uint64_t(warp * step);
#pragma unroll 1
    for (int first = warp; first < k; first += kTogether * kWarps) {
      uint32_t of_a[kTogether], of_x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        bool const inside = first + i * kWarps < k;
        of_a[i] = inside ? element(a) : 0;
        of_x[i] = inside ? element(x) : 0;
        a += uint64_t(kWarps * line_bytes);
        x += uint64_t(kWarps * step);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) sum = fmaf(number(of_a[i]), number(of_x[i]), sum);
    }
    return sum;
  }
};

/// Stores a tile from the registers of the threads that hold it.
template <class Config, class Mainloop>
class EpilogueVectorSm80 {
  using Number = Float16<Config::kType>;
  static constexpr int kValues = Mainloop::kValues;
  static constexpr unsigned kMask = (1u << Mainloop::kReducers) - 1;

 public:
  using Params = EpilogueParams;
  struct TensorStorage {};
  struct PipelineStorage {};

  CUTLASS_DEVICE EpilogueVectorSm80(Params const& params, TensorStorage&, PipelineStorage&, int, int thread)
      : params_(params), thread_(thread) {}

  using Output = TileCoord;
  static CUTLASS_DEVICE Output locate(TileCoord const& tile, int) { return tile; }

  template <class SchedulerParams, class SchedulerStorage>
  static CUTLASS_DEVICE void begin(Params const&, SchedulerParams const&, SchedulerStorage const&, int, int) {}
  CUTLASS_DEVICE void prefetch(Output const&) {}

  CUTLASS_DEVICE void store(typename Mainloop::Accumulator const& accumulator, Output const& tile) const {
    int const first = kValues * thread_, block = first % (2 * kGateBlock);
    int const m = Mainloop::kRow ? tile.m : tile.m * Mainloop::kOutputs + first;
    int const n = Mainloop::kRow ? tile.n * Mainloop::kOutputs + first : tile.n;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      int const row = Mainloop::kRow ? m : m + i, column = Mainloop::kRow ? n + i : n;
      bool const inside = row < params_.m && column < params_.n;
      float const bias = params_.bias != nullptr && inside ? load_bias(Float16<Config::kType>{}, params_, column) : 0.0f;
      float value = fmaf(params_.alpha, accumulator(i), bias);
      int to = column;
      float up = 0.0f;
      if (params_.gated) {  // of the thread two further on
        up = __shfl_down_sync(kMask, value, kGateBlock / kValues);
        to = column / (2 * kGateBlock) * kGateBlock + block + i;
      }
      if (!inside || (params_.gated && block >= kGateBlock)) continue;
      if (params_.c != nullptr) value = fmaf(params_.beta, load_c(Float16<Config::kType>{}, params_, row, to, tile.l), value);
      value = activate(params_.activation, value);
      if (params_.gated) value *= up;
      int64_t const at = tile.l * params_.d_batch_stride + row * params_.ldd + to;
      if (params_.d_scale != nullptr) {
        static_cast<uint8_t*>(params_.d)[at] = uint8_t(codes_e4m3(value, 0.0f, load_code_factor(params_.d_scale)));
      } else if (params_.d_f32) {
        static_cast<float*>(params_.d)[at] = value;
      } else {
        static_cast<typename Number::Type*>(params_.d)[at] = Number::from_float(value);
      }
    }
  }

 private:
  Params const& params_;
  int thread_;
};

/// Tiles that the first kReducers threads of a CTA hold, for four values each: the others have no part in what follows the mainloop.
template <int kReducers>
struct VectorTileSchedulerSm80 : GridTileSchedulerSm80<kReducers, 4> {
  using Base = GridTileSchedulerSm80<kReducers, 4>;

  class WorkItems : public Base::WorkItems {
    using Reduction = SplitReduction<kReducers, 4, 0, 4>;  // with more partials in flight their addresses would be spilled

   public:
    CUTLASS_DEVICE WorkItems(typename Base::Params const& params, typename Base::SharedStorage const& storage,
                             typename Base::Location const& at)
        : Base::WorkItems(params, storage, at), split_(params.split) {}
    template <class Accumulator, class Barrier, class Store>
    CUTLASS_DEVICE bool fixup(WorkItem const& item, Accumulator& accumulator, int, int thread, Barrier const&, Store const& store) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      allow_dependent_launch();
#endif
      auto const slot_of = [](int slot) { return slot; };
      auto const barrier = [] { __syncwarp((1u << kReducers) - 1); };
      if (thread < kReducers && Reduction::fixup(split_, item, slot_of, accumulator, thread, barrier)) store();
      return true;
    }

   private:
    SplitWorkspace const& split_;
  };
};

template <class Config>
struct GemmVectorSm80 : GemmKernelSm80<MainloopVectorSm80<Config>, EpilogueVectorSm80<Config, MainloopVectorSm80<Config>>,
                                       VectorTileSchedulerSm80<MainloopVectorSm80<Config>::kReducers>> {
  static_assert(GemmVectorSm80::kSmemBytes <= Config::kSmemBytes, "the generator's budget and the kernel's shared memory disagree");
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    gemm_vector_sm80_kernel(__grid_constant__ typename GemmVectorSm80<Config>::Params const params) {
  __shared__ __align__(16) char smem[GemmVectorSm80<Config>::kSmemBytes];
  GemmVectorSm80<Config>::run(params, smem);
}

template <class Config>
Status launch_gemm_vector_sm80(GemmLaunchArguments const& arguments) {
  using Kernel = GemmVectorSm80<Config>;
  GemmProblem const& problem = *arguments.problem;
  GemmOperands const& operands = *arguments.operands;

  typename Kernel::Params params{};
  LaunchShape shape;
  if (Status status = describe_grid<Config>(arguments, &params.scheduler, &shape.grid); !status.ok()) return status;
  params.mainloop.a = {reinterpret_cast<uint64_t>(operands.a), 2 * operands.lda, 2 * operands.a_batch_stride, int32_t(problem.m)};
  params.mainloop.b = {reinterpret_cast<uint64_t>(operands.b), 2 * operands.ldb, 2 * operands.b_batch_stride, int32_t(problem.n)};
  params.mainloop.k = int32_t(problem.k);
  params.epilogue = make_epilogue(problem, operands);
  shape.threads = unsigned(Kernel::kThreads);
  shape.programmatic = arguments.programmatic_launch && arguments.device->compute_capability() >= 90;
  shape.stream = arguments.stream;
  return launch(shape, "launch", &gemm_vector_sm80_kernel<Config>, params);
}

}  // namespace minfer::gemm
