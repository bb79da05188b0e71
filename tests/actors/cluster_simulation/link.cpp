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
    : world_{in}, ends_{std::move(at_decode), std::move(at_prefill)}, placed_{placed} {}

bool link::moves_bytes() const {
  if (!world_.reach(ends_[decode]->node, ends_[prefill]->node)) return false;
  return !broken_ || world_.now() < bytes_until_;
}

void link::send(side from, std::function<void()> what) {
  if (broken_) return;
  auto& last = last_[from];
  last = std::max(last, world_.now() + world_.one_way());
  world_.time.at(last, [self = shared_from_this(), to = other(from), what = std::move(what)] {
    if (self->broken_) return;
    auto& w = self->world_;
    if (!w.reach(self->ends_[decode]->node, self->ends_[prefill]->node)) {
      return self->breaks(milliseconds{1000});  // keepalives end it
    }
    w.in(self->ends_[to], what);
  });
}

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
  ends_[s]->links.erase(ends_[other(s)]->incarnation);
  for (const auto& who : std::exchange(attached_[s], {})) who->link_lost(s, why);
}

}  // namespace troupe::actors::cluster_simulation
