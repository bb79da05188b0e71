#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::link_parts {

namespace {

/// How long a node that stops waits until its peer knows: one that stands still never will.
constexpr auto goodbye_patience = std::chrono::milliseconds{1000};
/// How long a link whose peer has left is read on, at least.
constexpr auto last_words = std::chrono::milliseconds{300};
/// It ends after so many looks in a row that found nothing, with a pause before each; or, where the
/// peer goes on talking although it is said to be gone, after so many at all.
constexpr std::uint32_t empty_looks = 3;
constexpr std::uint32_t most_looks = 100;
constexpr auto look_pause = std::chrono::milliseconds{20};
constexpr std::size_t frames_per_look = 4096;

/// What the node's heartbeats say of links counts this one no more.
void leave_counters(link_state& st) {
  if (!st.context || st.now == link_state::phase::ending) return;
  if (st.now == link_state::phase::up) st.context->counters.links_up.fetch_sub(1);
  if (st.broke) st.context->counters.links_broken.fetch_sub(1);
}

void report_gone(self_pointer self, troupe::error why) {
  auto& st = self->state;
  tell(st.port, port_event{link_gone{st.peer.name, st.peer.incarnation, self->id(), st.asked,
                                     std::move(why)}});
}

}  // namespace

void finish_if_idle(self_pointer self) {
  auto& st = self->state;
  if (st.now != link_state::phase::ending || !st.sessions.empty()) return;
  if (st.link) st.link->close();
  st.link.reset();
  self->quit();
}

void end_link(self_pointer self, troupe::error why) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending) return;
  leave_counters(st);
  st.now = link_state::phase::ending;
  st.why_ended = to_string(why);
  st.lost = why;
  const auto over = st.chose ? " over " + std::string{transport::to_string(st.choice.kind)} : "";
  logger("link")->info("link to {} ({:016x}){} ended: {}", st.peer.name, st.peer.incarnation, over,
                       st.why_ended);
  st.for_room.clear();
  st.for_posting.clear();
  if (st.link) st.link->close();
  // Its transport may not be able to tell it any more.
  if (st.other_end && !st.leaving)
    self->send(st.other_end, link_notice{link_fate::ended, why.message});
  for (const auto& [transfer, session] : st.sessions) {
    tell(session, session_event{link_is_lost{why}});
  }
  report_gone(self, std::move(why));
  finish_if_idle(self);
}

void on_close_link(self_pointer self, close_link order) {
  end_link(self, std::move(order.why));
}

/// The peer's transport sees a closed link sooner than its actor hears why: it would take the link for
/// broken and make it again. So the peer hears first.
void on_leave_link(self_pointer self, leave_link order) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending || st.leaving) return;
  if (!st.other_end || st.peer_leaves) {
    end_link(self, std::move(order.why));
    return;
  }
  st.leaving = std::move(order.why);
  const auto patience = std::min(st.context->settings.peer_silence, goodbye_patience);
  const auto end = [self] { end_link(self, *self->state.leaving); };
  self->request(st.other_end, patience, link_notice{link_fate::node_stops, st.leaving->message})
      .then([end] { end(); }, [end](const caf::error&) { end(); });
}

/// What the peer said last may still be on its way through the link, a release above all: the
/// transport reads it out before it says that the link broke. The pause is for a peer that stands
/// still, of which the transport hears nothing. What is read slowly is another matter: an engine
/// that has not polled, a process that was stopped itself. So the link ends only when there is
/// nothing left to read.
void on_peer_left(self_pointer self, peer_left order) {
  auto& st = self->state;
  if (st.now == link_state::phase::ending || (st.peer_leaves && st.now == link_state::phase::up)) {
    return;
  }
  // Its node may have left while its link has not heard of that yet, and would take ours, closed now, for broken. It
  // answers our goodbye, or its end is heard, or our patience ends.
  if (st.leaving) return;
  tell(st.port, port_event{link_leaves{st.peer.name, st.peer.incarnation, self->id()}});
  if (st.now != link_state::phase::up) {
    end_link(self, std::move(order.why));
    return;
  }
  st.peer_leaves = order.why;
  self->delayed_send(self, last_words, link_command{read_last_frames{std::move(order.why)}});
}

void on_read_last_frames(self_pointer self, read_last_frames order) {
  auto& st = self->state;
  if (st.now != link_state::phase::up) return;
  if (order.found_nothing == empty_looks || order.looks == most_looks) {
    end_link(self, std::move(order.why));
    return;
  }
  // What it reports comes to the mailbox before the next look.
  const auto before = st.link->stats();
  read_out(st, frames_per_look);
  const auto after = st.link->stats();
  const bool found = after.frames_in != before.frames_in || after.bytes_in != before.bytes_in;
  ++order.looks;
  order.found_nothing = found ? 0 : order.found_nothing + 1;
  self->delayed_send(self, look_pause, link_command{std::move(order)});
}

}  // namespace troupe::actors::link_parts

namespace troupe::actors {

link_state::~link_state() {
  link_parts::leave_counters(*this);
}

}  // namespace troupe::actors
