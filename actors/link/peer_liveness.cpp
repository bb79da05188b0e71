#include "troupe/actors/link/peer_liveness.hpp"

namespace troupe::actors {

void peer_liveness::begin(time_point now) noexcept {
  heard_ = asked_ = looked_ = now;
}

void peer_liveness::sign(time_point now) noexcept {
  heard_ = asked_ = now;
}

peer_liveness::advice peer_liveness::look(time_point now) noexcept {
  // This process stood still or got no core: what the peer sent meanwhile may not be read yet.
  if (now - looked_ > 3 * period()) heard_ = now;
  looked_ = now;
  const auto silence = now - heard_;
  if (silence >= patience_ * 3 / 4) {
    // The process is asked only from half the patience on.
    const bool answered = now - word_ < patience_ / 2;
    return answered ? advice::link_is_silent : advice::peer_is_silent;
  }
  if (silence >= patience_ / 2) return advice::ask_both_ways;
  if (now - asked_ < patience_ / 4) return advice::nothing;
  asked_ = now;
  return advice::ask;
}

}  // namespace troupe::actors
