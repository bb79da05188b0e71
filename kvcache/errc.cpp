#include "troupe/kvcache/errc.hpp"

namespace troupe {

std::string_view to_string(errc code) noexcept {
  switch (code) {
    case errc::invalid_config: return "invalid_config";
    case errc::no_device: return "no_device";
    case errc::layout_mismatch: return "layout_mismatch";
    case errc::version_mismatch: return "version_mismatch";
    case errc::unknown_region: return "unknown_region";
    case errc::out_of_range: return "out_of_range";
    case errc::grant_revoked: return "grant_revoked";
    case errc::pool_exhausted: return "pool_exhausted";
    case errc::overloaded: return "overloaded";
    case errc::not_found: return "not_found";
    case errc::already_exists: return "already_exists";
    case errc::peer_unreachable: return "peer_unreachable";
    case errc::peer_lost: return "peer_lost";
    case errc::link_broken: return "link_broken";
    case errc::deadline: return "deadline";
    case errc::aborted: return "aborted";
    case errc::lease_expired: return "lease_expired";
    case errc::stale_incarnation: return "stale_incarnation";
    case errc::unauthorized: return "unauthorized";
    case errc::backend_unavailable: return "backend_unavailable";
    case errc::internal: return "internal";
  }
  return "unknown_error";
}

bool is_errc(std::uint8_t number) noexcept {
  return number >= static_cast<std::uint8_t>(errc::invalid_config) &&
         number <= static_cast<std::uint8_t>(errc::internal);
}

std::string to_string(const error& e) {
  std::string text{to_string(e.code)};
  if (!e.message.empty()) {
    text += ": ";
    text += e.message;
  }
  return text;
}

}  // namespace troupe
