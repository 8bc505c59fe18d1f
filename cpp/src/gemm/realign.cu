// Copies operands of a GEMM into K-major rows of 16-byte vectors (realign.h), bound by memory.
//
// Reads. An operand consists of lines: its rows, or, where m or n is its contiguous mode, its columns. A line begins at any multiple of 2
// bytes. A thread's 8 elements of a line are in one or two aligned words of 16 bytes; it loads those, and shifts their elements into place
// in registers. The second word is the next thread's first, and comes from L1. A word that holds an element of the line is read whole, as
// long as it does not reach behind the operand's last element: those few elements are read one by one.
// Writes. Whole vectors, in which elements behind k are zeros. Lines along k are stored as they come. A transposing CTA puts 128 lines of
// 64 rows into shared memory, vectors of 8 rows, and reads them by transposing ldmatrix. Matrix j of an ldmatrix takes lines 2 j and
// 2 j + 1 of each of four groups of 8, so that the four matrices give each thread 8 consecutive elements of a row of the copy.
// Bytes in flight. Four vectors for each of 1024 threads of an SM.
// Walk. Each CTA copies one part of one matrix, those of the first operand come first. Successors are let in at once: when the last CTAs
// have started, the GEMM sets up on the SMs that are free. It waits for all of this kernel before it reads the copies.
#include "common/dependent_launch.cuh"
#include "common/kernel_launch.h"
#include "common/mma_sm80.cuh"
#include "gemm/realign.h"

namespace minfer::gemm {

namespace {

constexpr int kThreads = RealignShape::kThreads, kVectors = RealignShape::kVectors;
constexpr int kTileRows = int(RealignShape::kTileRows), kTileLines = int(RealignShape::kTileLines);

struct Copy {
  uint16_t const* from;
  uint16_t* to;
  uint16_t const* end;       // behind the operand's last element
  int64_t ld, batch_stride;  // of the operand, elements
  int64_t to_ld, to_batch_stride;
  uint32_t rows, k;
  uint32_t blocks, blocks_of_matrix, blocks_x;  // CTAs: all of them; of a matrix; along its contiguous mode
  int32_t lanes, along;                         // RealignShape
  bool transposes;
};

struct RealignParams {
  Copy copies[2];
};

/// The kVectors vectors that a thread copies. Vector u is 8 elements of a line of `extent` from `first` on.
class Vectors {
 public:
  /// Issues the loads of a vector, where it is inside.
  __device__ __forceinline__ void load(int u, uint16_t const* line, uint32_t first, uint32_t extent, bool inside, uint16_t const* end) {
    uint16_t const* const from = line + first;
    uint32_t const shift = uint32_t(reinterpret_cast<uintptr_t>(from) >> 1) & 7;
    uint16_t const* const word = from - shift;
    bool const two = shift != 0 && first + 8 - shift < extent;  // whether the second word holds an element of the line
    bool const whole = reinterpret_cast<uintptr_t>(word) + (two ? 32 : 16) <= reinterpret_cast<uintptr_t>(end);
    shifts_ |= (whole ? shift : kOneByOne) << 4 * u;
    uint4 low = make_uint4(0, 0, 0, 0), high = make_uint4(0, 0, 0, 0);
    if (inside && whole) low = load_operand(reinterpret_cast<uint4 const*>(word));
    if (inside && whole && two) high = load_operand(reinterpret_cast<uint4 const*>(word) + 1);
    if (inside && !whole) {
      last_ = uint32_t(end - from);
      last_left_ = extent - first;
    }
    words_[u][0] = low.x, words_[u][1] = low.y, words_[u][2] = low.z, words_[u][3] = low.w;
    words_[u][4] = high.x, words_[u][5] = high.y, words_[u][6] = high.z, words_[u][7] = high.w;
  }

  /// Behind all loads: those at the operand's end. The vectors of a thread are further apart than the two words that may reach over it, so
  /// only one of them is there.
  __device__ __forceinline__ void load_last(uint16_t const* end) {
    if (last_ == 0) return;
    uint32_t elements[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) elements[i] = uint32_t(i) < last_left_ ? load_operand(end - last_ + i) : 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (shift_of(u) != kOneByOne) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) words_[u][i] = elements[2 * i] | elements[2 * i + 1] << 16;
    }
  }

  /// The 8 elements, of which the line has `left`; the others are zeros.
  __device__ __forceinline__ uint4 get(int u, uint32_t left) const {
    uint32_t w[8], out[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = words_[u][i];
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = shift_of(u) & 4 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = shift_of(u) & 2 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __funnelshift_r(w[i], w[i + 1], (shift_of(u) & 1) * 16);
    if (left < 8) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) out[i] = left > 2 * i + 1 ? out[i] : left > 2 * i ? out[i] & 0xffff : 0;
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

 private:
  static constexpr uint32_t kOneByOne = 8;  // of a vector that is read element by element: its elements are in their places
  __device__ __forceinline__ uint32_t shift_of(int u) const { return shifts_ >> 4 * u & 15; }

  uint32_t words_[kVectors][8];
  uint32_t shifts_ = 0;     // elements, 4 bits for each vector
  uint32_t last_ = 0;       // elements from the vector that is read element by element, if there is one, to the operand's end
  uint32_t last_left_ = 0;  // elements that the line has of it
};

/// Rows along k: block y, vectors block x.
__device__ __forceinline__ void copy_rows(Copy const& copy, uint16_t const* from, uint16_t* to, uint32_t x, uint32_t y) {
  uint32_t const lane = threadIdx.x & ((1u << copy.lanes) - 1), group = threadIdx.x >> copy.lanes;
  uint32_t const rows = kThreads >> copy.lanes;  // side by side
  uint32_t const first_row = y * (rows * kVectors >> copy.along) + group, first_vector = (x << (copy.lanes + copy.along)) + lane;
  auto const row = [&](uint32_t u) { return first_row + (u >> copy.along) * rows; };
  auto const element = [&](uint32_t u) { return 8 * (first_vector + ((u & ((1u << copy.along) - 1)) << copy.lanes)); };
  auto const inside = [&](uint32_t u) { return row(u) < copy.rows && element(u) < copy.k; };
  Vectors vectors;
#pragma unroll
  for (int u = 0; u < kVectors; ++u) vectors.load(u, from + row(u) * copy.ld, element(u), copy.k, inside(u), copy.end);
  vectors.load_last(copy.end);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (inside(u)) *reinterpret_cast<uint4*>(to + row(u) * copy.to_ld + element(u)) = vectors.get(u, copy.k - element(u));
  }
}

/// The vectors of shared memory's line l are exchanged so that neither the 8 of a line nor the same of the lines of a matrix of ldmatrix,
/// which differ in l % 2 and l / 8 % 4, meet in a bank.
__device__ __forceinline__ uint32_t swizzled(uint32_t line, uint32_t vector) { return vector ^ (line / 8 % 4 * 2 + line % 2); }

/// Columns along k: tile y of k, tile x of rows.
__device__ __forceinline__ void transpose_tile(Copy const& copy, uint16_t const* from, uint16_t* to, uint32_t x, uint32_t y) {
  constexpr uint32_t kRowVectors = kTileRows / 8, kLinesAtOnce = kThreads / kRowVectors;
  static_assert(kLinesAtOnce * kVectors == kTileLines && kRowVectors == 8 && kThreads / 32 == kRowVectors);
  __shared__ uint4 tile[kTileLines][kRowVectors];
  uint32_t const vector = threadIdx.x % kRowVectors, line = threadIdx.x / kRowVectors;
  uint32_t const first_row = x * kTileRows, first_line = y * kTileLines;
  uint32_t const loaded_row = first_row + 8 * vector;
  auto const inside = [&](uint32_t at) { return first_line + at < copy.k && loaded_row < copy.rows; };
  Vectors vectors;
#pragma unroll
  for (uint32_t u = 0; u < kVectors; ++u) {
    uint32_t const at = line + u * kLinesAtOnce;
    vectors.load(int(u), from + (first_line + at) * copy.ld, loaded_row, copy.rows, inside(at), copy.end);
  }
  vectors.load_last(copy.end);
#pragma unroll
  for (uint32_t u = 0; u < kVectors; ++u) {
    uint32_t const at = line + u * kLinesAtOnce;
    tile[at][swizzled(at, vector)] = vectors.get(int(u), inside(at) ? copy.rows - loaded_row : 0);
  }
  __syncthreads();
  uint32_t const warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // the warp's 8 rows are vector number `warp` of all lines
  uint32_t const row = first_row + 8 * warp + lane / 4;
#pragma unroll
  for (uint32_t h = 0; h < kTileLines / 32; ++h) {
    uint32_t const at = 32 * h + 8 * (lane % 8 / 2) + 2 * (lane / 8) + lane % 2;
    uint32_t d[4];  // of row lane / 4: elements 8 (lane % 4) to 8 (lane % 4) + 7 of the 32
    load_matrices_transposed(shared_address(&tile[at][swizzled(at, warp)]), d);
    uint32_t const element = first_line + 32 * h + 8 * (lane % 4);
    if (row < copy.rows && element < copy.k) {
      *reinterpret_cast<uint4*>(to + row * copy.to_ld + element) = make_uint4(d[0], d[1], d[2], d[3]);
    }
  }
}

__global__ void __launch_bounds__(kThreads, 4) realign_kernel(__grid_constant__ RealignParams const params) {
#if __CUDA_ARCH__ >= 900
  allow_dependent_launch();
#endif
  bool const second = blockIdx.x >= params.copies[0].blocks;
  Copy const& copy = params.copies[second];
  uint32_t const block = blockIdx.x - (second ? params.copies[0].blocks : 0);
  uint32_t const batch = block / copy.blocks_of_matrix, of_matrix = block - batch * copy.blocks_of_matrix;
  uint32_t const y = of_matrix / copy.blocks_x, x = of_matrix - y * copy.blocks_x;
  uint16_t const* const from = copy.from + batch * copy.batch_stride;
  uint16_t* const to = copy.to + batch * copy.to_batch_stride;
#if __CUDA_ARCH__ >= 900
  wait_for_predecessor();
#endif
  if (copy.transposes) {
    transpose_tile(copy, from, to, x, y);
  } else {
    copy_rows(copy, from, to, x, y);
  }
}

Copy describe(RealignedOperand const& operand, int64_t k, int64_t batch) {
  Copy copy{};
  if (operand.to == nullptr) return copy;
  RealignShape const shape(operand.major, operand.rows, k);
  copy.transposes = operand.major == Major::kMN;
  int64_t const lines = copy.transposes ? k : operand.rows, extent = copy.transposes ? operand.rows : k;
  copy.from = static_cast<uint16_t const*>(operand.from);
  copy.to = static_cast<uint16_t*>(operand.to);
  copy.end = copy.from + (batch - 1) * operand.batch_stride + (lines - 1) * operand.ld + extent;
  copy.ld = operand.ld;
  copy.batch_stride = operand.batch_stride;
  copy.to_ld = realigned_stride(k);
  copy.to_batch_stride = operand.rows * copy.to_ld;
  copy.rows = uint32_t(operand.rows);
  copy.k = uint32_t(k);
  copy.blocks_x = uint32_t(shape.blocks_x);
  copy.blocks_of_matrix = uint32_t(shape.blocks_x * shape.blocks_y);
  copy.blocks = uint32_t(shape.blocks_x * shape.blocks_y * batch);
  copy.lanes = shape.lanes;
  copy.along = shape.along;
  return copy;
}

}  // namespace

Status realign(RealignedOperand const& a, RealignedOperand const& b, int64_t k, int64_t batch, bool programmatic, Stream stream) {
  RealignParams const params{{describe(a, k, batch), describe(b, k, batch)}};
  LaunchShape shape;
  shape.grid = dim3(params.copies[0].blocks + params.copies[1].blocks);
  shape.threads = kThreads;
  shape.programmatic = programmatic;
  shape.stream = stream;
  return launch(shape, "launch of the copy in front of a GEMM", &realign_kernel, params);
}

}  // namespace minfer::gemm
