#pragma once

#include <string_view>

namespace troupe::config {

/// `auto` in place of a host: whichever host the node is started on, at the address by which that
/// reaches the supervisor. Only the node itself can say which.
[[nodiscard]] constexpr bool is_automatic(std::string_view host) noexcept {
  return host == "auto";
}

}  // namespace troupe::config
