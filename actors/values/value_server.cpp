#include "troupe/actors/values/value_server.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

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

store_reply done(std::uint64_t op) {
  store_reply reply;
  reply.op = op;
  return reply;
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

value_server::value_server(value_server_options options)
    : context_{std::move(options.context)},
      link_{std::move(options.link)},
      message_{std::move(options.message)} {}

void value_server::begin(session_surroundings& around) {
  around_ = &around;
  auto message = std::move(message_);
  if (auto* put = std::get_if<store_put>(&message)) {
    transfer_ = transfer_id{put->op};
    phase_ = phase::reading;
    ask_link(*around_, link_, attach_session{transfer_, around_->this_session()});
    serve_put(*put);
  } else if (const auto* get = std::get_if<store_get>(&message)) {
    transfer_ = transfer_id{get->op};
    phase_ = phase::lending;
    ask_link(*around_, link_, attach_session{transfer_, around_->this_session()});
    serve_get(*get);
  }
}

void value_server::handle(session_event& event) {
  std::visit(overloaded{[this](session_message& x) { on_session_message(x); },
                        [this](transport::completion& x) { on_completion(x); },
                        [this](transfer_fenced&) { on_transfer_fenced(); },
                        [this](link_is_lost&) { on_link_is_lost(); },
                        [this](link_is_back& x) { link_.epoch = std::max(link_.epoch, x.epoch); },
                        [](source_progress&) {}, [](source_blocks&) {}, [](source_sealed&) {},
                        [this](abort_session& x) { on_abort_session(x); },
                        [this](deadline_reached&) { finish(); }, [](receive_is_whole&) {}},
             event.what);
}

void value_server::finish() {
  if (phase_ == phase::fencing) return;
  phase_ = phase::fencing;
  ask_link(*around_, link_, fence_now{transfer_});
}

void value_server::refuse(const troupe::error& why) {
  if (phase_ == phase::fencing) return;
  reply_ = refused_value(transfer_.value, why);
  finish();
}

void value_server::say_held() {
  phase_ = phase::held;
  said_held_ = around_->now();
  ask_link(*around_, link_, say{store_held{transfer_.value}, {}});
}

bool value_server::may_count_as_lost() const {
  return around_->now() - said_held_ > context_->settings.peer_silence / 2;
}

result<void> value_server::commit() {
  if (!read_again_) return memory_->room->commit();
  auto pin = memory_->room->commit_pinned(key_);
  if (!pin) return fail(pin.error());
  memory_->pins.push_back(std::move(*pin));
  return {};
}

void value_server::store() {
  // Only once: an engine that polls seldom is always late.
  if (phase_ == phase::held && !asked_again_ && may_count_as_lost()) {
    asked_again_ = true;
    say_held();
    return;
  }
  if (phase_ == phase::held) {
    if (auto committed = commit(); !committed) {
      refuse(committed.error());
      return;
    }
    phase_ = phase::stored;
    around_->tell_pool(pool_command{pool_changed{}});
  }
  if (phase_ == phase::stored) ask_link(*around_, link_, say{done(transfer_.value), {}});
}

void value_server::serve_put(store_put& put) {
  read_again_ = memory_->room.has_value();
  if (!memory_->room) {
    auto room = context_->values->reserve(put.key, put.size, std::chrono::milliseconds{put.ttl_ms});
    if (!room) {
      refuse(room.error());
      return;
    }
    memory_->room.emplace(std::move(*room));
    key_ = put.key;
  }
  if (!put.source) {
    std::ranges::copy(put.value, memory_->room->bytes().begin());
    say_held();
    return;
  }
  read_over_ = link_.epoch;
  const auto from = put.source->permitted.extents().front();
  transport::batch read;
  read.id = transport::batch_id{1};
  read.transfer = transfer_;
  read.dir = transport::direction::read;
  const segment all{memory_->room->where().offset, from.offset, put.size, 0, 0, 1};
  read.pieces.push_back({context_->values->region(),
                         std::make_shared<const transport::remote_grant>(std::move(*put.source)),
                         {all}});
  ask_link(*around_, link_, post_batch{std::move(read)});
}

void value_server::serve_get(const store_get& get) {
  read_over_ = link_.epoch;
  auto value = context_->values->get(get.key);
  if (!value) {
    reply_ = refused_value(get.op, value.error());
    finish();
    return;
  }
  memory_->pins.push_back(value->pin);
  auto reply = done(get.op);
  reply.size = value->bytes.size();
  reply.ttl_ms = static_cast<std::uint64_t>(value->ttl.count());
  ask_link(*around_, link_,
           say{std::move(reply),
               {{context_->values->region(), {value->where}, transport::access::read}}});
}

void value_server::on_session_message(session_message& message) {
  if (std::holds_alternative<store_release>(message) ||
      std::holds_alternative<transfer_abort>(message)) {
    finish();
  }
  if (std::holds_alternative<store_commit>(message)) store();
  if (auto* put = std::get_if<store_put>(&message); put != nullptr) {
    if (phase_ == phase::held) say_held();
    // One read per link: the bytes of two reads could not be told apart.
    if (phase_ == phase::reading && memory_->room && read_over_ < link_.epoch && put->source &&
        acceptable(*put) && put->size == memory_->room->where().length) {
      serve_put(*put);
    }
  }
  // Answered once per link: each answer pins the value once more.
  if (const auto* get = std::get_if<store_get>(&message);
      get != nullptr && phase_ == phase::lending && read_over_ < link_.epoch)
    serve_get(*get);
}

void value_server::on_completion(const transport::completion& outcome) {
  if (phase_ != phase::reading || !memory_->room) return;
  // The peer's end of the link broke before ours, and the peer asks again; or it has given up and
  // says so.
  if (outcome.failure && outcome.failure->code == errc::grant_revoked) return;
  if (outcome.failure) {
    refuse(*outcome.failure);
    return;
  }
  say_held();
}

void value_server::on_transfer_fenced() {
  if (phase_ != phase::fencing) return;
  if (reply_) ask_link(*around_, link_, say{std::move(*reply_), {}});
  memory_->room.reset();
  memory_->pins.clear();
  ask_link(*around_, link_, detach_session{transfer_});
  around_->tell_runner(runner_event{session_unpinned{transfer_}});
  around_->finish();
}

void value_server::on_link_is_lost() {
  reply_.reset();
  finish();
}

void value_server::on_abort_session(const abort_session& refused) {
  // The link could not carry the message, or not give its grant.
  if (phase_ != phase::stored) refuse(refused.why);
}

}  // namespace troupe::actors
