#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace troupe::config {

/// Length of the UTF-8 sequence at the front of `text`, which must not be empty; 0 if it is not
/// UTF-8.
[[nodiscard]] std::size_t utf8_length(std::string_view text) noexcept;

/// Text of a file or of a peer, made safe for a terminal. Control characters (of ISO 646, and of
/// ISO 6429 in UTF-8), which could move the cursor or colour later text, and bytes that are not
/// UTF-8 are spelt out: `\x1b`.
[[nodiscard]] std::string printable(std::string_view text);

}  // namespace troupe::config
