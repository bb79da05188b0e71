#include "transfer.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <variant>

namespace troupe::actors::cluster_simulation {

namespace {

constexpr milliseconds time_to_end{5000};
constexpr milliseconds time_to_connect{2000};

}  // namespace

transfer::transfer(world& in, std::uint64_t number, placement where, stage_of_things placed,
                   outcome_told told)
    : world_{in},
      number_{number},
      where_{std::move(where)},
      placed_{placed},
      told_{std::move(told)},
      mode_{in.chance.one_in(2) ? transfer_mode::write : transfer_mode::read},
      tokens_{1 + in.chance.upto(most_tokens - 1)} {
  for (const auto s : {decode, prefill}) {
    ends_[s].at = in.life_of(*in.number_of(placed_on(s).name));
  }
}

// -- the engines

void transfer::begin(side s) {
  auto& e = ends_[s];
  if (e.at->incarnation != placed_on(s).incarnation) {
    // The caller names the life that was placed.
    return told_(s, error{errc::stale_incarnation, "another life of that node"});
  }
  if (!e.at->failure.empty()) {
    return told_(s, error{errc::aborted, "its engine can serve nobody"});
  }
  e.begun = true;
  e.at->busy_with.emplace_back(shared_from_this(), s);
  e.deadline = world_.clock_of(*e.at) + time_to_end;
  expire_after(s, time_to_end);
  want_blocks(s);
}

void transfer::abort_session(side s) {
  auto& e = ends_[s];
  if (gone(s) || !e.begun || e.outcomes > 0) return;
  const error why{errc::aborted, "the frontend gave it up"};
  if (s == decode && receiver_) return carry_out(s, receiver_->local_abort(why));
  if (s == prefill && sender_) return carry_out(s, sender_->local_abort(why));
  conclude_side(s, why);
  unpin(s);
}

void transfer::expire_after(side s, microseconds time) {
  world_.time.after(time, [self = shared_from_this(), s] {
    self->world_.in(self->ends_[s].at, [self, s] { self->expire(s); });
  });
}

void transfer::expire(side s) {
  auto& e = ends_[s];
  if (gone(s)) return;
  const auto now = world_.clock_of(*e.at);
  if (now < e.deadline) {
    return expire_after(s, std::chrono::ceil<microseconds>(e.deadline - now));
  }
  if (s == decode && receiver_) {
    carry_out(s, receiver_->expire(now));
  } else if (s == prefill && sender_) {
    carry_out(s, sender_->expire(now));
  } else if (e.outcomes == 0) {
    conclude_side(s, error{errc::deadline, "nobody came"});
    unpin(s);
  }
  world_.require(e.outcomes == 1, "the deadline passed without an outcome");
}

// -- blocks

void transfer::want_blocks(side s) {
  auto& pool = ends_[s].at->pool;
  const auto count = (tokens_ + block_tokens - 1) / block_tokens;
  if (auto given = pool.allocate(count)) return have_blocks(s, std::move(given));
  const auto waiter = pool.wait(count, ends_[s].deadline);
  if (!waiter) return have_blocks(s, fail(waiter.error()));
  ends_[s].at->waiters[*waiter] = [self = shared_from_this(),
                                   s](result<kvcache::allocation> given) {
    self->have_blocks(s, std::move(given));
  };
}

void transfer::have_blocks(side s, result<kvcache::allocation> given) {
  auto& e = ends_[s];
  if (!given) {
    if (e.outcomes > 0) return;
    conclude_side(s, given.error());
    return unpin(s);
  }
  e.blocks = *std::move(given);
  for (const auto block : e.blocks->blocks) e.at->holder[block.value] = number_;
  if (e.outcomes > 0) return free_blocks(s);  // aborted while it waited for blocks
  world_.require(e.at->pool.pin(e.blocks->owner, e.blocks->blocks).has_value(),
                 "blocks of one's own cannot be pinned");
  e.pinned = true;
  hold(s);
  s == decode ? want_link() : compute();
}

void transfer::free_blocks(side s) {
  auto& e = ends_[s];
  if (!e.blocks || std::exchange(e.freed, true)) return;
  world_.require(e.at->pool.free(e.blocks->owner, e.blocks->blocks).has_value(),
                 "an engine's blocks are not its own");
  world_.serve_pool(e.at);
}

void transfer::unpin(side s) {
  auto& e = ends_[s];
  world_.require(!e.unpinned, "unpinned twice");
  e.unpinned = true;
  if (!e.pinned) return;
  world_.require(e.at->pool.unpin(e.blocks->owner, e.blocks->blocks).has_value(),
                 "what was pinned cannot be unpinned");
  world_.serve_pool(e.at);
}

/// Bytes move now, from the source's blocks to the destination's: both must still belong to this
/// transfer.
void transfer::touch(const cache_slice& what) {
  for (const auto s : {decode, prefill}) {
    const auto& e = ends_[s];
    for (auto token = what.token_begin; token < what.token_end; ++token) {
      const auto block = e.blocks->blocks[token / block_tokens];
      world_.require(!e.reclaimed, "bytes are read from a source behind its reclaim");
      world_.require(e.at->holder[block.value] == number_,
                     s == decode ? "bytes land in a block of another request"
                                 : "bytes are read from a block of another request");
    }
  }
}

// -- decode

void transfer::want_link() {
  const auto& here = ends_[decode].at;
  const auto& there = ends_[prefill].at;
  const auto incarnation = placed_on(prefill).incarnation;
  if (const auto known = here->links.find(incarnation); known != here->links.end()) {
    return link_is_up(known->second);
  }
  const auto self = shared_from_this();
  const auto fails_after = [&](microseconds time, const char* why) {
    world_.time.after(time, [self, why] {
      self->world_.in(self->ends_[decode].at, [self, why] {
        if (self->link_ || self->ends_[decode].outcomes > 0) return;
        self->conclude_side(decode, error{errc::peer_lost, why});
        self->unpin(decode);
      });
    });
  };
  if (!world_.reach(here->node, there->node)) {
    return fails_after(time_to_connect, "it cannot be reached");
  }
  if (!there->alive || there->incarnation != incarnation) {
    return fails_after(world_.one_way() * 2, "nobody listens there");
  }
  fails_after(time_to_connect, "it does not answer");
  world_.time.after(world_.one_way(), [self, there, here] {
    self->world_.in(there, [self, there, here] {
      self->world_.time.after(self->world_.one_way(), [self, there, here] {
        self->world_.in(here, [self, there, here] {
          if (self->ends_[decode].outcomes > 0) return;
          auto& wire = here->links[there->incarnation];
          if (!wire) {
            wire = std::make_shared<link>(self->world_, here, there, self->placed_);
            self->world_.takes_apart([which = std::weak_ptr{wire}] {
              if (const auto one = which.lock()) one->take_apart();
            });
            there->links[here->incarnation] = wire;
            if (!there->alive) wire->breaks(milliseconds{5});
          }
          self->link_is_up(wire);
        });
      });
    });
  });
}

void transfer::link_is_up(const std::shared_ptr<link>& wire) {
  link_ = wire;
  link_->attach(decode, shared_from_this());
  transfer_request request;
  request.transfer = transfer_id{number_};
  request.request = where_.request;
  request.mode = mode_;
  request.token_end = tokens_;
  meet(decode);
  receiver_.emplace(receive_session::options{layers, 1, 2, false, ends_[decode].deadline}, request);
  carry_out(decode, receiver_->start());
}

// -- prefill

/// Computes chunk by chunk, all layers of a chunk in order.
void transfer::compute() {
  const auto self = shared_from_this();
  microseconds when{0};
  const auto step = 1 + world_.chance.upto(most_tokens / 2);
  for (std::uint32_t until = 0; until < tokens_;) {
    until = std::min(until + step, tokens_);
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      when += world_.between(microseconds{50}, milliseconds{4});
      world_.time.after(when, [self, layer, until] {
        self->world_.in(self->ends_[prefill].at, [self, layer, until] {
          // An engine learns of an outcome a moment later, and computes until then.
          if (self->computes_until_ && self->world_.now() > *self->computes_until_) return;
          self->ready_[layer] = until;
          if (!self->sender_ || self->ends_[prefill].unpinned) return;
          self->carry_out(prefill, self->sender_->source_ready(layer, layer + 1, until));
        });
      });
    }
  }
  world_.time.after(when, [self] {
    self->world_.in(self->ends_[prefill].at, [self] {
      if (self->ends_[prefill].outcomes > 0) return;
      self->sealed_ = true;
      auto& at = self->ends_[prefill].at;
      if (self->ends_[prefill].pinned) {
        at->leases.sealed(self->operation(prefill), self->world_.clock_of(*at));
      }
      if (self->sender_) self->carry_out(prefill, self->sender_->sealed(self->tokens_, {}));
    });
  });
  if (parked_) serve_request();
}

void transfer::request_came(const transfer_request& request, const std::shared_ptr<link>& wire) {
  auto& e = ends_[prefill];
  if (e.outcomes > 0) {
    const auto refusal = make_abort(request.transfer, {errc::not_found, "it has ended here"});
    return wire->send(prefill,
                      [self = shared_from_this(), refusal] { self->came(decode, refusal); });
  }
  asked_over_ = *wire->present(prefill);
  if (sender_) return ask_again(request);
  parked_ = request;
  if (e.pinned) serve_request();
}

/// The request is repeated because the link was rebuilt.
void transfer::ask_again(const transfer_request& request) {
  world_.require(request.progress.has_value(), "a transfer was asked for twice over one link");
  if (!last_words_[prefill].empty()) return resend_final_messages(prefill);
  if (ends_[prefill].unpinned) return world_.violate("it ended without a word to the other side");
  link_back(prefill, asked_over_);
  carry_out(prefill, sender_->asked_again(request));
}

void transfer::serve_request() {
  const auto request = *std::exchange(parked_, std::nullopt);
  if (link_->seen_broken(prefill)) return;
  held_since_ = asked_over_;
  meet(prefill);
  link_->attach(prefill, shared_from_this());
  sender_.emplace(send_session::options{layers, 1, 2, false, ends_[prefill].deadline});
  carry_out(prefill,
            sender_->start(request, ready_, sealed_ ? std::optional{tokens_} : std::nullopt, {}));
  // The link may have been rebuilt while the request waited.
  if (const auto now = link_->present(prefill); now && sender_) link_back(prefill, *now);
}

// -- both

void transfer::link_lost(side s, const error& why) {
  if (s == decode) return carry_out(s, receiver_->link_lost(why));
  if (sender_) carry_out(s, sender_->link_lost(why));
}

void transfer::link_back(side s, std::uint32_t generation) {
  if (s == decode) return carry_out(s, receiver_->link_back());
  if (!sender_ || std::exchange(held_since_, generation) == generation) return;
  carry_out(s, sender_->link_back());
}

void transfer::resend_final_messages(side s) {
  for (const auto& word : last_words_[s]) {
    link_->send(s, [self = shared_from_this(), to = other(s), word] { self->came(to, word); });
  }
}

void transfer::came(side to, const session_message& message) {
  if (to == prefill && std::holds_alternative<transfer_request>(message)) {
    return request_came(std::get<transfer_request>(message), link_);
  }
  if (link_->seen_broken(to) || (to == prefill && !sender_)) return;
  if (const auto* m = std::get_if<transfer_abort>(&message)) {
    const error why{m->code, m->reason};
    return carry_out(to, to == decode ? receiver_->peer_aborted(why) : sender_->peer_aborted(why));
  }
  if (std::holds_alternative<transfer_release>(message))
    return carry_out(to, sender_->peer_released());
  if (const auto* m = std::get_if<transfer_sealed>(&message))
    return carry_out(to, receiver_->sealed(*m));
  if (const auto* m = std::get_if<transfer_offer>(&message))
    return carry_out(to, receiver_->offered(*m));
  if (const auto* m = std::get_if<layers_landed>(&message))
    return carry_out(to, receiver_->landed(*m));
}

/// A sender's messages and posts belong to the link over which it was asked. Once that link is
/// rebuilt, the link's owner drops them until the sender has learned of it.
bool transfer::speaks_of_a_former_link(side s) const {
  return s == prefill && link_->present(prefill) != held_since_;
}

void transfer::carry_out(side s, const session_actions& actions) {
  auto& e = ends_[s];
  world_.require(!e.unpinned || actions.empty(), "something was done after the unpin");
  for (const auto& action : actions) {
    if (const auto* a = std::get_if<post_slice>(&action)) {
      post(s, *a);
    } else if (const auto* m = std::get_if<send_message>(&action)) {
      if (std::holds_alternative<transfer_abort>(m->message) ||
          std::holds_alternative<transfer_release>(m->message)) {
        last_words_[s].push_back(m->message);
        link_->remember(s, shared_from_this());
      }
      const bool last = !last_words_[s].empty();
      if (!last && speaks_of_a_former_link(s)) continue;
      link_->send(s, [self = shared_from_this(), to = other(s), message = m->message] {
        self->came(to, message);
      });
    } else if (const auto* o = std::get_if<send_offer>(&action)) {
      if (speaks_of_a_former_link(s)) continue;
      transfer_offer offer;
      offer.transfer = transfer_id{number_};
      offer.token_end = tokens_;
      offer.aux = o->aux;
      link_->send(s, [self = shared_from_this(), offer] { self->came(decode, offer); });
    } else if (std::holds_alternative<fence_transfer>(action)) {
      fence(s);
    } else if (const auto* t = std::get_if<tell_layers>(&action)) {
      for (auto layer = t->slice.layer_begin; layer < t->slice.layer_end; ++layer) {
        world_.require(told_layers_[layer] == t->slice.token_begin, "layers told out of order");
        told_layers_[layer] = t->slice.token_end;
        for (auto token = t->slice.token_begin; token < t->slice.token_end; ++token) {
          world_.require(landed_[layer][token], "a layer was told that is not there");
        }
      }
    } else if (const auto* c = std::get_if<conclude>(&action)) {
      conclude_side(s, c->failure);
      if (s == decode && !c->failure) {
        world_.time.after(microseconds{world_.between(microseconds{0}, microseconds{50})},
                          [self = shared_from_this()] {
                            if (self->ends_[decode].unpinned) return;
                            self->carry_out(decode, self->receiver_->received_whole());
                          });
      }
    } else {
      world_.require(e.quiescent || !e.fenced, "unpinned before it was quiescent");
      link_->detach(s, shared_from_this());
      unpin(s);
    }
  }
}

void transfer::conclude_side(side s, const std::optional<error>& why) {
  auto& e = ends_[s];
  world_.note(s == decode ? "decode concludes" : "prefill concludes", number_,
              why ? static_cast<std::uint64_t>(why->code) : 0);
  if (why) world_.trace("  since " + why->message);
  world_.require(++e.outcomes == 1, "a second outcome");
  world_.require(!why || (why->code != errc::out_of_range && why->code != errc::internal),
                 "one side takes what the other said for nonsense");
  e.failure = why;
  let_go(s);
  if (s == prefill) {
    computes_until_ = world_.now() + world_.between(microseconds{0}, milliseconds{8});
  }
  if (!why && s == decode) {
    for (const auto& layer : landed_) {
      for (std::uint32_t token = 0; token < tokens_; ++token) {
        world_.require(layer[token], "done, and not all is there");
      }
    }
  }
  told_(s, why);
  // A decode engine uses the blocks after success; in every other case they are no longer needed.
  const auto keeps =
      !why && s == decode ? world_.between(milliseconds{1}, milliseconds{40}) : microseconds{0};
  world_.time.after(keeps, [self = shared_from_this(), s] {
    self->world_.in(self->ends_[s].at, [self, s] { self->free_blocks(s); });
  });
}

// -- bytes

void transfer::post(side by, const post_slice& what) {
  world_.require(!ends_[by].fenced, "posted behind its own fence");
  world_.require(by == decode || asked_over_ >= held_since_,
                 "posted over a link that was made again before it was asked for again");
  const auto over = link_->present(by);
  batches_.push_back({what, by, over.value_or(0), asked_over_, false, std::nullopt});
  // Nothing of the batch moves; it is posted again over the next link.
  if (!over || speaks_of_a_former_link(by)) return;
  auto moving = world_.one_way();
  if (world_.chance.one_in(16)) moving += world_.between(microseconds{0}, milliseconds{30});
  world_.time.after(moving,
                    [self = shared_from_this(), i = batches_.size() - 1] { self->land(i); });
}

bool transfer::may_move(moved_batch& b) {
  if (gone(decode) || gone(prefill) || !link_->moves_bytes(b.over)) {
    b.failure = error{errc::link_broken, "the link broke"};
  } else if (b.by == prefill && b.granted != b.over) {
    b.failure = error{errc::grant_revoked, "its grants were of a link that broke"};
  } else if (ends_[b.by].shut) {
    b.failure = error{errc::aborted, "cancelled by the fence"};
  } else if (ends_[other(b.by)].shut) {
    ++world_.told.refused_late;
    b.failure = error{errc::grant_revoked, "the peer fenced the transfer"};
  } else {
    return true;
  }
  return false;
}

void transfer::land(std::size_t index) {
  auto& b = batches_[index];
  const auto self = shared_from_this();
  if (may_move(b)) {
    touch(b.what.slice);
    b.landed = true;
    for (auto layer = b.what.slice.layer_begin; layer < b.what.slice.layer_end; ++layer) {
      for (auto token = b.what.slice.token_begin; token < b.what.slice.token_end; ++token) {
        landed_[layer][token] = true;
      }
    }
    if (mode_ == transfer_mode::write) {
      const layers_landed notice{transfer_id{number_}, b.what.slice, b.what.state, b.what.seal};
      link_->send(prefill, [self, notice] { self->came(decode, notice); });
    }
    // A retransmission, which is possible until the fence.
    if (world_.chance.one_in(8)) {
      world_.time.after(world_.between(microseconds{0}, milliseconds{15}), [self, index] {
        auto copy = self->batches_[index];
        if (self->may_move(copy)) self->touch(copy.what.slice);
      });
    }
  }
  world_.time.after(world_.one_way(), [self, index] {
    const auto by = self->batches_[index].by;
    self->world_.in(self->ends_[by].at, [self, index] { self->complete(index); });
  });
}

void transfer::complete(std::size_t index) {
  const auto& b = batches_[index];
  // A batch over a link that was rebuilt reports nothing; a broken link is reported to this end
  // instead.
  if (link_->present(b.by) != b.over) return;
  const auto& why = b.failure;
  if (why && why->code == errc::link_broken && link_->is_made_again()) return;
  carry_out(b.by, b.by == decode ? receiver_->batch_completed(b.what.id, why)
                                 : sender_->batch_completed(b.what.id, why));
}

void transfer::fence(side s) {
  auto& e = ends_[s];
  world_.require(!e.fenced, "fenced twice");
  e.fenced = true;
  const auto self = shared_from_this();
  // The NIC refuses new bytes at once. Completion of the last ones is known later, and reported
  // when the process runs.
  const auto shut = world_.between(microseconds{0}, milliseconds{1});
  world_.time.after(shut, [self, s] { self->ends_[s].shut = true; });
  world_.time.after(shut + world_.between(microseconds{0}, milliseconds{3}), [self, s] {
    self->world_.in(self->ends_[s].at, [self, s] {
      self->ends_[s].quiescent = true;
      self->carry_out(s, s == decode ? self->receiver_->quiescent() : self->sender_->quiescent());
    });
  });
}

// -- the end

bool transfer::settled(side s) const {
  const auto& e = ends_[s];
  return gone(s) || !e.begun || (e.outcomes == 1 && e.unpinned && (!e.blocks || e.freed));
}

std::string transfer::standing() const {
  std::string out = "transfer " + std::to_string(number_);
  for (const auto s : {decode, prefill}) {
    const auto& e = ends_[s];
    out += std::string{s == decode ? ": decode " : ", prefill "} + e.at->info.name +
           (gone(s) ? " gone" : "") + (e.begun ? " begun" : "") + " outcomes " +
           std::to_string(e.outcomes) + (e.unpinned ? " unpinned" : "") + (e.freed ? " freed" : "");
  }
  return out;
}

}  // namespace troupe::actors::cluster_simulation
