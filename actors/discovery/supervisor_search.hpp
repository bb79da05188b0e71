#pragma once

/// Locates a supervisor that may be replaced by another one (`supervisor.begin`): looks again when
/// it is gone, at most once a second.

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// The shortest time between two looks: a look opens files, and may begin a process.
inline constexpr std::chrono::milliseconds between_looks{1000};

/// For callers that may block. Thread-safe.
class supervisor_place {
 public:
  /// With an empty `how` the supervisor is always at `first`. Otherwise only `text` uses `first`,
  /// until a look has found the supervisor.
  supervisor_place(found_supervisor first, supervisor_look how)
      : first_{std::move(first)}, how_{std::move(how)} {}

  /// The supervisor's place, for a caller about to connect: from a new look, or from one less than
  /// `between_looks` ago. Otherwise the error of that look.
  [[nodiscard]] result<found_supervisor> now(std::chrono::milliseconds patience);
  /// The place found last, for messages: "127.0.0.1:7400".
  [[nodiscard]] std::string text() const;

 private:
  mutable std::mutex mutex_;
  found_supervisor first_;
  supervisor_look how_;
  std::optional<found_supervisor> last_;  ///< found by the last successful look
  std::optional<std::chrono::steady_clock::time_point> looked_;
  std::optional<troupe::error> why_not_;  ///< the error of the last look, if it failed
};

/// For an actor, which must not block: looks on its own thread, one look at a time. Thread-safe.
class supervisor_search {
 public:
  supervisor_search() = default;
  ~supervisor_search() { stop(); }
  supervisor_search(const supervisor_search&) = delete;
  supervisor_search& operator=(const supervisor_search&) = delete;

  /// Finds or begins the supervisor and calls `told` on that thread. If `told` throws (out of
  /// memory), it is called again until it succeeds, because the actor waits for it. Returns false
  /// if a look is in progress or the search was stopped. `overloaded`: no thread can be started.
  [[nodiscard]] result<bool> begin(std::shared_ptr<const begun_terms> terms,
                                   std::function<void(const result<found_supervisor>&)> told);
  /// Gives up a look in progress and waits until its thread has ended. No look begins after that.
  void stop() noexcept;

 private:
  std::mutex mutex_;
  bool stopped_{false};
  std::atomic<bool> looks_{false};
  std::jthread thread_;
};

}  // namespace troupe::actors
