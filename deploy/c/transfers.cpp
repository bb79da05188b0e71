#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/handles.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

result<send_spec> send_of(const troupe_send_spec* given) {
  const auto spec = read(given, "spec");
  if (!spec) return fail(spec.error());
  auto request = text(spec->request, "spec.request");
  if (!request) return fail(request.error());
  auto ids = blocks(spec->blocks, spec->block_count, "spec.blocks");
  if (!ids) return fail(ids.error());
  auto held_for = texts(spec->held_for, spec->held_for_count, "spec.held_for");
  if (!held_for) return fail(held_for.error());
  send_spec out;
  out.request = std::move(*request);
  out.blocks = std::move(*ids);
  out.state_slot = spec->state_slot;
  out.deadline = milliseconds(spec->deadline_ms);
  out.consumers = spec->consumers;
  out.held_for = std::move(*held_for);
  return out;
}

/// Where it comes from: a placement, or what the spec says itself.
result<receive_spec> sources_of(const troupe_receive_spec& spec) {
  if (auto mode = in_range(spec.mode, TROUPE_MODE_DEFAULT, TROUPE_MODE_READ, "spec.mode"); !mode)
    return fail(mode.error());
  if (spec.placement) {
    if (spec.source_count != 0 || spec.placed_by != 0 || spec.placed_at != 0)
      return bad_argument(
          "`spec.placement` is given, and so is `spec.sources`, `placed_by` or `placed_at`");
    auto out = receive_spec::of(spec.placement->where, spec.tokens);
    if (spec.mode != TROUPE_MODE_DEFAULT) out.mode = static_cast<transfer_mode>(spec.mode);
    return out;
  }
  receive_spec out;
  auto sources = texts(spec.sources, spec.source_count, "spec.sources");
  if (!sources) return fail(sources.error());
  out.sources = std::move(*sources);
  if (spec.mode != TROUPE_MODE_DEFAULT) out.mode = static_cast<transfer_mode>(spec.mode);
  out.placed_by = spec.placed_by;
  out.placed_at = spec.placed_at;
  return out;
}

result<receive_spec> receive_of(const troupe_receive_spec* given) {
  const auto spec = read(given, "spec");
  if (!spec) return fail(spec.error());
  if (spec->reserved != 0) return bad_argument("`spec.reserved` is not 0");
  if (auto flag = in_range(spec->fail_when_full, 0, 1, "spec.fail_when_full"); !flag)
    return fail(flag.error());
  auto out = sources_of(*spec);
  if (!out) return out;
  if (spec->request || !spec->placement) {
    auto request = text(spec->request, "spec.request");
    if (!request) return fail(request.error());
    out->request = std::move(*request);
  }
  auto ids = blocks(spec->blocks, spec->block_count, "spec.blocks");
  if (!ids) return fail(ids.error());
  out->blocks = std::move(*ids);
  out->tokens = spec->tokens;
  out->prefix_tokens = spec->prefix_tokens;
  out->state_slot = spec->state_slot;
  out->deadline = milliseconds(spec->deadline_ms);
  out->fail_when_full = spec->fail_when_full != 0;
  return out;
}

result<transport::compute_point> point_of(const troupe_compute_point* given) {
  const auto point = read(given, "computed");
  if (!point) return fail(point.error());
  if (point->event && point->shared)
    return bad_argument("`computed.event` and `computed.shared` are both given");
  transport::compute_point out{point->event, point->gpu, {}};
  if (point->shared) {
    transport::event_handle shared;
    std::memcpy(shared.data(), point->shared, shared.size());
    out.shared = shared;
  }
  return out;
}

}  // namespace

troupe_status troupe_engine_send(troupe_engine* engine, const troupe_send_spec* spec,
                                 troupe_operation* operation) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(operation, "operation"); !out) return out;
    auto what = send_of(spec);
    if (!what) return fail(what.error());
    return begun(core.node->send(std::move(*what)), operation);
  });
}

troupe_status troupe_engine_layers_ready(troupe_engine* engine, troupe_operation send,
                                         uint32_t layer_begin, uint32_t layer_end,
                                         uint32_t token_end, const troupe_compute_point* computed) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    const operation_id id{send};
    if (!computed) return core.node->layers_ready(id, layer_begin, layer_end, token_end);
    const auto point = point_of(computed);
    if (!point) return fail(point.error());
    return core.node->layers_ready(id, layer_begin, layer_end, token_end, *point);
  });
}

troupe_status troupe_engine_seal(troupe_engine* engine, troupe_operation send, uint32_t tokens,
                                 const void* aux, size_t aux_size) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    const auto given = bytes(aux, aux_size, "aux");
    if (!given) return fail(given.error());
    if (aux_size > max_text_bytes) return fail(errc::out_of_range, "`aux` has more than 64 KiB");
    return core.node->seal(operation_id{send}, tokens, {given->begin(), given->end()});
  });
}

troupe_status troupe_engine_receive(troupe_engine* engine, const troupe_receive_spec* spec,
                                    troupe_operation* operation) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(operation, "operation"); !out) return out;
    auto what = receive_of(spec);
    if (!what) return fail(what.error());
    return begun(core.node->receive(std::move(*what)), operation);
  });
}

troupe_status troupe_engine_await_layers(troupe_engine* engine, troupe_operation receive,
                                         uint32_t layer_begin, uint32_t layer_end,
                                         uint32_t token_end, const troupe_compute_stream* stream) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    const auto given = read(stream, "stream");
    if (!given) return fail(given.error());
    return core.node->await_layers(operation_id{receive}, layer_begin, layer_end, token_end,
                                   {given->stream, given->gpu});
  });
}

troupe_status troupe_engine_abort(troupe_engine* engine, troupe_operation operation,
                                  const char* reason) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    auto why = optional_text(reason, "reason");
    if (!why) return fail(why.error());
    return core.node->abort(operation_id{operation}, std::move(*why));
  });
}
