#include "troupe/actors/values/value_client.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/runtime/ask_link.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

namespace {

using self_pointer = session_actor::stateful_pointer<value_client_state>;
using phase = value_client_state::phase;
using outcome_type = decltype(value_concluded::outcome);

/// Fences first: the peer must not read what the engine will reuse, nor a late read land in scratch
/// memory.
void end_with(self_pointer self, outcome_type outcome) {
  auto& st = self->state;
  if (st.now == phase::fencing) return;
  st.now = phase::fencing;
  st.outcome = std::move(outcome);
  ask_link(self, fence_now{st.transfer});
}

void end_with(self_pointer self, troupe::error why) {
  end_with(self, outcome_type{event_failed{std::move(why)}});
}

/// Tells the peer to hold nothing for us any longer, and to store nothing.
void let_go(self_pointer self) {
  const auto& st = self->state;
  if (st.order.verb == value_verb::put || st.order.verb == value_verb::get) {
    ask_link(self, say{store_release{st.transfer.value}, {}});
  }
}

/// Ends the operation unless it is too late for that.
void give_up(self_pointer self, troupe::error why) {
  auto& st = self->state;
  if (st.now == phase::fencing || st.now == phase::storing) return;
  let_go(self);
  end_with(self, std::move(why));
}

/// The error of a put whose `store_commit` was sent and not answered.
troupe::error in_doubt(const value_client_state& st, troupe::error why) {
  why.message += "; the last word of the put under key `" + st.order.key +
                 "` was not answered, so it is not known whether the value is stored";
  return why;
}

void store(self_pointer self) {
  ask_link(self, say{store_commit{self->state.transfer.value}, {}});
}

void tell_outcome(self_pointer self) {
  auto& st = self->state;
  if (!st.outcome) return;
  value_concluded said{st.order.operation, {}};
  said.outcome.swap(*st.outcome);
  st.outcome.reset();
  self->send(st.port, port_event{std::move(said)});
}

/// The outcome returns the value's memory to the caller: if the peer may read it, the fence comes
/// first.
void tell_failure(self_pointer self) {
  if (!self->state.lent) tell_outcome(self);
}

/// A grant on a copy of the value in memory that every peer reaches.
result<grant_wish> grant_on_copy(value_client_state& st) {
  const auto value = st.order.value;
  if (auto room = room_for_copy(*st.context, value.size())) {
    std::ranges::copy(value, room->bytes().begin());
    st.copy.emplace(std::move(*room));
    return grant_wish{
        st.context->value_copies->region(), {st.copy->where()}, transport::access::read};
  }
  auto& endpoint = *st.context->endpoint;
  const auto region = endpoint.allocate(value.size(), "copy for put " + st.order.key);
  if (!region) return fail(region.error());
  st.copy_apart = *region;
  const auto room = endpoint.bytes(*region);
  if (!room) return fail(room.error());
  std::ranges::copy(value, room->begin());
  return grant_wish{*region, {{0, value.size(), 0, 1}}, transport::access::read};
}

/// A grant on the value itself, which is registered for the time of the put unless it is already.
result<grant_wish> grant_on_value(value_client_state& st) {
  const auto value = st.order.value;
  auto& endpoint = *st.context->endpoint;
  auto known = st.context->regions;
  if (st.context->values) known.push_back(st.context->values->region());
  for (const auto region : known) {
    const auto bytes = endpoint.bytes(region);
    if (!bytes || value.data() < bytes->data() ||
        value.data() + value.size() > bytes->data() + bytes->size()) {
      continue;
    }
    const auto offset = static_cast<std::uint64_t>(value.data() - bytes->data());
    st.lent = st.order.pinned.empty();
    return grant_wish{region, {{offset, value.size(), 0, 1}}, transport::access::read};
  }
  auto registered = register_value(*st.context, value, st.order.key);
  if (!registered) {
    // Memory that overlaps another put's cannot be registered beside it.
    if (registered.error().code == errc::already_exists) return grant_on_copy(st);
    return fail(registered.error());
  }
  st.registered = registered->region;
  st.lent = !st.order.copy;
  return grant_wish{
      registered->region, {{registered->offset, value.size(), 0, 1}}, transport::access::read};
}

void ask(self_pointer self) {
  auto& st = self->state;
  switch (st.order.verb) {
    case value_verb::put: {
      const lent_memory::read reading{st.context->lent};
      if (!reading) {
        end_with(self, lent_memory::refusal());
        return;
      }
      store_put put{st.transfer.value, st.order.key, st.order.value.size(),
                    st.order.ttl_ms,   {},           {}};
      if (st.order.value.size() <= max_inline) {
        put.value.assign(st.order.value.begin(), st.order.value.end());
        ask_link(self, say{std::move(put), {}});
        return;
      }
      if (!st.wish) {
        auto wish = must_copy(st.order, st.link) ? grant_on_copy(st) : grant_on_value(st);
        if (!wish) {
          end_with(self, wish.error());
          return;
        }
        st.wish = std::move(*wish);
      }
      ask_link(self, say{std::move(put), {*st.wish}});
      return;
    }
    case value_verb::get:
      ask_link(self, say{store_get{st.transfer.value, st.order.key, UINT64_MAX}, {}});
      return;
    case value_verb::query:
      ask_link(self, say{store_query{st.transfer.value, st.order.key}, {}});
      return;
    case value_verb::remove:
      ask_link(self, say{store_remove{st.transfer.value, st.order.key}, {}});
      return;
  }
}

void read_value(self_pointer self, store_reply& reply) {
  auto& st = self->state;
  if (!st.context->values) {
    give_up(self, {errc::pool_exhausted, "this node has no memory for keyed values to read into"});
    return;
  }
  auto room = st.context->values->scratch(reply.size);
  if (!room) {
    give_up(self, room.error());
    return;
  }
  st.scratch.emplace(std::move(*room));
  const auto& from = reply.source->permitted.extents().front();
  transport::batch read;
  read.id = transport::batch_id{1};
  read.transfer = st.transfer;
  read.dir = transport::direction::read;
  const segment all{st.scratch->where().offset, from.offset, reply.size, 0, 0, 1};
  read.pieces.push_back({st.context->values->region(),
                         std::make_shared<const transport::remote_grant>(std::move(*reply.source)),
                         {all}});
  st.now = phase::reading;
  ask_link(self, post_batch{std::move(read)});
}

void got_value(self_pointer self, store_reply& reply) {
  if (reply.source && !reply.source->permitted.extents().empty()) {
    if (reply.source->permitted.extents().front().length < reply.size) {
      give_up(self, {errc::out_of_range, "the grant of the value covers less than its size"});
      return;
    }
    read_value(self, reply);
    return;
  }
  auto owned = std::make_shared<const std::vector<std::byte>>(std::move(reply.value));
  end_with(self, outcome_type{event_value{{{owned->data(), owned->size()}, owned}}});
}

void on_session_message(self_pointer self, session_message& message) {
  auto& st = self->state;
  if (st.now != phase::asked && st.now != phase::storing) return;
  if (std::holds_alternative<store_held>(message) && st.order.verb == value_verb::put) {
    st.said_again = st.now == phase::storing;
    st.now = phase::storing;
    store(self);
    return;
  }
  if (const auto* crashed = std::get_if<transfer_abort>(&message); crashed != nullptr) {
    troupe::error why{crashed->code, crashed->reason};
    end_with(self, st.now == phase::storing ? in_doubt(st, std::move(why)) : std::move(why));
    return;
  }
  auto* reply = std::get_if<store_reply>(&message);
  if (reply == nullptr) return;
  if (reply->failed != 0) {
    end_with(self, refusal(*reply));
    return;
  }
  switch (st.order.verb) {
    case value_verb::put:
      if (st.now != phase::storing) return;  // no store_commit was sent yet
      let_go(self);
      end_with(self, outcome_type{event_done{{}, st.order.value.size()}});
      return;
    case value_verb::remove: end_with(self, outcome_type{event_done{}}); return;
    case value_verb::query:
      end_with(self,
               outcome_type{event_info{reply->size, std::chrono::milliseconds{reply->ttl_ms}}});
      return;
    case value_verb::get: got_value(self, *reply); return;
  }
}

void on_completion(self_pointer self, transport::completion& done) {
  auto& st = self->state;
  if (st.now != phase::reading) return;
  // The peer's end of the link broke before ours, or the peer is ending: the link reports which.
  if (done.failure && done.failure->code == errc::grant_revoked) return;
  if (done.failure) {
    give_up(self, std::move(*done.failure));
    return;
  }
  ask_link(self, say{store_release{st.transfer.value}, {}});
  auto kept = std::make_shared<const value_store::reservation>(std::move(*st.scratch));
  st.scratch.reset();
  const auto bytes = kept->bytes();
  end_with(self, outcome_type{event_value{{bytes, std::move(kept)}}});
}

void on_transfer_fenced(self_pointer self) {
  auto& st = self->state;
  if (st.now != phase::fencing) return;
  if (st.registered) (void)unregister_value(*st.context, *st.registered);
  if (st.copy_apart) (void)st.context->endpoint->deregister(*st.copy_apart);
  ask_link(self, detach_session{st.transfer});
  tell_outcome(self);
  self->send(st.port, port_event{session_unpinned{st.transfer}});
  self->quit();
}

void on_link_is_lost(self_pointer self, link_is_lost& lost) {
  auto& st = self->state;
  const bool doubtful = st.now == phase::storing;
  end_with(self, doubtful ? in_doubt(st, std::move(lost.why)) : std::move(lost.why));
  tell_failure(self);
}
/// Asks again with a copy. The grant on the value itself ended with the link, or was never sent.
void grant_copy_instead(self_pointer self) {
  auto& st = self->state;
  const lent_memory::read reading{st.context->lent};
  if (!reading) {
    give_up(self, lent_memory::refusal());
    return;
  }
  auto wish = grant_on_copy(st);
  if (!wish) {
    give_up(self, wish.error());
    return;
  }
  st.wish = std::move(*wish);
  st.lent = false;
  ask(self);
}

void on_link_is_back(self_pointer self, link_is_back& back) {
  auto& st = self->state;
  if (back.epoch <= st.link.epoch) return;
  st.link.epoch = back.epoch;
  st.link.backend = std::move(back.backend);
  if (st.now == phase::fencing) return;
  if (st.now == phase::storing) {
    st.said_again = true;
    store(self);
    return;
  }
  if (st.scratch) st.former_scratch.push_back(std::move(*st.scratch));
  st.scratch.reset();
  st.now = phase::asked;
  if (st.lent && must_copy(st.order, st.link)) {
    grant_copy_instead(self);
  } else {
    ask(self);
  }
}
/// Continues a put with a copy if the peer does not reach the value itself: over `shm`, memory that
/// the endpoint has not allocated, of a process that the peer may not trace. Returns whether it
/// does so.
bool asks_with_copy(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  if (st.now != phase::asked || !st.wish || st.copy || st.copy_apart ||
      why.code != errc::backend_unavailable) {
    return false;
  }
  grant_copy_instead(self);
  return true;
}

void on_abort_session(self_pointer self, abort_session& abort) {
  auto& st = self->state;
  if (asks_with_copy(self, abort.why)) return;
  // The link could not take the put's store_commit, so the peer has not had it, unless this one was
  // a repetition.
  if (st.now == phase::storing && abort.why.code != errc::aborted && !st.said_again) {
    st.now = phase::asked;
  }
  give_up(self, std::move(abort.why));
  tell_failure(self);
}
void on_deadline_reached(self_pointer self) {
  auto& st = self->state;
  troupe::error why{errc::deadline,
                    st.link.peer + " did not answer for key `" + st.order.key + "` in time"};
  if (st.now == phase::storing) {
    end_with(self, in_doubt(st, std::move(why)));
  } else {
    give_up(self, std::move(why));
  }
  tell_failure(self);
}

}  // namespace

bool must_copy(const start_value& order, const link_handle& link) {
  const bool callers = order.pinned.empty() && !order.copy;
  const bool reaches_in = link.backend == "shm" || link.backend == "xgmi";
  return order.verb == value_verb::put && order.value.size() > max_inline && callers && reaches_in;
}

session_actor::behavior_type value_client(session_actor::stateful_pointer<value_client_state> self,
                                          value_client_options options) {
  auto& st = self->state;
  st.context = std::move(options.context);
  st.port = std::move(options.port);
  st.link = std::move(options.link);
  st.transfer = options.transfer;
  st.order = std::move(options.order);
  ask_link(self, attach_session{st.transfer, caf::actor_cast<session_actor>(self)});
  ask(self);
  return {[self](session_event& event) {
    std::visit(overloaded{[self](session_message& x) { on_session_message(self, x); },
                          [self](transport::completion& x) { on_completion(self, x); },
                          [self](transfer_fenced&) { on_transfer_fenced(self); },
                          [self](link_is_lost& x) { on_link_is_lost(self, x); },
                          [self](link_is_back& x) { on_link_is_back(self, x); },
                          [](source_progress&) {}, [](source_blocks&) {}, [](source_sealed&) {},
                          [self](abort_session& x) { on_abort_session(self, x); },
                          [self](deadline_reached&) { on_deadline_reached(self); },
                          [](receive_is_whole&) {}},
               event.what);
  }};
}

decltype(value_concluded::outcome) value_here(node_context& context, const start_value& order) {
  if (!context.values) {
    return event_failed{{errc::not_found, "this node keeps no keyed values"}};
  }
  auto& values = *context.values;
  switch (order.verb) {
    case value_verb::put: {
      const lent_memory::read reading{context.lent};
      if (!reading) return event_failed{lent_memory::refusal()};
      auto done = values.put(order.key, order.value, std::chrono::milliseconds{order.ttl_ms});
      if (!done) return event_failed{done.error()};
      return event_done{{}, order.value.size()};
    }
    case value_verb::get: {
      auto value = values.get(order.key);
      if (!value) return event_failed{value.error()};
      return event_value{{value->bytes, value->pin}};
    }
    case value_verb::query: {
      auto info = values.query(order.key);
      if (!info) return event_failed{info.error()};
      return event_info{info->size, info->ttl};
    }
    case value_verb::remove: {
      auto gone = values.remove(order.key);
      if (!gone) return event_failed{gone.error()};
      return event_done{};
    }
  }
  return event_failed{{errc::internal, "no such operation"}};
}

}  // namespace troupe::actors
