#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace troupe::config {

/// Length of the UTF-8 sequence at the front of `text`, which is not empty; 0: there is none.
[[nodiscard]] std::size_t utf8_length(std::string_view text) noexcept;

/// Text of a file or of a peer as a terminal may show it. Control characters (of ISO 646, and of
/// ISO 6429 as UTF-8 has them), which could move the cursor or colour what follows, and bytes that are
/// no UTF-8 are spelt out: `\x1b`.
[[nodiscard]] std::string printable(std::string_view text);

}  // namespace troupe::config
