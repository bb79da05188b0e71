#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/deploy/reference_engine/block_source.hpp"
#include "troupe/deploy/reference_engine/calls.hpp"
#include "troupe/deploy/reference_engine/paged_cache.hpp"
#include "troupe/deploy/reference_engine/transformer.hpp"

namespace troupe::reference {

using clock = std::chrono::steady_clock;

/// The current time, in the form used in calls and replies.
[[nodiscard]] inline std::int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(clock::now().time_since_epoch())
      .count();
}

/// Free state slots of the cache. A slot goes back when the network can no longer touch it
/// (`event_unpinned`) and the engine is done with it. Not thread-safe.
class slot_pool {
 public:
  explicit slot_pool(const kvcache::cache_layout& layout);
  /// Whether requests need a slot at all.
  [[nodiscard]] bool in_use() const noexcept { return in_use_; }
  [[nodiscard]] bool available() const noexcept { return !in_use_ || !free_.empty(); }
  /// Empty if none is needed. Call it only while `available`.
  [[nodiscard]] std::optional<std::uint32_t> take();
  void give_back(std::optional<std::uint32_t> slot);

 private:
  bool in_use_{false};
  std::vector<std::uint32_t> free_;
};

/// Shared by both roles. Used by one thread.
struct worker_context {
  troupe::engine* node{nullptr};
  std::string name;  ///< of the node
  std::shared_ptr<const transformer> model;
  std::shared_ptr<const cache_memory> memory;  ///< the node's pool
  slot_pool slots;
  std::shared_ptr<block_source> blocks;
  std::chrono::milliseconds default_deadline{30'000};

  [[nodiscard]] const kvcache::cache_layout& layout() const noexcept { return memory->layout(); }
  [[nodiscard]] std::size_t blocks_for(std::size_t tokens) const noexcept {
    return (tokens + layout().block_tokens - 1) / layout().block_tokens;
  }
  /// `pool_exhausted` if a request of that many tokens can never fit the pool.
  [[nodiscard]] result<void> check_fits(std::size_t tokens) const;
  /// A cache, private to this process, for the heads of rank `rank` of `ranks`.
  [[nodiscard]] result<paged_cache> private_part(std::size_t tokens, std::uint32_t rank,
                                                 std::uint32_t ranks) const;
};

/// One role of the engine: a set of requests driven by calls, events and steps, all on one thread.
class worker {
 public:
  virtual ~worker() = default;
  /// A call of the role's own method. Answered now or later, exactly once.
  virtual void on_call(call what) = 0;
  virtual void on_event(event what) = 0;
  /// Computes one step for every request that can proceed. Returns false if there was nothing to
  /// do.
  virtual bool step() = 0;
  /// `not_found` if the request is not alive here.
  virtual result<void> abort(const std::string& request) = 0;
  /// The text so far; `not_found` likewise.
  [[nodiscard]] virtual result<text_reply> text(const std::string& request) const = 0;
  /// When `step` must run even without events (a wait that ends, a retry).
  [[nodiscard]] virtual std::optional<clock::time_point> next_wakeup() const = 0;
  /// Requests waiting or running.
  [[nodiscard]] virtual std::uint32_t requests() const = 0;
  /// The engine stops: answers everything with `aborted`.
  virtual void stop() = 0;
};

[[nodiscard]] std::unique_ptr<worker> make_prefill_worker(worker_context& context);
[[nodiscard]] std::unique_ptr<worker> make_decode_worker(worker_context& context);

}  // namespace troupe::reference
