// Private operators of minfer.distributed: sums over the GPUs of a host, and the memory that they go through.
#include <cstring>

#include "core/checks.h"
#include "core/device.h"
#include "core/json.h"
#include "core/operators.h"
#include "minfer/all_reduce.h"

namespace minfer::torch_binding {

namespace {

/// x becomes the sum of all ranks'.
void all_reduce_in_place(Tensor const& x, std::vector<int64_t> const& buffers, int64_t rank, int64_t most) {
  char const* op = "minfer::_all_reduce";
  check_16bit(op, "x", x);
  int64_t const ranks = int64_t(buffers.size()), count = x.numel();
  if (!x.is_contiguous() || !x.is_aligned(16) || count % 8 != 0 || count > most) {
    fail(op, ": x must be contiguous, aligned to 16 bytes, of a multiple of 8 and at most ", most, " elements, got ", x);
  }
  if (ranks < 2 || ranks > kMostReduceRanks) fail(op, ": buffers must be of 2 to ", kMostReduceRanks, " ranks, got ", ranks);
  if (rank < 0 || rank >= ranks) fail(op, ": rank must be that of a buffer, got ", rank);
  OnDevice const on(op, x);
  AllReduce sum{};
  sum.type = data_type(x.scalar_type());
  sum.x = sum.out = x.data_ptr();
  sum.count = count;
  sum.ranks = int32_t(ranks);
  sum.rank = int32_t(rank);
  sum.most = most;
  for (int64_t i = 0; i < ranks; ++i) sum.buffers[i] = reinterpret_cast<void*>(buffers[size_t(i)]);
  Status const status = all_reduce(sum, on.properties(), on.programmatic(), on.stream());
  if (!status.ok()) fail(op, ": x ", x, ": ", status.message);
}

int64_t exchange_bytes(int64_t most, int64_t ranks) { return int64_t(all_reduce_bytes(most, int32_t(ranks))); }

/// like: a tensor of the device. Address and handle.
std::string allocate_for_peers(Tensor const& like, int64_t bytes) {
  char const* op = "minfer::_allocate_peer_memory";
  OnDevice const on(op, like);
  void* memory = nullptr;
  PeerHandle handle;
  Status const status = allocate_peer_memory(size_t(bytes), &memory, &handle);
  if (!status.ok()) fail(op, ": ", bytes, " bytes: ", status.message);
  std::string text;
  for (unsigned char const byte : handle.bytes) {
    for (int const digit : {byte >> 4, byte & 15}) text += "0123456789abcdef"[digit];
  }
  Json json;
  json.open('{').key("address").value(int64_t(address_of(memory))).key("handle").value(text.c_str()).close('}');
  return json.text();
}

int64_t map_peer_memory(Tensor const& like, std::string const& handle) {
  char const* op = "minfer::_open_peer_memory";
  PeerHandle peer;
  auto const digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  if (handle.size() != 2 * sizeof(peer.bytes)) fail(op, ": handle must have ", 2 * sizeof(peer.bytes), " digits, got ", handle.size());
  for (size_t i = 0; i < sizeof(peer.bytes); ++i) {
    int const high = digit(handle[2 * i]), low = digit(handle[2 * i + 1]);
    if (high < 0 || low < 0) fail(op, ": handle must be of hexadecimal digits");
    peer.bytes[i] = static_cast<unsigned char>(16 * high + low);
  }
  OnDevice const on(op, like);
  void* memory = nullptr;
  Status const status = open_peer_memory(peer, &memory);
  if (!status.ok()) fail(op, ": ", status.message);
  return int64_t(address_of(memory));
}

void release_peer_memory(Tensor const& like, int64_t address, bool mapped) {
  char const* op = "minfer::_release_peer_memory";
  OnDevice const on(op, like);
  void* const memory = reinterpret_cast<void*>(address);
  Status const status = mapped ? close_peer_memory(memory) : free_peer_memory(memory);
  if (!status.ok()) fail(op, ": ", status.message);
}

constexpr Operator kOperators[] = {
    // x becomes the sum of all ranks' x; buffers: where this process has all ranks' exchange buffers, each for `most` numbers.
    {"_all_reduce(Tensor(a!) x, int[] buffers, int rank, int most) -> ()", boxed<&all_reduce_in_place>},
    // Memory of like's device that other processes of the host can map: {"address": .., "handle": ".."}.
    {"_allocate_peer_memory(Tensor like, int bytes) -> str", boxed<&allocate_for_peers>},
    // Where this process has another's memory.
    {"_open_peer_memory(Tensor like, str handle) -> int", boxed<&map_peer_memory>},
    // Memory that was allocated, or mapped.
    {"_release_peer_memory(Tensor like, int address, bool mapped) -> ()", boxed<&release_peer_memory>},
};
constexpr Operator kSizes[] = {
    // Bytes of an exchange buffer.
    {"_all_reduce_bytes(int most, int ranks) -> int", boxed<&exchange_bytes>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) {
  define(m, kOperators);
  define(m, kSizes);
}
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CUDA, m) { implement(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kSizes); }

}  // namespace

}  // namespace minfer::torch_binding
