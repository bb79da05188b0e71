#pragma once

/// The output of a benchmark for bench/run.

#include <optional>
#include <string>
#include <vector>

namespace troupe::bench {

struct row {
  std::string name;
  double ours{0};
  double rival{0};
  std::optional<double> wanted;  ///< of ours / rival; none: no limit
  const char* unit{""};
  bool lower_is_better{false};
};

[[nodiscard]] std::string to_json(const row& r);
/// Prints the rows to standard output as one JSON array.
void print(const std::vector<row>& rows);
/// The same for rows that are JSON already.
void print(const std::vector<std::string>& rows);

}  // namespace troupe::bench
