// Time of a launch: CUDA-graph replays over rotated operands, contestants in turn (A B A B), median, p10 and p90 of the rounds.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/device_ops.h"

namespace minfer::bench {

struct Contestant {
  std::string name;
  std::function<void(int64_t set, cudaStream_t stream)> launch;  // capturable; `set` picks the operands
};

struct Timing {
  double us = 0, p10 = 0, p90 = 0;  // per launch
};

struct TimingOptions {
  int rounds = 15;
  double graph_us = 1000;  // work in one replay: event resolution (about 0.5 us) and the gap between graphs stay under 0.3 %
};

/// A graph of `launches` calls that walks the sets of operands.
class TimedGraph {
 public:
  TimedGraph(Contestant const& contestant, int64_t sets, int64_t launches, cudaStream_t stream) : launches_(launches) {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      for (int64_t i = 0; i < launches; ++i) contestant.launch(i % sets, stream);
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    cudaError_t const instantiated = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    check(instantiated, "cudaGraphInstantiate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  TimedGraph(TimedGraph&& other) noexcept { swap(other); }
  TimedGraph& operator=(TimedGraph&& other) noexcept {
    swap(other);
    return *this;
  }
  ~TimedGraph() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (begin_ != nullptr) cudaEventDestroy(begin_);
    if (end_ != nullptr) cudaEventDestroy(end_);
  }

  /// Enqueues one replay between two events; elapsed_us() after a synchronisation reads them.
  void replay(cudaStream_t stream) {
    check(cudaEventRecord(begin_, stream), "cudaEventRecord");
    check(cudaGraphLaunch(executable_, stream), "cudaGraphLaunch");
    check(cudaEventRecord(end_, stream), "cudaEventRecord");
  }

  double elapsed_us() const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return double(ms) * 1000 / double(launches_);
  }

  int64_t launches() const { return launches_; }

 private:
  void swap(TimedGraph& other) {
    std::swap(launches_, other.launches_);
    std::swap(executable_, other.executable_);
    std::swap(begin_, other.begin_);
    std::swap(end_, other.end_);
  }

  int64_t launches_ = 0;
  cudaGraphExec_t executable_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// One graph per contestant, long enough for `graph_us`, always a whole number of rotations.
inline std::vector<TimedGraph> capture_all(std::vector<Contestant> const& contestants, int64_t sets, double graph_us, cudaStream_t stream) {
  std::vector<TimedGraph> graphs;
  for (Contestant const& contestant : contestants) {
    TimedGraph once(contestant, sets, sets, stream);
    once.replay(stream);
    once.replay(stream);
    check(cudaStreamSynchronize(stream), contestant.name.c_str());
    int64_t const rotations = std::llround(graph_us / (std::max(once.elapsed_us(), 0.5) * double(sets)));
    graphs.push_back(rotations <= 1 ? std::move(once) : TimedGraph(contestant, sets, sets * rotations, stream));
  }
  return graphs;
}

inline Timing summarise(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  auto const at = [&](double q) { return samples[size_t(std::llround(q * double(samples.size() - 1)))]; };
  return {at(0.5), at(0.1), at(0.9)};
}

/// Times the contestants against each other.
inline std::vector<Timing> time_interleaved(std::vector<Contestant> const& contestants, int64_t sets, TimingOptions const& options,
                                            cudaStream_t stream) {
  std::vector<TimedGraph> graphs = capture_all(contestants, sets, options.graph_us, stream);
  std::vector<std::vector<double>> samples(graphs.size());
  for (int round = -1; round < options.rounds; ++round) {  // round -1 warms up
    // Everything of a round is in the queue before the first replay starts: a replay that found the GPU idle would be charged
    // the graph's launch latency (5 to 10 us).
    spin(30.0 * double(graphs.size()) + 20.0, stream);
    for (size_t i = 0; i < graphs.size(); ++i) graphs[(i + size_t(round + 1)) % graphs.size()].replay(stream);
    check(cudaStreamSynchronize(stream), "timing");
    for (size_t i = 0; round >= 0 && i < graphs.size(); ++i) samples[i].push_back(graphs[i].elapsed_us());
  }
  std::vector<Timing> timings;
  for (std::vector<double>& s : samples) timings.push_back(summarise(std::move(s)));
  return timings;
}

}  // namespace minfer::bench
