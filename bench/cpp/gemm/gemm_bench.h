// What the benchmarks of all GEMM families share: the command line around a family's own options, plans, the check, timing, tables.
//
// Protocol: values first (norm-wise error against float64), then CUDA-graph replays over operands rotated through three L2s,
// ours and the baseline in turn. Needs neither torch nor Python.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "common/arguments.h"
#include "gemm/gemm_case.h"

namespace minfer::bench {

struct Family {
  char const* name;                   // of the program
  std::vector<std::string> families;  // of the registry whose kernels it runs
  char const* usage;                  // the first lines of --help
  std::vector<Option> options;        // that say what is computed
  int operands_width;                 // of GemmCase::operands() in the table
  std::vector<GemmCase> (*cases)(Arguments const&);
};

/// A name that is one of `types`.
DataType parse_type(std::string const& text, std::initializer_list<DataType> types = {DataType::kF16, DataType::kBF16, DataType::kF32});
Activation parse_activation(std::string const& text);

/// Options of every benchmark: the registry, the check, the protocol.
std::vector<Option> protocol_options();

/// Whether a kernel's name matches --kernel; an empty glob takes all.
bool matches(std::string const& glob, char const* name);

/// --list, of these families.
void print_registry(std::vector<std::string> const& families, std::string const& glob);

/// "H200, 132 SMs, ..": the first line of a run.
void print_device(DeviceProperties const& device);

/// main() of a family's benchmark: 0, 1 where a result was wrong, 2 and a message on an error.
int bench_main(Family const& family, int argc, char** argv);

}  // namespace minfer::bench
