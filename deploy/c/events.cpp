#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <utility>

#include <poll.h>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/handles.hpp"
#include "troupe/deploy/c/placements.hpp"

namespace troupe::c {

namespace {

using core_pointer = std::shared_ptr<engine_core>;
using detail_pointer = std::unique_ptr<troupe_detail>;

/// A detail with room for the variable part of any event. Made before an event is taken: a call
/// that finds no memory then has not lost the event.
detail_pointer make_detail(const engine_core& core) {
  auto made = std::make_unique<troupe_detail>();
  if (core.watching) made->labels_seen.reserve(actors::max_labels);
  return made;
}

/// Clamped to a field of an event.
template <class Number>
uint32_t at_most_32_bits(Number value) {
  return static_cast<uint32_t>(std::clamp<Number>(value, 0, std::numeric_limits<uint32_t>::max()));
}

/// Converts an event for C. Takes `spare` if the event has a variable part.
struct event_writer {
  troupe_event& out;
  const core_pointer& core;
  detail_pointer& spare;

  troupe_detail& detail() const noexcept {
    if (!out.detail) out.detail = spare.release();
    return *out.detail;
  }
  void operator()(event_allocated& what) const {
    out.kind = TROUPE_EVENT_ALLOCATED;
    out.u.allocated = {what.blocks.owner.value, what.blocks.blocks.size()};
    detail().blocks = std::move(what.blocks);
  }
  void operator()(const event_layers& what) const {
    out.kind = TROUPE_EVENT_LAYERS;
    const auto& slice = what.slice;
    out.u.layers = {slice.layer_begin, slice.layer_end, slice.token_begin, slice.token_end};
  }
  void operator()(event_done& what) const {
    out.kind = TROUPE_EVENT_DONE;
    out.u.done = {.bytes = what.bytes,
                  .aux_size = what.aux.size(),
                  .waited_us = at_most_32_bits(what.how.waited.count()),
                  .moving_us = at_most_32_bits(what.how.moving.count()),
                  .segments = at_most_32_bits(what.how.segments),
                  .backend = {}};
    what.how.backend.copy(static_cast<char*>(out.u.done.backend), sizeof out.u.done.backend);
    if (!what.aux.empty()) detail().aux = std::move(what.aux);
  }
  void operator()(event_failed& what) const {
    out.kind = TROUPE_EVENT_FAILED;
    out.code = code_of(what.why.code);
    detail().reason = std::move(what.why.message);
  }
  void operator()(const event_unpinned&) const { out.kind = TROUPE_EVENT_UNPINNED; }
  void operator()(event_value& what) const {
    out.kind = TROUPE_EVENT_VALUE;
    out.u.value = {what.value.bytes.size()};
    detail().keeper = core;
    detail().view = std::move(what.value);
  }
  void operator()(const event_info& what) const {
    out.kind = TROUPE_EVENT_INFO;
    out.u.info = {what.size, static_cast<uint64_t>(what.ttl.count())};
  }
  void operator()(event_wanted& what) const {
    out.kind = TROUPE_EVENT_WANTED;
    out.u.wanted = {what.rank, what.ranks, what.expected, what.token_begin, what.token_end};
    detail().node = std::move(what.node);
  }
  void operator()(event_member& what) const {
    out.kind = TROUPE_EVENT_MEMBER;
    out.u.member = {what.incarnation, static_cast<uint32_t>(what.state), what.replica, what.rank,
                    static_cast<uint32_t>(what.labels.size())};
    auto& texts = detail();
    texts.node = std::move(what.node);
    texts.stage = std::move(what.stage);
    texts.reason = std::move(what.reason);
    texts.labels = std::move(what.labels);
    add_labels(texts.labels, texts.labels_seen);
  }
  void operator()(event_placed& what) const {
    out.kind = TROUPE_EVENT_PLACED;
    detail().where = std::move(what.where);
  }
};

troupe_event event_of(event& came, const core_pointer& core, detail_pointer& spare) {
  troupe_event out{};
  out.operation = came.operation.value;
  std::visit(event_writer{out, core, spare}, came.what);
  return out;
}

troupe_event event_of(waiting_call& incoming, detail_pointer& spare) noexcept {
  troupe_event out{};
  out.kind = TROUPE_EVENT_CALL;
  out.u.call.id = incoming.id;
  out.detail = spare.release();
  out.detail->method = std::move(incoming.method);
  out.detail->payload = std::move(incoming.payload);
  return out;
}

using event_array = filled_array<troupe_event>;

void take_at_once(const core_pointer& core, event_array& to) {
  detail_pointer spare;
  fill(to, [&] {
    if (!spare) spare = make_detail(*core);
    if (core->calls) {
      for (auto& incoming : core->calls->take(1)) {
        to.add(event_of(incoming, spare));
        return true;
      }
    }
    for (auto& came : core->node->take(1)) {
      to.add(event_of(came, core, spare));
      return true;
    }
    return false;
  });
}

/// For engines that take no calls.
void take_after_waiting(const core_pointer& core, std::chrono::milliseconds timeout,
                        event_array& to) {
  auto spare = make_detail(*core);
  for (auto& came : core->node->wait(timeout, 1)) to.add(event_of(came, core, spare));
  if (to.count() != 0) take_at_once(core, to);
}

/// For engines that take calls as events, too: waits for the descriptor of both.
void take_either(const core_pointer& core, std::chrono::milliseconds timeout, event_array& to) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    if (core->polling) (void)core->node->poll();
    take_at_once(core, to);
    if (to.count() != 0) return;
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    pollfd readable{core->events, POLLIN, 0};
    // A polling thread makes the progress itself and must not sleep.
    const auto nap = core->polling ? std::chrono::milliseconds{0}
                                   : std::min(left, std::chrono::milliseconds{60'000});
    (void)::poll(&readable, 1, static_cast<int>(nap.count()));
  }
}

uint32_t kind_of(const outcome& what) noexcept {
  if (what.value.pin || what.value.bytes.data()) return TROUPE_EVENT_VALUE;
  if (!what.where.prefill.empty() || !what.where.decode.empty()) return TROUPE_EVENT_PLACED;
  return TROUPE_EVENT_DONE;
}

/// Takes `detail` if the outcome has a variable part.
troupe_outcome outcome_of(outcome& what, const core_pointer& core, detail_pointer detail) noexcept {
  troupe_outcome out{};
  out.kind = kind_of(what);
  out.bytes = what.bytes;
  out.aux_size = what.aux.size();
  out.value_size = out.kind == TROUPE_EVENT_VALUE ? what.value.bytes.size() : what.size;
  out.ttl_ms = static_cast<uint64_t>(what.ttl.count());
  out.owner = what.blocks.owner.value;
  out.block_count = what.blocks.blocks.size();
  out.waited_us = static_cast<uint64_t>(what.how.waited.count());
  out.moving_us = static_cast<uint64_t>(what.how.moving.count());
  out.segments = what.how.segments;
  what.how.backend.copy(static_cast<char*>(out.backend), sizeof out.backend - 1);
  if (out.kind == TROUPE_EVENT_DONE && what.aux.empty() && what.blocks.blocks.empty()) return out;
  detail->aux = std::move(what.aux);
  detail->blocks = std::move(what.blocks);
  if (out.kind == TROUPE_EVENT_VALUE) {
    detail->keeper = core;
    detail->view = std::move(what.value);
  }
  if (out.kind == TROUPE_EVENT_PLACED) detail->where = std::move(what.where);
  out.detail = detail.release();
  return out;
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_status troupe_engine_event_fd(const troupe_engine* engine, int* fd) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(fd, "fd"); !out) return out;
    *fd = core.events >= 0 ? core.events : core.node->event_fd();
    return {};
  });
}

troupe_status troupe_engine_take(troupe_engine* engine, troupe_event* events, size_t event_size,
                                 size_t capacity, uint64_t timeout_ms, size_t* count) {
  return on_engine(engine, [&](engine_core& core, const core_pointer& shared) -> result<void> {
    if (auto out = present({{events, "events"}, {count, "count"}}); !out) return out;
    if (event_size < sizeof(troupe_event) || event_size > max_struct_bytes)
      return bad_argument(
          "`event_size` is not the size of a troupe_event; give sizeof(troupe_event)");
    if (capacity == 0) return bad_argument("`capacity` is 0; give room for an event");
    event_array to{events, event_size, capacity};
    if (timeout_ms == 0) {
      take_at_once(shared, to);
    } else if (core.calls) {
      take_either(shared, milliseconds(timeout_ms), to);
    } else {
      take_after_waiting(shared, milliseconds(timeout_ms), to);
    }
    *count = to.count();
    return {};
  });
}

troupe_status troupe_engine_wait(troupe_engine* engine, troupe_operation operation,
                                 uint64_t timeout_ms, troupe_outcome* outcome) {
  bool ended = true;
  const auto status =
      on_engine(engine, [&](engine_core& core, const core_pointer& shared) -> result<void> {
        if (outcome)
          if (auto out = writable(outcome, "outcome"); !out) return out;
        auto detail = outcome ? make_detail(core) : nullptr;
        const operation_id id{operation};
        auto came = timeout_ms == UINT64_MAX ? std::optional{core.node->wait(id)}
                                             : core.node->wait(id, milliseconds(timeout_ms));
        ended = came.has_value();
        if (!ended) return {};
        if (!*came) return fail(std::move(*came).error());
        if (outcome) write(outcome_of(**came, shared, std::move(detail)), outcome);
        return {};
      });
  return ended ? status
               : refuse(TROUPE_TIMED_OUT, "the operation goes on; the time to wait for it is over");
}

troupe_status troupe_engine_poll(troupe_engine* engine, uint32_t* worked) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    const bool done = core.node->poll();
    if (worked) *worked = done ? 1 : 0;
    return {};
  });
}

const char* troupe_detail_reason(const troupe_detail* detail) {
  return detail ? detail->reason.c_str() : "";
}

const char* troupe_detail_method(const troupe_detail* detail) {
  return detail ? detail->method.c_str() : "";
}

const char* troupe_detail_node(const troupe_detail* detail) {
  return detail ? detail->node.c_str() : "";
}

const char* troupe_detail_stage(const troupe_detail* detail) {
  return detail ? detail->stage.c_str() : "";
}

troupe_status troupe_detail_bytes(const troupe_detail* detail, const void** bytes,
                                  size_t* byte_count) {
  return guarded([&]() -> result<void> {
    if (auto out = present({{detail, "detail"}, {bytes, "bytes"}, {byte_count, "byte_count"}});
        !out)
      return out;
    *bytes = nullptr;
    *byte_count = 0;
    if (!detail->view.bytes.empty()) {
      *bytes = detail->view.bytes.data();
      *byte_count = detail->view.bytes.size();
    } else if (!detail->aux.empty()) {
      *bytes = detail->aux.data();
      *byte_count = detail->aux.size();
    } else if (!detail->payload.empty()) {
      *bytes = detail->payload.data();
      *byte_count = detail->payload.size();
    }
    return {};
  });
}

troupe_status troupe_detail_labels(const troupe_detail* detail, const troupe_label** labels,
                                   size_t* count) {
  return guarded([&]() -> result<void> {
    if (auto out = present({{detail, "detail"}, {labels, "labels"}, {count, "count"}}); !out)
      return out;
    *labels = detail->labels_seen.empty() ? nullptr : detail->labels_seen.data();
    *count = detail->labels_seen.size();
    return {};
  });
}

troupe_status troupe_detail_blocks(const troupe_detail* detail, uint64_t* owner,
                                   const uint32_t** blocks, size_t* count) {
  return guarded([&]() -> result<void> {
    if (auto out =
            present({{detail, "detail"}, {owner, "owner"}, {blocks, "blocks"}, {count, "count"}});
        !out)
      return out;
    *owner = detail->blocks.owner.value;
    *blocks = reinterpret_cast<const uint32_t*>(detail->blocks.blocks.data());
    *count = detail->blocks.blocks.size();
    return {};
  });
}

troupe_status troupe_detail_placement(const troupe_detail* detail, troupe_placement** placement) {
  return guarded([&]() -> result<void> {
    if (auto out = present({{detail, "detail"}, {placement, "placement"}}); !out) return out;
    if (!detail->where)
      return fail(errc::not_found, "this is not the outcome of a place: it has no placement");
    *placement = new troupe_placement{*detail->where};
    return {};
  });
}

void troupe_detail_free(troupe_detail* detail) {
  // In a child of a fork the value stays pinned: unpinning would take the parent's locks.
  if (detail && detail->keeper && !detail->keeper->life.is_this_process()) return;
  delete detail;
}

void troupe_events_free(troupe_event* events, size_t event_size, size_t count) {
  if (!events || event_size < sizeof(troupe_event)) return;
  auto* at = reinterpret_cast<std::byte*>(events);
  for (size_t i = 0; i < count; ++i, at += event_size) {
    auto* each = reinterpret_cast<troupe_event*>(at);
    troupe_detail_free(each->detail);
    each->detail = nullptr;
  }
}

troupe_status troupe_engine_reply(troupe_engine* engine, uint64_t call, troupe_status code,
                                  const char* sentence, const void* payload, size_t payload_size) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (!core.calls) return bad_argument("the engine takes no calls; start it with TROUPE_CALLS");
    const auto given = bytes(payload, payload_size, "payload");
    if (!given) return fail(given.error());
    if (payload_size > actors::max_call_bytes)
      return fail(errc::out_of_range, "`payload` has more than 1 MiB");
    if (code == TROUPE_OK) {
      const auto* first = reinterpret_cast<const std::uint8_t*>(given->data());
      return core.calls->reply(call, std::vector<std::uint8_t>(first, first + given->size()));
    }
    if (code < 0 || code > 255 || !is_errc(static_cast<std::uint8_t>(code)))
      return bad_argument("`code` is not a code of Troupe");
    auto why = optional_text(sentence, "sentence");
    if (!why) return fail(why.error());
    return core.calls->reply(call, fail(static_cast<errc>(code), std::move(*why)));
  });
}
