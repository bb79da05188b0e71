#include "troupe/actors/values/value_client.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/values/value_regions.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

value_client::value_client(value_client_options options)
    : context_{std::move(options.context)},
      link_{std::move(options.link)},
      transfer_{options.transfer},
      order_{std::move(options.order)},
      memory_{std::make_shared<touched_memory>(context_, order_.copy)} {}

void value_client::touched_memory::release() noexcept {
  (void)or_error("", [this] {
    if (const auto region = std::exchange(registered, std::nullopt)) {
      (void)unregister_value(*context, *region);
    }
    if (const auto region = std::exchange(copy_apart, std::nullopt)) {
      (void)context->endpoint->deregister(*region);
    }
  });
  copy.reset();
  scratch.reset();
  former_scratch.clear();
}

void value_client::begin(session_surroundings& around) {
  around_ = &around;
  ask_link(*around_, link_, attach_session{transfer_, around_->this_session()});
  ask();
}

void value_client::handle(session_event& event) {
  std::visit(
      overloaded{[this](session_message& x) { on_session_message(x); },
                 [this](transport::completion& x) { on_completion(x); },
                 [this](transfer_fenced&) { on_transfer_fenced(); },
                 [this](link_is_lost& x) { on_link_is_lost(x); },
                 [this](link_is_back& x) { on_link_is_back(x); }, [](source_progress&) {},
                 [](source_blocks&) {}, [](source_sealed&) {},
                 [this](abort_session& x) { on_abort_session(x); },
                 [this](deadline_reached&) { on_deadline_reached(); }, [](receive_is_whole&) {}},
      event.what);
}

void value_client::end_with(outcome_type outcome) {
  if (phase_ == phase::fencing) return;
  phase_ = phase::fencing;
  outcome_ = std::move(outcome);
  ask_link(*around_, link_, fence_now{transfer_});
}

void value_client::end_with(troupe::error why) {
  end_with(outcome_type{event_failed{std::move(why)}});
}

void value_client::let_go() {
  if (order_.verb == value_verb::put || order_.verb == value_verb::get) {
    ask_link(*around_, link_, say{store_release{transfer_.value}, {}});
  }
}

void value_client::give_up(troupe::error why) {
  if (phase_ == phase::fencing || phase_ == phase::storing) return;
  let_go();
  end_with(std::move(why));
}

troupe::error value_client::in_doubt(troupe::error why) const {
  why.message += "; the last word of the put under key `" + order_.key +
                 "` was not answered, so it is not known whether the value is stored";
  return why;
}

void value_client::store() {
  ask_link(*around_, link_, say{store_commit{transfer_.value}, {}});
}

void value_client::tell_outcome() {
  if (!outcome_) return;
  value_concluded said{order_.operation, {}};
  said.outcome.swap(*outcome_);
  outcome_.reset();
  around_->tell_runner(runner_event{std::move(said)});
}

void value_client::tell_failure() {
  if (!lent_) tell_outcome();
}

result<grant_wish> value_client::grant_on_copy() {
  const auto value = order_.value;
  if (auto room = room_for_copy(*context_, value.size())) {
    std::ranges::copy(value, room->bytes().begin());
    memory_->copy.emplace(std::move(*room));
    return grant_wish{
        context_->value_copies->region(), {memory_->copy->where()}, transport::access::read};
  }
  auto& endpoint = *context_->endpoint;
  const auto region = endpoint.allocate(value.size(), "copy for put " + order_.key);
  if (!region) return fail(region.error());
  memory_->copy_apart = *region;
  const auto room = endpoint.bytes(*region);
  if (!room) return fail(room.error());
  std::ranges::copy(value, room->begin());
  return grant_wish{*region, {{0, value.size(), 0, 1}}, transport::access::read};
}

result<grant_wish> value_client::grant_on_value() {
  const auto value = order_.value;
  auto& endpoint = *context_->endpoint;
  auto known = context_->regions;
  if (context_->values) known.push_back(context_->values->region());
  for (const auto region : known) {
    const auto memory = endpoint.bytes(region);
    if (!memory || value.data() < memory->data() ||
        value.data() + value.size() > memory->data() + memory->size()) {
      continue;
    }
    const auto offset = static_cast<std::uint64_t>(value.data() - memory->data());
    lent_ = order_.pinned.empty();
    return grant_wish{region, {{offset, value.size(), 0, 1}}, transport::access::read};
  }
  auto registered = register_value(*context_, value, order_.key);
  if (!registered) {
    // Memory that overlaps another put's cannot be registered beside it.
    if (registered.error().code == errc::already_exists) return grant_on_copy();
    return fail(registered.error());
  }
  memory_->registered = registered->region;
  lent_ = !order_.copy;
  return grant_wish{
      registered->region, {{registered->offset, value.size(), 0, 1}}, transport::access::read};
}

void value_client::ask() {
  switch (order_.verb) {
    case value_verb::put: {
      const lent_memory::read reading{context_->lent};
      if (!reading) {
        end_with(lent_memory::refusal());
        return;
      }
      store_put put{transfer_.value, order_.key, order_.value.size(), order_.ttl_ms, {}, {}};
      if (order_.value.size() <= max_inline) {
        put.value.assign(order_.value.begin(), order_.value.end());
        ask_link(*around_, link_, say{std::move(put), {}});
        return;
      }
      if (!wish_) {
        auto wish = must_copy(order_, link_) ? grant_on_copy() : grant_on_value();
        if (!wish) {
          end_with(wish.error());
          return;
        }
        wish_ = std::move(*wish);
      }
      ask_link(*around_, link_, say{std::move(put), {*wish_}});
      return;
    }
    case value_verb::get:
      ask_link(*around_, link_, say{store_get{transfer_.value, order_.key, UINT64_MAX}, {}});
      return;
    case value_verb::query:
      ask_link(*around_, link_, say{store_query{transfer_.value, order_.key}, {}});
      return;
    case value_verb::remove:
      ask_link(*around_, link_, say{store_remove{transfer_.value, order_.key}, {}});
      return;
  }
}

void value_client::read_value(store_reply& reply) {
  if (!context_->values) {
    give_up({errc::pool_exhausted, "this node has no memory for keyed values to read into"});
    return;
  }
  auto room = context_->values->scratch(reply.size);
  if (!room) {
    give_up(room.error());
    return;
  }
  memory_->scratch.emplace(std::move(*room));
  const auto& from = reply.source->permitted.extents().front();
  transport::batch read;
  read.id = transport::batch_id{1};
  read.transfer = transfer_;
  read.dir = transport::direction::read;
  const segment all{memory_->scratch->where().offset, from.offset, reply.size, 0, 0, 1};
  read.pieces.push_back({context_->values->region(),
                         std::make_shared<const transport::remote_grant>(std::move(*reply.source)),
                         {all}});
  phase_ = phase::reading;
  ask_link(*around_, link_, post_batch{std::move(read)});
}

void value_client::got_value(store_reply& reply) {
  if (reply.source && !reply.source->permitted.extents().empty()) {
    if (reply.source->permitted.extents().front().length < reply.size) {
      give_up({errc::out_of_range, "the grant of the value covers less than its size"});
      return;
    }
    read_value(reply);
    return;
  }
  auto owned = std::make_shared<const std::vector<std::byte>>(std::move(reply.value));
  end_with(outcome_type{event_value{{{owned->data(), owned->size()}, owned}}});
}

void value_client::on_session_message(session_message& message) {
  if (phase_ != phase::asked && phase_ != phase::storing) return;
  if (std::holds_alternative<store_held>(message) && order_.verb == value_verb::put) {
    said_again_ = phase_ == phase::storing;
    phase_ = phase::storing;
    store();
    return;
  }
  if (const auto* crashed = std::get_if<transfer_abort>(&message); crashed != nullptr) {
    troupe::error why{crashed->code, crashed->reason};
    end_with(phase_ == phase::storing ? in_doubt(std::move(why)) : std::move(why));
    return;
  }
  auto* reply = std::get_if<store_reply>(&message);
  if (reply == nullptr) return;
  if (reply->failed != 0) {
    end_with(refusal(*reply));
    return;
  }
  switch (order_.verb) {
    case value_verb::put:
      if (phase_ != phase::storing) return;  // no store_commit was sent yet
      let_go();
      end_with(outcome_type{event_done{{}, order_.value.size()}});
      return;
    case value_verb::remove: end_with(outcome_type{event_done{}}); return;
    case value_verb::query:
      end_with(outcome_type{event_info{reply->size, std::chrono::milliseconds{reply->ttl_ms}}});
      return;
    case value_verb::get: got_value(*reply); return;
  }
}

void value_client::on_completion(transport::completion& done) {
  if (phase_ != phase::reading) return;
  // The peer's end of the link broke before ours, or the peer is ending: the link reports which.
  if (done.failure && done.failure->code == errc::grant_revoked) return;
  if (done.failure) {
    give_up(std::move(*done.failure));
    return;
  }
  ask_link(*around_, link_, say{store_release{transfer_.value}, {}});
  auto kept = std::make_shared<const value_store::reservation>(std::move(*memory_->scratch));
  memory_->scratch.reset();
  end_with(outcome_type{event_value{{kept->bytes(), kept}}});
}

void value_client::on_transfer_fenced() {
  if (phase_ != phase::fencing) return;
  memory_->release();
  ask_link(*around_, link_, detach_session{transfer_});
  tell_outcome();
  around_->tell_runner(runner_event{session_unpinned{transfer_}});
  around_->finish();
}

void value_client::on_link_is_lost(link_is_lost& lost) {
  const bool doubtful = phase_ == phase::storing;
  end_with(doubtful ? in_doubt(std::move(lost.why)) : std::move(lost.why));
  tell_failure();
}

void value_client::grant_copy_instead() {
  const lent_memory::read reading{context_->lent};
  if (!reading) {
    give_up(lent_memory::refusal());
    return;
  }
  auto wish = grant_on_copy();
  if (!wish) {
    give_up(wish.error());
    return;
  }
  wish_ = std::move(*wish);
  lent_ = false;
  ask();
}

void value_client::on_link_is_back(link_is_back& back) {
  if (back.epoch <= link_.epoch) return;
  link_.epoch = back.epoch;
  link_.backend = std::move(back.backend);
  if (phase_ == phase::fencing) return;
  if (phase_ == phase::storing) {
    said_again_ = true;
    store();
    return;
  }
  if (memory_->scratch) memory_->former_scratch.push_back(std::move(*memory_->scratch));
  memory_->scratch.reset();
  phase_ = phase::asked;
  if (lent_ && must_copy(order_, link_)) {
    grant_copy_instead();
  } else {
    ask();
  }
}

bool value_client::asks_with_copy(const troupe::error& why) {
  if (phase_ != phase::asked || !wish_ || memory_->copy || memory_->copy_apart ||
      why.code != errc::backend_unavailable) {
    return false;
  }
  grant_copy_instead();
  return true;
}

void value_client::on_abort_session(abort_session& abort) {
  if (asks_with_copy(abort.why)) return;
  // The link could not take the put's store_commit, so the peer has not had it, unless this one was
  // a repetition.
  if (phase_ == phase::storing && abort.why.code != errc::aborted && !said_again_) {
    phase_ = phase::asked;
  }
  give_up(std::move(abort.why));
  tell_failure();
}

void value_client::on_deadline_reached() {
  troupe::error why{errc::deadline,
                    link_.peer + " did not answer for key `" + order_.key + "` in time"};
  if (phase_ == phase::storing) {
    end_with(in_doubt(std::move(why)));
  } else {
    give_up(std::move(why));
  }
  tell_failure();
}

bool must_copy(const start_value& order, const link_handle& link) {
  const bool reaches_in = link.backend == "shm" || link.backend == "xgmi";
  return reaches_in && is_lent(order);
}

bool is_lent(const start_value& order) {
  const bool callers = order.pinned.empty() && !order.copy;
  return order.verb == value_verb::put && order.value.size() > max_inline && callers;
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
