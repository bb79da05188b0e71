#include <algorithm>
#include <chrono>
#include <limits>

#include <poll.h>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/handles.hpp"
#include "troupe/deploy/c/placements.hpp"

namespace troupe::c {

namespace {

using core_pointer = std::shared_ptr<engine_core>;

/// Clamped to a field of an event.
template <class Number>
uint32_t at_most_32_bits(Number value) {
  return static_cast<uint32_t>(std::clamp<Number>(value, 0, std::numeric_limits<uint32_t>::max()));
}

/// Converts an event for C.
struct event_writer {
  troupe_event& out;
  const core_pointer& core;

  troupe_detail& detail() const {
    if (!out.detail) out.detail = new troupe_detail;
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
    texts.labels_seen = labels_of(texts.labels);
  }
  void operator()(event_placed& what) const {
    out.kind = TROUPE_EVENT_PLACED;
    detail().where = std::make_unique<actors::placement>(std::move(what.where));
  }
};

troupe_event event_of(waiting_call& incoming) {
  troupe_event out{};
  out.kind = TROUPE_EVENT_CALL;
  out.u.call.id = incoming.id;
  out.detail = new troupe_detail;
  out.detail->method = std::move(incoming.method);
  out.detail->payload = std::move(incoming.payload);
  return out;
}

using event_array = filled_array<troupe_event>;

void add_events(std::vector<event> events, const core_pointer& core, event_array& to) {
  for (auto& each : events) {
    troupe_event out{};
    out.operation = each.operation.value;
    std::visit(event_writer{out, core}, each.what);
    to.add(out);
  }
}

void take_at_once(const core_pointer& core, event_array& to) {
  if (core->calls)
    for (auto& incoming : core->calls->take(to.room())) to.add(event_of(incoming));
  if (to.room() != 0) add_events(core->node->take(to.room()), core, to);
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

troupe_outcome outcome_of(outcome& what, const core_pointer& core) {
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
  auto detail = std::make_unique<troupe_detail>();
  detail->aux = std::move(what.aux);
  detail->blocks = std::move(what.blocks);
  if (out.kind == TROUPE_EVENT_VALUE) {
    detail->keeper = core;
    detail->view = std::move(what.value);
  }
  if (out.kind == TROUPE_EVENT_PLACED)
    detail->where = std::make_unique<actors::placement>(std::move(what.where));
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
      add_events(core.node->wait(milliseconds(timeout_ms), capacity), shared, to);
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
        const operation_id id{operation};
        auto came = timeout_ms == UINT64_MAX ? std::optional{core.node->wait(id)}
                                             : core.node->wait(id, milliseconds(timeout_ms));
        ended = came.has_value();
        if (!ended) return {};
        if (!*came) return fail(std::move(*came).error());
        if (outcome) write(outcome_of(**came, shared), outcome);
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
