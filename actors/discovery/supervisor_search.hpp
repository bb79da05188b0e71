#pragma once

/// Who has to know where a supervisor is that may be another one tomorrow (`supervisor.begin`): it looks
/// again when that one is gone, at most once a second.

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

/// A look opens files, and may begin a process.
inline constexpr std::chrono::milliseconds between_looks{1000};

/// For whoever may block. Thread-safe.
class supervisor_place {
 public:
  /// `how` empty: it is at `first`, whatever happens. Else `first` counts for nothing until a look.
  supervisor_place(found_supervisor first, supervisor_look how)
      : first_{std::move(first)}, how_{std::move(how)} {}

  /// For whoever is about to connect to it: where it is, as a look shows, or showed less than
  /// `between_looks` ago. The error of the look otherwise.
  [[nodiscard]] result<found_supervisor> now(std::chrono::milliseconds patience);
  /// As it was found last, for sentences: "127.0.0.1:7400".
  [[nodiscard]] std::string text() const;

 private:
  mutable std::mutex mutex_;
  found_supervisor first_;
  supervisor_look how_;
  std::optional<found_supervisor> last_;  ///< that a look found
  std::optional<std::chrono::steady_clock::time_point> looked_;
  std::optional<troupe::error> why_not_;  ///< the last look found none
};

/// For an actor, which may not block: looks on a thread of its own, one look at a time. Thread-safe.
class supervisor_search {
 public:
  supervisor_search() = default;
  ~supervisor_search() { stop(); }
  supervisor_search(const supervisor_search&) = delete;
  supervisor_search& operator=(const supervisor_search&) = delete;

  /// Finds or begins it and tells `told` so, on that thread: again and again where that throws, for want of
  /// memory, since whoever looks waits for it. False: a look is under way, or it was stopped.
  /// `overloaded`: there is no thread to be had.
  [[nodiscard]] result<bool> begin(std::shared_ptr<const begun_terms> terms,
                                   std::function<void(const result<found_supervisor>&)> told);
  /// Gives up what is under way and waits until its thread has ended. None begins after that.
  void stop() noexcept;

 private:
  std::mutex mutex_;
  bool stopped_{false};
  std::atomic<bool> looks_{false};
  std::jthread thread_;
};

}  // namespace troupe::actors
