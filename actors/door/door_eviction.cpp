#include "troupe/actors/door/door_eviction.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace troupe::actors {

void door_offenders::add(std::string_view network, time_point now) {
  auto at = records_.find(network);
  if (at == records_.end()) {
    if (records_.size() >= capacity) {
      const auto oldest = records_.find(by_last_failure_.front());
      by_last_failure_.pop_front();
      records_.erase(oldest);
    }
    at = records_.try_emplace(std::string{network}).first;
    at->second.place = by_last_failure_.insert(by_last_failure_.end(), at->first);
  }
  auto& one = at->second;
  one.points = std::min(points_at(one, now) + 1, most_points);
  one.at = now;
  by_last_failure_.splice(by_last_failure_.end(), by_last_failure_, one.place);
}

bool door_offenders::has(std::string_view network, time_point now) const {
  const auto at = records_.find(network);
  return at != records_.end() && points_at(at->second, now) >= least_points;
}

double door_offenders::points_at(const record& of, time_point now) {
  const auto passed = std::chrono::duration<double>{now - of.at}.count();
  return std::max(of.points - passed, 0.0);
}

namespace {

struct party {
  std::size_t weight{0};
  std::array<std::size_t, door_stages> in_stage{};
};

}  // namespace

std::size_t choose_who_goes(std::span<const door_seat> seats, const door_offenders& offenders,
                            door_offenders::time_point now) {
  // IPv6 addresses and networks have keys of different length, so they never collide.
  std::unordered_map<std::string_view, party> parties;
  std::vector<const party*> party_of;
  party_of.reserve(seats.size());
  for (const auto& seat : seats) {
    const bool offends = offenders.has(seat.network, now);
    auto& its = parties[offends ? seat.network : seat.address];
    its.weight += offends ? offender_weight : 1;
    ++its.in_stage[static_cast<std::size_t>(seat.stage)];
    party_of.push_back(&its);
  }
  const auto claim_to_go = [&](std::size_t i) {
    const auto stage = static_cast<std::size_t>(seats[i].stage);
    const auto alike = seats[i].stage == door_stage::refused
                           ? std::numeric_limits<std::size_t>::max()
                           : party_of[i]->in_stage[stage];
    return std::tuple{party_of[i]->weight, alike, door_stages - stage};
  };
  std::size_t chosen = 0;
  for (std::size_t i = 1; i < seats.size(); ++i) {
    const auto one = claim_to_go(i);
    const auto best = claim_to_go(chosen);
    if (one > best || (one == best && seats[i].since < seats[chosen].since)) chosen = i;
  }
  return chosen;
}

}  // namespace troupe::actors
