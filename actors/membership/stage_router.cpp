#include "troupe/actors/membership/stage_router.hpp"

#include <algorithm>
#include <limits>

#include "troupe/config/open_name.hpp"

namespace troupe::actors {

namespace {

constexpr std::size_t max_listed_stages = 8;
constexpr int together = 20;  // a lag of up to ease_in / together is none
constexpr auto nobody = std::numeric_limits<std::uint32_t>::max();

}  // namespace

std::uint64_t stage_router::rank_view::queue() const {
  const std::uint64_t counted = queue_length;
  return counted - std::min(counted, finished_since) + placed_since;
}

void stage_router::rank_view::heard(std::uint32_t queue, std::uint64_t at) {
  queue_length = queue;
  placed_since = 0;
  finished_since = 0;
  heard_at = at;
}

bool stage_router::replica_view::all_up() const {
  return !ranks.empty() && std::ranges::all_of(ranks, &rank_view::up);
}

std::uint64_t stage_router::replica_view::queue() const {
  std::uint64_t longest = 0;
  for (const rank_view& r : ranks) longest = std::max(longest, r.queue());
  return longest;
}

stage_router::stage_router(stage_options options)
    : options_{std::move(options)}, random_{options_.seed} {}

void stage_router::add(const expected_slot& slot) {
  add_rank(place_for(slot.replica), slot.name, slot.rank);
}

/// The place of that replica; if it has none, a free or a new one.
std::size_t stage_router::place_for(std::uint32_t id) {
  auto found = std::ranges::find(replicas_, id, &replica_view::id);
  if (found == replicas_.end()) found = std::ranges::find(replicas_, nobody, &replica_view::id);
  if (found == replicas_.end()) found = replicas_.emplace(replicas_.end());
  found->id = id;
  return static_cast<std::size_t>(found - replicas_.begin());
}

void stage_router::add_rank(std::size_t replica, std::string name, std::uint32_t rank) {
  replica_of_[name] = replica;
  rank_view fresh;
  fresh.name = std::move(name);
  fresh.info.rank = rank;
  fresh.born_at = ++clock_;  // earlier placements belong to the former holder of the place
  auto& ranks = replicas_[replica].ranks;
  const auto place =
      std::ranges::upper_bound(ranks, rank, {}, [](const rank_view& r) { return r.info.rank; });
  ranks.insert(place, std::move(fresh));
}

void stage_router::follow(const membership& members) {
  std::map<std::uint32_t, const node_info*> shown;
  for (const member& m : members.members) {
    if (m.node.stage == options_.name) shown.emplace(m.node.replica, &m.node);
  }
  for (replica_view& replica : replicas_) {
    const auto at = shown.find(replica.id);
    const bool stays = at != shown.end() && at->second->ranks == replica.ranks.size();
    if (!stays && replica.id != nobody) vacate(replica);
    if (stays) shown.erase(at);
  }
  for (const auto& [id, node] : shown) {
    const auto place = place_for(id);
    for (std::uint32_t rank = 0; rank < node->ranks; ++rank) {
      add_rank(place, config::open_node_name({node->stage, node->replica_name, rank}), rank);
    }
  }
}

void stage_router::vacate(replica_view& replica) {
  for (const rank_view& rank : replica.ranks) replica_of_.erase(rank.name);
  replica.ranks.clear();
  replica.id = nobody;
  ++replica.life;
}

// -- events

void stage_router::update(const membership& members, steady_time now) {
  if (options_.open) follow(members);
  for (replica_view& replica : replicas_) {
    for (rank_view& rank : replica.ranks) rank.registered = false;
  }
  for (const member& m : members.members) {
    const auto it = replica_of_.find(m.node.name);
    if (it == replica_of_.end()) continue;
    replica_view& replica = replicas_[it->second];
    update(*std::ranges::find(replica.ranks, m.node.name, &rank_view::name), replica, m);
  }
  begin_easing(now);
}

void stage_router::update(rank_view& rank, replica_view& replica, const member& m) {
  const auto state = node_state_from(m.state);
  if (!state) return;
  if (rank.info.incarnation != m.node.incarnation) {
    // A new life has nothing of the former life's queue or cache.
    rank.heard(m.load.queue_length, ++clock_);
    rank.born_at = clock_;
    ++replica.life;
  }
  rank.registered = true;
  rank.state = *state;
  rank.info = m.node;
  rank.registered_at = m.registered;
  rank.queue_length = m.load.queue_length;
}

void stage_router::begin_easing(steady_time now) {
  std::vector<std::size_t> newcomers;
  for (std::size_t r = 0; r < replicas_.size(); ++r) {
    replica_view& replica = replicas_[r];
    if (!replica.all_up() || replica.came_up_life == replica.life) continue;
    replica.came_up_life = replica.life;
    replica.came_up = served_before(replica) ? now - options_.ease_in : now;
    replica.credit = full_share / 2;
    newcomers.push_back(r);
  }
  if (newcomers.empty()) return;
  for (const offer& o : offers(now)) {
    if (o.share == full_share || std::ranges::find(newcomers, o.replica) == newcomers.end()) {
      continue;
    }
    notes_.push_back("replica " + std::to_string(replicas_[o.replica].id) + " of stage " +
                     options_.name +
                     " is new beside others: its share of the requests grows over " +
                     std::to_string(options_.ease_in.count()) + " ms, from " +
                     std::to_string(100 * std::uint64_t{o.share} / full_share) + " %");
  }
}

bool stage_router::served_before(const replica_view& replica) const {
  return remembered_ && std::ranges::all_of(replica.ranks, [this](const rank_view& r) {
           return r.registered_at <= *remembered_;
         });
}

bool stage_router::load(std::string_view name, std::uint64_t incarnation,
                        const load_report& report) {
  const auto it = replica_of_.find(name);
  if (it == replica_of_.end()) return false;
  rank_view& rank = *std::ranges::find(replicas_[it->second].ranks, name, &rank_view::name);
  if (rank.registered && rank.info.incarnation == incarnation) {
    rank.heard(report.queue_length, ++clock_);
  }
  return true;
}

stage_router::receipt stage_router::place(std::size_t replica) {
  for (rank_view& rank : replicas_[replica].ranks) ++rank.placed_since;
  return {replica, ++clock_};
}

void stage_router::ended(receipt what) {
  for (rank_view& rank : replicas_[what.replica].ranks) {
    if (what.at < rank.born_at) continue;  // this life never had the request
    if (what.at > rank.heard_at) {
      --rank.placed_since;
    } else {
      ++rank.finished_since;
    }
  }
}

// -- choosing

std::size_t stage_router::choose(steady_time now, const std::vector<std::size_t>& avoid,
                                 const filter& may, std::size_t turn) {
  std::vector<offer> all = offers(now, avoid, may, turn);
  if (all.empty()) all = offers(now, {}, may, turn);
  std::size_t chosen = 0;
  switch (options_.policy) {
    case placement_policy::round_robin: chosen = in_turn(all); break;
    case placement_policy::least_queue_length: chosen = in_turn(shortest(all)); break;
    case placement_policy::random: chosen = drawn(all); break;
  }
  next_[turn] = (chosen + 1) % replicas_.size();
  return chosen;
}

std::chrono::nanoseconds stage_router::seniority(const replica_view& replica,
                                                 steady_time now) const {
  return std::clamp<std::chrono::nanoseconds>(now - replica.came_up, std::chrono::nanoseconds{0},
                                              options_.ease_in);
}

/// The candidates in the order of the round. At least one of them has its full share.
std::vector<stage_router::offer> stage_router::offers(steady_time now,
                                                      const std::vector<std::size_t>& avoid,
                                                      const filter& may, std::size_t turn) const {
  std::vector<offer> all;
  std::chrono::nanoseconds longest{0};
  for (std::size_t i = 0; i < replicas_.size(); ++i) {
    const std::size_t r = (next_[turn] + i) % replicas_.size();
    if (!replicas_[r].all_up() || std::ranges::find(avoid, r) != avoid.end()) continue;
    if (may && !may(r)) continue;
    all.push_back({r});
    longest = std::max(longest, seniority(replicas_[r], now));
  }
  const std::chrono::nanoseconds whole{options_.ease_in};
  for (offer& o : all) {
    const auto lag = longest - seniority(replicas_[o.replica], now);
    if (lag * together <= whole) continue;
    o.share = static_cast<std::uint32_t>((whole - lag).count() * full_share / whole.count());
  }
  return all;
}

/// The first candidate that has its full share, or has saved up a turn.
std::size_t stage_router::in_turn(const std::vector<offer>& offers) {
  for (const offer& o : offers) {
    if (o.share == full_share) return o.replica;
    std::uint32_t& credit = replicas_[o.replica].credit;
    credit += o.share;
    if (credit < full_share) continue;
    credit -= full_share;
    return o.replica;
  }
  return offers.front().replica;
}

/// The candidates with the shortest queue. A newcomer's queue is lengthened for its missing share.
std::vector<stage_router::offer> stage_router::shortest(const std::vector<offer>& offers) const {
  std::uint64_t total = 0;
  std::uint64_t counted = 0;
  for (const offer& o : offers) {
    if (o.share != full_share) continue;
    total += replicas_[o.replica].queue();
    ++counted;
  }
  const auto length = [&](const offer& o) {
    const std::uint64_t lacks = full_share - o.share;
    const std::uint64_t unit = counted * full_share;
    return replicas_[o.replica].queue() + (total * lacks + unit - 1) / unit;
  };
  std::vector<offer> ties;
  std::uint64_t least = 0;
  for (const offer& o : offers) {
    const std::uint64_t queue = length(o);
    if (!ties.empty() && queue > least) continue;
    if (ties.empty() || queue < least) ties.clear();
    least = queue;
    ties.push_back(o);
  }
  return ties;
}

std::size_t stage_router::drawn(const std::vector<offer>& offers) {
  std::uint64_t total = 0;
  for (const offer& o : offers) total += o.share;
  std::uint64_t draw = random_() % total;
  for (const offer& o : offers) {
    if (draw < o.share) return o.replica;
    draw -= o.share;
  }
  return offers.back().replica;
}

// -- properties

bool stage_router::has_candidate(const filter& may) const {
  if (!may) return std::ranges::any_of(replicas_, &replica_view::all_up);
  for (std::size_t r = 0; r < replicas_.size(); ++r) {
    if (replicas_[r].all_up() && may(r)) return true;
  }
  return false;
}

std::string stage_router::title(std::size_t replica) const {
  const auto number = replicas_[replica].id;
  return number == nobody ? "a replica that is gone" : "replica " + std::to_string(number);
}

kvcache::layout_fingerprint stage_router::fingerprint(std::size_t replica) const {
  const auto& ranks = replicas_[replica].ranks;
  return ranks.empty() ? kvcache::layout_fingerprint{} : ranks.front().info.fingerprint;
}

bool stage_router::has(receipt what) const {
  return std::ranges::all_of(replicas_[what.replica].ranks,
                             [&](const rank_view& r) { return what.at > r.born_at; });
}

std::vector<std::size_t> stage_router::replicas_of(const std::vector<std::string>& nodes) const {
  std::vector<std::size_t> found;
  for (const std::string& node : nodes) {
    if (const auto it = replica_of_.find(node); it != replica_of_.end())
      found.push_back(it->second);
  }
  return found;
}

bool stage_router::taken_in_since(std::size_t replica, std::uint64_t epoch) const {
  return std::ranges::any_of(replicas_[replica].ranks,
                             [&](const rank_view& r) { return r.registered_at > epoch; });
}

std::vector<node_info> stage_router::ranks(std::size_t replica) const {
  std::vector<node_info> all;
  for (const rank_view& r : replicas_[replica].ranks) all.push_back(r.info);
  return all;
}

std::string stage_router::missing() const {
  return missing_of(replicas_);
}

std::string stage_router::missing(std::size_t replica) const {
  return missing_of({&replicas_[replica], 1});
}

std::string stage_router::missing_of(std::span<const replica_view> replicas) {
  std::string names;
  std::size_t missing = 0;
  for (const replica_view& replica : replicas) {
    for (const rank_view& rank : replica.ranks) {
      if (rank.up() || ++missing > max_listed_stages) continue;
      names += (missing == 1 ? "" : ", ") + rank.name + " ";
      names += rank.registered ? to_string(rank.state) : "never registered";
    }
  }
  if (missing > max_listed_stages)
    names += ", and " + std::to_string(missing - max_listed_stages) + " more";
  return names;
}

std::uint64_t stage_router::queue_length(std::uint32_t id) const {
  const auto it = std::ranges::find(replicas_, id, &replica_view::id);
  return it == replicas_.end() ? 0 : it->queue();
}

}  // namespace troupe::actors
