#include "troupe/actors/operations/cache_leases.hpp"

#include <algorithm>
#include <utility>

#include "troupe/actors/messages/member_list.hpp"

namespace troupe::actors {

// -- holds

void cache_leases::hold(operation_id id, const std::string& peer, time_point now, mark placed) {
  auto& of = operations_[id];
  if (std::ranges::find(of.claims, peer, &claim::peer) != of.claims.end()) return;
  auto& one = of.claims.emplace_back(claim{peer, {}, {}, {}, now, placed, false});
  bind_if_shown(id, one, now);
  update_lease_for_anyone(id, of, now);
}

void cache_leases::meet(operation_id id, transfer_id session, const std::string& peer,
                        incarnation life, time_point now) {
  auto& of = operations_[id];
  auto one = std::ranges::find_if(
      of.claims, [&](const claim& h) { return h.peer == peer && h.session == transfer_id{}; });
  if (one == of.claims.end()) {
    one = of.claims.insert(one, claim{peer, {}, {}, {}, now, {}, false});
  }
  one->session = session;
  if (one->of != life) {
    give_back(*one);
    bind(id, *one, life, now);
  }
  update_lease_for_anyone(id, of, now);
}

void cache_leases::keep(operation_id id, transfer_id word, const std::string& peer,
                        incarnation life, time_point now) {
  auto& of = operations_[id];
  auto& one = of.claims.emplace_back(claim{.peer = peer, .session = word, .since = now});
  one.kept = true;
  bind(id, one, life, now);
  update_lease_for_anyone(id, of, now);
}

void cache_leases::leave(operation_id id, transfer_id session, time_point now) {
  const auto of = operations_.find(id);
  if (of == operations_.end()) return;
  std::erase_if(of->second.claims, [&](claim& h) {
    if (h.session != session) return false;
    give_back(h);
    return true;
  });
  update_lease_for_anyone(id, of->second, now);
}

void cache_leases::sealed(operation_id id, time_point now) {
  auto& of = operations_[id];
  of.sealed = true;
  update_lease_for_anyone(id, of, now);
}

void cache_leases::end(operation_id id) {
  const auto of = operations_.find(id);
  if (of == operations_.end()) return;
  for (auto& one : of->second.claims) give_back(one);
  of->second.claims.clear();
  of->second.sealed = false;
  update_lease_for_anyone(id, of->second, last_beat_);
  operations_.erase(of);
}

// -- which nodes live

std::vector<cache_leases::lapse> cache_leases::see(std::shared_ptr<const membership> members,
                                                   time_point now) {
  const bool is_news = members->supervisor_incarnation != members_->supervisor_incarnation ||
                       members->epoch > members_->epoch;
  if (is_news) doubted_.clear();
  members_ = std::move(members);
  by_name_.clear();
  for (const auto& m : members_->members) by_name_.emplace(m.node.name, &m);
  std::vector<lapse> lapses;
  review(now, lapses);
  return lapses;
}

std::vector<cache_leases::lapse> cache_leases::answered(mark supervisor, time_point asked,
                                                        time_point now) {
  for (auto& [id, of] : operations_) {
    for (auto& one : of.claims) {
      const bool known =
          one.certain || one.placed.supervisor_incarnation == supervisor.supervisor_incarnation;
      if (!known && one.since <= asked) one.placed = supervisor;
    }
  }
  std::vector<lapse> lapses;
  review(now, lapses);
  return lapses;
}

void cache_leases::linked(incarnation life) {
  linked_.insert(life);
  doubted_.erase(life);
}

void cache_leases::unlinked(incarnation life) {
  if (linked_.erase(life) == 0) return;
  // Also while it holds nothing, as it may hold something before the next news. Lives that are not
  // shown are not believed anyway.
  const bool shown = std::ranges::any_of(
      members_->members, [&](const member& m) { return m.node.incarnation == life.value; });
  if (shown) doubted_.insert(life);
}

std::vector<cache_leases::lapse> cache_leases::beat(time_point now, news of) {
  const auto before = std::exchange(lease_time_, clock(now));
  last_beat_ = now;
  std::vector<lapse> lapses;
  review(now, lapses);
  for (const auto& [id, one] : lives_) {
    if (judge(id, one, of) != standing::lives) continue;
    // Also revives a lease that ran out since the last beat: its holder was shown or linked
    // meanwhile.
    table_.renew_all(id, before, lease_time_ - before + options_.length);
  }
  collect(now, lapses);
  return lapses;
}

// -- properties

std::size_t cache_leases::waiting(operation_id id) const {
  const auto of = operations_.find(id);
  if (of == operations_.end()) return 0;
  const auto& claims = of->second.claims;
  const auto is_held_anyway = [&](const std::string& peer) {
    return std::ranges::any_of(claims, [&](const claim& h) { return h.peer == peer && !h.kept; });
  };
  return static_cast<std::size_t>(std::ranges::count_if(claims, [&](const claim& h) {
    if (h.of == incarnation{}) return false;
    return h.kept ? h.lease != kvcache::lease_id{} && !is_held_anyway(h.peer)
                  : h.session == transfer_id{};
  }));
}

cache_leases::duration cache_leases::beat_period(duration heartbeat) const {
  return std::min(heartbeat, options_.length / 4);
}

// -- inside

/// Lease time: the time that leases run by.
time_point cache_leases::clock(time_point now) const {
  return lease_time_ + std::clamp(now - last_beat_, duration::zero(), options_.length / 2);
}

const member* cache_leases::member_of(const std::string& peer) const {
  const auto found = by_name_.find(peer);
  return found == by_name_.end() ? nullptr : found->second;
}

std::string cache_leases::reason_of(const std::string& peer) const {
  const auto* m = member_of(peer);
  return m == nullptr ? std::string{} : m->reason;
}

cache_leases::standing cache_leases::judge(incarnation id, const living& one, news of) const {
  const auto* m = member_of(one.peer);
  if (m != nullptr && m->node.incarnation == id.value) {
    if (is_lost(*m)) return standing::down;
    const bool doubtful = of == news::old && doubted_.contains(id);
    return doubtful ? standing::unknown : standing::lives;
  }
  // A new supervisor may have restored its predecessor's record; the same supervisor only moves on.
  const bool later = one.shown.supervisor_incarnation == members_->supervisor_incarnation &&
                     one.shown.epoch <= members_->epoch && one.shown.epoch != 0;
  if (later && m != nullptr) return standing::replaced;
  if (later && is_open_name(one.peer)) return standing::down;  // it joined, and was forgotten
  return linked_.contains(id) ? standing::lives : standing::unknown;
}

/// Whether the present membership is as new as what the caller who named the peer went by.
bool cache_leases::news_count(const claim& one) const {
  return one.placed.supervisor_incarnation != 0 &&
         one.placed.supervisor_incarnation == members_->supervisor_incarnation &&
         members_->epoch >= one.placed.epoch;
}

/// Whether the membership's entry says which life was meant. A `joining` entry may be what the
/// supervisor remembers from before its restart, without the lives that its predecessor last
/// admitted.
bool cache_leases::proves(const member& shown, const claim& one) const {
  return news_count(one) && node_state_from(shown.state) != node_state::joining;
}

/// Confirms which life was meant, as soon as news that count show the peer. Returns false if it is
/// not the life that the hold was bound to; the hold is then unseen again.
bool cache_leases::makes_certain(claim& one) {
  const auto* m = member_of(one.peer);
  if (one.certain || one.of == incarnation{} || m == nullptr || !proves(*m, one)) return true;
  // Admitted by the time that the peer was named; or before the restart of a supervisor that forgot
  // this life, remembers the one before it, and now admits it again.
  const bool was_there = m->registered <= one.placed.epoch ||
                         lives_.at(one.of).taken_in_by != members_->supervisor_incarnation;
  const bool another = m->node.incarnation != one.of.value && was_there;
  if (another) {
    give_back(one);
  } else {
    one.certain = true;
  }
  return !another;
}

kvcache::lease_id cache_leases::lease_for(operation_id id, incarnation holder, time_point now) {
  const kvcache::lease_id lease{++last_lease_};
  // It cannot fail: the id is new, no life is 0, and a length is positive.
  if (!table_.grant(lease, holder, clock(now), options_.length)) return {};
  operation_of_.emplace(lease, id);
  return lease;
}

void cache_leases::give_back(claim& from) {
  if (from.lease != kvcache::lease_id{}) {
    (void)table_.end(from.lease, from.of);
    operation_of_.erase(from.lease);
    forget_life(from.of);
  }
  from.lease = {};
  from.of = {};
  from.certain = false;
}

/// Removes one hold of that life.
void cache_leases::forget_life(incarnation id) {
  const auto one = lives_.find(id);
  if (one == lives_.end() || --one->second.holds > 0) return;
  lives_.erase(one);
}

void cache_leases::bind(operation_id id, claim& to, incarnation to_life, time_point now) {
  to.lease = lease_for(id, to_life, now);
  if (to.lease == kvcache::lease_id{}) return;
  to.of = to_life;
  auto& one = lives_[to_life];
  one.peer = to.peer;
  ++one.holds;
  note_shown(one, to_life);
}

void cache_leases::note_shown(living& one, incarnation id) const {
  const auto* m = member_of(one.peer);
  if (m == nullptr || m->node.incarnation != id.value) return;
  one.shown = {members_->supervisor_incarnation, members_->epoch};
  if (node_state_from(m->state) != node_state::joining)
    one.taken_in_by = members_->supervisor_incarnation;
}

/// Makes an unseen hold waiting, if a life with its name lives.
void cache_leases::bind_if_shown(operation_id id, claim& to, time_point now) {
  const auto* m = member_of(to.peer);
  if (m == nullptr || m->node.incarnation == 0 || is_lost(*m)) return;
  bind(id, to, incarnation{m->node.incarnation}, now);
  to.certain = proves(*m, to);
}

/// Starts or ends the lease for anyone: it runs while the source is sealed and no taker is known.
void cache_leases::update_lease_for_anyone(operation_id id, held& of, time_point now) {
  const bool known = std::ranges::any_of(of.claims, [](const claim& h) {
    return h.of != incarnation{} || h.session != transfer_id{};
  });
  const bool wanted = of.sealed && !known;
  const bool runs = of.for_anyone != kvcache::lease_id{};
  if (wanted && !runs) {
    of.for_anyone = lease_for(id, options_.self, now);
    of.alone_since = now;
  } else if (!wanted && runs) {
    (void)table_.end(of.for_anyone, options_.self);
    operation_of_.erase(of.for_anyone);
    of.for_anyone = {};
  }
}

/// A life is dead: ends all its leases.
void cache_leases::bury(incarnation id, standing how, time_point now, std::vector<lapse>& lapses) {
  for (const auto lease : table_.end_holder(id)) {
    const auto operation = operation_of_.at(lease);
    operation_of_.erase(lease);
    auto& of = operations_.at(operation);
    const auto one = std::ranges::find(of.claims, lease, &claim::lease);
    if (one == of.claims.end()) {  // a lease for anyone: held by this node's own life
      of.for_anyone = {};
      continue;
    }
    one->lease = {};
    forget_life(id);
    if (one->session != transfer_id{}) continue;
    one->of = {};
    if (std::exchange(one->certain, false)) {
      lapses.push_back({operation,
                        how == standing::down ? cause::down : cause::replaced,
                        one->peer,
                        how == standing::down ? reason_of(one->peer) : "",
                        {},
                        {}});
      of.claims.erase(one);
    }
    update_lease_for_anyone(operation, of, now);
  }
}

/// Applies the membership to the lives that hold something, or shall.
void cache_leases::review(time_point now, std::vector<lapse>& lapses) {
  for (auto& [id, of] : operations_) {
    for (auto& one : of.claims) {
      if (one.session == transfer_id{} && !makes_certain(one)) update_lease_for_anyone(id, of, now);
    }
  }
  for (auto next = lives_.begin(); next != lives_.end();) {
    const auto id = next->first;
    auto& one = next->second;
    ++next;  // `bury` erases the entry of a dead life
    note_shown(one, id);
    const auto how = judge(id, one, news::current);
    if (how == standing::down || how == standing::replaced) bury(id, how, now, lapses);
  }
  for (auto& [id, of] : operations_) {
    const auto before = of.claims.size();
    bool bound = false;
    std::erase_if(of.claims, [&, id = id](claim& one) {
      if (one.of != incarnation{} || one.session != transfer_id{}) return false;
      bind_if_shown(id, one, now);
      if (one.of != incarnation{}) {
        bound = true;
        return false;
      }
      const auto* m = member_of(one.peer);
      if (m == nullptr || !is_lost(*m) || !news_count(one)) return false;
      lapses.push_back({id, cause::down, one.peer, m->reason, {}, {}});
      return true;
    });
    if (bound || of.claims.size() != before) update_lease_for_anyone(id, of, now);
  }
}

/// Collects the leases that were not renewed.
void cache_leases::collect(time_point now, std::vector<lapse>& lapses) {
  for (const auto lease : table_.expire(lease_time_)) {
    const auto operation = operation_of_.at(lease);
    operation_of_.erase(lease);
    auto& of = operations_.at(operation);
    if (of.for_anyone == lease) {
      of.for_anyone = {};
      lapses.push_back({operation, cause::unread, {}, {}, {}, now - of.alone_since});
      continue;
    }
    const auto one = std::ranges::find(of.claims, lease, &claim::lease);
    lapses.push_back({operation, cause::unheard, one->peer, {}, one->session, {}});
    one->lease = {};
    forget_life(one->of);
    if (one->session == transfer_id{}) of.claims.erase(one);
    update_lease_for_anyone(operation, of, now);
  }
}

}  // namespace troupe::actors
