#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/deployment.hpp"

namespace troupe::config {

/// One error in a file.
struct issue {
  std::string file;
  int line{0};           ///< from 1; 0: the file as a whole
  int column{0};         ///< from 1
  std::string key;       ///< e.g. "stages[1].pool.size"; empty: the file as a whole
  std::string found;     ///< the text in the file; empty if there is none
  std::string expected;  ///< "a size such as 1GiB"; may be empty
  std::string message;   ///< why, or what to do; may be empty

  friend bool operator==(const issue&, const issue&) = default;
};

/// "demo.yaml:9: key `stages[1].pool.size`: found `12 parsecs`, expected a size such as 1GiB; why".
[[nodiscard]] std::string to_string(const issue& what);

struct parse_outcome {
  std::optional<deployment> value;  ///< set if and only if there are no issues
  std::vector<issue> issues;        ///< all errors by line, at most `max_issues`
};

inline constexpr std::size_t max_file_bytes = std::size_t{1} << 20U;
inline constexpr std::size_t max_issues = 200;

/// Reads a deployment (schema: deployment.hpp), fills in the defaults and checks all of it. Never
/// throws for any input; memory is bounded by a small multiple of `max_file_bytes`. `file_name` is
/// for messages only.
[[nodiscard]] parse_outcome parse(std::string_view text, std::string file_name);

/// `parse` of a file's content. A file that cannot be read is an issue of the outcome.
[[nodiscard]] parse_outcome load(const std::string& path);

/// All issues, one per line.
[[nodiscard]] std::string to_string(const std::vector<issue>& issues);

}  // namespace troupe::config
