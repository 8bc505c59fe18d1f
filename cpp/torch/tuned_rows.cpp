#include "tuned_rows.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/failure.h"
#include "core/operators.h"
#include "core/parse.h"
#include "gemm/cost_model.h"

namespace minfer::torch_binding {

namespace {

/// Immutable once in use: a load makes a new one.
struct UserRows {
  std::map<int32_t, std::shared_ptr<UserModel const>> models;  // by device index
  std::map<int32_t, std::vector<GemmTunedRow>> loaded;         // by device index, in the order of loading
  std::map<int32_t, std::vector<GemmTunedRow>> used;           // by device index: its own rows, then the rows for all devices
  std::shared_ptr<std::deque<std::string>> names;              // kernel names that rows point to
};

std::mutex user_rows_mutex;
std::shared_ptr<UserRows const> user_rows = std::make_shared<UserRows const>();
std::atomic<uint64_t> generation{0};

std::shared_ptr<UserRows const> current() {
  std::lock_guard<std::mutex> lock(user_rows_mutex);
  return user_rows;
}

/// The columns of minfer/tuned.py, in order.
constexpr char const* kHeader =
    "op,m,n,k,batch,ab_type,a_major,b_major,b_format,group_size,has_zeros,has_c,gated,kernel,decomposition,splits,swizzle,raster,columns,"
    "us";

/// One line of the table: its cells by column name, and its number for messages.
class Line {
 public:
  Line(int number, std::string const& text) : where_("minfer::_load_tuned: line " + std::to_string(number)), cells_(split(text, ',')) {
    if (cells_.size() != columns().size()) fail(where_, ": expected ", columns().size(), " cells, got ", cells_.size());
  }

  std::string const& where() const { return where_; }
  std::string const& cell(char const* column) const {
    return cells_[size_t(std::find(columns().begin(), columns().end(), column) - columns().begin())];
  }
  template <class Parse, class... Limits>
  auto parsed(Parse&& parse, char const* column, Limits... limits) const {
    return parse((where_ + ": " + column).c_str(), cell(column), limits...);
  }

 private:
  static std::vector<std::string> const& columns() {
    static std::vector<std::string> const all = split(kHeader, ',');
    return all;
  }

  std::string where_;
  std::vector<std::string> cells_;
};

/// A row without the kernel's name, which needs memory that outlives the line.
GemmTunedRow row_of(Line const& line) {
  constexpr int64_t kMaxSize = INT32_MAX;  // plans take no larger sizes
  GemmTunedRow row{};
  row.m = line.parsed(parse_integer, "m", 0, kMaxSize);
  row.n = line.parsed(parse_integer, "n", 0, kMaxSize);
  row.k = line.parsed(parse_integer, "k", 0, kMaxSize);
  row.batch = line.parsed(parse_integer, "batch", 0, kMaxSize);
  row.ab_type = line.parsed(parse_type, "ab_type");
  row.a_major = line.parsed(parse_major, "a_major");
  row.b_major = line.parsed(parse_major, "b_major");
  if (line.cell("op") == "gemm") {
    if (line.cell("b_format") != name_of(WeightFormat::kDense)) {
      fail(line.where(), ": b_format of gemm must be dense, got '", line.cell("b_format"), "'");
    }
  } else {
    row.b_format = parse_format(line.where().c_str(), 0, line.cell("b_format"));
    row.group_size = group_of(line.where().c_str(), line.parsed(parse_integer, "group_size", -1, INT64_MAX));
    row.has_zeros = line.parsed(parse_flag, "has_zeros");
  }
  row.has_c = line.parsed(parse_flag, "has_c");
  row.gated = line.parsed(parse_flag, "gated");
  row.launch.decomposition = line.parsed(parse_decomposition, "decomposition");
  row.launch.splits = line.parsed(parse_launch_number, "splits");
  row.launch.max_swizzle_size = line.parsed(parse_launch_number, "swizzle");
  row.launch.raster_order = line.parsed(parse_raster, "raster");
  row.launch.columns = line.parsed(parse_integer, "columns", 0, 256);
  row.us = line.parsed(parse_positive, "us");
  return row;
}

/// Appends the rows of a CSV text; returns their number.
int64_t read_rows(std::string const& csv, std::vector<GemmTunedRow>* rows, std::deque<std::string>* names) {
  int64_t count = 0;
  bool header = false;
  int number = 0;
  for (std::string text : split(csv, '\n')) {
    ++number;
    if (!text.empty() && text.back() == '\r') text.pop_back();
    if (text.empty() || text[0] == '#') continue;
    if (!header) {
      if (text != kHeader) {
        fail("minfer::_load_tuned: line ", number, ": the header must be ", kHeader, ", got '", text,
             "'; this table is of another version: remove it and tune again");
      }
      header = true;
      continue;
    }
    Line const line(number, text);
    if (line.cell("op") != "gemm" && line.cell("op") != "w4a16_gemm") continue;
    GemmTunedRow row = row_of(line);
    names->push_back(line.cell("kernel"));
    row.kernel = names->back().c_str();
    rows->push_back(row);
    ++count;
  }
  return count;
}

}  // namespace

void use_user_rows(GemmPlanOptions* options, int32_t device) {
  thread_local std::shared_ptr<UserRows const> held;
  held = current();
  for (int32_t index : {device, kAnyDevice}) {
    auto const own = held->models.find(index);
    if (own == held->models.end()) continue;
    options->model = &own->second->model;
    break;
  }
  auto found = held->used.find(device);
  if (found == held->used.end()) found = held->used.find(kAnyDevice);
  if (found == held->used.end()) return;
  options->user_rows = found->second.data();
  options->user_row_count = int64_t(found->second.size());
}

std::shared_ptr<UserModel const> read_model(char const* op, std::string const& csv) {
  auto result = std::make_shared<UserModel>();
  std::map<std::string, GemmKernelFactors> factors;
  std::vector<std::string> seen;
  int number = 0;
  for (std::string text : split(csv, '\n')) {
    ++number;
    if (!text.empty() && text.back() == '\r') text.pop_back();
    if (text.empty() || text[0] == '#') continue;
    std::string const where = std::string(op) + (": line " + std::to_string(number));
    std::vector<std::string> const cells = split(text, ',');
    auto const value = [&](size_t i) { return parse_positive((where + ": " + cells[1]).c_str(), cells[i]); };
    if (cells[0] == "rate" && cells.size() == 3) {
      auto const is_it = [&](GemmRateName const& rate) { return cells[1] == rate.name; };
      auto const found = std::find_if(std::begin(kGemmRateNames), std::end(kGemmRateNames), is_it);
      if (found == std::end(kGemmRateNames)) fail(where, ": no rate is named '", cells[1], "'; remove the table and calibrate again");
      if (std::find(seen.begin(), seen.end(), cells[1]) != seen.end()) fail(where, ": repeats ", cells[1]);
      seen.push_back(cells[1]);
      result->model.rates.*found->rate = value(2);
    } else if (cells[0] == "kernel" && cells.size() == 8) {
      factors[cells[1]] = {value(2), value(3), value(4), value(5), value(6), value(7)};
    } else {
      fail(where, ": expected rate,name,value or kernel,name,compute,tile,start,epilogue,latency,bytes, got '", text, "'");
    }
  }
  if (seen.size() != std::size(kGemmRateNames)) fail(op, ": ", seen.size(), " rates of ", std::size(kGemmRateNames), "; calibrate again");
  int64_t count = 0;
  KernelInfo const* kernels = registry(&count);
  for (int64_t i = 0; i < count; ++i) result->factors.push_back(factors[model_name_of(kernels[i]).text]);
  result->model.factors = result->factors.data();
  return result;
}

uint64_t user_rows_generation() { return generation.load(std::memory_order_acquire); }

namespace {

/// Adds the rows of a CSV text to the rows for `device`, or for all devices with kAnyDevice, and returns their number. An empty text
/// removes the rows for the device, or all rows. A text with an error raises with its line and column, and changes nothing.
int64_t load_tuned(std::string const& csv, int64_t device) {
  if (device < kAnyDevice || device > INT16_MAX) fail("minfer::_load_tuned: device must be an index, or -1 for all devices, got ", device);
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> const alone(one_at_a_time);
  int32_t const index = int32_t(device);
  auto next = std::make_shared<UserRows>();
  next->names = std::make_shared<std::deque<std::string>>();
  std::shared_ptr<UserRows const> const before = current();
  next->models = before->models;
  if (!csv.empty() || index != kAnyDevice) {
    for (auto const& [of, rows] : before->loaded) {
      if (csv.empty() && of == index) continue;
      for (GemmTunedRow row : rows) {
        next->names->push_back(row.kernel);
        row.kernel = next->names->back().c_str();
        next->loaded[of].push_back(row);
      }
    }
  }
  int64_t const count = csv.empty() ? 0 : read_rows(csv, &next->loaded[index], next->names.get());
  std::vector<GemmTunedRow> const for_all = next->loaded[kAnyDevice];
  for (auto const& [of, rows] : next->loaded) {
    std::vector<GemmTunedRow>& used = next->used[of];
    used = rows;
    if (of != kAnyDevice) used.insert(used.end(), for_all.begin(), for_all.end());
  }
  {
    std::lock_guard<std::mutex> lock(user_rows_mutex);
    user_rows = next;
  }
  generation.fetch_add(1, std::memory_order_release);
  return count;
}

/// Replaces the cost model of a device, or of all that have none of their own; an empty text removes it.
void load_model(std::string csv, int64_t device) {
  auto next = std::make_shared<UserRows>(*current());
  next->models.erase(int32_t(device));
  if (!csv.empty()) next->models[int32_t(device)] = read_model("minfer::_load_model", csv);
  {
    std::lock_guard<std::mutex> lock(user_rows_mutex);
    user_rows = next;
  }
  generation.fetch_add(1, std::memory_order_release);
}

constexpr Operator kOperators[] = {
    {"_load_model(str csv, int device=-1) -> ()", boxed<&load_model>},
    {"_load_tuned(str csv, int device=-1) -> int", boxed<&load_tuned>},
};
STABLE_TORCH_LIBRARY_FRAGMENT(MINFER_NAMESPACE, m) { define(m, kOperators); }
STABLE_TORCH_LIBRARY_IMPL(MINFER_NAMESPACE, CompositeExplicitAutograd, m) { implement(m, kOperators); }

}  // namespace

}  // namespace minfer::torch_binding
