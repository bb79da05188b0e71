#include "troupe/actors/cluster_messages.hpp"

#include <algorithm>
#include <cctype>
#include <cstddef>

namespace troupe::actors {

std::string_view to_string(node_role role) noexcept {
  switch (role) {
    case node_role::supervisor: return "supervisor";
    case node_role::prefill: return "prefill";
    case node_role::decode: return "decode";
    case node_role::store: return "store";
  }
  return "unknown role";
}

std::string_view to_string(node_state state) noexcept {
  switch (state) {
    case node_state::joining: return "joining";
    case node_state::up: return "up";
    case node_state::suspect: return "suspect";
    case node_state::down: return "down";
    case node_state::leaving: return "leaving";
  }
  return "unknown state";
}

std::optional<node_role> node_role_from(std::uint8_t number) noexcept {
  if (number < static_cast<std::uint8_t>(node_role::supervisor)) return std::nullopt;
  if (number > static_cast<std::uint8_t>(node_role::store)) return std::nullopt;
  return static_cast<node_role>(number);
}

std::optional<node_state> node_state_from(std::uint8_t number) noexcept {
  if (number < static_cast<std::uint8_t>(node_state::joining)) return std::nullopt;
  if (number > static_cast<std::uint8_t>(node_state::leaving)) return std::nullopt;
  return static_cast<node_state>(number);
}

std::optional<troupe::error> wrong_mode(const placement& where) {
  if (where.failed != 0 || is_transfer_mode(static_cast<std::uint8_t>(where.mode)))
    return std::nullopt;
  return troupe::error{errc::internal, "the supervisor's answer has a transfer mode that is none"};
}

bool is_boot_id(std::string_view text) noexcept {
  constexpr std::size_t longest = 64;
  return text.size() <= longest && std::ranges::all_of(text, [](unsigned char c) {
           return std::isxdigit(c) != 0 || c == '-';
         });
}

}  // namespace troupe::actors
