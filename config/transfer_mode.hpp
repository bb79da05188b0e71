#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace troupe {

/// Which side of a transfer moves the bytes. The numbers are part of the wire protocol: append,
/// never renumber.
enum class transfer_mode : std::uint8_t {
  write = 1,  ///< the prefill side pushes each layer as it is computed
  read = 2,   ///< the decode side pulls when the prefill side says that the blocks are ready
};

/// The word in the deployment file and in calls: `write` or `read`.
[[nodiscard]] constexpr std::string_view to_string(transfer_mode mode) noexcept {
  return mode == transfer_mode::read ? "read" : "write";
}
/// The reverse. Empty for any other word.
[[nodiscard]] constexpr std::optional<transfer_mode> transfer_mode_of(
    std::string_view word) noexcept {
  for (const auto mode : {transfer_mode::write, transfer_mode::read}) {
    if (word == to_string(mode)) return mode;
  }
  return std::nullopt;
}
/// Whether a number from outside is one of the modes.
[[nodiscard]] constexpr bool is_transfer_mode(std::uint8_t number) noexcept {
  return number == static_cast<std::uint8_t>(transfer_mode::write) ||
         number == static_cast<std::uint8_t>(transfer_mode::read);
}

}  // namespace troupe
