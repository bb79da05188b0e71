#include "troupe/actors/source.hpp"

#include <algorithm>
#include <utility>

namespace troupe::actors {

void source::computed(std::uint32_t layer_begin, std::uint32_t layer_end, std::uint32_t token_end) {
  for (auto layer = layer_begin; layer < layer_end && layer < ready_.size(); ++layer) {
    ready_[layer] = std::max(ready_[layer], token_end);
  }
}

void source::seal(std::uint32_t tokens, std::vector<std::byte> aux) {
  sealed_ = tokens;
  aux_ = std::move(aux);
  std::ranges::fill(ready_, tokens);
}

void source::learn_replicas(const std::function<std::string(const std::string& node)>& name_of) {
  for (auto& of : replicas_) {
    for (auto rank = of.ranks.begin(); of.name.empty() && rank != of.ranks.end(); ++rank)
      of.name = name_of(rank->second.node);
  }
  for (std::size_t i = 0; i < replicas_.size(); ++i) {
    for (auto j = replicas_.size() - 1; j > i; --j) {
      if (replicas_[i].name.empty() || replicas_[i].name != replicas_[j].name) continue;
      replicas_[i].take_in(std::move(replicas_[j]));
      replicas_.erase(replicas_.begin() + static_cast<std::ptrdiff_t>(j));
    }
  }
}

void source::taken_by(transfer_id sender, const consumer& who) {
  if (wanted_ == 0) wanted_ = who.ranks;
  senders_.insert(sender);
  auto& of = replica_of(who);
  if (of.name.empty()) of.name = who.replica;
  of.missing.erase(who.node);
  of.ranks.insert_or_assign(who.rank, taker{who.node, sender});
}

bool source::released(transfer_id sender, std::uint64_t bytes) {
  bytes_ += bytes;
  if (auto* who = find(sender)) who->how = taker::now::released;
  return count(false) >= wanted_;
}

void source::lost_one(transfer_id sender) {
  if (auto* who = find(sender)) who->how = taker::now::lost;
}

void source::lost_unasked(const std::string& node, const std::string& replica_name) {
  for (auto& of : replicas_) {
    if (of.ranks.size() < wanted_ && of.may_be(replica_name)) of.missing.insert(node);
  }
}

bool source::replica::is_whole() const noexcept {
  return missing.empty() && std::ranges::none_of(ranks, [](const auto& one) {
           return one.second.how == taker::now::lost;
         });
}

bool source::replica::may_be(const std::string& other) const {
  return name.empty() || other.empty() || name == other;
}

void source::replica::take_in(replica&& other) {
  for (auto& [rank, who] : other.ranks) {
    const auto known = ranks.find(rank);
    if (known == ranks.end() || known->second.how == taker::now::lost)
      ranks.insert_or_assign(rank, std::move(who));
  }
  missing.merge(other.missing);
  for (const auto& [rank, who] : ranks)
    if (who.how != taker::now::lost) missing.erase(who.node);
}

bool source::replica::admits(const consumer& who) const {
  if (const auto known = ranks.find(who.rank); known != ranks.end()) {
    return known->second.node == who.node;
  }
  if (!name.empty() && !who.replica.empty()) return name == who.replica;
  return is_whole() || missing.contains(who.node);
}

source::replica& source::replica_of(const consumer& who) {
  const auto newest = std::find_if(replicas_.rbegin(), replicas_.rend(),
                                   [&](const replica& of) { return of.admits(who); });
  return newest != replicas_.rend() ? *newest : replicas_.emplace_back();
}

source::taker* source::find(transfer_id sender) {
  for (auto& of : replicas_) {
    for (auto& [rank, who] : of.ranks) {
      if (who.sender == sender) return &who;
    }
  }
  return nullptr;
}

std::size_t source::count(bool moving) const noexcept {
  std::size_t most = 0;
  std::size_t all = 0;
  for (const auto& of : replicas_) {
    const auto these =
        static_cast<std::size_t>(std::ranges::count_if(of.ranks, [&](const auto& one) {
          return one.second.how == taker::now::released ||
                 (moving && one.second.how == taker::now::moves);
        }));
    most = std::max(most, these);
    if (of.is_whole()) all += these;
  }
  return spec_.consumers == 0 ? most : all;
}

void ended_requests::remember(const std::string& request, troupe::error why) {
  if (!why_.insert_or_assign(request, std::move(why)).second) return;
  order_.push_back(request);
  if (order_.size() > bound) {
    why_.erase(order_.front());
    order_.pop_front();
  }
}

const troupe::error* ended_requests::find(const std::string& request) const {
  const auto found = why_.find(request);
  return found == why_.end() ? nullptr : &found->second;
}

}  // namespace troupe::actors
