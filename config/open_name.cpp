#include "troupe/config/open_name.hpp"

#include <charconv>
#include <system_error>
#include <utility>

namespace troupe::config {

std::string open_node_name(const open_place& place) {
  return place.stage + "." + place.replica + "." + std::to_string(place.rank);
}

std::optional<open_place> open_place_of(std::string_view name) {
  const auto first = name.find('.');
  const auto last = name.rfind('.');
  if (first == std::string_view::npos || first == last) return std::nullopt;
  open_place place;
  place.stage = name.substr(0, first);
  place.replica = name.substr(first + 1, last - first - 1);
  const auto rank = name.substr(last + 1);
  const auto [end, failed] = std::from_chars(rank.data(), rank.data() + rank.size(), place.rank);
  if (failed != std::errc{} || end != rank.data() + rank.size()) return std::nullopt;
  if (!stage_name.allows(place.stage) || !open_replica_name.allows(place.replica)) {
    return std::nullopt;
  }
  // Refuses "007", which would be a second name of the same place.
  return open_node_name(place) == name ? std::optional{std::move(place)} : std::nullopt;
}

}  // namespace troupe::config
