#include <algorithm>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_undo.hpp"

// The agents that this agent knows from descriptors and greetings.

namespace troupe::io {

namespace {

/// If memory runs out, a memory that was not known yet is known as a whole or not at all.
void learn(remote_agent& who, std::vector<described_memory> memories) {
  for (auto& one : memories) {
    const auto number = one.number;
    const auto known = who.memories.find(number);
    if (known != who.memories.end()) {
      if (known->second == one) continue;
      who.by_address.remove(number);
      who.by_address.add(one.address(), one.length(), number);
      known->second = std::move(one);
      continue;
    }
    const auto made = who.memories.emplace(number, std::move(one)).first;
    or_undo([&] { who.in_order.push_back(number); }, [&] { who.memories.erase(made); });
    or_undo([&] { who.by_address.add(made->second.address(), made->second.length(), number); },
            [&] {
              who.in_order.pop_back();
              who.memories.erase(made);
            });
  }
}

/// Whether two descriptors are of the same agent at the same address, whatever memory they name.
bool same_agent(const descriptor& a, const descriptor& b) {
  return a.life == b.life && a.token == b.token && a.host == b.host && a.port == b.port &&
         a.name == b.name;
}

}  // namespace

result<agent_core::peer_ptr> agent_core::find_peer(peer_id who) const {
  const auto at = peers_.find(who.value);
  if (at != peers_.end()) return at->second;
  return fail(errc::not_found, "there is no peer " + std::to_string(who.value) +
                                   "; it was never added, or was removed");
}

result<agent_core::peer_ptr> agent_core::take_in(descriptor said) {
  const bool is_self = said.life == life_;
  const auto known = by_life_.find(said.life.value);
  const auto& token = is_self                   ? token_
                      : known != by_life_.end() ? known->second->known.token
                                                : said.token;
  if (said.token != token) {
    return fail(errc::unauthorized, "the descriptor of agent '" + said.name +
                                        "' is forged: that life of an agent has another token");
  }
  if (known != by_life_.end()) {
    learn(*known->second, std::move(said.memories));
    return known->second;
  }
  if (peers_.size() >= options_.max_peers) forget_one_that_left();
  if (peers_.size() >= options_.max_peers) {
    return fail(errc::overloaded,
                std::to_string(peers_.size()) + " peers are known, the most; remove some first");
  }
  auto made = std::make_shared<remote_agent>();
  made->id = peer_id{++last_id_};
  made->is_self = is_self;
  made->account = notice_account{{options_.max_notices, options_.max_notice_bytes}};
  learn(*made, std::exchange(said.memories, {}));
  made->known = std::move(said);
  peers_.emplace(last_id_, made);
  by_life_.emplace(made->known.life.value, made);
  return made;
}

/// Whether the peer is known only from its greeting, and has left.
bool agent_core::has_left(const remote_agent& who) noexcept {
  return !who.added && !who.guest && who.guest_link == 0 && !who.wants_link() &&
         (who.now == remote_agent::phase::idle || who.now == remote_agent::phase::gone);
}

/// Forgets a peer that has left and has no notices unread.
void agent_core::forget_one_that_left() {
  const auto at = std::ranges::find_if(peers_, [](const auto& known) {
    return has_left(*known.second) && known.second->received == known.second->taken;
  });
  if (at != peers_.end()) forget(peer_ptr{at->second});
}

void agent_core::forget(const peer_ptr& who) {
  who->removed = true;
  peers_.erase(who->id.value);
  by_life_.erase(who->known.life.value);
  drop_event(who->loss_event);
  drop_event(who->notes_event);
  fail_waiting(who, removed_error(*who));
  static_cast<void>(drop_notes(*who));
  inbox_bytes_ -= who->received.bytes - who->taken.bytes;
  std::erase_if(inbox_, [&](const notice& one) { return one.life == who->id; });
  wake_waiters();
  loop_->post([this, who] { part_from(who); });
}

troupe::error agent_core::removed_error(const remote_agent& who) {
  return {errc::aborted, "agent '" + who.known.name + "' was removed"};
}

result<peer_id> agent_core::add_peer(std::span<const std::byte> bytes) {
  auto said = descriptor::decode(bytes);
  if (!said) return fail(std::move(said).error());
  const lock_type lock{mutex_};
  // A descriptor from the program overrides a greeting, in which anybody with a descriptor of ours
  // could have claimed the peer's life.
  if (const auto at = by_life_.find(said->life.value); at != by_life_.end()) {
    const auto greeted = at->second;
    if (!greeted->added && !greeted->is_self && !same_agent(greeted->known, *said)) forget(greeted);
  }
  const auto known = take_in(std::move(*said));
  if (!known) return fail(known.error());
  (*known)->added = true;
  return (*known)->id;
}

result<void> agent_core::remove_peer(peer_id who) {
  const lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  forget(peer_ptr{*found});
  return {};
}

/// On the loop's thread.
void agent_core::part_from(const peer_ptr& who) {
  const auto why = removed_error(*who);
  std::shared_ptr<control_channel> channel;
  std::shared_ptr<control_channel> guest;
  std::uint64_t link = 0;
  std::uint64_t guest_link = 0;
  {
    const lock_type lock{mutex_};
    who->now = remote_agent::phase::gone;
    who->last_error = why;
    channel = std::exchange(who->channel, nullptr);
    guest = std::exchange(who->guest, nullptr);
    link = std::exchange(who->link, 0);
    guest_link = who->guest_link;
  }
  if (channel) channel->close();
  if (guest) guest->close();
  std::erase_if(newcomers_, [&](const auto& one) { return one->who == who; });
  for (const auto one : {link, guest_link}) {
    if (one != 0) close_link(one, why);
  }
}

result<transport::backend_kind> agent_core::connect(peer_id who, std::chrono::milliseconds wait) {
  lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  const auto& peer = *found;
  using phase = remote_agent::phase;
  if (peer->is_self) {
    return fail(errc::invalid_config, "an agent reaches its own memory without a link");
  }
  const auto until = std::chrono::steady_clock::now() + bounded(wait);
  const auto failed = peer->failed;
  if (peer->now != phase::up && peer->now != phase::gone) {
    peer->connecting = true;
    lock.unlock();
    want_link(peer);
    lock.lock();
  }
  wait_until(lock, until, [&] {
    return peer->now == phase::up || peer->now == phase::gone || peer->failed != failed ||
           peer->removed;
  });
  if (peer->now == phase::up) return peer->kind;
  if (peer->removed) return fail(errc::aborted, "the peer was removed meanwhile");
  if ((peer->now == phase::gone || peer->failed != failed) && peer->last_error) {
    return fail(*peer->last_error);
  }
  return fail(errc::deadline,
              "there is no link to agent '" + peer->known.name + "' yet; it is still being made");
}

result<std::vector<agent::remote_memory>> agent_core::remote_memories(peer_id who) const {
  const lock_type lock{mutex_};
  const auto found = find_peer(who);
  if (!found) return fail(found.error());
  std::vector<remote_memory> all;
  for (const auto number : (*found)->in_order) {
    const auto& one = (*found)->memories.at(number);
    all.push_back(
        {.number = number, .address = one.address(), .length = one.length(), .rights = one.rights});
  }
  return all;
}

agent_report agent_core::report() const {
  std::vector<backend_report> backends;
  for (auto& one : place_->backends()) {
    backends.push_back({one.kind, one.state.usable, std::move(one.state.reason)});
  }
  const lock_type lock{mutex_};
  agent_report said{.name = options_.name,
                    .life = life_,
                    .host = options_.host,
                    .port = port_,
                    .data_port = place_->data_port(),
                    .memories = memories_.size(),
                    .plans = plans_.size(),
                    .transfers = transfers_.size(),
                    .active = runs_.size(),
                    .events = events_.size(),
                    .notices_dropped = notices_dropped_,
                    .backends = std::move(backends),
                    .peers = {}};
  for (const auto& [number, one] : peers_) {
    peer_report of{.who = one->id, .name = one->known.name, .life = one->known.life};
    if (one->now == remote_agent::phase::up) of.backend = one->kind;
    of.reason = one->reason;
    of.lost = one->last_error;
    of.links = one->links;
    of.notices_unread = one->received.notices - one->taken.notices;
    of.grants = one->grants.size();
    said.peers.push_back(std::move(of));
  }
  return said;
}

}  // namespace troupe::io
