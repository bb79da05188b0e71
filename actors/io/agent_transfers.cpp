#include <algorithm>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/or_undo.hpp"

// Transfers: posted, handed to links, ended.

namespace troupe::io {

namespace {

/// Whether a transfer that failed with this code may have been delivered nevertheless.
bool leaves_doubt(errc code) noexcept {
  return code == errc::aborted || code == errc::link_broken || code == errc::peer_lost ||
         code == errc::deadline;
}

/// A transfer ends also where memory is short, and then names no entries.
template <class Call>
std::vector<std::uint32_t> or_none(Call&& call) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return {};
  }
}

std::vector<std::uint32_t> every_entry(const planned_batch& moves) {
  return or_none([&] { return moves.all_entries(); });
}

std::vector<std::uint32_t> bad_entries(const planned_batch& moves, const auto& bad_segments) {
  return or_none([&] { return moves.entries_of(bad_segments); });
}

}  // namespace

result<agent_core::transfer_ptr> agent_core::find_transfer(transfer_handle which) const {
  const auto at = transfers_.find(which.value);
  if (at != transfers_.end()) return at->second;
  return fail(errc::not_found, "there is no transfer " + std::to_string(which.value) +
                                   "; it was never made, or was released");
}

result<void> agent_core::post(transfer_handle which, std::span<const std::byte> note_bytes,
                              std::chrono::milliseconds deadline, then caller) {
  lock_type lock{mutex_};
  const auto found = find_transfer(which);
  if (!found) return fail(found.error());
  const auto& one = *found;
  if (one->at != agent_transfer::stage::idle) {
    return fail(errc::overloaded, "transfer " + std::to_string(which.value) +
                                      " is active; post it again when it has ended");
  }
  const auto peer = find_peer(one->who);
  if (!peer) return fail(peer.error());
  auto& who = **peer;
  if (who.now == remote_agent::phase::gone) return fail(*who.last_error);
  for (const auto number : one->moves->local_memories) {
    const auto* own = memories_.find(memory_id{number});
    if (own != nullptr && !own->withdrawn) continue;
    return fail(errc::aborted, "memory " + std::to_string(number) + ", which transfer " +
                                   std::to_string(which.value) + " moves, was deregistered");
  }
  if (!note_bytes.empty()) {
    if (auto ok = look_for_room(lock, *peer, note_bytes.size()); !ok) return ok;
  }
  // All that may fail comes first: a transfer that cannot be posted is as it was.
  std::vector<std::byte> words{note_bytes.begin(), note_bytes.end()};
  if (one->next_end.empty()) {
    one->next_end.push_back({.what = event_kind::transfer_ended, .which = one->id});
  }
  one->run = ++last_run_;
  runs_.emplace(one->run, one);
  or_undo(
      [&] {
        if (deadline.count() > 0) set_deadline(one, deadline);
      },
      [&] { runs_.erase(one->run); });
  one->outcome = {.now = state::active};
  one->link = 0;
  one->lost_links = 0;
  one->stop_as.reset();
  one->completed = one->quiescent = false;
  one->has_note = !note_bytes.empty();
  one->note = std::move(words);
  if (one->has_note && !who.is_self) who.account.reserve(one->note.size());
  one->at = agent_transfer::stage::waiting;
  const auto run = one->run;
  const auto started = or_error("a transfer is posted", [&] {
    if (who.is_self) {
      copy_within(lock, one);
    } else {
      start(lock, *peer, one, caller);
    }
  });
  if (started) return {};
  if (!lock.owns_lock()) lock.lock();
  if (one->run == run && one->at == agent_transfer::stage::waiting) {
    std::erase(who.waiting, one);
    refuse(who, one, started.error());
  }
  return {};
}

/// Releases the lock meanwhile, and may return without it.
void agent_core::start(lock_type& lock, const peer_ptr& who, const transfer_ptr& which,
                       then caller) {
  std::list<transfer_ptr> turn{which};  // made before questions count as asked
  if (who->now == remote_agent::phase::up) {
    grant_questions ask;
    if (has_grants(*who, *which, ask)) {
      hand_to_link(lock, who, which, caller);
      return;
    }
    who->waiting.splice(who->waiting.end(), turn);
    ask_for_grants(lock, who, ask);
    return;
  }
  who->waiting.splice(who->waiting.end(), turn);
  lock.unlock();
  want_link(who);
}

/// Posts the waiting transfers that have their link and grants now. Releases the lock meanwhile.
void agent_core::go_on(lock_type& lock, const peer_ptr& who) {
  grant_questions ask;
  auto some = std::exchange(who->waiting, {});
  while (!some.empty()) {
    const auto one = some.front();
    bool waits = false;
    const auto gone_on = or_error("a transfer goes on", [&] {
      if (one->at != agent_transfer::stage::waiting) return;
      waits = who->now != remote_agent::phase::up || !has_grants(*who, *one, ask);
      if (!waits) hand_to_link(lock, who, one, then::goes_on);
    });
    if (waits) {
      who->waiting.splice(who->waiting.end(), some, some.begin());
      continue;
    }
    some.pop_front();
    if (!gone_on && one->at == agent_transfer::stage::waiting) {
      refuse(*who, one, gone_on.error());
    }
  }
  ask_for_grants(lock, who, ask);
  // The peer or its link may have gone while this thread held the transfers, out of sight of the
  // code that fails the waiting ones.
  if (who->removed) fail_waiting(who, removed_error(*who));
  if (who->now == remote_agent::phase::gone) fail_waiting(who, *who->last_error);
  if (who->waiting.empty() || who->now == remote_agent::phase::up) return;
  lock.unlock();
  want_link(who);
  lock.lock();
}

/// The pieces that a link moves for the transfer. Empty if the peer's grants do not match its
/// descriptor.
std::optional<std::vector<transport::piece>> agent_core::pieces_of(remote_agent& who,
                                                                   const agent_transfer& which) {
  std::vector<transport::piece> pieces;
  pieces.reserve(which.moves->groups.size());
  for (const auto& group : which.moves->groups) {
    const auto& parts = who.grants[group.remote_memory].parts;
    const auto at = std::ranges::find_if(
        parts, [&](const auto& grant) { return grant->region == group.remote; });
    if (at == parts.end()) return std::nullopt;
    pieces.push_back({group.local, *at, group.segments});
  }
  return pieces;
}

void agent_core::hand_to_link(lock_type& lock, const peer_ptr& who, const transfer_ptr& which,
                              then caller) {
  const auto run = which->run;
  const auto link = who->link;
  const auto wire = wire_of(link);
  const auto noted = which->has_note ? std::optional{which->note.size()} : std::nullopt;
  auto prepared = which->prepared_on == link ? which->prepared : nullptr;
  const bool again = std::exchange(which->first_on, link) == link;
  std::optional<std::vector<transport::piece>> pieces;
  if (!prepared) {
    pieces = pieces_of(*who, *which);
    if (!pieces) {
      refuse(*who, which,
             {errc::grant_revoked, "agent '" + who->known.name +
                                       "' grants its memory differently from its description"});
      return;
    }
  }
  std::vector<std::byte> frame;
  if (noted) {
    frame = encode_frame(note{which->note});
    who->account.hand_over(*noted);
    who->account.batch_begins();
  }
  which->at = agent_transfer::stage::posted;
  which->link = link;
  const auto dir = which->dir;
  lock.unlock();
  auto posted = or_error("a batch is posted", [&]() -> result<void> {
    if (!wire) return fail(errc::link_broken, "the link is gone");
    if (!prepared && !again) {
      return wire->post({.id = transport::batch_id{run},
                         .transfer = transfer_id{run},
                         .dir = dir,
                         .pieces = std::move(*pieces),
                         .frame = std::move(frame)});
    }
    if (!prepared) {
      auto made = wire->prepare(dir, std::move(*pieces));
      if (!made) return fail(std::move(made).error());
      prepared = std::move(*made);
    }
    return wire->post_prepared(*prepared, {.id = transport::batch_id{run},
                                           .transfer = transfer_id{run},
                                           .which = {},
                                           .frame = frame,
                                           .caller_waits = caller == then::waits});
  });
  lock.lock();
  if (again && prepared) {
    which->prepared = std::move(prepared);
    which->prepared_on = link;
  }
  if (posted) return;
  if (noted) {
    who->account.batch_ends();
    who->account.take_back(*noted);
  }
  // `stop` has already ended a transfer whose link was gone.
  if (which->run != run || which->at == agent_transfer::stage::idle) return;
  if (which->at == agent_transfer::stage::stopping) {
    which->completed = true;
    finish_stopped(which);
  } else {
    finish(which, std::move(posted).error(), 0, every_entry(*which->moves));
  }
}

void agent_core::on_completion(std::uint64_t link, transport::completion done) {
  const lock_type lock{mutex_};
  const auto at = runs_.find(done.id.value);
  if (at == runs_.end()) return;
  const auto one = at->second;
  if (const auto peer = find_peer(one->who); peer && one->has_note) {
    auto& account = (*peer)->account;
    account.batch_ends();
    if (done.failure && leaves_doubt(done.failure->code)) account.doubt();
    if (done.failure && !leaves_doubt(done.failure->code)) account.take_back(one->note.size());
  }
  if (!done.failure) {
    if (const auto peer = find_peer(one->who); peer && (*peer)->link == link) (*peer)->failures = 0;
    finish(one, std::nullopt, done.bytes, {});
    return;
  }
  if (one->at == agent_transfer::stage::stopping) {
    one->completed = true;
    one->outcome.bytes = done.bytes;
    one->outcome.bad_entries = bad_entries(*one->moves, done.bad_segments);
    finish_stopped(one);
    return;
  }
  const auto peer = find_peer(one->who);
  if (peer && done.failure->code == errc::grant_revoked &&
      one->moves->remote_memories.size() == 1 && (*peer)->link == link) {
    // The owner has deregistered the memory, or is merely ending the link. The next transfer asks
    // again.
    auto& grants = (*peer)->grants;
    const auto known = grants.find(one->moves->remote_memories.front());
    if (known != grants.end() && !known->second.parts.empty()) {
      grants.erase(known);
      ++(*peer)->grants_epoch;
    }
  }
  const auto entry_of_link = links_.find(link);
  if (entry_of_link != links_.end() && entry_of_link->second.closed_for &&
      done.failure->code == errc::aborted) {
    done.failure = entry_of_link->second.closed_for;
  }
  finish(one, std::move(done.failure), done.bytes, bad_entries(*one->moves, done.bad_segments));
}

void agent_core::on_quiescent(std::uint64_t link, transfer_id of) {
  const lock_type lock{mutex_};
  if (revoking_.erase({link, of.value}) != 0) {
    wake_waiters();
    return;
  }
  const auto at = runs_.find(of.value);
  if (at == runs_.end() || at->second->link != link) return;
  const auto one = at->second;
  one->quiescent = true;
  finish_stopped(one);
}

// -- ends

/// Releases the lock meanwhile.
void agent_core::stop(lock_type& lock, const transfer_ptr& which, troupe::error why,
                      bool is_cancel) {
  switch (which->at) {
    case agent_transfer::stage::idle:
    case agent_transfer::stage::stopping: return;
    case agent_transfer::stage::waiting: {
      const auto peer = find_peer(which->who);
      if (peer) {
        std::erase((*peer)->waiting, which);
        if (which->has_note) (*peer)->account.unreserve(which->note.size());
      }
      which->stop_is_cancel = is_cancel;
      which->stop_as = std::move(why);
      which->at = agent_transfer::stage::stopping;
      which->completed = which->quiescent = true;
      finish_stopped(which);
      return;
    }
    case agent_transfer::stage::posted: break;
  }
  which->at = agent_transfer::stage::stopping;
  which->stop_is_cancel = is_cancel;
  which->stop_as = std::move(why);
  if (which->link == 0) {  // a local copy, which ends by itself
    which->quiescent = true;
    return;
  }
  const auto run = which->run;
  const auto wire = wire_of(which->link);
  lock.unlock();
  const bool at_rest = !wire || wire->fence(transfer_id{run}) == transport::fence_state::quiescent;
  lock.lock();
  if (which->run != run || which->at != agent_transfer::stage::stopping || !at_rest) return;
  which->quiescent = true;
  if (!wire) which->completed = true;
  finish_stopped(which);
}

void agent_core::finish_stopped(const transfer_ptr& which) {
  if (which->at != agent_transfer::stage::stopping || !which->completed || !which->quiescent) {
    return;
  }
  auto bad = std::move(which->outcome.bad_entries);
  if (bad.empty()) bad = every_entry(*which->moves);
  finish(which, std::exchange(which->stop_as, std::nullopt), which->outcome.bytes, std::move(bad));
  if (which->stop_is_cancel) {
    which->outcome.now = state::cancelled;
    which->outcome.why.reset();
  }
}

void agent_core::finish(const transfer_ptr& which, std::optional<troupe::error> why,
                        std::uint64_t bytes, std::vector<std::uint32_t> bad_entries) {
  runs_.erase(which->run);
  if (which->until) deadlines_.erase({*std::exchange(which->until, std::nullopt), which->run});
  which->at = agent_transfer::stage::idle;
  which->note.clear();
  which->outcome.now = why ? state::failed : state::done;
  which->outcome.why = std::move(why);
  which->outcome.bytes = bytes;
  which->outcome.bad_entries = std::move(bad_entries);
  if (!which->end_event) {
    events_.splice(events_.end(), which->next_end);
    which->end_event = tell_of_event();
  }
  wake_waiters();
}

/// Fails the transfers that wait for a link that cannot be made.
void agent_core::fail_waiting(const peer_ptr& who, const troupe::error& why) {
  for (const auto& one : std::exchange(who->waiting, {})) {
    if (one->at != agent_transfer::stage::waiting) continue;
    refuse(*who, one, why);
  }
}

/// Fails a transfer that was not handed to a link.
void agent_core::refuse(remote_agent& who, const transfer_ptr& which, troupe::error why) {
  if (which->has_note) who.account.unreserve(which->note.size());
  finish(which, std::move(why), 0, every_entry(*which->moves));
}

void agent_core::set_deadline(const transfer_ptr& which, std::chrono::milliseconds after) {
  const auto until = std::chrono::steady_clock::now() + bounded(after);
  const bool first = deadlines_.empty() || until < deadlines_.begin()->first;
  deadlines_.emplace(until, which->run);
  or_undo(
      [&] {
        if (first) loop_->post([this] { look_at_deadlines(); });
      },
      [&] {
        deadlines_.erase({until, which->run});
      });
  which->until = until;
}

/// On the loop's thread.
void agent_core::look_at_deadlines() {
  lock_type lock{mutex_};
  const auto now = std::chrono::steady_clock::now();
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto due = deadlines_.extract(deadlines_.begin());
    const auto at = runs_.find(due.value().second);
    if (at == runs_.end()) continue;
    const auto one = at->second;
    one->until.reset();
    stop(lock, one,
         {errc::deadline, "transfer " + std::to_string(one->id.value) +
                              " did not end within the time that its caller gave"},
         false);
  }
  loop_->cancel(deadline_timer_);
  if (deadlines_.empty()) return;
  deadline_timer_ = loop_->call_at(deadlines_.begin()->first, [this] {
    deadline_timer_ = 0;
    look_at_deadlines();
  });
}

// -- status

result<status> agent_core::status_of(transfer_handle which) const {
  const lock_type lock{mutex_};
  const auto found = find_transfer(which);
  if (!found) return fail(found.error());
  return (*found)->outcome;
}

std::size_t agent_core::wait(std::span<const transfer_handle> which, wait_for how_many,
                             std::chrono::milliseconds limit) {
  lock_type lock{mutex_};
  const auto ended = [&] {
    return static_cast<std::size_t>(std::ranges::count_if(which, [&](transfer_handle one) {
      const auto found = transfers_.find(one.value);
      return found == transfers_.end() || found->second->at == agent_transfer::stage::idle;
    }));
  };
  const auto wanted =
      how_many == wait_for::all ? which.size() : std::min<std::size_t>(1, which.size());
  wait_until(lock, std::chrono::steady_clock::now() + bounded(limit),
             [&] { return ended() >= wanted; });
  return ended();
}

result<void> agent_core::cancel(transfer_handle which) {
  lock_type lock{mutex_};
  const auto found = find_transfer(which);
  if (!found) return fail(found.error());
  stop(lock, *found, {errc::aborted, "cancelled"}, true);
  return {};
}

result<void> agent_core::release(transfer_handle which) {
  const lock_type lock{mutex_};
  const auto found = find_transfer(which);
  if (!found) return fail(found.error());
  if ((*found)->at != agent_transfer::stage::idle) {
    return fail(errc::overloaded, "transfer " + std::to_string(which.value) +
                                      " is active; cancel it and wait for its end first");
  }
  drop_event((*found)->end_event);
  transfers_.erase(which.value);
  return {};
}

}  // namespace troupe::io
