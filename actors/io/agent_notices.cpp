#include <algorithm>
#include <string>
#include <utility>

#include <sys/eventfd.h>

#include "troupe/io/agent_core.hpp"

// Notices, with the count of those that the other end has not read, and events.

namespace troupe::io {

namespace {

/// A peer whose notices go beyond what it was told by so many breaks the protocol; those that were
/// cancelled on the way may go beyond by a few.
constexpr std::uint64_t tolerance = 2;

std::uint64_t less(std::uint64_t from, std::uint64_t what) noexcept {
  return from - std::min(from, what);
}

}  // namespace

// -- the account

bool notice_account::has_room_for(std::size_t bytes) const noexcept {
  const auto unread = less(handed.notices + reserved.notices, taken.notices);
  const auto unread_bytes = less(handed.bytes + reserved.bytes, taken.bytes);
  return unread < room.notices && unread_bytes + bytes <= room.bytes;
}

void notice_account::reserve(std::size_t bytes) noexcept {
  ++reserved.notices;
  reserved.bytes += bytes;
}

void notice_account::unreserve(std::size_t bytes) noexcept {
  reserved.notices = less(reserved.notices, 1);
  reserved.bytes = less(reserved.bytes, bytes);
}

void notice_account::hand_over(std::size_t bytes) noexcept {
  unreserve(bytes);
  ++handed.notices;
  handed.bytes += bytes;
  ++changes;
}

void notice_account::take_back(std::size_t bytes) noexcept {
  handed.notices = less(handed.notices, 1);
  handed.bytes = less(handed.bytes, bytes);
  ++changes;
}

void notice_account::on_count(const notice_count& received,
                              const notice_count& said_taken) noexcept {
  taken = said_taken;
  const auto asked = std::exchange(asked_at, std::nullopt);
  // What was handed over since, or is on its way, is not in the peer's count.
  if (!asked || *asked != changes || in_flight != 0) return;
  handed = received;
  uncertain = false;
}

// -- sent

result<void> agent_core::notify(peer_id who, std::span<const std::byte> bytes) {
  lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  const auto& peer = *found;
  if (peer->now == remote_agent::phase::gone) return fail(*peer->last_error);
  if (bytes.size() > max_notice_size) {
    return fail(errc::out_of_range, "a notice has at most " + std::to_string(max_notice_size) +
                                        " bytes, found " + std::to_string(bytes.size()));
  }
  if (peer->is_self) {
    if (inbox_.size() >= options_.max_notices) {
      return fail(errc::overloaded, "this agent has not taken its own notices");
    }
    inbox_.push_back({options_.name, who, {bytes.begin(), bytes.end()}});
    tell_of_notices();
    return {};
  }
  if (!peer->account.has_room_for(bytes.size())) {
    ask_for_count(lock, peer);
    return fail(errc::overloaded, "agent '" + peer->known.name +
                                      "' has not taken the notices that were sent to it; notify "
                                      "it again when it has");
  }
  peer->account.reserve(bytes.size());
  peer->notes.emplace_back(bytes.begin(), bytes.end());
  const bool up = peer->now == remote_agent::phase::up;
  lock.unlock();
  if (up) {
    send_notes(peer);
  } else {
    want_link(peer);
  }
  return {};
}

/// In their order: one thread at a time. Without the lock.
void agent_core::send_notes(const peer_ptr& who) {
  lock_type lock{mutex_};
  if (std::exchange(who->sending_notes, true)) return;  // that thread sends ours as well
  while (!who->notes.empty() && who->now == remote_agent::phase::up) {
    const auto wire = wire_of(who->link);
    const auto link = who->link;
    if (!wire) break;
    auto bytes = std::move(who->notes.front());
    who->notes.pop_front();
    who->account.hand_over(bytes.size());
    lock.unlock();
    const auto sent = wire->send_frame(encode_frame(note{bytes}));
    lock.lock();
    if (sent) continue;
    who->account.take_back(bytes.size());
    who->account.reserve(bytes.size());
    who->notes.push_front(std::move(bytes));
    if (sent.error().code == errc::overloaded) {
      loop_->post([this, who] { send_notes_later(who); });
    } else if (who->link == link) {
      loop_->post([this, link, why = sent.error()] { link_went(link, why); });
    }
    break;
  }
  who->sending_notes = false;
}

/// On the loop's thread: the link takes no more frames just now.
void agent_core::send_notes_later(const peer_ptr& who) {
  constexpr std::chrono::milliseconds pause{2};
  static_cast<void>(
      loop_->call_at(control_channel::clock::now() + pause, [this, who] { send_notes(who); }));
}

/// So that notices of which nobody knows whether they arrived do not count for ever. Gives the lock up.
void agent_core::ask_for_count(lock_type& lock, const peer_ptr& who) {
  auto& account = who->account;
  if (!account.uncertain || account.asked_at || account.in_flight != 0) return;
  const auto wire = wire_of(who->link);
  if (!wire || who->now != remote_agent::phase::up) return;
  account.asked_at = account.changes;
  lock.unlock();
  const auto sent = wire->send_frame(encode_frame(count_wanted{}));
  lock.lock();
  if (!sent) account.asked_at.reset();
}

// -- received

void agent_core::on_note(const peer_ptr& from, std::span<const std::byte> bytes) {
  lock_type lock{mutex_};
  const auto unread = from->received.notices - from->taken.notices;
  const auto unread_bytes = from->received.bytes - from->taken.bytes;
  if (bytes.size() > max_notice_size || unread >= tolerance * options_.max_notices ||
      unread_bytes > tolerance * options_.max_notice_bytes) {
    const auto link = from->guest_link;
    lock.unlock();
    loop_->post([this, link] {
      link_went(link, {errc::overloaded, "the peer sends more notices than it was told to"});
    });
    return;
  }
  ++from->received.notices;
  from->received.bytes += bytes.size();
  inbox_.push_back({from->known.name, from->id, {bytes.begin(), bytes.end()}});
  tell_of_notices();
}

void agent_core::tell_of_notices() {
  if (!std::exchange(notices_told_, true)) put_event({.what = event_kind::notices_wait});
}

std::vector<notice> agent_core::take_notices(std::size_t max) {
  std::vector<notice> some;
  std::vector<peer_ptr> tell;
  {
    const lock_type lock{mutex_};
    while (!inbox_.empty() && some.size() < max) {
      auto& next = inbox_.front();
      if (const auto at = peers_.find(next.life.value); at != peers_.end()) {
        auto& from = at->second;
        if (!from->is_self) {
          ++from->taken.notices;
          from->taken.bytes += next.bytes.size();
          if (std::ranges::find(tell, from) == tell.end()) tell.push_back(from);
        }
      }
      some.push_back(std::move(next));
      inbox_.pop_front();
    }
    if (inbox_.empty()) notices_told_ = false;
  }
  for (const auto& who : tell) send_counts(who, false);
  return some;
}

/// When the peer asks, or when enough was taken that it should know. Without the lock.
void agent_core::send_counts(const peer_ptr& who, bool asked) {
  lock_type lock{mutex_};
  const auto untold = who->taken.notices - who->told_taken;
  const bool all = who->taken == who->received;
  if (!asked && !all && untold < options_.max_notices / 4) return;
  const auto wire = wire_of(who->guest_link);
  if (!wire) return;
  const taken said{who->received, who->taken};
  who->told_taken = who->taken.notices;
  lock.unlock();
  // A link that does not take it is on its end, and the next greeting has the count.
  static_cast<void>(wire->send_soon(encode_frame(said)));
}

// -- events

void agent_core::put_event(event what) {
  events_.push_back(std::move(what));
  if (events_.size() == 1) static_cast<void>(::eventfd_write(events_fd_.get(), 1));
}

std::vector<event> agent_core::take(std::size_t max) {
  std::vector<event> some;
  const lock_type lock{mutex_};
  while (!events_.empty() && some.size() < max) {
    auto next = std::move(events_.front());
    events_.pop_front();
    if (next.what == event_kind::transfer_ended) {
      const auto at = transfers_.find(next.which.value);
      if (at == transfers_.end()) continue;  // released meanwhile
      at->second->event_waits = false;
    }
    if (next.what == event_kind::peer_lost) {
      if (const auto at = peers_.find(next.who.value); at != peers_.end()) {
        next.why = at->second->last_error;
        at->second->loss_told = true;
      }
    }
    some.push_back(std::move(next));
  }
  if (events_.empty()) {
    std::uint64_t count = 0;
    static_cast<void>(::eventfd_read(events_fd_.get(), &count));
  }
  return some;
}

}  // namespace troupe::io
