#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "troupe/kvcache/arena.hpp"
#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::kvcache {

/// A value that is being written, never reused.
using put_id = strong_id<struct put_tag, std::uint64_t>;
/// A hold on a value that is being read, never reused.
using view_id = strong_id<struct view_tag, std::uint64_t>;

/// What a put does when the store is full.
enum class on_full : std::uint8_t {
  fail,   ///< `pool_exhausted`
  evict,  ///< drops values without readers, the least recently used first, until the value fits
};

struct store_options {
  std::uint64_t size{0};  ///< bytes of memory that values may take together
  on_full policy{on_full::fail};
  std::uint64_t alignment{64};      ///< of values, bytes, a power of two
  std::size_t max_keys{1U << 20U};  ///< values, in flight included
};

/// Where to write a value: `[offset, offset + size)` of the store's memory, owned by this put
/// alone.
struct put_slot {
  put_id put;
  std::uint64_t offset{0};
  std::uint64_t size{0};
};

/// Where to read a value. The value stays unchanged until `release`, whatever happens to its key.
struct pinned_view {
  view_id view;
  std::uint64_t offset{0};
  std::uint64_t size{0};
};

struct value_info {
  std::uint64_t size{0};
  std::uint32_t views{0};
  std::optional<std::chrono::steady_clock::time_point> expires;
};

struct store_counters {
  std::uint64_t values{0};     ///< that `get` can find (an expired one until `expire`)
  std::uint64_t in_flight{0};  ///< puts begun, neither committed nor aborted
  std::uint64_t views{0};
  std::uint64_t detached{0};  ///< removed or expired, but still read
  std::uint64_t hits{0};      ///< this and the rest: since the start
  std::uint64_t misses{0};
  std::uint64_t evicted{0};
  std::uint64_t expired{0};
  arena_counters memory;
};

/// Values by key in one range of memory. Bookkeeping only: it touches no memory; time is passed in.
///
/// | state     | event                          | next                                           |
/// | --------- | ------------------------------ | ---------------------------------------------- |
/// | none      | begin_put                      | in flight: key taken, `get` does not find it   |
/// | in flight | commit                         | stored, its time to live begins                |
/// | in flight | abort                          | none                                           |
/// | stored    | get / release                  | stored, views +1 / -1                          |
/// | stored    | remove, expiry, eviction       | none; detached while views are left            |
/// | detached  | last release                   | none                                           |
///
/// A value being read is never evicted. Its memory, and that of an aborted put, is given out again
/// at once: abort or release only when no byte of it can land or be read any more. Not thread-safe.
class keyed_store {
 public:
  using time_point = std::chrono::steady_clock::time_point;
  using duration = std::chrono::steady_clock::duration;
  static constexpr std::size_t max_key_size = 512;

  /// Options are checked at the first put. A store of size 0 has room for empty values only.
  explicit keyed_store(const store_options& options);

  /// Reserves room for a value of `size` bytes (0 is allowed). `invalid_config` (key empty or
  /// longer than `max_key_size`), `already_exists` (stored or in flight; an expired value does not
  /// count), `pool_exhausted`, `overloaded` (`max_keys`).
  [[nodiscard]] result<put_slot> begin_put(std::string_view key, std::uint64_t size,
                                           time_point now);
  /// Completes the value. Without `time_to_live` it stays until it is removed or evicted.
  /// `not_found` when the put has ended; `invalid_config` for a time that is not positive.
  [[nodiscard]] result<void> commit(put_id put, time_point now,
                                    std::optional<duration> time_to_live = std::nullopt);
  /// Abandons the put. `not_found` when it has ended.
  [[nodiscard]] result<void> abort(put_id put);

  /// `not_found` for a key that is not stored, still in flight, or past its time.
  [[nodiscard]] result<pinned_view> get(std::string_view key, time_point now);
  /// Ends a view. `not_found` when it has ended.
  [[nodiscard]] result<void> release(view_id view);

  /// `not_found` as for `get`. A value in flight is not removed: abort it.
  [[nodiscard]] result<void> remove(std::string_view key, time_point now);
  /// Like `get`, but takes no view and changes no counter.
  [[nodiscard]] std::optional<value_info> query(std::string_view key, time_point now) const;
  /// Drops expired values. Returns how many.
  std::size_t expire(time_point now);
  [[nodiscard]] std::optional<time_point> next_expiry() const;

  [[nodiscard]] store_counters counters() const noexcept;

 private:
  using value_number = std::uint64_t;
  enum class value_state : std::uint8_t { in_flight, stored, detached };
  struct value {
    std::string key;
    std::uint64_t size{0};
    std::optional<arena_range> memory;  // none for an empty value
    value_state state{value_state::in_flight};
    std::uint32_t views{0};
    std::optional<time_point> expires;
    // In `idle_` while stored and not read, else in `busy_`.
    std::list<value_number>::iterator place;
  };
  struct string_hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept {
      return std::hash<std::string_view>{}(text);
    }
  };
  using value_map = std::unordered_map<value_number, value>;

  [[nodiscard]] result<std::optional<arena_range>> make_room(std::uint64_t size, time_point now);
  void take_in(value_number number, std::string_view key, std::uint64_t size,
               const std::optional<arena_range>& memory);
  bool evict_one();
  void detach(value_map::iterator at);
  void destroy(value_map::iterator at);
  [[nodiscard]] value_map::iterator find_stored(std::string_view key, time_point now);
  [[nodiscard]] static bool over(const value& v, time_point now) noexcept;

  store_options options_;
  arena memory_;
  value_map values_;  // by number; a put's id is its value's number
  std::unordered_map<std::string, value_number, string_hash, std::equal_to<>> by_key_;
  std::unordered_map<view_id, value_number> views_;
  std::list<value_number> idle_;  // stored values without readers, least recently used first
  std::list<value_number> busy_;  // all others; ending a view only moves a node, without memory
  std::set<std::pair<time_point, value_number>> expiries_;
  std::uint64_t next_number_{1};
  std::uint64_t next_view_{1};
  store_counters counters_;
};

}  // namespace troupe::kvcache
