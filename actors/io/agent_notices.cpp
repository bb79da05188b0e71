#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include <sys/eventfd.h>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

// Notices, the accounting of unread ones, and events.

namespace troupe::io {

namespace {

/// A peer that exceeds its room by this factor violates the protocol; notices cancelled in flight
/// may exceed the room slightly.
constexpr std::uint64_t tolerance = 2;
/// The room for unread notices of all peers together, in rooms of one peer. Lives of peers cost
/// nothing, so a limit of each alone would be none.
constexpr std::uint64_t rooms_in_all = 16;
/// The peer is told of free room at the latest when 1/`parts_told` of the room is free again.
constexpr std::uint64_t parts_told = 4;

/// The unread notices that a peer has sent, or that this agent has sent to itself.
notice_count unread_of(const remote_agent& who) noexcept {
  return {who.received.notices - who.taken.notices, who.received.bytes - who.taken.bytes};
}

}  // namespace

// -- sent

/// Checks that one more notice may go to the peer. If the peer has no room, asks it for its count,
/// and releases the lock meanwhile.
result<void> agent_core::look_for_room(lock_type& lock, const peer_ptr& who, std::size_t bytes) {
  if (bytes > max_notice_size) {
    return fail(errc::out_of_range, "a notice has at most " + std::to_string(max_notice_size) +
                                        " bytes, found " + std::to_string(bytes));
  }
  if (who->is_self) {
    const auto unread = unread_of(*who);
    const bool fits = unread.bytes + bytes <= options_.max_notice_bytes;
    if (unread.notices < options_.max_notices && fits) return {};
    return fail(errc::overloaded, "this agent has not taken its own notices");
  }
  if (who->account.has_room_for(bytes)) return {};
  ask_for_count(lock, who);
  return fail(errc::overloaded, "agent '" + who->known.name +
                                    "' has not taken the notices that were sent to it; send "
                                    "again when it has");
}

result<void> agent_core::notify(peer_id who, std::span<const std::byte> bytes) {
  lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  const auto& peer = *found;
  if (peer->now == remote_agent::phase::gone) return fail(*peer->last_error);
  if (auto ok = look_for_room(lock, peer, bytes.size()); !ok) return ok;
  if (peer->is_self) {
    put_own_note(*peer, bytes);
    return {};
  }
  // Encoded here, so that no allocation fails between the queue and the link.
  peer->notes.push_back({encode_frame(note{bytes}), bytes.size()});
  peer->account.reserve(bytes.size());
  const bool up = peer->now == remote_agent::phase::up;
  lock.unlock();
  if (up) {
    send_notes(peer);
  } else {
    want_link(peer);
  }
  return {};
}

/// Sends the waiting notices in order: one thread at a time. Called without the lock.
void agent_core::send_notes(const peer_ptr& who) {
  lock_type lock{mutex_};
  if (std::exchange(who->sending_notes, true)) return;  // that thread sends ours as well
  const auto sent = or_error("notices are sent", [&] { send_notes_in(lock, who); });
  who->sending_notes = false;
  // While this thread held the only notice, the link may have ended, and whoever ended it saw none
  // that wants another.
  using phase = remote_agent::phase;
  const bool no_link = who->now != phase::up && who->now != phase::gone;
  const bool wants = !who->notes.empty() && (no_link || !sent);
  lock.unlock();
  if (wants && no_link) want_link(who);
  if (wants && !no_link) loop_->post([this, who] { send_notes_later(who); });
}

/// What throws, throws under the lock, and leaves the notices in the queue.
void agent_core::send_notes_in(lock_type& lock, const peer_ptr& who) {
  while (!who->notes.empty() && who->now == remote_agent::phase::up) {
    const auto wire = wire_of(who->link);
    const auto link = who->link;
    if (!wire) return;
    std::list<remote_agent::waiting_note> hand;
    hand.splice(hand.end(), who->notes, who->notes.begin());
    const auto& note = hand.front();
    who->account.hand_over(note.bytes);
    ++who->unsure_notes;
    who->note_in_hand = true;
    lock.unlock();
    const auto sent = or_error("a notice is sent", [&] { return wire->send_frame(note.frame); });
    lock.lock();
    const bool dropped = !std::exchange(who->note_in_hand, false);
    if (sent) continue;
    if (who->unsure_notes > 0) --who->unsure_notes;
    who->account.take_back(note.bytes);
    if (dropped) {
      // The peer may have told its count meanwhile, and that has no such notice to take back.
      who->account.doubt();
      continue;
    }
    who->account.reserve(note.bytes);
    who->notes.splice(who->notes.begin(), hand);
    if (sent.error().code == errc::overloaded) {
      // One timer, however many calls of `notify` find the link full.
      if (who->notes_later) return;
      loop_->post([this, who] { send_notes_later(who); });
      who->notes_later = true;
      return;
    }
    // The thread that brought the next link up has left these notices to this one.
    if (who->link != link) continue;
    loop_->post([this, link, why = sent.error()] { link_went(link, why); });
    return;
  }
}

/// Reports notices that may be lost with a link; the peer lives.
void agent_core::tell_of_lost_notes(remote_agent& who) {
  if (std::exchange(who.unsure_notes, 0) == 0 || who.removed || who.notes_event) return;
  who.notes_event = put_event({.what = event_kind::notices_lost, .who = who.id});
}

/// Takes the peer's count of notices.
void agent_core::on_taken(std::uint64_t link, const peer_ptr& who, const taken& said) {
  const lock_type lock{mutex_};
  if (who->link != link) return;
  if (said.received.notices >= who->account.handed().notices) {
    if (std::exchange(who->unsure_notes, 0) != 0) who->failures = 0;
  }
  who->account.on_count(said);
}

/// On the loop's thread. Retries after a pause, because the link is full.
void agent_core::send_notes_later(const peer_ptr& who) {
  constexpr std::chrono::milliseconds pause{2};
  static_cast<void>(loop_->call_at(control_channel::clock::now() + pause, [this, who] {
    {
      const lock_type lock{mutex_};
      who->notes_later = false;
    }
    send_notes(who);
  }));
}

/// Asks for the peer's count. Otherwise notices of unknown fate, and notices that the peer took
/// while it had no link to report them over, would count as unread for ever. Releases the lock
/// meanwhile.
void agent_core::ask_for_count(lock_type& lock, const peer_ptr& who) {
  if (who->now != remote_agent::phase::up) {
    who->wants_count = true;
    lock.unlock();
    want_link(who);
    lock.lock();
    return;
  }
  const auto wire = wire_of(who->link);
  const auto number = wire ? who->account.ask() : std::nullopt;
  if (!number) return;
  lock.unlock();
  const auto sent = or_error("a count is asked for",
                             [&] { return wire->send_frame(encode_frame(count_wanted{*number})); });
  lock.lock();
  if (!sent) who->account.forget_question();
}

// -- received

void agent_core::put_own_note(remote_agent& self, std::span<const std::byte> bytes) {
  put_in_inbox(self, {options_.name, self.id, {bytes.begin(), bytes.end()}});
}

void agent_core::put_in_inbox(remote_agent& from, notice what) {
  const auto bytes = what.bytes.size();
  inbox_.push_back(std::move(what));
  or_undo([this] { tell_of_notices(); }, [this] { inbox_.pop_back(); });
  inbox_bytes_ += bytes;
  ++from.received.notices;
  from.received.bytes += bytes;
}

bool agent_core::inbox_takes(std::size_t bytes) const noexcept {
  return inbox_.size() < rooms_in_all * options_.max_notices &&
         inbox_bytes_ + bytes <= rooms_in_all * options_.max_notice_bytes;
}

/// Drops unread notices to make room: of the peers that have left, those of the oldest ones, at
/// least one peer's room, because each call goes through all notices.
void agent_core::drop_notes_of_those_that_left() {
  std::set<peer_id> losers;
  notice_count freed;
  for (const auto& [number, one] : peers_) {
    if (freed.notices >= options_.max_notices || freed.bytes >= options_.max_notice_bytes) break;
    const auto unread = unread_of(*one);
    if (unread.notices == 0 || !has_left(*one)) continue;
    losers.insert(one->id);
    one->last_error = {errc::overloaded, "agent '" + one->known.name + "' has left, and its " +
                                             std::to_string(unread.notices) +
                                             " unread notices were dropped to make room for those "
                                             "of others; take notices sooner"};
    tell_of_loss(*one);
    freed.notices += unread.notices;
    freed.bytes += unread.bytes;
  }
  if (losers.empty()) return;
  std::erase_if(inbox_, [&](const notice& one) { return losers.contains(one.life); });
  for (const auto who : losers) {
    auto& one = *peers_.at(who.value);
    one.taken = one.received;
  }
  inbox_bytes_ -= freed.bytes;
  notices_dropped_ += freed.notices;
}

void agent_core::on_note(std::uint64_t link, const peer_ptr& from,
                         std::span<const std::byte> bytes) {
  const lock_type lock{mutex_};
  if (from->removed || from->guest_link != link) return;
  const auto unread = unread_of(*from);
  if (bytes.size() > max_notice_size || unread.notices >= tolerance * options_.max_notices ||
      unread.bytes > tolerance * options_.max_notice_bytes) {
    loop_->post([this, link] {
      link_went(link, {errc::overloaded, "the peer sends more notices than it was told to"});
    });
    return;
  }
  if (!inbox_takes(bytes.size())) drop_notes_of_those_that_left();
  if (!inbox_takes(bytes.size())) {
    loop_->post([this, link] {
      link_went(link, {errc::overloaded, "agent '" + options_.name +
                                             "' has too many notices of all its peers unread"});
    });
    return;
  }
  put_in_inbox(*from, {from->known.name, from->id, {bytes.begin(), bytes.end()}});
}

void agent_core::tell_of_notices() {
  if (!notices_told_) put_event({.what = event_kind::notices_wait});
  notices_told_ = true;
  wake_waiters();
}

bool agent_core::wait_for_notices(std::chrono::milliseconds limit) {
  lock_type lock{mutex_};
  return wait_until(lock, std::chrono::steady_clock::now() + bounded(limit),
                    [this] { return !inbox_.empty(); });
}

std::vector<notice> agent_core::take_notices(std::size_t max) {
  std::vector<notice> some;
  std::vector<peer_ptr> tell;
  {
    const lock_type lock{mutex_};
    const auto count = std::min(max, inbox_.size());
    some.reserve(count);
    tell.reserve(std::min(count, peers_.size()));
    // Nothing is allocated from here on: a call that finds no memory has taken no notice.
    while (some.size() < count) {
      auto& next = inbox_.front();
      if (const auto at = peers_.find(next.life.value); at != peers_.end()) {
        const auto& from = at->second;
        ++from->taken.notices;
        from->taken.bytes += next.bytes.size();
        inbox_bytes_ -= next.bytes.size();
        if (std::ranges::find(tell, from) == tell.end()) tell.push_back(from);
      }
      some.push_back(std::move(next));
      inbox_.pop_front();
    }
    if (inbox_.empty()) notices_told_ = false;
    std::erase_if(tell, [this](const auto& who) { return !counts_are_due(*who); });
  }
  for (const auto& who : tell) {
    // A peer that is not told asks when its room is used up.
    static_cast<void>(or_error("a count is told", [&] { send_counts(who, 0); }));
  }
  return some;
}

/// Whether enough notices were taken to report it to the peer.
bool agent_core::counts_are_due(const remote_agent& who) const {
  return who.taken == who.received ||
         who.taken.notices - who.told_taken.notices >= options_.max_notices / parts_told ||
         who.taken.bytes - who.told_taken.bytes >= options_.max_notice_bytes / parts_told;
}

/// `answers` is the number of the peer's question; 0: unasked. Called without the lock.
void agent_core::send_counts(const peer_ptr& who, std::uint64_t answers) {
  lock_type lock{mutex_};
  const auto wire = wire_of(who->guest_link);
  if (!wire) return;
  const taken said{.received = who->received, .taken = who->taken, .answers = answers};
  const auto frame = encode_frame(said);
  who->told_taken = who->taken;
  lock.unlock();
  // A link that does not take the frame is about to end, and the next greeting carries the count.
  static_cast<void>(wire->send_soon(frame));
}

// -- events

event_ref agent_core::put_event(event what) {
  events_.push_back(std::move(what));
  return tell_of_event();
}

/// The last event has just been added.
event_ref agent_core::tell_of_event() {
  if (events_.size() == 1) static_cast<void>(::eventfd_write(events_fd_.get(), 1));
  return std::prev(events_.end());
}

void agent_core::drop_event(std::optional<event_ref>& what) {
  if (!what) return;
  events_.erase(*std::exchange(what, std::nullopt));
  calm_event_fd();
}

/// Drains the event descriptor once there are no events: it is readable only while there are some.
void agent_core::calm_event_fd() {
  if (!events_.empty()) return;
  std::uint64_t count = 0;
  static_cast<void>(::eventfd_read(events_fd_.get(), &count));
}

std::vector<event> agent_core::take(std::size_t max) {
  std::vector<event> some;
  const lock_type lock{mutex_};
  const auto count = std::min(max, events_.size());
  some.reserve(count);
  auto each = events_.begin();
  for (std::size_t i = 0; i < count; ++i, ++each) {
    if (each->what != event_kind::peer_lost) continue;
    if (const auto at = peers_.find(each->who.value); at != peers_.end())
      each->why = at->second->last_error;
  }
  // Nothing is allocated from here on: a call that finds no memory has taken no event.
  while (some.size() < count) {
    auto next = std::move(events_.front());
    events_.pop_front();
    if (next.what == event_kind::transfer_ended) {
      const auto at = transfers_.find(next.which.value);
      if (at != transfers_.end()) at->second->end_event.reset();
    }
    if (next.what == event_kind::peer_lost) {
      const auto at = peers_.find(next.who.value);
      if (at != peers_.end()) at->second->loss_event.reset();
    }
    if (next.what == event_kind::notices_lost) {
      const auto at = peers_.find(next.who.value);
      if (at != peers_.end()) at->second->notes_event.reset();
    }
    some.push_back(std::move(next));
  }
  calm_event_fd();
  return some;
}

}  // namespace troupe::io
