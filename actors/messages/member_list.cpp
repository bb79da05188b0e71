#include "troupe/actors/messages/member_list.hpp"

#include <algorithm>

#include "troupe/config/open_name.hpp"

namespace troupe::actors {

bool is_open_name(std::string_view name) {
  return config::open_place_of(name).has_value();
}

bool reports_failure(const member& m) noexcept {
  return node_state_from(m.state) == node_state::down && m.reason.starts_with(report_prefix);
}

bool is_lost(const member& m) noexcept {
  return node_state_from(m.state) == node_state::down && !reports_failure(m);
}

const member* find_member(const membership& all, std::string_view name) noexcept {
  const auto found = std::ranges::find(
      all.members, name, [](const member& m) -> std::string_view { return m.node.name; });
  return found == all.members.end() ? nullptr : &*found;
}

}  // namespace troupe::actors
