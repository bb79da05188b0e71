#include "troupe/kvcache/store.hpp"

#include <algorithm>

#include "troupe/kvcache/saturating_time.hpp"

namespace troupe::kvcache {
namespace {

/// The key in a form fit for a log line: printable and short.
std::string shown(std::string_view key) {
  constexpr std::size_t limit = 64;
  std::string text{"'"};
  for (const char c : key.substr(0, limit)) text += (c >= ' ' && c <= '~') ? c : '?';
  text += key.size() > limit ? "...'" : "'";
  return text;
}

unexpected missing(std::string_view key) {
  return fail(errc::not_found, "store: nothing is stored under " + shown(key));
}

}  // namespace

keyed_store::keyed_store(const store_options& options) : options_{options}, memory_{options.size} {}

// -- putting

result<put_slot> keyed_store::begin_put(std::string_view key, std::uint64_t size, time_point now) {
  if (key.empty() || key.size() > max_key_size) {
    return fail(errc::invalid_config, "store: a key of " + std::to_string(key.size()) +
                                          " bytes; keys have 1 to " + std::to_string(max_key_size));
  }
  if (const auto taken = by_key_.find(key); taken != by_key_.end()) {
    const auto at = values_.find(taken->second);
    if (!over(at->second, now)) {
      const bool writing = at->second.state == value_state::in_flight;
      return fail(errc::already_exists, "store: " + shown(key) +
                                            (writing ? " is being written; wait for it or abort it"
                                                     : " is stored; remove it first"));
    }
    ++counters_.expired;
    detach(at);
  }
  if (values_.size() >= options_.max_keys) expire(now);
  while (values_.size() >= options_.max_keys && options_.policy == on_full::evict && evict_one()) {
  }
  if (values_.size() >= options_.max_keys) {
    return fail(errc::overloaded, "store: " + std::to_string(values_.size()) +
                                      " values are the most it keeps; remove some");
  }
  auto memory = make_room(size, now);
  if (!memory) return fail(memory.error());
  const value_number number = next_number_++;
  try {
    take_in(number, key, size, *memory);
  } catch (...) {
    if (*memory) static_cast<void>(memory_.free(**memory));
    throw;
  }
  ++counters_.in_flight;
  return put_slot{put_id{number}, *memory ? (*memory)->offset : 0, size};
}

/// Adds the value to all containers, or to none if memory runs out.
void keyed_store::take_in(value_number number, std::string_view key, std::uint64_t size,
                          const std::optional<arena_range>& memory) {
  std::list<value_number> place{number};
  value fresh;
  fresh.key = std::string{key};
  fresh.size = size;
  fresh.memory = memory;
  fresh.place = place.begin();
  const auto by_key = by_key_.emplace(fresh.key, number).first;
  try {
    values_.emplace(number, std::move(fresh));
  } catch (...) {
    by_key_.erase(by_key);
    throw;
  }
  busy_.splice(busy_.end(), place);
}

result<std::optional<arena_range>> keyed_store::make_room(std::uint64_t size, time_point now) {
  if (size == 0) return std::optional<arena_range>{};
  auto room = memory_.allocate(size, options_.alignment);
  if (!room && room.error().code == errc::pool_exhausted && size <= options_.size) {
    if (expire(now) > 0) room = memory_.allocate(size, options_.alignment);
    while (!room && options_.policy == on_full::evict && evict_one()) {
      if (memory_.free_bytes() >= size) room = memory_.allocate(size, options_.alignment);
    }
  }
  if (!room) return fail(room.error().code, "store: " + room.error().message);
  return std::optional<arena_range>{*room};
}

bool keyed_store::evict_one() {
  if (idle_.empty()) return false;
  ++counters_.evicted;
  detach(values_.find(idle_.front()));
  return true;
}

result<void> keyed_store::commit(put_id put, time_point now, std::optional<duration> time_to_live) {
  const auto at = values_.find(put.value);
  if (at == values_.end() || at->second.state != value_state::in_flight) {
    return fail(errc::not_found, "store: put " + std::to_string(put.value) +
                                     " is not in flight; it was committed or aborted before");
  }
  if (time_to_live && *time_to_live <= duration::zero()) {
    return fail(errc::invalid_config,
                "store: the time to live of " + shown(at->second.key) + " is not positive");
  }
  value& v = at->second;
  if (time_to_live) {
    const auto expires = after(now, *time_to_live);
    expiries_.emplace(expires, at->first);
    v.expires = expires;
  }
  v.state = value_state::stored;
  idle_.splice(idle_.end(), busy_, v.place);
  --counters_.in_flight;
  ++counters_.values;
  return {};
}

result<void> keyed_store::abort(put_id put) {
  const auto at = values_.find(put.value);
  if (at == values_.end() || at->second.state != value_state::in_flight) {
    return fail(errc::not_found, "store: put " + std::to_string(put.value) +
                                     " is not in flight; it was committed or aborted before");
  }
  by_key_.erase(at->second.key);
  --counters_.in_flight;
  destroy(at);
  return {};
}

// -- reading

result<pinned_view> keyed_store::get(std::string_view key, time_point now) {
  const auto at = find_stored(key, now);
  if (at == values_.end()) {
    ++counters_.misses;
    return missing(key);
  }
  value& v = at->second;
  const view_id view{next_view_++};
  views_.emplace(view, at->first);
  if (v.views++ == 0) busy_.splice(busy_.end(), idle_, v.place);
  ++counters_.hits;
  return pinned_view{view, v.memory ? v.memory->offset : 0, v.size};
}

result<void> keyed_store::release(view_id view) {
  const auto found = views_.find(view);
  if (found == views_.end()) {
    return fail(errc::not_found,
                "store: view " + std::to_string(view.value) + " was released before");
  }
  const auto at = values_.find(found->second);
  views_.erase(found);
  value& v = at->second;
  if (--v.views > 0) return {};
  switch (v.state) {
    case value_state::in_flight: break;  // has no views
    case value_state::stored: idle_.splice(idle_.end(), busy_, v.place); break;
    case value_state::detached:
      --counters_.detached;
      destroy(at);
      break;
  }
  return {};
}

// -- removing

result<void> keyed_store::remove(std::string_view key, time_point now) {
  const auto at = find_stored(key, now);
  if (at == values_.end()) return missing(key);
  detach(at);
  return {};
}

std::optional<value_info> keyed_store::query(std::string_view key, time_point now) const {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return std::nullopt;
  const value& v = values_.find(found->second)->second;
  if (v.state != value_state::stored || over(v, now)) return std::nullopt;
  return value_info{v.size, v.views, v.expires};
}

std::size_t keyed_store::expire(time_point now) {
  std::size_t dropped = 0;
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    detach(values_.find(expiries_.begin()->second));
    ++dropped;
  }
  counters_.expired += dropped;
  return dropped;
}

std::optional<keyed_store::time_point> keyed_store::next_expiry() const {
  if (expiries_.empty()) return std::nullopt;
  return expiries_.begin()->first;
}

/// Removes a stored value from its key; its memory is freed at once, or with its last view.
void keyed_store::detach(value_map::iterator at) {
  value& v = at->second;
  by_key_.erase(v.key);
  if (v.views == 0) busy_.splice(busy_.end(), idle_, v.place);
  if (v.expires) expiries_.erase({*v.expires, at->first});
  --counters_.values;
  if (v.views > 0) {
    v.state = value_state::detached;
    ++counters_.detached;
  } else {
    destroy(at);
  }
}

void keyed_store::destroy(value_map::iterator at) {
  // The range came from this arena and is freed only here, so this cannot fail.
  const auto memory = at->second.memory;
  busy_.erase(at->second.place);
  values_.erase(at);
  if (memory) static_cast<void>(memory_.free(*memory));
}

keyed_store::value_map::iterator keyed_store::find_stored(std::string_view key, time_point now) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return values_.end();
  const auto at = values_.find(found->second);
  if (at->second.state != value_state::stored || over(at->second, now)) return values_.end();
  return at;
}

bool keyed_store::over(const value& v, time_point now) noexcept {
  return v.expires && *v.expires <= now;
}

store_counters keyed_store::counters() const noexcept {
  store_counters counters = counters_;
  counters.views = views_.size();
  counters.memory = memory_.counters();
  return counters;
}

}  // namespace troupe::kvcache
