#include "link.hpp"

#include <algorithm>
#include <utility>

#include "transfer.hpp"

namespace troupe::actors::cluster_simulation {

bool link::by_number::operator()(const std::shared_ptr<transfer>& a,
                                 const std::shared_ptr<transfer>& b) const {
  return a->number() < b->number();
}

link::link(world& in, life at_decode, life at_prefill, stage_of_things placed)
    : world_{in}, ends_{std::move(at_decode), std::move(at_prefill)}, placed_{placed} {
  world_.trace(ends_[decode]->info.name + " and " + ends_[prefill]->info.name + " have a link");
  for (const auto s : {decode, prefill}) {
    ends_[s]->leases.linked(incarnation{ends_[other(s)]->incarnation});
  }
}

bool link::moves_bytes(std::uint32_t generation) const {
  if (!world_.reach(ends_[decode]->node, ends_[prefill]->node)) return false;
  if (broken_ && world_.now() >= bytes_until_) return false;
  if (generation == generation_) return true;
  // An end that has seen the break has closed its lanes.
  const auto open = [&](side s) { return !gap_[s] && knows_[s] == generation; };
  return open(decode) && open(prefill) && world_.now() < former_until_;
}

void link::send(side from, std::function<void()> what) {
  if (broken_ || gap_[from]) return;
  auto& last = last_[from];
  last = std::max(last, world_.now() + world_.one_way());
  world_.time.at(last, [self = shared_from_this(), to = other(from), over = knows_[from],
                        what = std::move(what)] {
    if (self->broken_) return;
    auto& w = self->world_;
    if (!w.reach(self->ends_[decode]->node, self->ends_[prefill]->node)) {
      return self->breaks(milliseconds{1000});  // keepalives end it
    }
    w.in(self->ends_[to], [self, to, over, what] {
      if (self->arrives(to, over)) what();
    });
  });
}

// -- rebuilding

void link::breaks_and_returns() {
  const bool rebuilding = knows_[decode] != generation_ || knows_[prefill] != generation_;
  if (broken_ || rebuilding) return;
  const auto next = ++generation_;
  former_until_ = world_.now() + world_.between(microseconds{0}, milliseconds{20});
  auto seen = world_.between(microseconds{100}, milliseconds{200});
  const auto first = world_.chance.one_in(2) ? decode : prefill;
  for (const auto s : {first, other(first)}) {
    world_.time.after(seen, [self = shared_from_this(), s, next] {
      self->world_.in(self->ends_[s], [self, s, next] { self->see_break(s, next); });
    });
    if (!world_.chance.one_in(3)) seen += world_.between(microseconds{0}, milliseconds{60});
  }
  // An end that stays frozen ends the link after a bounded time.
  world_.time.after(milliseconds{7000}, [self = shared_from_this(), next] {
    if (self->knows_[decode] != next || self->knows_[prefill] != next) {
      self->breaks(milliseconds{10});
    }
  });
}

void link::see_break(side s, std::uint32_t next) {
  if (broken_ || seen_[s]) return;
  gap_[s] = true;
  world_.trace(ends_[s]->info.name + " sees its link with " + ends_[other(s)]->info.name +
               " break");
  if (!gap_[other(s)]) return;
  const auto up = world_.between(milliseconds{1}, milliseconds{300});
  for (const auto each : {decode, prefill}) {
    world_.time.after(up + world_.between(microseconds{0}, milliseconds{10}),
                      [self = shared_from_this(), each, next] {
                        self->world_.in(self->ends_[each],
                                        [self, each, next] { self->come_back(each, next); });
                      });
  }
}

void link::come_back(side s, std::uint32_t next) {
  if (broken_ || seen_[s] || knows_[s] == next) return;
  knows_[s] = next;
  gap_[s] = false;
  world_.note(s == decode ? "decode's link is back" : "prefill's link is back", next);
  if (knows_[other(s)] == next) ++world_.told.rebuilds;
  for (const auto& who : std::deque{words_[s]}) who->resend_final_messages(s);
  for (const auto& who : std::set{attached_[s]}) who->link_back(s, next);
}

/// Whether a frame arrives. A frame of the current link implies that the link is back; a frame of
/// the former one may still be read until this end has seen the break.
bool link::arrives(side to, std::uint32_t generation) {
  if (broken_) return false;
  if (generation == generation_) {
    come_back(to, generation);
    return true;
  }
  return generation == knows_[to] && !gap_[to] && world_.chance.one_in(2);
}

void link::remember(side s, const std::shared_ptr<transfer>& who) {
  words_[s].push_back(who);
  if (words_[s].size() > most_words) words_[s].pop_front();
}

// -- its end

void link::breaks(microseconds seen_within) {
  if (broken_) return;
  broken_ = true;
  bytes_until_ = world_.now() + world_.between(microseconds{0}, milliseconds{20});
  for (const auto s : {decode, prefill}) {
    world_.time.after(world_.between(microseconds{100}, seen_within),
                      [self = shared_from_this(), s] {
                        self->world_.in(self->ends_[s], [self, s] {
                          self->see(s, {errc::peer_lost, "the link has broken"});
                        });
                      });
  }
}

void link::left_by_peer(const life& at) {
  see(at == ends_[decode] ? decode : prefill, {errc::peer_lost, "the membership says it is down"});
  breaks(milliseconds{10});
}

void link::see(side s, const error& why) {
  if (std::exchange(seen_[s], true)) return;
  world_.trace(ends_[s]->info.name + " sees its link with " + ends_[other(s)]->info.name + " end");
  ends_[s]->links.erase(ends_[other(s)]->incarnation);
  ends_[s]->leases.unlinked(incarnation{ends_[other(s)]->incarnation});
  for (const auto& who : std::exchange(attached_[s], {})) who->link_lost(s, why);
}

}  // namespace troupe::actors::cluster_simulation
