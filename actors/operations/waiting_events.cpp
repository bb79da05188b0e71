#include "troupe/actors/operations/waiting_events.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

namespace troupe::actors {

namespace {

/// Whether `next` only extends `last` by more tokens: then one event is enough.
bool extends(const event& last, const event& next) {
  if (last.operation != next.operation) return false;
  const auto* before = std::get_if<event_layers>(&last.what);
  const auto* after = std::get_if<event_layers>(&next.what);
  return before != nullptr && after != nullptr &&
         before->slice.layer_begin == after->slice.layer_begin &&
         before->slice.layer_end == after->slice.layer_end &&
         before->slice.token_end == after->slice.token_begin;
}

/// The layer events of one operation, layer by layer.
class layer_progress {
 public:
  void add(const cache_slice& slice) {
    if (tokens_.size() < slice.layer_end) tokens_.resize(slice.layer_end);
    for (auto layer = slice.layer_begin; layer < slice.layer_end; ++layer) {
      auto& [begin, end] = tokens_[layer];
      // A layer's events follow each other without a gap.
      if (begin == end) begin = slice.token_begin;
      end = std::max(end, slice.token_end);
    }
  }
  /// The fewest slices that cover the same.
  [[nodiscard]] std::vector<cache_slice> slices() const {
    std::vector<cache_slice> all;
    const auto layers = static_cast<std::uint32_t>(tokens_.size());
    for (std::uint32_t layer = 0; layer < layers;) {
      auto end = layer + 1;
      while (end < layers && tokens_[end] == tokens_[layer]) ++end;
      const auto [first, last] = tokens_[layer];
      if (first != last) all.push_back({layer, end, first, last});
      layer = end;
    }
    return all;
  }

 private:
  std::vector<std::pair<std::uint32_t, std::uint32_t>> tokens_;  ///< [begin, end) per layer
};

}  // namespace

bool waiting_events::push(waiting_event e) {
  const auto found = chains_.find(e.what.operation);
  if (found != chains_.end()) {
    auto& newest = found->second.newest->event.what;
    if (extends(newest, e.what)) {
      std::get<event_layers>(newest.what).slice.token_end =
          std::get<event_layers>(e.what.what).slice.token_end;
      return false;
    }
  }
  append(std::move(e));
  if (events_.size() >= merge_at_) merge_layers();
  return true;
}

void waiting_events::append(waiting_event e) {
  const auto id = e.what.operation;
  events_.push_back({std::move(e), {}});
  const auto added = std::prev(events_.end());
  const auto [found, is_first] = chains_.try_emplace(id, chain{added, added});
  if (is_first) return;
  found->second.newest->next = added;
  found->second.newest = added;
}

waiting_event waiting_events::pop() {
  const auto oldest = events_.begin();
  const auto found = chains_.find(oldest->event.what.operation);
  if (found->second.newest == oldest) {
    chains_.erase(found);
  } else {
    found->second.oldest = oldest->next;
  }
  auto popped = std::move(oldest->event);
  events_.pop_front();
  return popped;
}

waiting_events waiting_events::extract(operation_id operation) {
  waiting_events extracted;
  auto found = chains_.extract(operation);
  if (found.empty()) return extracted;
  const auto [oldest, newest] = found.mapped();
  for (auto at = oldest;;) {
    const auto next = at->next;
    extracted.events_.splice(extracted.events_.end(), events_, at);
    if (at == newest) break;
    at = next;
  }
  extracted.chains_.insert(std::move(found));
  return extracted;
}

void waiting_events::put_first(waiting_events events) {
  events_.splice(events_.begin(), events.events_);
  chains_.merge(events.chains_);
}

bool waiting_events::has_last(operation_id operation) const {
  const auto found = chains_.find(operation);
  return found != chains_.end() && found->second.newest->event.last;
}

/// Moves all layer events of an operation to where its oldest one waits. Amortised constant cost
/// per event: the next merge comes when twice as many wait.
void waiting_events::merge_layers() {
  std::unordered_map<operation_id, layer_progress> progress;
  for (const auto& [e, next] : events_) {
    if (const auto* layers = std::get_if<event_layers>(&e.what.what)) {
      progress[e.what.operation].add(layers->slice);
    }
  }
  chains_.clear();
  for (auto& [e, next] : std::exchange(events_, {})) {
    const auto id = e.what.operation;
    if (!std::holds_alternative<event_layers>(e.what.what)) {
      append(std::move(e));
    } else if (const auto of = progress.find(id); of != progress.end()) {
      for (const auto& slice : of->second.slices()) append({{id, event_layers{slice}}, false});
      progress.erase(of);
    }
  }
  merge_at_ = std::max(least_merged, 2 * events_.size());
}

}  // namespace troupe::actors
