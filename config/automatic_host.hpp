#pragma once

#include <string_view>

namespace troupe::config {

/// `auto` in place of a host: the host on which the node is started, at the address by which that
/// host reaches the supervisor. Only the node itself knows it.
[[nodiscard]] constexpr bool is_automatic(std::string_view host) noexcept {
  return host == "auto";
}

}  // namespace troupe::config
