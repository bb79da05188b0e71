#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "troupe/config/printable.hpp"

namespace troupe::deploy::cli {

/// Rows of words under headings. Each column is as wide as its widest word; numbers are
/// right-aligned.
class text_table {
 public:
  enum class align : std::uint8_t { left, right };
  struct column {
    std::string heading;
    align side{align::left};
  };

  explicit text_table(std::vector<column> columns) : columns_{std::move(columns)} {}
  /// One word per column; missing words are empty, extra words are dropped.
  void add(std::vector<std::string> row);
  [[nodiscard]] bool empty() const noexcept { return rows_.empty(); }
  void print(std::ostream& out) const;

 private:
  std::vector<column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

using config::printable;
/// "1.50 GiB", "812 B"
[[nodiscard]] std::string bytes_text(std::uint64_t bytes);
/// "3d 04:05:06", "04:05:06", "5.2 s", "310 ms"
[[nodiscard]] std::string duration_text(std::uint64_t ms);
/// A fixed number of digits after the point.
[[nodiscard]] std::string fixed_text(double value, int digits);

}  // namespace troupe::deploy::cli
