#include "troupe/actors/stage_router.hpp"

#include <algorithm>

namespace troupe::actors {

namespace {

constexpr std::size_t max_listed_stages = 8;
constexpr int together = 20;  // a lag of up to ease_in / together is none

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
  auto replica = std::ranges::find(replicas_, slot.replica, &replica_view::id);
  if (replica == replicas_.end()) {
    replicas_.emplace_back().id = slot.replica;
    replica = replicas_.end() - 1;
  }
  replica_of_[slot.name] = static_cast<std::size_t>(replica - replicas_.begin());
  rank_view rank;
  rank.name = slot.name;
  rank.info.rank = slot.rank;
  const auto place = std::ranges::upper_bound(replica->ranks, slot.rank, {},
                                              [](const rank_view& r) { return r.info.rank; });
  replica->ranks.insert(place, std::move(rank));
}

// -- events

void stage_router::update(const membership& members, steady_time now) {
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
    // A new life holds nothing of the former one's queue, nor of its cache.
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
    if (what.at < rank.born_at) continue;  // this life never had it
    if (what.at > rank.heard_at) {
      --rank.placed_since;
    } else {
      ++rank.finished_since;
    }
  }
}

// -- choosing

std::size_t stage_router::choose(steady_time now, const std::vector<std::size_t>& avoid) {
  std::vector<offer> all = offers(now, avoid);
  if (all.empty()) all = offers(now);
  std::size_t chosen = 0;
  switch (options_.policy) {
    case placement_policy::round_robin: chosen = in_turn(all); break;
    case placement_policy::least_queue_length: chosen = in_turn(shortest(all)); break;
    case placement_policy::random: chosen = drawn(all); break;
  }
  next_ = (chosen + 1) % replicas_.size();
  return chosen;
}

std::chrono::nanoseconds stage_router::seniority(const replica_view& replica,
                                                 steady_time now) const {
  return std::clamp<std::chrono::nanoseconds>(now - replica.came_up, std::chrono::nanoseconds{0},
                                              options_.ease_in);
}

/// The candidates in the order of the round. One of them at least has its full share.
std::vector<stage_router::offer> stage_router::offers(steady_time now,
                                                      const std::vector<std::size_t>& avoid) const {
  std::vector<offer> all;
  std::chrono::nanoseconds longest{0};
  for (std::size_t i = 0; i < replicas_.size(); ++i) {
    const std::size_t r = (next_ + i) % replicas_.size();
    if (!replicas_[r].all_up() || std::ranges::find(avoid, r) != avoid.end()) continue;
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

/// The first that has its full share, or has saved up a turn.
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

/// Those with the shortest queue, a newcomer's lengthened by what it lacks of its full share.
std::vector<stage_router::offer> stage_router::shortest(const std::vector<offer>& offers) const {
  std::uint64_t total = 0;
  std::uint64_t settled = 0;
  for (const offer& o : offers) {
    if (o.share != full_share) continue;
    total += replicas_[o.replica].queue();
    ++settled;
  }
  const auto length = [&](const offer& o) {
    const std::uint64_t lacks = full_share - o.share;
    const std::uint64_t unit = settled * full_share;
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

bool stage_router::has_candidate() const {
  return std::ranges::any_of(replicas_, &replica_view::all_up);
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
  std::vector<const rank_view*> ranks;
  for (const replica_view& replica : replicas_) {
    for (const rank_view& rank : replica.ranks) ranks.push_back(&rank);
  }
  return missing_of(ranks);
}

std::string stage_router::missing(std::size_t replica) const {
  std::vector<const rank_view*> ranks;
  for (const rank_view& rank : replicas_[replica].ranks) ranks.push_back(&rank);
  return missing_of(ranks);
}

std::string stage_router::missing_of(const std::vector<const rank_view*>& ranks) {
  std::string names;
  std::size_t missing = 0;
  for (const rank_view* rank : ranks) {
    if (rank->up() || ++missing > max_listed_stages) continue;
    names += (missing == 1 ? "" : ", ") + rank->name + " ";
    names += rank->registered ? to_string(rank->state) : "never registered";
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
