#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/config/parse.hpp"

/// YAML text as a tree with positions. Only the source of this header uses yaml-cpp. It builds the
/// tree from the library's events, because the library's own tree drops duplicate keys and expands
/// aliases without a bound.
namespace troupe::config {

inline constexpr std::size_t max_values =
    100'000;  ///< scalars, sequences and mappings, aliases expanded
inline constexpr std::size_t max_depth = 32;

struct yaml_entry;

struct yaml_node {
  enum class form { null, scalar, sequence, mapping };

  form kind{form::null};
  bool quoted{false};  ///< a scalar in quotes or a block scalar: always text
  std::string text;    ///< of a scalar
  int line{0};
  int column{0};
  std::vector<yaml_node> items;     ///< of a sequence
  std::vector<yaml_entry> entries;  ///< of a mapping, in file order, duplicates included

  [[nodiscard]] bool is_mapping() const noexcept { return kind == form::mapping; }
};

struct yaml_entry {
  std::string key;
  int line{0};
  int column{0};
  yaml_node value;
};

struct yaml_outcome {
  std::optional<yaml_node> root;
  std::optional<issue> wrong;  ///< set if and only if `root` is not
};

/// Reads exactly one document whose root is a mapping. Refuses text that is larger than
/// `max_file_bytes`, not UTF-8 or not YAML, or that has more than `max_values` values or
/// `max_depth` levels, tags, or keys that are not scalars. Aliases become copies of the anchored
/// node.
[[nodiscard]] yaml_outcome read_yaml(std::string_view text, const std::string& file);

}  // namespace troupe::config
