#include "troupe/actors/router.hpp"

#include <algorithm>

namespace troupe::actors {

namespace {

constexpr std::size_t max_request_id = 256;
constexpr std::size_t max_listed = 8;

std::string count_of(std::size_t n, std::string_view what) {
  return std::to_string(n) + " " + std::string{what} + (n == 1 ? "" : "s");
}

}  // namespace

bool router::replica_view::all_up() const {
  return !ranks.empty() && std::ranges::all_of(ranks, [](const rank_view& r) {
    return r.registered && r.state == node_state::up;
  });
}

std::uint64_t router::replica_view::queue() const {
  std::uint64_t longest = 0;
  for (const rank_view& r : ranks) longest = std::max<std::uint64_t>(longest, r.queue_length);
  return longest - std::min(longest, finished_since) + placed_since;
}

router::router(router_options options) : options_{std::move(options)}, random_{options_.seed} {
  for (const expected_slot& slot : options_.slots) {
    std::size_t s = stage_index(slot.stage);
    if (s == stages_.size()) {
      stage_view stage;
      stage.name = slot.stage;
      const auto policy = options_.policies.find(slot.stage);
      if (policy != options_.policies.end()) stage.policy = policy->second;
      stages_.push_back(std::move(stage));
    }
    auto& replicas = stages_[s].replicas;
    auto replica = std::ranges::find(replicas, slot.replica, &replica_view::id);
    if (replica == replicas.end()) {
      replicas.emplace_back().id = slot.replica;
      replica = replicas.end() - 1;
    }
    rank_view rank;
    rank.name = slot.name;
    rank.info.rank = slot.rank;
    const auto place = std::ranges::upper_bound(replica->ranks, slot.rank, {},
                                                [](const rank_view& r) { return r.info.rank; });
    replica->ranks.insert(place, std::move(rank));
  }
  for (std::size_t s = 0; s < stages_.size(); ++s) {
    for (std::size_t r = 0; r < stages_[s].replicas.size(); ++r) {
      for (const rank_view& rank : stages_[s].replicas[r].ranks) node_replica_[rank.name] = {s, r};
    }
  }
  for (const router_edge& edge : options_.edges) {
    edge_stages_.emplace_back(stage_index(edge.from), stage_index(edge.to));
  }
}

// -- events

void router::update(const membership& members) {
  epoch_ = members.epoch;
  for (const member& m : members.members) {
    const auto it = node_replica_.find(m.node.name);
    const auto state = node_state_from(m.state);
    if (it == node_replica_.end() || !state) continue;
    replica_view& replica = stages_[it->second.first].replicas[it->second.second];
    rank_view& rank = *std::ranges::find(replica.ranks, m.node.name, &rank_view::name);
    if (rank.registered && rank.info.incarnation != m.node.incarnation) {
      // A new life holds nothing of the former one's queue.
      replica.placed_since = 0;
      replica.finished_since = 0;
      ++replica.beats;
    }
    rank.registered = true;
    rank.state = *state;
    rank.info = m.node;
    rank.queue_length = m.load.queue_length;
  }
}

void router::load(std::string_view name, std::uint64_t incarnation, const load_report& report) {
  const auto it = node_replica_.find(name);
  if (it == node_replica_.end()) return;
  replica_view& replica = stages_[it->second.first].replicas[it->second.second];
  rank_view& rank = *std::ranges::find(replica.ranks, name, &rank_view::name);
  if (!rank.registered || rank.info.incarnation != incarnation) return;
  rank.queue_length = report.queue_length;
  if (&rank == &replica.ranks.front()) {
    replica.placed_since = 0;
    replica.finished_since = 0;
    ++replica.beats;
  }
}

result<std::variant<placement, ticket_id>> router::place(const placement_request& request,
                                                         steady_time now) {
  if (request.request.size() > max_request_id) {
    return fail(errc::invalid_config,
                "a request's id has at most " + std::to_string(max_request_id) +
                    " characters, this has " + std::to_string(request.request.size()));
  }
  const auto edge = find_edge(request);
  if (!edge) return fail(edge.error());
  if (has_candidate(*edge)) return assign(request, *edge);
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
  release(it->second.from);
  release(it->second.to);
  placed_.erase(it);
}

std::vector<served_ticket> router::serve(steady_time now) {
  std::vector<served_ticket> served;
  std::deque<waiting_request> still;
  for (waiting_request& w : line_) {
    if (has_candidate(w.edge)) {
      served.push_back({w.ticket, assign(w.request, w.edge)});
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

placement router::assign(const placement_request& request, std::size_t edge) {
  const auto [from, to] = edge_stages_[edge];
  const std::size_t from_replica = choose(stages_[from]);
  const std::size_t to_replica = choose(stages_[to]);
  replica_view& source = stages_[from].replicas[from_replica];
  replica_view& target = stages_[to].replicas[to_replica];
  ++source.placed_since;
  ++target.placed_since;
  if (!request.request.empty()) {
    track(request.request, {from, from_replica, source.beats}, {to, to_replica, target.beats});
  }
  placement out;
  out.request = request.request;
  out.epoch = epoch_;
  out.mode = options_.edges[edge].mode;
  for (const rank_view& r : source.ranks) out.prefill.push_back(r.info);
  for (const rank_view& r : target.ranks) out.decode.push_back(r.info);
  return out;
}

std::size_t router::choose(stage_view& stage) {
  const std::size_t n = stage.replicas.size();
  std::vector<std::size_t> candidates;  // in the order of the round
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t r = (stage.next + i) % n;
    if (stage.replicas[r].all_up()) candidates.push_back(r);
  }
  std::size_t chosen = candidates.front();
  switch (stage.policy) {
    case placement_policy::round_robin: break;
    case placement_policy::least_queue_length:
      chosen = *std::ranges::min_element(candidates, {},
                                         [&](std::size_t r) { return stage.replicas[r].queue(); });
      break;
    case placement_policy::random: chosen = candidates[random_() % candidates.size()]; break;
  }
  stage.next = (chosen + 1) % n;
  return chosen;
}

void router::track(const std::string& request, choice from, choice to) {
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

void router::release(const choice& c) {
  replica_view& replica = stages_[c.stage].replicas[c.replica];
  if (replica.beats == c.beats) {
    replica.placed_since -= std::min<std::uint64_t>(replica.placed_since, 1);
  } else {
    ++replica.finished_since;
  }
}

bool router::has_candidate(const stage_view& stage) {
  return std::ranges::any_of(stage.replicas, [](const replica_view& r) { return r.all_up(); });
}

bool router::has_candidate(std::size_t edge) const {
  const auto [from, to] = edge_stages_[edge];
  return from < stages_.size() && to < stages_.size() && has_candidate(stages_[from]) &&
         has_candidate(stages_[to]);
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
    if (s < stages_.size() && has_candidate(stages_[s])) continue;
    const std::string& name = s == from ? options_.edges[edge].from : options_.edges[edge].to;
    sentence += (sentence.empty() ? "" : "; ") + ("no replica of stage '" + name + "' is up");
    if (s >= stages_.size()) {
      sentence += " (the deployment gives it no nodes)";
      continue;
    }
    std::size_t missing = 0;
    for (const replica_view& replica : stages_[s].replicas) {
      for (const rank_view& rank : replica.ranks) {
        if (rank.registered && rank.state == node_state::up) continue;
        if (++missing > max_listed) continue;
        sentence += (missing == 1 ? " (missing: " : ", ") + rank.name + " ";
        sentence += rank.registered ? to_string(rank.state) : "never registered";
      }
    }
    if (missing > max_listed) {
      sentence += ", and " + std::to_string(missing - max_listed) + " more";
    }
    sentence += ")";
    if (from == to) break;
  }
  return sentence;
}

std::size_t router::stage_index(std::string_view name) const {
  const auto it = std::ranges::find(stages_, name, &stage_view::name);
  return static_cast<std::size_t>(it - stages_.begin());
}

std::uint64_t router::queue_length(std::string_view stage, std::uint32_t replica) const {
  const std::size_t s = stage_index(stage);
  if (s == stages_.size()) return 0;
  const auto it = std::ranges::find(stages_[s].replicas, replica, &replica_view::id);
  return it == stages_[s].replicas.end() ? 0 : it->queue();
}

}  // namespace troupe::actors
