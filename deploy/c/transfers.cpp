#include "troupe/actors/engine.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/deploy/c/handles.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

result<std::vector<group_blocks>> groups_of(const troupe_group_blocks* given, std::uint32_t count) {
  std::vector<group_blocks> groups;
  if (count == 0) return groups;
  if (auto here = present(given, "spec.groups"); !here) return fail(here.error());
  if (count > kvcache::max_layer_groups)
    return bad_argument("`spec.group_count` is more than 64, the most that a layout has");
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto name = "spec.groups[" + std::to_string(i) + "]";
    if (given[i].reserved != 0) return bad_argument("`" + name + ".reserved` is not 0");
    auto ids = blocks(given[i].blocks, given[i].block_count, name + ".blocks");
    if (!ids) return fail(ids.error());
    groups.push_back({given[i].first_token, std::move(*ids)});
  }
  return groups;
}

result<send_spec> send_of(const troupe_send_spec* given) {
  const auto spec = read(given, "spec");
  if (!spec) return fail(spec.error());
  if (auto flags = known_flags(spec->flags, TROUPE_GROWS | TROUPE_TELL_WANTED, "spec.flags");
      !flags)
    return fail(flags.error());
  if (spec->reserved != 0) return bad_argument("`spec.reserved` is not 0");
  if (spec->reserved_2 != 0) return bad_argument("`spec.reserved_2` is not 0");
  auto request = text(spec->request, "spec.request");
  if (!request) return fail(request.error());
  auto ids = blocks(spec->blocks, spec->block_count, "spec.blocks");
  if (!ids) return fail(ids.error());
  auto groups = groups_of(spec->groups, spec->group_count);
  if (!groups) return fail(groups.error());
  auto held_for = texts(spec->held_for, spec->held_for_count, "spec.held_for");
  if (!held_for) return fail(held_for.error());
  send_spec out;
  out.request = std::move(*request);
  out.blocks = std::move(*ids);
  out.state_slot = spec->state_slot;
  out.deadline = milliseconds(spec->deadline_ms);
  out.consumers = spec->consumers;
  out.held_for = std::move(*held_for);
  out.grows = (spec->flags & TROUPE_GROWS) != 0;
  out.tell_wanted = (spec->flags & TROUPE_TELL_WANTED) != 0;
  out.groups = std::move(*groups);
  return out;
}

/// The sources of a receive: from the placement, or from the spec's own fields.
result<receive_spec> sources_of(const troupe_receive_spec& spec) {
  if (auto mode = in_range(spec.mode, TROUPE_MODE_DEFAULT, TROUPE_MODE_READ, "spec.mode"); !mode)
    return fail(mode.error());
  if (spec.placement) {
    if (spec.source_count != 0 || spec.placed_by != 0 || spec.placed_at != 0 || spec.lives)
      return bad_argument(
          "`spec.placement` is given, and so is `spec.sources`, `lives`, `placed_by` or "
          "`placed_at`");
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
  if (spec.lives) out.lives.assign(spec.lives, spec.lives + spec.source_count);
  return out;
}

result<receive_spec> receive_of(const troupe_receive_spec* given) {
  const auto spec = read(given, "spec");
  if (!spec) return fail(spec.error());
  if (spec->reserved != 0) return bad_argument("`spec.reserved` is not 0");
  if (spec->reserved_2 != 0) return bad_argument("`spec.reserved_2` is not 0");
  if (spec->reserved_3 != 0) return bad_argument("`spec.reserved_3` is not 0");
  if (auto flags = known_flags(spec->flags, TROUPE_PARK | TROUPE_AGAIN, "spec.flags"); !flags)
    return fail(flags.error());
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
  auto groups = groups_of(spec->groups, spec->group_count);
  if (!groups) return fail(groups.error());
  out->groups = std::move(*groups);
  out->tokens = spec->tokens;
  out->prefix_tokens = spec->prefix_tokens;
  out->state_slot = spec->state_slot;
  out->deadline = milliseconds(spec->deadline_ms);
  out->fail_when_full = spec->fail_when_full != 0;
  const auto expect = bytes(spec->expect, spec->expect_size, "spec.expect");
  if (!expect) return fail(expect.error());
  if (spec->expect_size > actors::max_expect)
    return fail(errc::out_of_range, "`spec.expect` has more than 64 bytes; give a hash");
  out->expect.assign(expect->begin(), expect->end());
  if ((spec->flags & TROUPE_PARK) != 0) out->park = milliseconds(spec->park_ms);
  if ((spec->flags & TROUPE_PARK) == 0 && spec->park_ms != 0)
    return bad_argument("`spec.park_ms` is given without TROUPE_PARK");
  out->again = (spec->flags & TROUPE_AGAIN) != 0;
  return out;
}

struct sources_of_request {
  std::string request;
  std::vector<std::string> sources;
  std::vector<std::uint64_t> lives;
};

result<sources_of_request> words_of(const troupe_sources* given) {
  const auto of = read(given, "of");
  if (!of) return fail(of.error());
  auto request = text(of->request, "of.request");
  if (!request) return fail(request.error());
  auto sources = texts(of->sources, of->source_count, "of.sources");
  if (!sources) return fail(sources.error());
  sources_of_request out{std::move(*request), std::move(*sources), {}};
  if (of->lives) out.lives.assign(of->lives, of->lives + of->source_count);
  return out;
}

/// Calls `release` or `hold`.
template <class Call>
troupe_status say_to_sources(troupe_engine* engine, const troupe_sources* of,
                             troupe_operation* operation, Call call) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(operation, "operation"); !out) return out;
    auto what = words_of(of);
    if (!what) return fail(what.error());
    return begun((*core.node.*call)(std::move(what->request), std::move(what->sources),
                                    std::move(what->lives)),
                 operation);
  });
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

troupe_status troupe_engine_add_blocks(troupe_engine* engine, troupe_operation send,
                                       const uint32_t* ids, size_t block_count) {
  return troupe_engine_add_group_blocks(engine, send, 0, ids, block_count);
}

troupe_status troupe_engine_add_group_blocks(troupe_engine* engine, troupe_operation send,
                                             uint32_t group, const uint32_t* ids,
                                             size_t block_count) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    auto more = blocks(ids, block_count, "blocks");
    if (!more) return fail(more.error());
    return core.node->add_blocks(operation_id{send}, std::move(*more), group);
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
    // Checked before it is copied: no vector holds every size.
    if (aux_size > actors::max_aux) {
      return fail(errc::out_of_range, "`aux` has " + std::to_string(aux_size) + " bytes; at most " +
                                          std::to_string(actors::max_aux) +
                                          " can travel with a transfer");
    }
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

troupe_status troupe_engine_release(troupe_engine* engine, const troupe_sources* of,
                                    troupe_operation* operation) {
  return say_to_sources(engine, of, operation, &troupe::engine::release);
}

troupe_status troupe_engine_hold(troupe_engine* engine, const troupe_sources* of,
                                 troupe_operation* operation) {
  return say_to_sources(engine, of, operation, &troupe::engine::hold);
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
