#include "troupe/actors/operations/waiting_events.hpp"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <new>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/kvcache/or_undo.hpp"

namespace troupe::actors {

namespace {

static_assert(std::is_nothrow_move_constructible_v<waiting_event>);

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
  if (events_.size() < merge_at_) return true;
  try {
    merge_layers();
  } catch (const std::bad_alloc&) {  // they are merged later, then
    merge_at_ = 2 * events_.size();
  }
  return true;
}

void waiting_events::append(waiting_event e) {
  const auto id = e.what.operation;
  events_.push_back({std::move(e), {}});
  const auto added = std::prev(events_.end());
  or_undo(
      [&] {
        const auto [found, is_first] = chains_.try_emplace(id, chain{added, added});
        if (is_first) return;
        found->second.newest->next = added;
        found->second.newest = added;
      },
      [&] { events_.erase(added); });
}

waiting_event waiting_events::pop() noexcept {
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

void waiting_events::drop_newest(operation_id operation) noexcept {
  const auto found = chains_.find(operation);
  auto& [oldest, newest] = found->second;
  const auto dropped = newest;
  if (oldest == dropped) {
    chains_.erase(found);
  } else {
    newest = oldest;
    while (newest->next != dropped) newest = newest->next;
  }
  events_.erase(dropped);
}

waiting_events waiting_events::extract(operation_id operation) noexcept {
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

void waiting_events::put_first(waiting_events events) noexcept {
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
  std::unordered_map<operation_id, std::list<link>> merged;
  for (const auto& [id, of] : progress) {
    auto& events = merged[id];
    for (const auto& slice : of.slices())
      events.push_back({{{id, event_layers{slice}}, false}, {}});
  }
  // Nothing is allocated from here on.
  for (auto at = events_.begin(); at != events_.end();) {
    if (std::holds_alternative<event_layers>(at->event.what.what)) {
      events_.splice(at, merged.find(at->event.what.operation)->second);
      at = events_.erase(at);
    } else {
      ++at;
    }
  }
  link_chains();
  merge_at_ = std::max(least_merged, 2 * events_.size());
}

/// Makes the chains anew. No operation without a chain has events.
void waiting_events::link_chains() noexcept {
  for (auto& [id, of] : chains_) of = {events_.end(), events_.end()};
  for (auto at = events_.begin(); at != events_.end(); ++at) {
    auto& [oldest, newest] = chains_.find(at->event.what.operation)->second;
    if (oldest == events_.end()) {
      oldest = at;
    } else {
      newest->next = at;
    }
    newest = at;
  }
  std::erase_if(chains_, [this](const auto& of) { return of.second.oldest == events_.end(); });
}

}  // namespace troupe::actors
