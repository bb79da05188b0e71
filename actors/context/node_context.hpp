#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "troupe/actors/discovery/supervisor_search.hpp"
#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/actors/messages/types.hpp"
#include "troupe/actors/operations/cache_pool.hpp"
#include "troupe/actors/operations/event_queue.hpp"
#include "troupe/actors/operations/lent_memory.hpp"
#include "troupe/actors/operations/operation_table.hpp"
#include "troupe/actors/operations/value_store.hpp"
#include "troupe/kvcache/layout.hpp"
#include "troupe/kvcache/plan.hpp"
#include "troupe/transport/endpoint.hpp"

namespace troupe::actors {

/// Where a node stands in the deployment.
struct node_place {
  std::string stage;
  std::uint32_t replica{0};
  std::uint32_t rank{0}, ranks{1};  ///< of the replica
  std::string replica_name{};       ///< in an open stage; `replica` and `ranks` are 0 there
};

/// What the deployment tells the actors of one node.
struct node_settings {
  std::string cluster;
  node_info self;  ///< port: the one to ask for; replica: the wished-for slot
  std::string supervisor_host;
  std::uint16_t supervisor_port{0};
  std::chrono::milliseconds heartbeat_interval{1000};
  std::chrono::milliseconds heartbeat_timeout{5000};
  std::optional<transport::backend_kind> backend;  ///< empty: auto
  std::vector<transport::backend_kind> fallback;
  std::uint32_t lanes{4};
  std::int32_t post_batch_size{-1};
  std::chrono::milliseconds connect_timeout{2000};
  std::chrono::milliseconds default_deadline{30'000};
  std::chrono::milliseconds retry_window{0};  ///< how long a source waits for another decode rank
  std::chrono::milliseconds source_lease{60'000};  ///< of a sealed cache with no living taker
  std::chrono::milliseconds peer_silence{1000};    ///< of a peer with transfers in flight
  std::uint32_t max_reconnects{3};                 ///< of one backend before the next of `fallback`
  std::uint32_t max_operations{16'384};
  std::uint32_t max_parked{4096};           ///< receives of unknown requests, per peer
  bool fail_when_full{false};               ///< `pool.on_full: fail`
  std::map<std::string, node_place> nodes;  ///< of the deployment, by name
  std::set<std::string> open_stages;        ///< `nodes` does not list theirs
  bool joins{false};                        ///< this node is of an open stage
  /// With `supervisor.begin`: how to find and begin a supervisor. Null: it is at the address above.
  std::shared_ptr<const begun_terms> begun_from{};
  /// The deployment's edges, by their two stages: how layers move over them; empty: none do.
  std::multimap<std::pair<std::string, std::string>, std::optional<transfer_mode>> edges;
};

/// Whether the supervisor has admitted the node; for the engine's thread that waits for that.
class registration_state {
 public:
  void set(bool registered, std::string why_not) {
    {
      const std::lock_guard lock{mutex_};
      registered_ = registered;
      if (registered) untold_ = true;
      why_not_ = std::move(why_not);
    }
    changed_.notify_all();
  }
  /// The node is refused for good: waits end at once.
  void end(troupe::error why) {
    {
      const std::lock_guard lock{mutex_};
      registered_ = false;
      ended_ = std::move(why);
    }
    changed_.notify_all();
  }
  /// Empty if the node is registered, or was at some time since the last call that returned empty
  /// (a registration that is lost again before the waiting thread runs still counts). Otherwise the
  /// reason: at once if the node will never be registered, after `timeout` (as `deadline`) if it
  /// still may be.
  [[nodiscard]] std::optional<troupe::error> wait(std::chrono::milliseconds timeout) {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, timeout, [this] { return registered_ || untold_ || ended_; });
    if (ended_) return ended_;
    if (std::exchange(untold_, false) || registered_) return std::nullopt;
    return reason();
  }
  /// Empty if registered now; otherwise the reason.
  [[nodiscard]] std::optional<troupe::error> why_not() const {
    const std::lock_guard lock{mutex_};
    if (ended_) return ended_;
    return registered_ ? std::nullopt : std::optional{reason()};
  }

  /// The supervisor that last admitted the node, and its epoch then.
  struct mark {
    std::uint64_t supervisor_incarnation{0};
    std::uint64_t epoch{0};
  };
  void taken_in(mark by) {
    const std::lock_guard lock{mutex_};
    last_ = by;
  }
  /// Notes where the supervisor was found, which may be elsewhere than the settings say.
  void asks_at(std::string where) {
    const std::lock_guard lock{mutex_};
    asked_ = std::move(where);
  }
  /// Where the supervisor is asked, for messages. Empty: where the settings say.
  [[nodiscard]] std::string asked() const {
    const std::lock_guard lock{mutex_};
    return asked_;
  }
  [[nodiscard]] mark last() const {
    const std::lock_guard lock{mutex_};
    return last_;
  }

 private:
  [[nodiscard]] troupe::error reason() const {
    return {errc::deadline,
            why_not_.empty() ? std::string{"the supervisor has not answered yet"} : why_not_};
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool registered_{false};
  bool untold_{false};  ///< `wait` has not reported the registration yet
  std::string why_not_;
  std::optional<troupe::error> ended_;
  mark last_;
  std::string asked_;
};

struct node_counters {
  std::atomic<std::uint64_t> transfers_done{0}, transfers_failed{0}, bytes_moved{0};
  std::atomic<std::uint32_t> queue_length{0}, active_transfers{0}, links_up{0};
  std::atomic<std::uint32_t> links_broken{0};  ///< being made again
  std::atomic<std::uint32_t> local_copies{0};  ///< puts to the node itself that are being copied
  std::atomic<bool> runner_stops{false};       ///< all live operations have ended, and none begins
};

/// Memory of the engine that is registered while it is being put.
struct registered_value {
  std::span<const std::byte> bytes;
  std::uint32_t puts{0};
  bool closed{false};  ///< a put has ended: the caller may have other memory there by now
};

/// Shared by all actors of one node. Made before the first actor, destroyed after the last one.
/// Immutable except for the members that are thread-safe themselves.
struct node_context {
  node_settings settings;
  node_info self;  ///< with the bound port and the incarnation
  std::unique_ptr<transport::endpoint> endpoint;
  std::shared_ptr<const kvcache::cache_layout> layout;  ///< null: a node without a cache of blocks
  std::vector<std::uint32_t> table_pools;  ///< of the layout (`kvcache::pools_of_tables`)
  std::vector<region_id> regions;          ///< of the layout, in its order
  std::vector<std::byte> encoded_layout;
  /// The GPU whose memory holds the whole cache; empty: host memory, or both kinds.
  std::optional<std::uint32_t> cache_gpu;
  /// For a cache in both kinds of memory, which region is in which; else empty.
  std::string cache_in_both;
  std::string cache_memory;  ///< what host memory the cache is made of, for people; empty: none
  bool polled{false};        ///< the engine's polls make the progress, not a thread of ours
  std::unique_ptr<cache_pool> pool;  ///< null: the engine allocates its blocks itself
  std::shared_ptr<value_store> values;
  operation_table operations;
  event_queue events;
  node_counters counters;
  lent_memory lent;
  registration_state registration;
  supervisor_search search;  ///< of a supervisor that is to be begun
  std::mutex value_regions_mutex;
  std::map<region_id, registered_value> value_regions;  ///< memory of puts in flight
  std::shared_ptr<value_store> value_copies;  ///< of such values; made when the first one is copied
  std::function<void(call)> on_call;          ///< empty: calls of frontends are refused
  std::chrono::steady_clock::time_point started{std::chrono::steady_clock::now()};

  explicit node_context(node_settings s)
      : settings{std::move(s)},
        self{settings.self},
        operations{settings.max_operations},
        events{operations} {}
};

using context_ptr = std::shared_ptr<node_context>;

}  // namespace troupe::actors
