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

void source::taken_by(transfer_id sender, std::uint32_t ranks) {
  if (wanted_ == 0) wanted_ = ranks;
  senders_.insert(sender);
  active_.insert(sender);
}

bool source::lost_one(transfer_id sender) {
  active_.erase(sender);
  return has_open_place();
}

bool source::released(transfer_id sender, std::uint64_t bytes) {
  active_.erase(sender);
  ++released_;
  bytes_ += bytes;
  return released_ == wanted_;
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
