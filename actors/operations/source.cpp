#include "troupe/actors/operations/source.hpp"

#include <algorithm>
#include <utility>

namespace troupe::actors {

std::size_t source::block_count() const noexcept {
  auto count = spec_.blocks.size();
  for (const auto& group : spec_.groups) count += group.blocks.size();
  return count;
}

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
  std::vector<replica> known;
  const auto named = [&](const std::string& name) -> replica& {
    const auto there = std::ranges::find(known, name, &replica::name);
    if (there != known.end()) return *there;
    known.emplace_back().name = name;
    return known.back();
  };
  // A node that is not in the membership stays with the ranks it came with, unless its rank there
  // belongs to another node by now.
  std::vector<std::pair<std::string, replica>> unknown;
  for (auto& of : replicas_) {
    std::map<std::string, replica> parts;
    for (auto& [rank, who] : of.ranks) {
      if (auto name = name_of(who.node); !name.empty()) who.replica = std::move(name);
      parts[who.replica].ranks.emplace(rank, std::move(who));
    }
    for (auto& [name, part] : parts) {
      part.name = name;
      for (const auto& node : of.missing)
        if (part.may_be(name_of(node))) part.missing.insert(node);
    }
    const auto company = parts.rbegin()->first;
    for (auto& [name, part] : parts) {
      if (name.empty()) {
        unknown.emplace_back(company, std::move(part));
      } else {
        named(name).take_in(std::move(part));
      }
    }
  }
  for (auto& [company, part] : unknown) {
    const auto is_taken = [&](const auto& one) { return named(company).ranks.contains(one.first); };
    if (company.empty() || std::ranges::any_of(part.ranks, is_taken)) {
      known.push_back(std::move(part));
    } else {
      named(company).take_in(std::move(part));
    }
  }
  replicas_ = std::move(known);
}

void source::taken_by(transfer_id sender, const consumer& who) {
  // Replicas may be of different sizes.
  if (spec_.consumers == 0 && count(true) == 0) wanted_ = who.ranks;
  senders_.insert(sender);
  auto& of = replica_of(who);
  if (of.name.empty()) of.name = who.replica;
  of.missing.erase(who.node);
  auto& place = of.ranks[who.rank];
  if (place.life != who.life || who.again || place.how() == taker::now::lost) place.senders.clear();
  place.node = who.node;
  place.replica = who.replica;
  place.life = who.life;
  place.senders.emplace(sender, taker::now::moves);
}

bool source::released(transfer_id sender, std::uint64_t bytes) {
  bytes_ += bytes;
  if (auto* how = find(sender)) *how = taker::now::released;
  return is_delivered();
}

void source::not_taken_by(transfer_id sender) {
  for (auto& of : replicas_) {
    for (auto& [rank, who] : of.ranks) who.senders.erase(sender);
    std::erase_if(of.ranks, [](const auto& one) { return one.second.senders.empty(); });
  }
  std::erase_if(replicas_, [](const replica& of) { return of.ranks.empty(); });
  if (replicas_.empty()) wanted_ = spec_.consumers;
}

void source::lost_one(transfer_id sender) {
  if (auto* how = find(sender)) *how = taker::now::lost;
}

void source::lost_unasked(const std::string& node, const std::string& replica_name) {
  for (auto& of : replicas_) {
    if (of.ranks.size() < wanted_ && of.may_be(replica_name)) of.missing.insert(node);
  }
}

bool source::replica::is_whole() const noexcept {
  return missing.empty() && std::ranges::none_of(ranks, [](const auto& one) {
           return one.second.how() == taker::now::lost;
         });
}

bool source::replica::may_be(const std::string& other) const {
  return name.empty() || other.empty() || name == other;
}

void source::replica::take_in(replica&& other) {
  for (auto& [rank, who] : other.ranks) {
    const auto known = ranks.find(rank);
    if (known != ranks.end() && known->second.node == who.node && known->second.life == who.life) {
      known->second.senders.merge(who.senders);
    } else if (known == ranks.end() || known->second.how() == taker::now::lost) {
      ranks.insert_or_assign(rank, std::move(who));
    }
  }
  missing.merge(other.missing);
  for (const auto& [rank, who] : ranks)
    if (who.how() != taker::now::lost) missing.erase(who.node);
}

bool source::replica::admits(const consumer& who) const {
  if (const auto known = ranks.find(who.rank); known != ranks.end()) {
    return known->second.node == who.node;
  }
  if (!name.empty() && !who.replica.empty()) return name == who.replica;
  return is_whole() || missing.contains(who.node);
}

source::replica& source::replica_of(const consumer& who) {
  const auto its_own = std::ranges::find_if(replicas_, [&](const replica& of) {
    return !of.name.empty() && of.name == who.replica && of.admits(who);
  });
  if (its_own != replicas_.end()) return *its_own;
  const auto newest = std::find_if(replicas_.rbegin(), replicas_.rend(),
                                   [&](const replica& of) { return of.admits(who); });
  return newest != replicas_.rend() ? *newest : replicas_.emplace_back();
}

source::taker::now source::taker::how() const noexcept {
  auto best = now::lost;
  for (const auto& [sender, each] : senders) best = std::max(best, each);
  return best;
}

source::taker::now* source::find(transfer_id sender) {
  for (auto& of : replicas_) {
    for (auto& [rank, who] : of.ranks) {
      if (const auto one = who.senders.find(sender); one != who.senders.end()) return &one->second;
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
          const auto how = one.second.how();
          return how == taker::now::released || (moving && how == taker::now::moves);
        }));
    most = std::max(most, these);
    if (of.is_whole()) all += these;
  }
  return spec_.consumers == 0 ? most : all;
}

void ended_requests::forget(const std::string& request) {
  if (endings_.erase(request) == 0) return;
  order_.erase(std::ranges::find(order_, request));
}

void ended_requests::remember(const std::string& request, ending end) {
  if (!endings_.insert_or_assign(request, std::move(end)).second) return;
  order_.push_back(request);
  if (order_.size() > bound) {
    endings_.erase(order_.front());
    order_.pop_front();
  }
}

const ended_requests::ending* ended_requests::find(const std::string& request) const {
  const auto found = endings_.find(request);
  return found == endings_.end() ? nullptr : &found->second;
}

}  // namespace troupe::actors
