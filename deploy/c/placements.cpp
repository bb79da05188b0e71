#include "troupe/deploy/c/placements.hpp"

#include <algorithm>

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
  auto failed = texts(known->failed, known->failed_count, "request.failed");
  if (!failed) return fail(failed.error());
  if (auto flag = in_range(known->keep_source, 0, 1, "request.keep_source"); !flag)
    return fail(flag.error());
  out.failed = std::move(*failed);
  out.keep_source = static_cast<std::uint8_t>(known->keep_source);
  return out;
}

void add_labels(const std::vector<actors::node_label>& labels, std::vector<troupe_label>& out) {
  for (const auto& label : labels) out.push_back({label.key.c_str(), label.value.c_str()});
}

std::vector<troupe_label> labels_of(const std::vector<actors::node_label>& labels) {
  std::vector<troupe_label> out;
  out.reserve(labels.size());
  add_labels(labels, out);
  return out;
}

std::vector<troupe_label> labels_of(const actors::node_info& node) {
  return labels_of(node.labels);
}

troupe_node_info node_of(const actors::node_info& node,
                         std::span<const troupe_label> labels) noexcept {
  troupe_node_info out{sizeof(troupe_node_info),
                       node.port,
                       node.name.c_str(),
                       node.stage.c_str(),
                       node.host.c_str(),
                       node.incarnation,
                       node.replica,
                       node.rank,
                       node.ranks,
                       node.pid,
                       node.replica_name.c_str(),
                       {},
                       labels.data(),
                       static_cast<uint32_t>(labels.size()),
                       0};
  std::ranges::copy(node.fingerprint, static_cast<uint8_t*>(out.fingerprint));
  return out;
}

namespace {

std::vector<std::vector<troupe_label>> labels_of_each(const std::vector<actors::node_info>& nodes) {
  std::vector<std::vector<troupe_label>> out;
  out.reserve(nodes.size());
  for (const auto& node : nodes) out.push_back(labels_of(node));
  return out;
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_placement::troupe_placement(actors::placement placed)
    : where(std::move(placed)),
      prefill_labels(labels_of_each(where.prefill)),
      decode_labels(labels_of_each(where.decode)) {}

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
    troupe_placement_info seen{0,
                               static_cast<uint32_t>(where.mode),
                               where.request.c_str(),
                               where.supervisor_incarnation,
                               where.epoch,
                               where.attempt,
                               static_cast<uint32_t>(where.prefill.size()),
                               static_cast<uint32_t>(where.decode.size()),
                               where.same_source,
                               {}};
    std::ranges::copy(where.fingerprint, static_cast<uint8_t*>(seen.fingerprint));
    write(seen, info);
    return {};
  });
}

troupe_status troupe_placement_node(const troupe_placement* placement, uint32_t side,
                                    uint32_t index, troupe_node_info* node) {
  return guarded([&]() -> result<void> {
    if (auto given = present(placement, "placement"); !given) return given;
    if (auto known = in_range(side, TROUPE_PREFILL, TROUPE_DECODE, "side"); !known) return known;
    if (auto out = writable(node, "node"); !out) return out;
    const bool prefill = side == TROUPE_PREFILL;
    const auto& ranks = prefill ? placement->where.prefill : placement->where.decode;
    const auto& labels = prefill ? placement->prefill_labels : placement->decode_labels;
    if (auto known = check_index(index, ranks.size(), "ranks"); !known) return known;
    write(node_of(ranks[index], labels[index]), node);
    return {};
  });
}

void troupe_placement_free(troupe_placement* placement) {
  delete placement;
}
