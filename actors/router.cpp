#include "troupe/actors/router.hpp"

#include <algorithm>

#include "troupe/actors/phrases.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_request_id = 256;
constexpr std::size_t max_listed = 8;

}  // namespace

router::router(router_options options)
    : options_{std::move(options)}, affinities_{options_.max_affinities} {
  for (const expected_slot& slot : options_.slots) {
    const std::size_t s = stage_index(slot.stage);
    if (s == stages_.size()) {
      const auto policy = options_.policies.find(slot.stage);
      stages_.emplace_back(stage_options{
          slot.stage,
          policy == options_.policies.end() ? placement_policy::round_robin : policy->second,
          options_.ease_in, options_.seed + s});
    }
    stages_[s].add(slot);
  }
  for (const router_edge& edge : options_.edges) {
    edge_stages_.emplace_back(stage_index(edge.from), stage_index(edge.to));
  }
}

// -- events

void router::update(const membership& members, steady_time now) {
  epoch_ = members.epoch;
  for (stage_router& stage : stages_) stage.update(members, now);
}

void router::load(std::string_view name, std::uint64_t incarnation, const load_report& report) {
  for (stage_router& stage : stages_) {
    if (stage.load(name, incarnation, report)) return;
  }
}

std::vector<std::string> router::take_notes() {
  std::vector<std::string> all;
  for (stage_router& stage : stages_) {
    for (std::string& note : stage.take_notes()) all.push_back(std::move(note));
  }
  return all;
}

result<std::variant<placement, ticket_id>> router::place(const placement_request& request,
                                                         steady_time now) {
  if (request.request.size() > max_request_id) {
    return fail(errc::invalid_config,
                "a request's id has at most " + std::to_string(max_request_id) +
                    " characters, this has " + std::to_string(request.request.size()));
  }
  if (request.affinity.size() > max_affinity) {
    return fail(errc::invalid_config, "an affinity has at most " + std::to_string(max_affinity) +
                                          " bytes, that of request " + quoted(request.request) +
                                          " has " + std::to_string(request.affinity.size()) + ": " +
                                          quoted(request.affinity) + "; name a hash of it");
  }
  const auto edge = find_edge(request);
  if (!edge) return fail(edge.error());
  if (has_candidate(*edge)) return assign(request, *edge, now);
  if (request.timeout_ms == 0) {
    return fail(errc::peer_unreachable,
                nobody_up(*edge) + "; start them, or give the request time to wait");
  }
  if (line_.size() >= options_.max_waiting) {
    return fail(errc::overloaded, nobody_up(*edge) + ", and " + count_of(line_.size(), "request") +
                                      " wait already; try again later");
  }
  const auto deadline = now + std::chrono::milliseconds{request.timeout_ms};
  line_.push_back({++last_ticket_, request, *edge, now, deadline});
  return last_ticket_;
}

void router::finished(std::string_view request) {
  const auto it = placed_.find(std::string{request});
  if (it == placed_.end()) return;
  for (const tracked_part& p : {it->second.from, it->second.to}) stages_[p.stage].ended(p.placed);
  placed_.erase(it);
}

std::vector<served_ticket> router::serve(steady_time now) {
  std::vector<served_ticket> served;
  std::deque<waiting_request> still;
  for (waiting_request& w : line_) {
    if (has_candidate(w.edge)) {
      served.push_back({w.ticket, assign(w.request, w.edge, now)});
    } else if (now >= w.deadline) {
      const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - w.arrived);
      served.push_back({w.ticket, fail(errc::deadline, "waited " + std::to_string(waited.count()) +
                                                           " ms: " + nobody_up(w.edge))});
    } else {
      still.push_back(std::move(w));
    }
  }
  line_ = std::move(still);
  return served;
}

std::vector<served_ticket> router::abandon() {
  std::vector<served_ticket> served;
  for (const waiting_request& w : line_) {
    served.push_back(
        {w.ticket, fail(errc::aborted, "the supervisor stops; ask again when it is back")});
  }
  line_.clear();
  return served;
}

// -- choosing

placement router::assign(const placement_request& request, std::size_t edge, steady_time now) {
  const auto [from, to] = edge_stages_[edge];
  const choice source = choose(from, request.affinity, now);
  const choice target = choose(to, request.affinity, now);
  const tracked_part sends{from, stages_[from].place(source.replica)};
  const tracked_part receives{to, stages_[to].place(target.replica)};
  if (!request.request.empty()) track(request.request, sends, receives);
  placement out;
  out.request = request.request;
  out.epoch = epoch_;
  out.mode = options_.edges[edge].mode;
  out.prefill = stages_[from].ranks(source.replica);
  out.decode = stages_[to].ranks(target.replica);
  for (const std::string& move : {source.move, target.move}) {
    if (move.empty()) continue;
    out.sentence +=
        out.sentence.empty() ? "affinity " + quoted(request.affinity) + " moves " : "; ";
    out.sentence += move;
  }
  return out;
}

router::choice router::choose(std::size_t stage, const std::string& affinity, steady_time now) {
  stage_router& routes = stages_[stage];
  if (affinity.empty()) return {routes.choose(now), {}};
  const auto bound = affinities_.find(affinity, stage);
  if (bound && routes.is_candidate(bound->replica) && routes.life(bound->replica) == bound->life) {
    return {bound->replica, {}};
  }
  const std::size_t chosen = routes.choose(now);
  affinities_.bind(affinity, stage, {chosen, routes.life(chosen)});
  if (!bound) return {chosen, {}};
  const std::string missing = routes.missing(bound->replica);
  return {chosen, "in stage " + routes.name() + " from replica " +
                      std::to_string(routes.id(bound->replica)) + " (" +
                      (missing.empty() ? "restarted" : missing) + ") to replica " +
                      std::to_string(routes.id(chosen))};
}

void router::track(const std::string& request, tracked_part from, tracked_part to) {
  finished(request);  // the same id again is a request that goes elsewhere
  placed_[request] = {from, to, ++last_order_};
  placed_order_.emplace_back(last_order_, request);
  while (placed_.size() > options_.max_tracked || placed_order_.size() > 2 * options_.max_tracked) {
    const auto [order, oldest] = placed_order_.front();
    placed_order_.pop_front();
    const auto it = placed_.find(oldest);
    if (it != placed_.end() && it->second.order == order) placed_.erase(it);
  }
}

bool router::has_candidate(std::size_t edge) const {
  const auto [from, to] = edge_stages_[edge];
  return from < stages_.size() && to < stages_.size() && stages_[from].has_candidate() &&
         stages_[to].has_candidate();
}

// -- sentences

result<std::size_t> router::find_edge(const placement_request& request) const {
  std::vector<std::size_t> matching;
  for (std::size_t i = 0; i < options_.edges.size(); ++i) {
    const router_edge& edge = options_.edges[i];
    if (!request.from.empty() && edge.from != request.from) continue;
    if (!request.to.empty() && edge.to != request.to) continue;
    matching.push_back(i);
  }
  if (matching.size() == 1) return matching.front();
  const std::string wanted =
      (request.from.empty() ? "any stage" : "stage " + quoted(request.from)) + " to " +
      (request.to.empty() ? "any stage" : "stage " + quoted(request.to));
  if (matching.empty()) {
    return fail(errc::not_found, "the deployment has no edge from " + wanted + "; " + edge_names());
  }
  return fail(errc::invalid_config, "more than one edge goes from " + wanted + "; " + edge_names() +
                                        ": name both stages");
}

std::string router::edge_names() const {
  if (options_.edges.empty()) return "it has no edges";
  std::string names = "its edges are ";
  for (std::size_t i = 0; i < std::min(options_.edges.size(), max_listed); ++i) {
    names += (i == 0 ? "" : ", ") + options_.edges[i].from + " -> " + options_.edges[i].to;
  }
  return options_.edges.size() > max_listed ? names + ", ..." : names;
}

std::string router::nobody_up(std::size_t edge) const {
  std::string sentence;
  const auto [from, to] = edge_stages_[edge];
  for (const std::size_t s : {from, to}) {
    if (s < stages_.size() && stages_[s].has_candidate()) continue;
    const std::string& name = s == from ? options_.edges[edge].from : options_.edges[edge].to;
    sentence += (sentence.empty() ? "" : "; ") + ("no replica of stage '" + name + "' is up");
    sentence += s < stages_.size() ? " (missing: " + stages_[s].missing() + ")"
                                   : " (the deployment gives it no nodes)";
    if (from == to) break;
  }
  return sentence;
}

std::size_t router::stage_index(std::string_view name) const {
  const auto it = std::ranges::find(stages_, name, &stage_router::name);
  return static_cast<std::size_t>(it - stages_.begin());
}

std::size_t router::unfinished(std::string_view stage, std::uint32_t replica) const {
  const std::size_t s = stage_index(stage);
  if (s == stages_.size()) return 0;
  const auto is_there = [&](const tracked_part& p) {
    return p.stage == s && stages_[s].id(p.placed.replica) == replica && stages_[s].has(p.placed);
  };
  return static_cast<std::size_t>(std::ranges::count_if(placed_, [&](const auto& one) {
    return is_there(one.second.from) || is_there(one.second.to);
  }));
}

std::uint64_t router::queue_length(std::string_view stage, std::uint32_t replica) const {
  const std::size_t s = stage_index(stage);
  return s == stages_.size() ? 0 : stages_[s].queue_length(replica);
}

}  // namespace troupe::actors
