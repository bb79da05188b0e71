#include "troupe/actors/cluster_messages.hpp"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <set>

#include "troupe/actors/base/phrases.hpp"

namespace troupe::actors {

std::string_view to_string(node_role role) noexcept {
  switch (role) {
    case node_role::supervisor: return "supervisor";
    case node_role::prefill: return "prefill";
    case node_role::decode: return "decode";
    case node_role::store: return "store";
    case node_role::both: return "both";
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
  if (number > static_cast<std::uint8_t>(node_role::both)) return std::nullopt;
  return static_cast<node_role>(number);
}

std::optional<node_state> node_state_from(std::uint8_t number) noexcept {
  if (number < static_cast<std::uint8_t>(node_state::joining)) return std::nullopt;
  if (number > static_cast<std::uint8_t>(node_state::leaving)) return std::nullopt;
  return static_cast<node_state>(number);
}

std::optional<std::string> wrong_labels(const std::vector<node_label>& labels) {
  if (labels.size() > max_labels) {
    return std::to_string(labels.size()) + " labels; at most " + std::to_string(max_labels) +
           " are kept";
  }
  std::size_t total = 0;
  std::set<std::string_view> keys;
  for (const node_label& label : labels) {
    if (!keys.insert(label.key).second) return "label " + in_quotes(label.key) + " twice";
    const bool fits = !label.key.empty() && label.key.size() <= max_label_key &&
                      label.value.size() <= max_label_value;
    total += label.key.size() + label.value.size();
    if (fits) continue;
    return "label " + in_quotes(label.key) + " of " + std::to_string(label.key.size()) +
           " bytes with a value of " + std::to_string(label.value.size()) + "; a label has 1 to " +
           std::to_string(max_label_key) + ", its value at most " + std::to_string(max_label_value);
  }
  if (total > max_label_bytes) {
    return "labels of " + std::to_string(total) + " bytes together; at most " +
           std::to_string(max_label_bytes) + " are kept";
  }
  return std::nullopt;
}

std::optional<troupe::error> wrong_mode(const placement& where) {
  if (where.failed != 0 || is_transfer_mode(static_cast<std::uint8_t>(where.mode)))
    return std::nullopt;
  return troupe::error{errc::internal, "the supervisor's answer has an invalid transfer mode"};
}

bool is_boot_id(std::string_view text) noexcept {
  constexpr std::size_t longest = 64;
  return text.size() <= longest && std::ranges::all_of(text, [](unsigned char c) {
           return std::isxdigit(c) != 0 || c == '-';
         });
}

}  // namespace troupe::actors
