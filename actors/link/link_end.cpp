#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"

namespace troupe::actors::links {

namespace {

/// How long a node that stops waits for the peer's answer: a peer that stands still never answers.
constexpr auto goodbye_patience = std::chrono::milliseconds{1000};
/// How long, at least, a link is still read after its peer has left.
constexpr auto last_words = std::chrono::milliseconds{300};
/// The link ends after `empty_looks` looks in a row that found nothing, with `look_pause` before
/// each, or after `most_looks` looks if a peer that is said to be gone goes on sending.
constexpr std::uint32_t empty_looks = 3;
constexpr std::uint32_t most_looks = 100;
constexpr auto look_pause = std::chrono::milliseconds{20};
constexpr std::size_t polls_per_look = 4096;

}  // namespace

void peer_link::report_gone(troupe::error why) {
  around_.tell_runner(
      {link_gone{peer_.name, peer_.incarnation, around_.id(), asked_, std::move(why)}});
}

void peer_link::finish_if_idle() {
  if (phase_ != phase::ending || !sessions_.empty()) return;
  if (link_) link_->close();
  link_.reset();
  around_.finish();
}

void peer_link::end_link(troupe::error why) {
  if (phase_ == phase::ending) return;
  count_.ends();
  phase_ = phase::ending;
  why_ended_ = to_string(why);
  lost_ = why;
  const auto over = chose_ ? " over " + std::string{transport::to_string(choice_.kind)} : "";
  logger("link")->info("link to {} ({:016x}){} ended: {}", peer_.name, peer_.incarnation, over,
                       why_ended_);
  for_room_.clear();
  for_posting_.clear();
  if (link_) link_->close();
  // The transport may no longer be able to tell the peer.
  if (other_end_ && !leaving_) around_.notify(other_end_, {link_fate::ended, why.message});
  for (const auto& [transfer, session] : sessions_) {
    around_.tell_session(transfer, session, {link_is_lost{why}});
  }
  report_gone(std::move(why));
  finish_if_idle();
}

void peer_link::on_close_link(close_link order) {
  end_link(std::move(order.why));
}

/// The peer is told before the link is closed: its transport would see the closed link before its
/// actor hears why, take the link for broken and rebuild it.
void peer_link::on_leave_link(leave_link order) {
  if (phase_ == phase::ending || leaving_) return;
  if (!other_end_ || peer_leaves_) {
    end_link(std::move(order.why));
    return;
  }
  leaving_ = std::move(order.why);
  const auto patience = std::min(context_->settings.peer_silence, goodbye_patience);
  around_.notify_and_wait(other_end_, {link_fate::node_stops, leaving_->message}, patience,
                          [this] { end_link(*leaving_); });
}

/// The peer's last messages, above all a release, may still be on their way through the link; the
/// transport reads them before it reports that the link broke. The pause serves a peer that stands
/// still, of which the transport hears nothing. This side may read slowly (an engine that has not
/// polled, a process that was stopped), so the link ends only when nothing is left to read.
void peer_link::on_peer_left(peer_left order) {
  if (phase_ == phase::ending || (peer_leaves_ && phase_ == phase::up)) {
    return;
  }
  // The peer's node may have left before its link actor hears of it, and that actor would take our
  // link, closed now, for broken. Wait until it answers our goodbye or ends, or our patience ends.
  if (leaving_) return;
  around_.tell_runner({link_draining{peer_.name, peer_.incarnation, around_.id()}});
  if (phase_ != phase::up) {
    end_link(std::move(order.why));
    return;
  }
  peer_leaves_ = order.why;
  around_.later(last_words, {read_last_frames{std::move(order.why)}});
}

void peer_link::on_read_last_frames(read_last_frames order) {
  if (phase_ != phase::up) return;
  if (order.found_nothing == empty_looks || order.looks == most_looks) {
    end_link(std::move(order.why));
    return;
  }
  // The frames that are read here reach the mailbox before the next look.
  const auto before = link_->stats();
  around_.read(*link_, polls_per_look);
  const auto after = link_->stats();
  const bool found = after.frames_in != before.frames_in || after.bytes_in != before.bytes_in;
  ++order.looks;
  order.found_nothing = found ? 0 : order.found_nothing + 1;
  around_.later(look_pause, {std::move(order)});
}

}  // namespace troupe::actors::links
