#include "troupe/actors/values/value_server.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/runtime/ask_link.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"
#include "troupe/kvcache/overloaded.hpp"

namespace troupe::actors {

store_reply refused_value(std::uint64_t op, const troupe::error& why) {
  store_reply reply;
  reply.op = op;
  reply.failed = static_cast<std::uint8_t>(why.code);
  reply.sentence = why.message;
  return reply;
}

namespace {

using self_pointer = session_actor::stateful_pointer<value_server_state>;
using phase = value_server_state::phase;

store_reply done(std::uint64_t op) {
  store_reply reply;
  reply.op = op;
  return reply;
}

void finish(self_pointer self) {
  auto& st = self->state;
  if (st.now == phase::fencing) return;
  st.now = phase::fencing;
  ask_link(self, fence_now{st.transfer});
}

void refuse(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  if (st.now == phase::fencing) return;
  st.reply = refused_value(st.transfer.value, why);
  finish(self);
}

void say_held(self_pointer self) {
  auto& st = self->state;
  st.now = phase::held;
  st.said_held = std::chrono::steady_clock::now();
  ask_link(self, say{store_held{st.transfer.value}, {}});
}

/// Whether the peer may have declared us lost, and told its caller so, since we last said
/// `store_held`. The peer heard us then, and declares us lost after `peer_silence` without a word.
bool may_count_as_lost(const value_server_state& st) {
  return std::chrono::steady_clock::now() - st.said_held > st.context->settings.peer_silence / 2;
}

/// Stores the value. After a second read it is pinned: even if it is removed before this actor
/// ends, late bytes of the former read must not land in another value.
result<void> commit(value_server_state& st) {
  if (!st.read_again) return st.room->commit();
  auto pin = st.room->commit_pinned(st.key);
  if (!pin) return fail(pin.error());
  st.pins.push_back(std::move(*pin));
  return {};
}

void store(self_pointer self) {
  auto& st = self->state;
  // Only once: an engine that polls seldom is always late.
  if (st.now == phase::held && !st.asked_again && may_count_as_lost(st)) {
    st.asked_again = true;
    say_held(self);
    return;
  }
  if (st.now == phase::held) {
    if (auto committed = commit(st); !committed) {
      refuse(self, committed.error());
      return;
    }
    st.now = phase::stored;
    self->send(st.pool, pool_command{pool_changed{}});
  }
  if (st.now == phase::stored) ask_link(self, say{done(st.transfer.value), {}});
}

result<void> acceptable(const store_put& put) {
  if (put.source) {
    if (put.source->permitted.extents().empty() ||
        put.source->permitted.extents().front().length < put.size) {
      return fail(errc::out_of_range, "the grant of the put covers less than its size");
    }
    return {};
  }
  if (put.value.size() != put.size) {
    return fail(errc::out_of_range, "the put says " + std::to_string(put.size) +
                                        " bytes and brings " + std::to_string(put.value.size()));
  }
  return {};
}

void serve_put(self_pointer self, store_put& put) {
  auto& st = self->state;
  st.read_again = st.room.has_value();
  if (!st.room) {
    auto room =
        st.context->values->reserve(put.key, put.size, std::chrono::milliseconds{put.ttl_ms});
    if (!room) {
      refuse(self, room.error());
      return;
    }
    st.room.emplace(std::move(*room));
    st.key = put.key;
  }
  if (!put.source) {
    std::ranges::copy(put.value, st.room->bytes().begin());
    say_held(self);
    return;
  }
  st.read_over = st.link.epoch;
  const auto from = put.source->permitted.extents().front();
  transport::batch read;
  read.id = transport::batch_id{1};
  read.transfer = st.transfer;
  read.dir = transport::direction::read;
  const segment all{st.room->where().offset, from.offset, put.size, 0, 0, 1};
  read.pieces.push_back({st.context->values->region(),
                         std::make_shared<const transport::remote_grant>(std::move(*put.source)),
                         {all}});
  ask_link(self, post_batch{std::move(read)});
}

void serve_get(self_pointer self, const store_get& get) {
  auto& st = self->state;
  st.read_over = st.link.epoch;
  auto value = st.context->values->get(get.key);
  if (!value) {
    st.reply = refused_value(get.op, value.error());
    finish(self);
    return;
  }
  st.pins.push_back(value->pin);
  auto reply = done(get.op);
  reply.size = value->bytes.size();
  reply.ttl_ms = static_cast<std::uint64_t>(value->ttl.count());
  ask_link(self, say{std::move(reply),
                     {{st.context->values->region(), {value->where}, transport::access::read}}});
}

void on_session_message(self_pointer self, session_message& message) {
  auto& st = self->state;
  if (std::holds_alternative<store_release>(message) ||
      std::holds_alternative<transfer_abort>(message)) {
    finish(self);
  }
  if (std::holds_alternative<store_commit>(message)) store(self);
  if (auto* put = std::get_if<store_put>(&message); put != nullptr) {
    if (st.now == phase::held) say_held(self);
    // One read per link: the bytes of two reads could not be told apart.
    if (st.now == phase::reading && st.room && st.read_over < st.link.epoch && put->source &&
        acceptable(*put) && put->size == st.room->where().length) {
      serve_put(self, *put);
    }
  }
  // Answered once per link: each answer pins the value once more.
  if (const auto* get = std::get_if<store_get>(&message);
      get != nullptr && st.now == phase::lending && st.read_over < st.link.epoch)
    serve_get(self, *get);
}

void on_link_is_back(self_pointer self, link_is_back& back) {
  auto& link = self->state.link;
  link.epoch = std::max(link.epoch, back.epoch);
}

void on_completion(self_pointer self, transport::completion& outcome) {
  auto& st = self->state;
  if (st.now != phase::reading || !st.room) return;
  // The peer's end of the link broke before ours, and the peer asks again; or it has given up and
  // says so.
  if (outcome.failure && outcome.failure->code == errc::grant_revoked) return;
  if (outcome.failure) {
    refuse(self, *outcome.failure);
    return;
  }
  say_held(self);
}

void on_transfer_fenced(self_pointer self) {
  auto& st = self->state;
  if (st.now != phase::fencing) return;
  if (st.reply) ask_link(self, say{std::move(*st.reply), {}});
  ask_link(self, detach_session{st.transfer});
  self->send(st.port, port_event{session_unpinned{st.transfer}});
  self->quit();
}

void on_link_is_lost(self_pointer self) {
  self->state.reply.reset();
  finish(self);
}

void on_abort_session(self_pointer self, abort_session& refused) {
  // The link could not carry the message, or not give its grant.
  if (self->state.now != phase::stored) refuse(self, refused.why);
}

/// Refuses keys that begin with a 0 byte: they are the store's own (`value_store::scratch`).
std::optional<session_message> refuse_key(const session_message& message) {
  return std::visit(
      []<class Message>(const Message& m) -> std::optional<session_message> {
        if constexpr (requires { m.key; }) {
          if (m.key.front() == '\0') {
            return refused_value(m.op,
                                 {errc::invalid_config, "a key must not begin with a byte of 0"});
          }
        }
        return std::nullopt;
      },
      message);
}

std::optional<session_message> answer_get(value_store& values, const store_get& get) {
  auto value = values.get(get.key);
  if (!value) return refused_value(get.op, value.error());
  if (value->bytes.size() > get.max_size) {
    return refused_value(get.op, {errc::out_of_range,
                                  "the value has " + std::to_string(value->bytes.size()) +
                                      " bytes, the reader takes " + std::to_string(get.max_size)});
  }
  if (value->bytes.size() > max_inline) return std::nullopt;
  auto reply = done(get.op);
  reply.size = value->bytes.size();
  reply.ttl_ms = static_cast<std::uint64_t>(value->ttl.count());
  reply.value.assign(value->bytes.begin(), value->bytes.end());
  return reply;
}

}  // namespace

std::optional<session_message> answer_value(node_context& context, session_message& message) {
  if (!context.values) {
    const auto op = std::visit(
        []<class Message>(const Message& m) -> std::uint64_t {
          if constexpr (requires { m.op; }) {
            return m.op;
          } else {
            return 0;
          }
        },
        message);
    return refused_value(op, {errc::not_found, context.self.name + " keeps no keyed values"});
  }
  auto& values = *context.values;
  if (auto refused = refuse_key(message)) return refused;
  if (const auto* put = std::get_if<store_put>(&message)) {
    if (auto fine = acceptable(*put); !fine) return refused_value(put->op, fine.error());
    return std::nullopt;
  }
  if (const auto* get = std::get_if<store_get>(&message)) return answer_get(values, *get);
  if (const auto* query = std::get_if<store_query>(&message)) {
    auto info = values.query(query->key);
    if (!info) return refused_value(query->op, info.error());
    auto reply = done(query->op);
    reply.size = info->size;
    reply.ttl_ms = static_cast<std::uint64_t>(info->ttl.count());
    return reply;
  }
  if (const auto* remove = std::get_if<store_remove>(&message)) {
    auto gone = values.remove(remove->key);
    return gone ? done(remove->op) : refused_value(remove->op, gone.error());
  }
  if (const auto* commit = std::get_if<store_commit>(&message)) {
    return refused_value(commit->op, {errc::not_found, "no such put is held here"});
  }
  return std::nullopt;
}

session_actor::behavior_type value_server(session_actor::stateful_pointer<value_server_state> self,
                                          value_server_options options) {
  auto& st = self->state;
  st.context = std::move(options.context);
  st.port = std::move(options.port);
  st.pool = std::move(options.pool);
  st.link = std::move(options.link);
  auto& message = options.message;
  if (auto* put = std::get_if<store_put>(&message)) {
    st.transfer = transfer_id{put->op};
    st.now = phase::reading;
    ask_link(self, attach_session{st.transfer, caf::actor_cast<session_actor>(self)});
    serve_put(self, *put);
  } else if (const auto* get = std::get_if<store_get>(&message)) {
    st.transfer = transfer_id{get->op};
    st.now = phase::lending;
    ask_link(self, attach_session{st.transfer, caf::actor_cast<session_actor>(self)});
    serve_get(self, *get);
  }
  return {[self](session_event& event) {
    std::visit(overloaded{[self](session_message& x) { on_session_message(self, x); },
                          [self](transport::completion& x) { on_completion(self, x); },
                          [self](transfer_fenced&) { on_transfer_fenced(self); },
                          [self](link_is_lost&) { on_link_is_lost(self); },
                          [self](link_is_back& x) { on_link_is_back(self, x); },
                          [](source_progress&) {}, [](source_blocks&) {}, [](source_sealed&) {},
                          [self](abort_session& x) { on_abort_session(self, x); },
                          [self](deadline_reached&) { finish(self); }, [](receive_is_whole&) {}},
               event.what);
  }};
}

}  // namespace troupe::actors
