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

/// Before the first attempt: when the peer has died, the news of it comes meanwhile.
constexpr auto first_rebuild_pause = std::chrono::milliseconds{20};
/// A link that was up for so long has all its attempts again.
constexpr auto settled = std::chrono::seconds{10};
/// Longer than the longest pause of the dialling side.
constexpr auto spare_time = std::chrono::seconds{3};
/// Many times what can be on its way when a link breaks; some 100 bytes each.
constexpr std::size_t max_last_words = 1024;

bool is_dialler(const link_state& st) {
  return st.role == transport::link_role::initiator;
}

/// Why the link broke that the peer says has broken. What this end knows of its own backend says more
/// than what the peer saw of it, and may be on its way still.
troupe::error cause_of(const link_state& st, const std::string& said) {
  for (const auto& here : st.context->endpoint->backends()) {
    if (here.kind == st.choice.kind && !here.state.usable) {
      return {errc::link_broken, here.state.reason};
    }
  }
  return {errc::link_broken, st.peer.name + " says that it broke: " + said};
}

}  // namespace

void meet(self_pointer self, const caf::strong_actor_ptr& other) {
  auto& st = self->state;
  if (!other) return;
  st.other_end = caf::actor_cast<link_actor>(other);
  st.may_be_up_there = st.unanswered = false;
  self->monitor(st.other_end);
}

void retire_transport(link_state& st) {
  if (!st.link) return;
  const auto generation = st.generation++;
  link_state::former_link former{generation, std::move(st.link), {}};
  st.link.reset();
  st.batches.clear();
  st.for_room.clear();  // their sessions say it again
  st.for_posting.clear();
  former.link->close();
  for (const auto& [transfer, session] : st.sessions) {
    if (former.link->fence(transfer) == transport::fence_state::pending) {
      former.pending.insert(transfer);
      continue;
    }
    const auto asked = st.fencing.find(transfer);
    if (asked == st.fencing.end() || asked->second.erase(generation) == 0) continue;
    if (!asked->second.empty()) continue;
    st.fencing.erase(asked);
    tell(session, session_event{transfer_fenced{}});
  }
  if (!former.pending.empty()) st.former.push_back(std::move(former));
}

void break_link(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  const auto& peer = st.peer.name;
  if (const auto& known = st.leaving ? st.leaving : st.peer_leaves) {
    end_link(self, *known);
    return;
  }
  if (!st.other_end) {
    end_link(self, {errc::peer_lost, "the link to " + peer + " broke (" + to_string(why) + ")"});
    return;
  }
  logger("link")->warn("link to {} ({:016x}) over {} broke: {}; making it again", peer,
                       st.peer.incarnation, transport::to_string(st.choice.kind), to_string(why));
  st.now = link_state::phase::dialling;
  st.broke = why;
  st.last_break = to_string(why);
  st.context->counters.links_up.fetch_sub(1);
  st.context->counters.links_broken.fetch_add(1);
  retire_transport(st);
  st.pulse.begin(now());
  watch(self);
  if (!is_dialler(st)) {
    st.tries = 0;
    self->send(st.other_end, link_notice{link_fate::broke, st.last_break});
    wait_for_dialler(self);
    return;
  }
  if (now() - st.up_since > settled) st.attempts = st.tries = 0;
  if (++st.attempts > st.context->settings.max_reconnects) {
    st.attempts = st.context->settings.max_reconnects;
    backend_failed(self, {errc::link_broken, to_string(why)});
    return;
  }
  self->delayed_send(self, first_rebuild_pause, link_command{dial_again{}});
}

void wait_for_dialler(self_pointer self) {
  auto& st = self->state;
  const auto patience = 2 * st.context->settings.connect_timeout + spare_time;
  self->delayed_send(self, patience, link_command{look_for_dialler{++st.alarm}});
}

void on_look_for_dialler(self_pointer self, const look_for_dialler& order) {
  auto& st = self->state;
  const bool waits =
      st.now == link_state::phase::dialling || st.now == link_state::phase::connecting;
  if (!waits || !st.broke || order.alarm != st.alarm) return;
  end_link(self, given_up(st, {errc::deadline, st.peer.name + " did not dial again"}));
}

troupe::error given_up(const link_state& st, const troupe::error& last) {
  return {errc::peer_lost, "the link to " + st.peer.name + " broke (" + st.last_break +
                               ") and could not be made again in " + std::to_string(st.tries) +
                               " attempts; last: " + to_string(last)};
}

// -- last words

void remember(link_state& st, transfer_id transfer, std::vector<std::byte> frame) {
  if (st.words.size() == max_last_words) st.words.pop_front();
  st.words.push_back({transfer, std::move(frame)});
}

bool repeat_words(link_state& st, transfer_id transfer) {
  bool any = false;
  for (const auto& word : st.words) {
    if (word.transfer != transfer) continue;
    any = true;
    (void)st.link->send_frame(word.frame);  // if the link broke, they are said over the next one
  }
  return any;
}

link_is_back is_back(const link_state& st) {
  return {st.generation, std::string{transport::to_string(st.choice.kind)}};
}

void resume_sessions(link_state& st) {
  for (const auto& word : st.words) (void)st.link->send_frame(word.frame);
  for (const auto& [transfer, session] : st.sessions) {
    tell(session, session_event{is_back(st)});
  }
}

// -- the other end

void other_end_ended(self_pointer self, std::string why, bool is_gone) {
  auto& st = self->state;
  if (st.leaving) {
    end_link(self, *st.leaving);
    return;
  }
  if (!is_dialler(st) || st.broke || st.now == link_state::phase::up) {
    on_peer_left(self, peer_left{{errc::peer_lost, std::move(why)}});
    return;
  }
  // The acceptor may hear sooner than this end that the attempt came to nothing. The next one has another.
  const bool was_asked = st.now == link_state::phase::dialling && st.link;
  if (was_asked && is_gone) ask_node_instead(self);
  if (was_asked) return;  // until it is gone it may answer, and a refusal says more
  st.other_end = nullptr;
  if (st.now == link_state::phase::connecting)
    backend_failed(self, {errc::link_broken, std::move(why)});
}

void hear(self_pointer self, const link_notice& notice) {
  auto& st = self->state;
  if (self->current_sender() == nullptr || !st.other_end ||
      self->current_sender() != caf::actor_cast<caf::strong_actor_ptr>(st.other_end)) {
    return;
  }
  heard_besides(st);
  const auto ended = st.peer.name + " ended the link: " + notice.why;
  switch (notice.fate) {
    case link_fate::broke:
      if (!is_dialler(st)) return;
      if (st.now == link_state::phase::up) break_link(self, cause_of(st, notice.why));
      // It was up there already, with what this attempt has made.
      if (st.now == link_state::phase::connecting) backend_failed(self, cause_of(st, notice.why));
      return;
    case link_fate::node_stops:
      if (st.leaving) break;  // it knows that both leave
      on_peer_left(self, peer_left{{errc::peer_lost, ended}});
      return;
    case link_fate::ended: break;
  }
  // A fate that this release does not know is taken for the end of the link, too.
  other_end_ended(self, ended, false);
}

}  // namespace troupe::actors::link_parts
