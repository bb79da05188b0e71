#include "troupe/deploy/c/placements.hpp"

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/c/handles.hpp"

namespace troupe::c {

result<actors::placement_request> placement_request_of(const troupe_placement_request* given) {
  const auto known = read(given, "request");
  if (!known) return fail(known.error());
  auto request = text(known->request, "request.request");
  if (!request) return fail(request.error());
  actors::placement_request out;
  out.request = std::move(*request);
  out.timeout_ms = known->timeout_ms;
  for (const auto& [from, to, name] :
       {std::tuple{known->from, &out.from, "request.from"},
        std::tuple{known->to, &out.to, "request.to"},
        std::tuple{known->affinity, &out.affinity, "request.affinity"}}) {
    auto word = optional_text(from, name);
    if (!word) return fail(word.error());
    *to = std::move(*word);
  }
  return out;
}

troupe_node_info node_of(const actors::node_info& node) noexcept {
  return {sizeof(troupe_node_info),
          node.port,
          node.name.c_str(),
          node.stage.c_str(),
          node.host.c_str(),
          node.incarnation,
          node.replica,
          node.rank,
          node.ranks,
          node.pid};
}

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_status troupe_engine_place(troupe_engine* engine, const troupe_placement_request* request,
                                  troupe_operation* operation) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    if (auto out = present(operation, "operation"); !out) return out;
    auto what = placement_request_of(request);
    if (!what) return fail(what.error());
    return begun(core.node->place(std::move(*what)), operation);
  });
}

troupe_status troupe_engine_placed_request_ended(troupe_engine* engine, const char* request) {
  return on_engine(engine, [&](engine_core& core, const auto&) -> result<void> {
    auto id = text(request, "request");
    if (!id) return fail(id.error());
    core.node->placed_request_ended(std::move(*id));
    return {};
  });
}

troupe_status troupe_placement_read(const troupe_placement* placement,
                                    troupe_placement_info* info) {
  return guarded([&]() -> result<void> {
    if (auto given = present(placement, "placement"); !given) return given;
    if (auto out = writable(info, "info"); !out) return out;
    const auto& where = placement->where;
    write(
        {0, static_cast<uint32_t>(where.mode), where.request.c_str(), where.supervisor_incarnation,
         where.epoch, where.attempt, static_cast<uint32_t>(where.prefill.size()),
         static_cast<uint32_t>(where.decode.size()), where.same_source},
        info);
    return {};
  });
}

troupe_status troupe_placement_node(const troupe_placement* placement, uint32_t side,
                                    uint32_t index, troupe_node_info* node) {
  return guarded([&]() -> result<void> {
    if (auto given = present(placement, "placement"); !given) return given;
    if (auto known = in_range(side, TROUPE_PREFILL, TROUPE_DECODE, "side"); !known) return known;
    if (auto out = writable(node, "node"); !out) return out;
    const auto& ranks = side == TROUPE_PREFILL ? placement->where.prefill : placement->where.decode;
    if (index >= ranks.size()) {
      std::string why{"`index` is "};
      why.append(std::to_string(index))
          .append(" of ")
          .append(std::to_string(ranks.size()))
          .append(" ranks");
      return fail(errc::out_of_range, std::move(why));
    }
    write(node_of(ranks[index]), node);
    return {};
  });
}

void troupe_placement_free(troupe_placement* placement) {
  delete placement;
}
