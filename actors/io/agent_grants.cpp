#include <algorithm>
#include <string>
#include <utility>

#include "troupe/io/agent_core.hpp"
#include "troupe/kvcache/or_error.hpp"

// Grants to memory: asked for, given, refused. A grant belongs to one link.

namespace troupe::io {

namespace {

/// The open question to the peer about this memory; null if there is none.
remote_agent::memory_grants* open_question(remote_agent& who, std::uint64_t memory) {
  const auto at = who.grants.find(memory);
  const bool open = at != who.grants.end() && at->second.asked && at->second.parts.empty();
  return open ? &at->second : nullptr;
}

/// An entry of a map, in no map yet. It is allocated now and gets its key and value later.
template <class Map>
typename Map::node_type unnamed_entry() {
  Map one;
  return one.extract(one.try_emplace(typename Map::key_type{}).first);
}

}  // namespace

// -- the end that asks

/// Whether all grants that the transfer needs are here. Adds the ones not yet asked for to `ask`.
/// Each answer calls this, so it goes on where the last call stopped.
bool agent_core::has_grants(remote_agent& who, agent_transfer& which, grant_questions& ask) {
  if (std::exchange(ask.link, who.link) != who.link) ask.memories.clear();
  const auto& needed = which.moves->remote_memories;
  auto& now = which.grants;
  if (now.epoch != who.grants_epoch) {
    for (const auto number : needed) who.grants.try_emplace(number);
    now = {.epoch = who.grants_epoch, .there = 0, .asked = 0};
  }
  const auto known = [&](std::size_t i) -> auto& {
    return who.grants.find(needed[i])->second;
  };
  while (now.there < needed.size() && !known(now.there).parts.empty()) ++now.there;
  if (now.there == needed.size()) return true;
  // Room first: a question that counts as asked is in `ask`.
  who.questions.reserve(max_grants_asked);
  ask.memories.reserve(ask.memories.size() + max_grants_asked - who.questions.size());
  const auto at = std::chrono::steady_clock::now();
  // A question beyond the limit is asked once an answer has come.
  for (; now.asked < needed.size() && who.questions.size() < max_grants_asked; ++now.asked) {
    auto& one = known(now.asked);
    if (std::exchange(one.asked, true)) continue;
    ask.memories.push_back(needed[now.asked]);
    who.questions.push_back({needed[now.asked], at});
  }
  return false;
}

/// Releases the lock meanwhile.
void agent_core::ask_for_grants(lock_type& lock, const peer_ptr& who, const grant_questions& ask) {
  // If that link is over, the questions are asked again on the next one.
  if (ask.memories.empty() || ask.link != who->link) return;
  const auto wire = wire_of(ask.link);
  if (!wire) return;
  lock.unlock();
  for (const auto number : ask.memories) {
    // The link is broken, or too full to take a question that transfers wait for.
    const auto sent = or_error("a grant is asked for", [&] {
      return wire->send_frame(encode_frame(grant_wanted{number}));
    });
    if (!sent) {
      loop_->post([this, link = ask.link, why = sent.error()] { link_went(link, why); });
      break;
    }
  }
  lock.lock();
  watch_questions(who);
}

// A peer that lives may leave questions unanswered, and no link breaks for that. It answers one
// after the other, so the wait for the oldest is limited; those behind it wait for their turn.

void agent_core::watch_questions(const peer_ptr& who) {
  if (who->questions.empty() || who->questions_watched) return;
  loop_->post([this, who] { look_at_questions(who); });
  who->questions_watched = true;
}

void agent_core::look_at_questions(const peer_ptr& who) {
  std::uint64_t link = 0;
  {
    const lock_type lock{mutex_};
    who->questions_watched = false;
    if (who->questions.empty()) return;
    const auto limit = bounded(options_.grant_timeout);
    const auto now = std::chrono::steady_clock::now();
    const auto due = std::max(who->questions.front().asked, who->answered_in_turn) + limit;
    if (now < due) {
      static_cast<void>(loop_->call_at(due, [this, who] { look_at_questions(who); }));
      who->questions_watched = true;
      return;
    }
    watch_questions(who);  // first: the reasons below may find no memory
    auto late = who->questions;
    std::erase_if(late, [&](const auto& one) { return now < one.asked + limit; });
    for (const auto& one : late) {
      refuse_waiting(who, {one.memory,
                           {errc::peer_unreachable,
                            "agent '" + who->known.name +
                                "' lives, but did not answer the request for a grant to its "
                                "memory " +
                                std::to_string(one.memory) + " within " +
                                std::to_string(limit.count()) + " ms (grant_timeout)"}});
    }
    link = who->link;
  }
  go_on_elsewhere(link, who);
}

/// The question is answered, or given up.
void agent_core::end_question(remote_agent& who, std::uint64_t memory) {
  const auto at = std::ranges::find(who.questions, memory, &remote_agent::grant_question::memory);
  if (at == who.questions.end()) return;
  if (at == who.questions.begin()) who.answered_in_turn = std::chrono::steady_clock::now();
  who.questions.erase(at);
}

void agent_core::on_grants(std::uint64_t link, const peer_ptr& who, grants said) {
  {
    const lock_type lock{mutex_};
    if (who->link != link) return;
    auto* const known = open_question(*who, said.memory);
    if (known == nullptr) return;
    for (auto& one : said.parts) {
      known->parts.push_back(std::make_shared<const transport::remote_grant>(std::move(one)));
    }
    end_question(*who, said.memory);
    who->failures = 0;
  }
  go_on_elsewhere(link, who);
}

void agent_core::on_grants_refused(std::uint64_t link, const peer_ptr& who, grants_refused said) {
  {
    const lock_type lock{mutex_};
    if (who->link != link || open_question(*who, said.memory) == nullptr) return;
    who->failures = 0;
    if (said.why.code == errc::backend_unavailable) {
      loop_->post([this, link, who, said = std::move(said)] { find_other_way(link, who, said); });
      return;
    }
    if (said.why.code == errc::grant_revoked) forget_memory(*who, said.memory);
    refuse_waiting(who, said);
  }
  go_on_elsewhere(link, who);
}

/// The backend of the link cannot reach a memory. Another backend may, but changing it ends the
/// link and every transfer in flight on it.
void agent_core::find_other_way(std::uint64_t link, const peer_ptr& who,
                                const grants_refused& said) {
  std::vector<transport::backend_kind> excluded;
  {
    const lock_type lock{mutex_};
    if (who->link != link || who->now != remote_agent::phase::up) return;
    excluded = who->excluded;
    excluded.push_back(who->kind);
  }
  const bool other = choose_backend(who->where, excluded).has_value();
  bool changes = false;
  {
    const lock_type lock{mutex_};
    if (who->link != link || who->now != remote_agent::phase::up) return;
    const auto uses = [link](const auto& one) { return one.second->link == link; };
    changes = other && std::ranges::none_of(runs_, uses);
    if (changes) {
      who->now = remote_agent::phase::linking;  // nothing more is posted on the old link
    } else {
      refuse_waiting(who, said);
    }
  }
  if (changes) {
    link_went(link, said.why);
  } else {
    go_on_elsewhere(link, who);
  }
}

/// Fails the transfers that wait for the grant. The next transfer asks again and may succeed.
void agent_core::refuse_waiting(const peer_ptr& who, const grants_refused& said) {
  if (open_question(*who, said.memory) == nullptr) return;
  who->grants.erase(said.memory);
  ++who->grants_epoch;
  end_question(*who, said.memory);
  for (const auto& one : std::exchange(who->waiting, {})) {
    if (one->at == agent_transfer::stage::waiting &&
        std::ranges::binary_search(one->moves->remote_memories, said.memory)) {
      refuse(*who, one, said.why);
    } else {
      who->waiting.push_back(one);
    }
  }
}

/// Continues on the work thread: a first post registers memory with devices, which would hold up a
/// progress thread.
void agent_core::go_on_elsewhere(std::uint64_t link, const peer_ptr& who) {
  work_->post([this, link, who] {
    lock_type lock{mutex_};
    if (who->link == link) go_on(lock, who);
  });
}

/// The owner has deregistered the memory, and memory numbers are never reused.
void agent_core::forget_memory(remote_agent& who, std::uint64_t number) {
  const auto at = who.memories.find(number);
  if (at == who.memories.end()) return;
  who.by_address.remove(number);
  std::erase(who.in_order, number);
  who.memories.erase(at);
}

// -- the end that grants

void agent_core::on_grant_wanted(std::uint64_t link, const peer_ptr& who, std::uint64_t memory) {
  const lock_type lock{mutex_};
  if (who->guest_link != link) return;
  if (who->granting.contains(memory)) return;  // the answer is on its way
  // A peer that has given up questions may ask others while those are still worked on.
  if (who->granting.size() >= 2 * max_grants_asked) {
    loop_->post([this, link] {
      link_went(link, {errc::overloaded, "the peer asks for more grants at once than it may"});
    });
    return;
  }
  who->granting.insert(memory);
  work_->post([this, link, memory] { grant_to(link, memory); });
}

/// On the work thread. A question that could not be answered ends the link: the peer asks again on
/// the next one.
void agent_core::grant_to(std::uint64_t link, std::uint64_t memory) {
  const auto answered =
      or_error("a question for grants is answered", [&] { find_answer(link, memory); });
  if (answered) return;
  loop_->post([this, link, why = answered.error()] { link_went(link, why); });
}

void agent_core::find_answer(std::uint64_t link, std::uint64_t memory) {
  link_ptr wire;
  described_memory what;
  std::optional<grants> given_before;
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at == links_.end()) return;
    wire = at->second.wire;
    auto& who = *at->second.of;
    const auto before = who.given.find(memory);
    if (who.guest_link == link && before != who.given.end()) {
      given_before = grants{.memory = memory, .parts = before->second};
      who.granting.erase(memory);
    }
    auto* own = memories_.find(memory_id{memory});
    if (!given_before && own != nullptr && !own->withdrawn) {
      what = own->what;
      ++own->busy;
    }
  }
  if (given_before) {
    answer_question(link, wire, *given_before);
    return;
  }
  grants made{.memory = memory, .parts = {}};
  std::optional<troupe::error> why;
  if (!what.parts.empty()) {
    std::vector<revoking_grants::node_type> room;
    const auto granted =
        or_error("memory is granted", [&] { return make_grants(link, wire, what, made, room); });
    if (granted && *granted) {
      answer_question(link, wire, made);
      return;
    }
    if (!granted) why = granted.error();
    take_back(link, wire, memory_id{memory}, made.parts, room);
  }
  {
    const lock_type lock{mutex_};
    const auto at = links_.find(link);
    if (at != links_.end() && at->second.of->guest_link == link) {
      at->second.of->granting.erase(memory);
    }
    const auto* const own = memories_.find(memory_id{memory});
    const bool there = own != nullptr && !own->withdrawn;
    if (!why && there) why = troupe::error{errc::link_broken, "the link is over"};
  }
  if (!why) {
    why = troupe::error{errc::grant_revoked, "memory " + std::to_string(memory) + " of agent '" +
                                                 options_.name +
                                                 "' was deregistered, or never registered"};
  }
  answer_question(link, wire, grants_refused{memory, std::move(*why)});
}

/// Grants all of the memory, in `made`. `room` receives at least as many entries as are granted.
/// Returns false if the grants are not kept.
result<bool> agent_core::make_grants(std::uint64_t link, const link_ptr& wire,
                                     const described_memory& what, grants& made,
                                     std::vector<revoking_grants::node_type>& room) {
  // Room first, so that whatever is granted can be taken back.
  made.parts.reserve(what.parts.size());
  room.reserve(what.parts.size());
  for (std::size_t i = 0; i < what.parts.size(); ++i)
    room.push_back(unnamed_entry<revoking_grants>());
  for (const auto& part : what.parts) {
    auto one = wire->grant(part.region, {{part.offset, part.length, 0, 1}}, what.rights,
                           transport::grant_scope::for_all_transfers());
    if (!one) return fail(std::move(one).error());
    made.parts.push_back(std::move(*one));
  }
  return keep_grants(link, what.number, made.parts);
}

/// Without an answer the peer would wait for ever, so a link that does not take the answer is
/// closed.
void agent_core::answer_question(std::uint64_t link, const link_ptr& wire,
                                 const link_frame& answer) {
  const auto sent = wire->send_frame(encode_frame(answer));
  if (sent) return;
  loop_->post([this, link, why = sent.error()] { link_went(link, why); });
}

/// Returns false if the memory or the link has gone meanwhile. Until the grants are kept, `busy`
/// makes `deregister` wait for them.
bool agent_core::keep_grants(std::uint64_t link, std::uint64_t memory,
                             const std::vector<transport::remote_grant>& given) {
  const lock_type lock{mutex_};
  auto* own = memories_.find(memory_id{memory});
  const auto at = links_.find(link);
  if (own == nullptr || own->withdrawn || at == links_.end()) return false;
  auto& who = *at->second.of;
  if (who.guest_link != link || !who.given.emplace(memory, given).second) return false;
  who.granting.erase(memory);
  --own->busy;
  wake_waiters();
  return true;
}

/// Revokes grants that were not sent to the peer, and ends this call's use of the memory. `room` has
/// an entry for each, so that this cannot fail.
void agent_core::take_back(std::uint64_t link, const link_ptr& wire, memory_id of,
                           const std::vector<transport::remote_grant>& given,
                           std::vector<revoking_grants::node_type>& room) {
  {
    const lock_type lock{mutex_};
    for (const auto& one : given) {
      auto entry = std::move(room.back());
      room.pop_back();
      entry.key() = {link, one.transfer.value};
      entry.mapped() = of;
      revoking_.insert(std::move(entry));
    }
  }
  for (const auto& one : given) revoke(link, wire, one);
  const lock_type lock{mutex_};
  if (auto* own = memories_.find(of)) --own->busy;
  wake_waiters();
}

}  // namespace troupe::io
