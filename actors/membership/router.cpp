#include "troupe/actors/membership/router.hpp"

#include <algorithm>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/messages/session_messages.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_failed = 1024;    ///< as many as a deployment has nodes
constexpr std::size_t max_node_name = 256;  ///< bytes
constexpr kvcache::layout_fingerprint not_said{};

std::string names_of(const std::vector<std::string>& nodes) {
  std::vector<std::string> names;
  for (const auto& node : nodes) names.push_back(printable(node, 64));
  return list_of(names);
}

}  // namespace

router::router(router_options options)
    : options_{std::move(options)}, affinities_{options_.max_affinities} {
  const auto stage_of = [this](const std::string& name) -> stage_router& {
    const std::size_t s = stage_index(name);
    if (s == stages_.size()) {
      const auto policy = options_.policies.find(name);
      stages_.emplace_back(stage_options{
          name, policy == options_.policies.end() ? placement_policy::round_robin : policy->second,
          options_.ease_in, options_.seed + s, options_.open.contains(name)});
    }
    return stages_[s];
  };
  for (const expected_slot& slot : options_.slots) stage_of(slot.stage).add(slot);
  for (const std::string& name : options_.open) stage_of(name);
  for (const router_edge& edge : options_.edges) {
    edge_stages_.emplace_back(stage_index(edge.from), stage_index(edge.to));
    const auto [from, to] = edge_stages_.back();
    if (from == to && from < stages_.size()) stages_[from].becomes_own_mate();
  }
  find_mates();
}

// -- events

void router::remember(std::uint64_t epoch) {
  for (stage_router& stage : stages_) stage.remember(epoch);
}

void router::update(const membership& members, steady_time now) {
  epoch_ = members.epoch;
  supervisor_ = members.supervisor_incarnation;
  for (stage_router& stage : stages_) stage.update(members, now);
  find_mates();
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
                                          " bytes, that of request " + in_quotes(request.request) +
                                          " has " + std::to_string(request.affinity.size()) + ": " +
                                          in_quotes(request.affinity) + "; name a hash of it");
  }
  const auto long_name = [](const std::string& name) { return name.size() > max_node_name; };
  if (request.failed.size() > max_failed || std::ranges::any_of(request.failed, long_name)) {
    return fail(errc::invalid_config, "request " + in_quotes(request.request) + " names " +
                                          count_of(request.failed.size(), "node") +
                                          " that failed it; at most " + std::to_string(max_failed) +
                                          " of at most " + std::to_string(max_node_name) +
                                          " bytes");
  }
  const auto edge = find_edge(request);
  if (!edge) return fail(edge.error());
  auto which = next_attempt(request);
  if (!which) return fail(which.error());
  if (which->said_again) {
    const auto& known = placed_.at(request.request);
    return answer(request, known.where, which->number, known.same_source);
  }
  if (has_candidate(*edge)) return assign(request, *edge, *which, now);
  if (request.timeout_ms == 0) {
    return fail(errc::peer_unreachable,
                nobody_up(*edge) + "; start them, or give the request time to wait");
  }
  if (line_.size() >= options_.max_waiting) {
    return fail(errc::overloaded, nobody_up(*edge) + ", and " + count_of(line_.size(), "request") +
                                      " wait already; try again later");
  }
  const auto deadline = now + std::chrono::milliseconds{request.timeout_ms};
  // A repeated request is counted even if this one still waits in line.
  if (const auto known = placed_.find(request.request); known != placed_.end()) {
    known->second.last = *which;
    known->second.failed = request.failed;
    known->second.in_line = true;
  }
  line_.push_back({++last_ticket_, request, *edge, *which, now, deadline});
  return last_ticket_;
}

void router::finished(std::string_view request) {
  forget(request);
  if (request.empty()) return;
  for (waiting_request& w : line_) w.over = w.over || w.request.request == request;
}

void router::forget(std::string_view request) {
  const auto it = placed_.find(std::string{request});
  if (it == placed_.end()) return;
  give_back(it->second);
  placed_.erase(it);
}

void router::give_back(tracked_request& request) {
  if (!std::exchange(request.queued, false)) return;
  for (const tracked_part& p : {request.from, request.to}) stages_[p.stage].ended(p.placed);
}

std::vector<served_ticket> router::serve(steady_time now) {
  std::vector<served_ticket> served;
  std::deque<waiting_request> still;
  for (waiting_request& w : line_) {
    if (w.over) {
      served.push_back({w.ticket, fail(errc::aborted, "the request ended while it waited")});
    } else if (has_candidate(w.edge)) {
      served.push_back({w.ticket, assign(w.request, w.edge, w.which, now)});
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

result<router::attempt> router::next_attempt(const placement_request& request) {
  if (request.failed.empty()) return attempt{};
  if (request.request.empty()) {
    return fail(errc::invalid_config, "a request that is placed once more must have an id");
  }
  attempt which{2, std::nullopt, false};  // a forgotten request was placed at least once
  const auto known = placed_.find(request.request);
  if (known != placed_.end()) {
    if (stands(known->second, request)) return attempt{known->second.last.number, {}, true};
    give_back(known->second);
    const bool waits = known->second.in_line && known->second.failed == request.failed;
    which = {known->second.last.number + (waits ? 0 : 1), known->second.where};
  }
  if (which.number > options_.retry_budget + 1) {
    return fail(errc::peer_lost,
                "request " + in_quotes(request.request) + " was placed " +
                    count_of(which.number - 1, "time") + " and lost " + names_of(request.failed) +
                    " last, which uses limits.retry_budget (" +
                    std::to_string(options_.retry_budget) +
                    ") up; see `troupe events` for why nodes were lost, or raise it");
  }
  return which;
}

placement router::assign(const placement_request& request, std::size_t edge, const attempt& which,
                         steady_time now) {
  const auto [from, to] = edge_stages_[edge];
  const auto former = which.former && which.former->edge == edge ? which.former : std::nullopt;
  const auto stays = [&](std::size_t stage, std::size_t replica, std::uint64_t life) {
    return is_unhurt(stage, replica, life, former->epoch, request.failed);
  };
  const bool same_source = former && stays(from, former->from, former->from_life);
  const bool same_target = former && stays(to, former->to, former->to_life);
  choice source{former ? former->from : 0, {}};
  auto may = sources_of(edge);
  const bool keeps = same_source && request.keep_source != 0 && (!may || may(former->from));
  if (!keeps) {
    // The decode side has the prefix: prefer a source that fits it.
    const auto fits_target = [&](std::size_t replica) { return fits(edge, replica, former->to); };
    if (may && same_target && stages_[from].has_candidate(fits_target)) may = fits_target;
    source = choose(from, side::source, request, now, may);
  }
  const auto takes = [&](std::size_t replica) { return fits(edge, source.replica, replica); };
  choice target{former ? former->to : 0, {}};
  if (!same_target || !takes(former->to)) {
    target = choose(to, side::target, request, now,
                    mates_.contains(edge) ? takes : stage_router::filter{});
  }
  tracked_request placed;
  placed.from = {from, stages_[from].place(source.replica)};
  placed.to = {to, stages_[to].place(target.replica)};
  placed.last = which;
  placed.where = {edge,
                  source.replica,
                  target.replica,
                  stages_[from].life(source.replica),
                  stages_[to].life(target.replica),
                  epoch_};
  placed.failed = request.failed;
  placed.same_source = same_source && source.replica == former->from;
  placement out = answer(request, placed.where, which.number, placed.same_source);
  if (!request.request.empty()) track(request.request, std::move(placed));
  for (const std::string& move : {source.move, target.move}) {
    if (move.empty()) continue;
    out.sentence +=
        out.sentence.empty() ? "affinity " + in_quotes(request.affinity) + " moves " : "; ";
    out.sentence += move;
  }
  return out;
}

placement router::answer(const placement_request& request, const former_attempt& where,
                         std::uint32_t number, bool same_source) const {
  const auto [from, to] = edge_stages_[where.edge];
  placement out;
  out.request = request.request;
  out.supervisor_incarnation = supervisor_;
  out.epoch = epoch_;
  out.attempt = number;
  out.same_source = same_source ? 1 : 0;
  out.mode = options_.edges[where.edge].mode.value_or(transfer_mode::write);
  out.prefill = stages_[from].ranks(where.from);
  out.decode = stages_[to].ranks(where.to);
  if (mates_.contains(where.edge)) {
    out.fingerprint = stages_[from].fingerprint(where.from);
    if (out.fingerprint == not_said) out.fingerprint = stages_[to].fingerprint(where.to);
  }
  return out;
}

bool router::stands(const tracked_request& placed, const placement_request& request) const {
  if (placed.in_line || !placed.queued || placed.failed != request.failed) return false;
  const auto [from, to] = edge_stages_[placed.where.edge];
  const auto& at = placed.where;
  // An asker that got this answer and then lost nodes names nodes of it.
  return is_unhurt(from, at.from, at.from_life, at.epoch, request.failed) &&
         is_unhurt(to, at.to, at.to_life, at.epoch, request.failed);
}

bool router::is_unhurt(std::size_t stage, std::size_t replica, std::uint64_t life,
                       std::uint64_t epoch, const std::vector<std::string>& failed) const {
  const stage_router& routes = stages_[stage];
  const auto hurt = routes.replicas_of(failed);
  return routes.is_candidate(replica) && routes.life(replica) == life &&
         !routes.taken_in_since(replica, epoch) && std::ranges::find(hurt, replica) == hurt.end();
}

router::choice router::choose(std::size_t stage, side at, const placement_request& request,
                              steady_time now, const stage_router::filter& may) {
  stage_router& routes = stages_[stage];
  const auto turn = static_cast<std::size_t>(at);
  // On an edge from a stage to itself, each side has a binding of its own.
  const auto slot = stage + (at == side::target && routes.is_own_mate() ? stages_.size() : 0);
  const std::string& affinity = request.affinity;
  const auto avoid = routes.replicas_of(request.failed);
  if (affinity.empty()) return {routes.choose(now, avoid, may, turn), {}};
  const auto bound = affinities_.find(affinity, slot);
  const bool up =
      bound && routes.is_candidate(bound->replica) && routes.life(bound->replica) == bound->life;
  const bool there = up && (!may || may(bound->replica));
  const bool lost = bound && std::ranges::find(avoid, bound->replica) != avoid.end();
  if (there && !lost) return {bound->replica, {}};
  const std::size_t chosen = routes.choose(now, avoid, may, turn);
  if (there && chosen == bound->replica) return {chosen, {}};  // nobody else is up
  affinities_.bind(affinity, slot, {chosen, routes.life(chosen)});
  if (!bound) return {chosen, {}};
  const std::string missing = routes.missing(bound->replica);
  const std::string why = !missing.empty() ? missing
                          : there          ? "lost to a request"
                          : up             ? "no replica that is up has its layout"
                                           : "restarted";
  return {chosen, "in stage " + routes.name() + " from " + routes.title(bound->replica) + " (" +
                      why + ") to " + routes.title(chosen)};
}

void router::track(const std::string& request, tracked_request placed) {
  forget(request);  // a known id belongs to a request that now goes elsewhere
  placed.order = ++last_order_;
  placed_.insert_or_assign(request, std::move(placed));
  placed_order_.emplace_back(last_order_, request);
  while (placed_.size() > options_.max_tracked || placed_order_.size() > 2 * options_.max_tracked) {
    const auto [order, oldest] = placed_order_.front();
    placed_order_.pop_front();
    const auto it = placed_.find(oldest);
    if (it != placed_.end() && it->second.order == order) placed_.erase(it);
  }
}

bool router::has_candidate(std::size_t edge) const {
  const auto mates = mates_.find(edge);
  if (mates != mates_.end()) return std::ranges::find(mates->second, true) != mates->second.end();
  const auto [from, to] = edge_stages_[edge];
  return from < stages_.size() && to < stages_.size() && stages_[from].has_candidate() &&
         stages_[to].has_candidate();
}

bool router::fits(std::size_t edge, std::size_t from, std::size_t to) const {
  if (!mates_.contains(edge)) return true;
  const auto [source, target] = edge_stages_[edge];
  if (source == target && from == to) return false;
  const auto one = stages_[source].fingerprint(from);
  const auto other = stages_[target].fingerprint(to);
  return one == other || one == not_said || other == not_said;
}

/// The pairs that can be chosen depend on the membership alone, not on placements.
void router::find_mates() {
  for (std::size_t edge = 0; edge < edge_stages_.size(); ++edge) {
    const auto [from, to] = edge_stages_[edge];
    if (from >= stages_.size() || to >= stages_.size()) continue;
    const stage_router& sources = stages_[from];
    const stage_router& targets = stages_[to];
    if (!sources.is_open() && !targets.is_open() && from != to) continue;
    std::map<kvcache::layout_fingerprint, std::size_t> up;
    std::size_t all = 0;
    for (std::size_t t = 0; t < targets.size(); ++t) {
      if (!targets.is_candidate(t)) continue;
      ++up[targets.fingerprint(t)];
      ++all;
    }
    const auto count = [&up](const kvcache::layout_fingerprint& of) {
      const auto found = up.find(of);
      return found == up.end() ? std::size_t{0} : found->second;
    };
    auto& mates = mates_[edge];
    mates.assign(sources.size(), false);
    for (std::size_t s = 0; s < sources.size(); ++s) {
      if (!sources.is_candidate(s)) continue;
      const auto own = sources.fingerprint(s);
      const auto fitting = own == not_said ? all : count(own) + count(not_said);
      mates[s] = fitting > (from == to ? 1 : 0);  // on such an edge the replica counts itself
    }
  }
}

stage_router::filter router::sources_of(std::size_t edge) const {
  const auto mates = mates_.find(edge);
  if (mates == mates_.end()) return {};
  return [with = &mates->second](std::size_t replica) { return (*with)[replica]; };
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
      (request.from.empty() ? "any stage" : "stage " + in_quotes(request.from)) + " to " +
      (request.to.empty() ? "any stage" : "stage " + in_quotes(request.to));
  if (matching.empty()) {
    return fail(errc::not_found, "the deployment has no edge from " + wanted + "; " + edge_names());
  }
  return fail(errc::invalid_config, "more than one edge goes from " + wanted + "; " + edge_names() +
                                        ": name both stages");
}

std::string router::edge_names() const {
  if (options_.edges.empty()) return "it has no edges";
  std::vector<std::string> names;
  for (const router_edge& edge : options_.edges) names.push_back(edge.from + " -> " + edge.to);
  return "its edges are " + list_of(names);
}

std::string router::nobody_up(std::size_t edge) const {
  std::string sentence;
  const auto [from, to] = edge_stages_[edge];
  for (const std::size_t s : {from, to}) {
    if (s < stages_.size() && stages_[s].has_candidate()) continue;
    const std::string& name = s == from ? options_.edges[edge].from : options_.edges[edge].to;
    sentence += (sentence.empty() ? "" : "; ") + ("no replica of stage '" + name + "' is up");
    const std::string missing = s < stages_.size() ? stages_[s].missing() : "";
    sentence += s >= stages_.size() ? " (the deployment gives it no nodes)"
                : missing.empty()   ? " (nobody has joined it)"
                                    : " (missing: " + missing + ")";
    if (from == to) break;
  }
  return sentence.empty() ? no_two_fit(edge) : sentence;
}

/// The sentence for an edge whose stages both have candidates.
std::string router::no_two_fit(std::size_t edge) const {
  const auto [from, to] = edge_stages_[edge];
  std::string sentence =
      "no two replicas of " +
      (from == to ? "stage '" + stages_[from].name() + "'"
                  : "stages '" + stages_[from].name() + "' and '" + stages_[to].name() + "'") +
      " that are up have equal layouts";
  std::set<std::string> prints;
  for (const std::size_t s : {from, to}) {
    for (std::size_t r = 0; r < stages_[s].size(); ++r) {
      if (stages_[s].is_candidate(r)) prints.insert(hex_text(stages_[s].fingerprint(r)));
    }
  }
  return prints.empty() ? sentence : sentence + "; their fingerprints are " + list_of(prints);
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
    return one.second.queued && (is_there(one.second.from) || is_there(one.second.to));
  }));
}

std::uint64_t router::queue_length(std::string_view stage, std::uint32_t replica) const {
  const std::size_t s = stage_index(stage);
  return s == stages_.size() ? 0 : stages_[s].queue_length(replica);
}

}  // namespace troupe::actors
