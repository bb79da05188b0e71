#include "troupe/transport/link_check.hpp"

#include <string>

namespace troupe::transport {

result<void> check_options(const link_options& options, const link_sink* sink) {
  if (sink == nullptr) return fail(errc::invalid_config, "a link needs a sink");
  if (options.peer.value == 0) {
    return fail(errc::invalid_config, "a link needs the peer's incarnation");
  }
  if (options.lanes < 1 || options.lanes > max_link_lanes) {
    return fail(errc::invalid_config, "qp_per_transfer is " + std::to_string(options.lanes) +
                                          ", expected 1 to " + std::to_string(max_link_lanes));
  }
  if (options.post_batch_size == 0 || options.post_batch_size < -1) {
    return fail(errc::invalid_config, "post_batch_size is " +
                                          std::to_string(options.post_batch_size) +
                                          ", expected -1 (best) or at least 1");
  }
  return {};
}

result<void> check_offer(backend_kind kind, incarnation peer, const link_offer& offer) {
  if (offer.kind != kind) {
    return fail(errc::invalid_config, "a link of backend " + std::string{to_string(kind)} +
                                          " cannot connect to an offer of backend " +
                                          std::string{to_string(offer.kind)});
  }
  if (offer.owner != peer) {
    return fail(errc::stale_incarnation, "the offer is of incarnation " +
                                             std::to_string(offer.owner.value) + ", expected " +
                                             std::to_string(peer.value));
  }
  return {};
}

unexpected not_up(backend_kind kind, link_phase now, const std::optional<troupe::error>& why) {
  const auto link = "the " + std::string{to_string(kind)} + " link ";
  switch (now) {
    case link_phase::opened:
    case link_phase::connecting: return fail(errc::link_broken, link + "is not up yet");
    case link_phase::up: break;
    case link_phase::broken:
      return fail(errc::link_broken, link + "is broken" + (why ? ": " + why->message : ""));
    case link_phase::closed: return fail(errc::link_broken, link + "was closed");
  }
  return fail(errc::internal, link + "is up");
}

}  // namespace troupe::transport
