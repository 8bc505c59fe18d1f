// Command line of the benchmarks: `--name value` or `--name=value`; lists are comma separated, integers also take ranges.
//
//   16,64,128      a list
//   128:1024:128   128, 256, ... 1024
//   1:8192:x2      1, 2, 4, ... 8192
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace minfer::bench {

/// One option as `--help` shows it. `value` names what follows ("GLOB"); null for a flag.
struct Option {
  char const* name;
  char const* value;
  char const* fallback;
  char const* help;
};

inline std::vector<std::string> split(std::string const& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (begin <= text.size()) {
    size_t end = text.find(separator, begin);
    if (end == std::string::npos) end = text.size();
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

inline int64_t parse_integer(std::string const& text, std::string const& option) {
  char* end = nullptr;
  int64_t const value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0') throw std::invalid_argument("--" + option + ": \"" + text + "\" is not an integer");
  return value;
}

class Arguments {
 public:
  /// @throws std::invalid_argument on an option that is not in `options` or that lacks its value.
  Arguments(int argc, char** argv, std::vector<Option> options) : options_(std::move(options)) {
    for (int i = 1; i < argc; ++i) {
      std::string word = argv[i];
      if (word == "-h") word = "--help";
      if (word.rfind("--", 0) != 0) throw std::invalid_argument("\"" + word + "\" is not an option; --help lists them");
      word = word.substr(2);
      size_t const equals = word.find('=');
      std::string const name = word.substr(0, equals);
      Option const* option = find(name);
      if (option == nullptr) throw std::invalid_argument("there is no option --" + name + "; --help lists them");
      if (option->value == nullptr) {
        given_[name] = "1";
      } else if (equals != std::string::npos) {
        given_[name] = word.substr(equals + 1);
      } else if (i + 1 < argc) {
        given_[name] = argv[++i];
      } else {
        throw std::invalid_argument("--" + name + " needs " + option->value);
      }
    }
  }

  void print_help(char const* usage) const {
    std::printf("%s\n\noptions:\n", usage);
    for (Option const& option : options_) {
      std::string left = std::string("--") + option.name + (option.value ? std::string(" ") + option.value : std::string());
      std::printf("  %-34s %s", left.c_str(), option.help);
      if (option.value != nullptr && option.fallback != nullptr && option.fallback[0] != '\0') std::printf(" [%s]", option.fallback);
      std::printf("\n");
    }
  }

  bool given(std::string const& name) const { return given_.count(name) != 0; }

  std::string text(std::string const& name) const {
    auto const found = given_.find(name);
    if (found != given_.end()) return found->second;
    Option const* option = find(name);
    return option != nullptr && option->fallback != nullptr ? option->fallback : "";
  }

  std::vector<std::string> list(std::string const& name) const { return split(text(name), ','); }

  int64_t integer(std::string const& name) const { return parse_integer(text(name), name); }

  double number(std::string const& name) const {
    std::string const value = text(name);
    char* end = nullptr;
    double const number = std::strtod(value.c_str(), &end);
    if (value.empty() || *end != '\0') throw std::invalid_argument("--" + name + ": \"" + value + "\" is not a number");
    return number;
  }

  /// A list of on and off.
  std::vector<bool> switches(std::string const& name) const {
    std::vector<bool> values;
    for (std::string const& item : list(name)) {
      if (item != "on" && item != "off") throw std::invalid_argument("--" + name + ": on or off, got \"" + item + "\"");
      values.push_back(item == "on");
    }
    return values;
  }

  /// Integers of lists and ranges.
  std::vector<int64_t> integers(std::string const& name) const {
    std::vector<int64_t> values;
    for (std::string const& item : list(name)) {
      std::vector<std::string> const parts = split(item, ':');
      if (parts.size() == 1) {
        values.push_back(parse_integer(parts[0], name));
        continue;
      }
      if (parts.size() > 3) throw std::invalid_argument("--" + name + ": a range is first:last:step, got \"" + item + "\"");
      int64_t const first = parse_integer(parts[0], name), last = parse_integer(parts[1], name);
      bool const geometric = parts.size() == 3 && parts[2][0] == 'x';
      int64_t const step = parts.size() < 3 ? 1 : parse_integer(geometric ? parts[2].substr(1) : parts[2], name);
      if (geometric ? step < 2 || first < 1 : step < 1) throw std::invalid_argument("--" + name + ": \"" + item + "\" never ends");
      for (int64_t v = first; v <= last; v = geometric ? v * step : v + step) values.push_back(v);
    }
    if (values.empty()) throw std::invalid_argument("--" + name + " needs at least one value");
    return values;
  }

 private:
  Option const* find(std::string const& name) const {
    for (Option const& option : options_)
      if (name == option.name) return &option;
    return nullptr;
  }

  std::vector<Option> options_;
  std::map<std::string, std::string> given_;
};

}  // namespace minfer::bench
