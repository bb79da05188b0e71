#include <chrono>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::link_parts {

namespace {

/// Between two tries to say a last word to a peer that does not take what was said before.
constexpr std::chrono::milliseconds room_for_last_words{20};

/// What a session is told that comes to a link which cannot be used any more.
troupe::error not_up(const link_state& st) {
  if (st.lost) return *st.lost;
  return {errc::peer_lost, "the link to " + st.peer.name + " is not up"};
}

/// Whether it belongs to a transport link that was replaced.
bool is_over(const link_state& st, std::uint64_t epoch) {
  return epoch != 0 && epoch != st.generation;
}

}  // namespace

void to_session(link_state& st, transfer_id transfer, session_event event) {
  if (const auto found = st.sessions.find(transfer); found != st.sessions.end()) {
    tell(found->second, std::move(event));
  }
}

void on_say(self_pointer self, say order) {
  auto& st = self->state;
  const auto transfer = route_of(order.message);
  if (st.now == link_state::phase::ending) {
    to_session(st, transfer, session_event{link_is_lost{not_up(st)}});
    return;
  }
  const bool up = st.now == link_state::phase::up;
  const bool last = order.grants.empty() && is_last_word(order.message);
  // What waits for room would come behind it, and begin again what it ends.
  if (last) leave_room(st, transfer);
  // While the link is being made again only last words are kept: the session will hear of the new
  // epoch, and say the rest again.
  if (!last && (!up || is_over(st, order.epoch))) return;
  if (up && !order.grants.empty()) {
    say_with_grants(self, std::move(order));
    return;
  }
  auto frame = encode(order.message);
  result<void> sent;
  if (!frame) {
    sent = fail(frame.error());
  } else {
    if (up) sent = order.nobody_waits ? st.link->send_soon(*frame) : st.link->send_frame(*frame);
    // It must come, and there may be nobody left to say it once more.
    if (last && !sent && sent.error().code == errc::overloaded) {
      self->delayed_send(self, room_for_last_words, link_command{std::move(order)});
      return;
    }
    if (last) remember(st, transfer, std::move(*frame));
  }
  if (!sent) failed_to_say(self, transfer, sent.error());
}

void failed_to_say(self_pointer self, transfer_id transfer, const troupe::error& why) {
  if (means_broken(why)) {
    on_link_broke(self, link_broke{why});
  } else {
    to_session(self->state, transfer, session_event{abort_session{why}});
  }
}

void on_post_batch(self_pointer self, post_batch order) {
  auto& st = self->state;
  const auto transfer = order.work.transfer;
  const auto session_id = order.work.id;
  if (st.now == link_state::phase::ending) {
    to_session(st, transfer, session_event{link_is_lost{not_up(st)}});
    return;
  }
  if (st.now != link_state::phase::up || is_over(st, order.epoch)) return;
  // As many as the transport takes: the rest waits here.
  if (st.batches.size() >= transport::link_options{}.max_batches) {
    st.for_posting.push_back(std::move(order));
    return;
  }
  const auto id = st.next_batch++;
  st.batches.emplace(id, session_id);
  order.work.id = transport::batch_id{id};
  const auto posted = st.link->post(std::move(order.work));
  if (posted) return;
  st.batches.erase(id);
  if (means_broken(posted.error())) {
    on_link_broke(self, link_broke{posted.error()});
  } else {
    to_session(st, transfer,
               session_event{transport::completion{session_id, transfer, posted.error(), 0, {}}});
  }
}

void post_waiting(self_pointer self) {
  auto& st = self->state;
  while (!st.for_posting.empty() && st.batches.size() < transport::link_options{}.max_batches) {
    auto next = std::move(st.for_posting.front());
    st.for_posting.pop_front();
    on_post_batch(self, std::move(next));
  }
}

namespace {

/// Ends as a batch does that the transport has and fences.
void give_up_waiting(link_state& st, transfer_id transfer) {
  std::erase_if(st.for_posting, [&](const post_batch& waiting) {
    if (waiting.work.transfer != transfer) return false;
    const troupe::error why{errc::aborted, "the transfer was fenced here"};
    to_session(st, transfer,
               session_event{transport::completion{waiting.work.id, transfer, why, 0, {}}});
    return true;
  });
}

}  // namespace

void on_fence_now(self_pointer self, const fence_now& order) {
  auto& st = self->state;
  leave_room(st, order.transfer);
  give_up_waiting(st, order.transfer);
  std::unordered_set<std::uint64_t> pending;
  if (st.link && st.link->fence(order.transfer) == transport::fence_state::pending) {
    pending.insert(st.generation);
  }
  for (const auto& former : st.former) {
    if (former.pending.contains(order.transfer)) pending.insert(former.generation);
  }
  if (pending.empty()) {
    to_session(st, order.transfer, session_event{transfer_fenced{}});
    serve_room(self);
  } else {
    st.fencing[order.transfer] = std::move(pending);
    watch(self);
  }
}

void on_attach_session(self_pointer self, attach_session order) {
  auto& st = self->state;
  switch (st.now) {
    case link_state::phase::up:
      if (is_over(st, order.epoch)) {
        tell(order.session, session_event{is_back(st)});
      }
      break;
    case link_state::phase::dialling:
    case link_state::phase::connecting: break;  // told when it is up again
    case link_state::phase::ending:
      tell(order.session, session_event{link_is_lost{not_up(st)}});
      break;
  }
  st.sessions.emplace(order.transfer, std::move(order.session));
  watch(self);
}

void on_detach_session(self_pointer self, const detach_session& order) {
  self->state.sessions.erase(order.transfer);
  self->state.fencing.erase(order.transfer);
  finish_if_idle(self);
}

}  // namespace troupe::actors::link_parts
