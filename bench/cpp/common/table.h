// Rows as they are measured: a table on stdout, the same and more as CSV.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

namespace minfer::bench {

inline std::string format(char const* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), pattern, value);
  return text;
}

/// Column of the table: `width` > 0 aligns right, < 0 left, as in printf.
struct Column {
  char const* header;
  int width;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  void header() const {
    std::vector<std::string> names;
    for (Column const& column : columns_) names.emplace_back(column.header);
    row(names);
  }

  void row(std::vector<std::string> const& cells) const {
    for (size_t i = 0; i < columns_.size(); ++i) {
      // The last column is free to be as long as it is.
      int const width = i + 1 == columns_.size() ? 0 : columns_[i].width;
      std::printf(i == 0 ? "%*s" : "  %*s", width, i < cells.size() ? cells[i].c_str() : "");
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::vector<Column> columns_;
};

/// Writes each row at once, so that a run that is cut short keeps what it measured.
class Csv {
 public:
  Csv(std::string const& path, std::vector<std::string> const& header) {
    if (path.empty()) return;
    file_ = std::fopen(path.c_str(), "w");
    if (file_ == nullptr) throw std::runtime_error("cannot write " + path);
    row(header);
  }
  Csv(Csv const&) = delete;
  Csv& operator=(Csv const&) = delete;
  ~Csv() {
    if (file_ != nullptr) std::fclose(file_);
  }

  void row(std::vector<std::string> const& cells) {
    if (file_ == nullptr) return;
    for (size_t i = 0; i < cells.size(); ++i) std::fprintf(file_, "%s%s", i == 0 ? "" : ",", cells[i].c_str());
    std::fprintf(file_, "\n");
    std::fflush(file_);
  }

 private:
  std::FILE* file_ = nullptr;
};

}  // namespace minfer::bench
