#include "troupe/actors/membership/affinity_table.hpp"

#include <algorithm>

namespace troupe::actors {

affinity_table::entry* affinity_table::use(std::string_view key) {
  const auto it = index_.find(key);
  if (it == index_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, it->second);
  return &entries_.front();
}

std::optional<affinity_binding> affinity_table::find(std::string_view key, std::size_t stage) {
  const entry* known = use(key);
  if (known == nullptr) return std::nullopt;
  const auto it = std::ranges::find(known->stages, stage, &stage_binding::stage);
  if (it == known->stages.end()) return std::nullopt;
  return it->where;
}

void affinity_table::bind(std::string_view key, std::size_t stage, affinity_binding where) {
  if (max_keys_ == 0) return;
  entry* known = use(key);
  if (known == nullptr) {
    if (entries_.size() >= max_keys_) {
      index_.erase(entries_.back().key);
      entries_.pop_back();
    }
    known = &entries_.emplace_front(entry{std::string{key}, {}});
    index_.emplace(known->key, entries_.begin());
  }
  const auto it = std::ranges::find(known->stages, stage, &stage_binding::stage);
  if (it == known->stages.end()) {
    known->stages.push_back({stage, where});
  } else {
    it->where = where;
  }
}

}  // namespace troupe::actors
