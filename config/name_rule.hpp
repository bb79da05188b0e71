#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace troupe::config {

/// The rule for names of clusters and stages. Nodes are named after their stage.
struct name_rule {
  std::size_t longest;

  /// Whether the text is an allowed name. No allowed name leads out of a folder.
  [[nodiscard]] constexpr bool allows(std::string_view text) const noexcept {
    const auto plain = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
    return !text.empty() && text.size() <= longest && plain(text.front()) &&
           std::ranges::all_of(text, [&](char c) { return plain(c) || c == '_' || c == '-'; });
  }
  /// The rule, for a sentence: "1 to 64 of ...".
  [[nodiscard]] std::string text() const {
    return "1 to " + std::to_string(longest) +
           " of a-z 0-9 _ -, beginning with a letter or a digit";
  }
};

inline constexpr name_rule cluster_name{64};
inline constexpr name_rule stage_name{32};

}  // namespace troupe::config
