#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "troupe/kvcache/ids.hpp"
#include "troupe/kvcache/result.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::transport {

using steady_time = std::chrono::steady_clock::time_point;

/// An object that a progress engine drives: a link, a listener. The engine holds it by `shared_ptr`
/// while it is registered and during each call; a call may unregister any object, its own included.
/// Calls of one engine never overlap and no lock of the engine is held in them.
class pollable {
 public:
  virtual ~pollable() = default;
  /// A watched descriptor is ready (`events`: EPOLLIN ...; level-triggered). `key` as given to
  /// `watch`. Returns whether it made progress.
  virtual bool on_ready(std::uint64_t key, std::uint32_t events) = 0;
  /// The time given to `call_at` has come.
  virtual void on_timer(std::uint64_t key, steady_time now) {
    static_cast<void>(key);
    static_cast<void>(now);
  }
  /// Called once per polling round on every registered poller. Returns whether it made progress.
  virtual bool on_poll(steady_time now) {
    static_cast<void>(now);
    return false;
  }
  /// For pollers: the engine is about to sleep. Arms whatever wakes it (a doorbell descriptor),
  /// then looks once more. Returns false if there is work, so that the engine does not sleep.
  virtual bool before_sleep() { return true; }
  /// For pollers: the engine woke up (or did not sleep after all). Disarms the wake-up.
  virtual void after_sleep() {}
};

using watch_id = strong_id<struct watch_tag, std::uint64_t>;
using timer_id = strong_id<struct timer_tag, std::uint64_t>;

/// How long to poll after work before sleeping. A sleep that traffic ends soon was not worth it:
/// the wake-up took longer than polling would have. The time therefore grows to the bound when
/// sleeps are short, and shrinks when they are long. Thread-safe, since two threads may wake up at
/// once.
class adaptive_spin {
 public:
  explicit adaptive_spin(std::chrono::nanoseconds bound) noexcept
      : bound_{bound.count()}, current_{bound_ / least} {}
  [[nodiscard]] std::chrono::nanoseconds time() const noexcept {
    return std::chrono::nanoseconds{current_.load(std::memory_order_relaxed)};
  }
  void slept(std::chrono::nanoseconds how_long) noexcept {
    const auto half = std::max(current_.load(std::memory_order_relaxed) / 2, bound_ / least);
    current_.store(how_long.count() <= bound_ ? bound_ : half, std::memory_order_relaxed);
  }

 private:
  static constexpr std::int64_t least = 8;  ///< 1/8 of the bound is always polled
  const std::int64_t bound_;                ///< nanoseconds, as `current_`
  std::atomic<std::int64_t> current_;
};

class progress_engine;

/// Wakes an engine. May outlive the engine, and then does nothing. Thread-safe.
class engine_waker {
 public:
  explicit engine_waker(progress_engine& engine) noexcept : engine_{&engine} {}
  void wake() noexcept;

 private:
  friend class progress_engine;
  std::mutex mutex_;
  progress_engine* engine_;
};

/// One epoll set and the thread that drives it. After work the thread polls for a time
/// (`adaptive_spin`), then sleeps in epoll_wait: an idle engine takes no CPU. A caller of
/// `poll_once` drives the engine from its own thread; the thread stands aside until 1 ms after its
/// last call. It also stands aside for a caller that only waits (`drive`): traffic then costs one
/// wake-up of that caller, instead of one of the thread and one of the caller. Thread-safe.
class progress_engine {
 public:
  struct settings {
    bool own_thread{true};
    std::chrono::microseconds spin{250};   ///< bound of the polling after work
    std::function<void()> after_progress;  ///< after each round that did work; no lock held
    /// Called when the thread ends by an exception, on that thread.
    std::function<void(const troupe::error& why)> on_thread_lost{};
  };

  [[nodiscard]] static result<std::unique_ptr<progress_engine>> create(settings with);
  progress_engine(const progress_engine&) = delete;
  progress_engine& operator=(const progress_engine&) = delete;
  ~progress_engine();

  /// Ends the thread. Afterwards only `poll_once` makes calls.
  void stop();

  /// `events` as for epoll_ctl; the descriptor stays the caller's and must be open until `unwatch`.
  [[nodiscard]] result<watch_id> watch(int fd, std::uint32_t events, std::shared_ptr<pollable> who,
                                       std::uint64_t key);
  void rearm(watch_id id, std::uint32_t events);
  /// A call that is in progress may still end afterwards.
  void unwatch(watch_id id);

  void add_poller(std::shared_ptr<pollable> who);
  void remove_poller(const pollable* who);

  timer_id call_at(steady_time when, std::shared_ptr<pollable> who, std::uint64_t key);
  void cancel(timer_id id);

  /// Makes a sleeping thread run a round and poll for `spin`.
  void wake();
  [[nodiscard]] std::shared_ptr<engine_waker> waker() const noexcept { return waker_; }
  /// Declares that the caller is doing the work of a round itself: the thread stands aside.
  void caller_polls() noexcept;
  /// Whether the thread that drives the engine sleeps until traffic comes, or is about to: no round
  /// runs until then. A caller that leaves work for the next round publishes the work first
  /// (sequentially consistent), then asks, and does the work at once if the answer is true.
  /// `pollable::before_sleep` looks for such work after the answer has become true, so one of the
  /// two sees the other.
  [[nodiscard]] bool asleep() const noexcept { return asleep_.load(std::memory_order_seq_cst); }
  /// Runs one round on the calling thread. Returns false at once when another thread (or a caller
  /// up the stack) runs a round or drives.
  bool poll_once();
  /// Does the thread's work on the calling thread, sleeps included, until `done` (asked after each
  /// round, with no lock held) or `until`. `wake_fd` becoming readable ends a sleep. Returns false
  /// at once when another caller drives already, and when the engine was stopped.
  bool drive(steady_time until, int wake_fd, const std::function<bool()>& done);

 private:
  /// The descriptors of one engine.
  struct descriptors {
    owned_fd epoll, wake, kick, handover;
  };
  [[nodiscard]] static result<descriptors> open_descriptors();

  progress_engine(settings with, descriptors fds);

  struct watch_entry {
    int fd{-1};
    std::uint32_t events{0};
    std::shared_ptr<pollable> who;
    std::uint64_t key{0};
  };
  struct timer_entry {
    std::shared_ptr<pollable> who;
    std::uint64_t key{0};
  };

  /// How a round that finds nothing to do ends.
  struct sleep_plan {
    bool may_sleep{false};
    steady_time until{steady_time::max()};
    int wake_fd{-1};  ///< besides the engine's own; -1: none
  };

  void run_thread() noexcept;
  void run();
  void stand_aside();
  void wait_for_handover();
  void leave();
  bool round(const sleep_plan& sleep);
  /// Whose round it is: the round of a polling caller gives way to a driver.
  enum class turn : std::uint8_t { own, of_caller };
  bool run_round(const sleep_plan& sleep, turn whose = turn::own);
  void sleep_until(const sleep_plan& sleep, steady_time now);
  bool take_events();
  bool run_timers(steady_time now);
  bool poll_pollers(steady_time now);
  bool prepare_sleep();
  void end_sleep();
  [[nodiscard]] std::chrono::milliseconds time_to_sleep(steady_time now, steady_time until) const;
  void refresh_pollers();
  void drain_wake();

  const settings with_;
  /// `kick`: tells the thread, its only reader, that a caller began to poll or to drive.
  /// `handover`: a timer that gives the thread its work back some time after a driver has left.
  const descriptors fds_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> running_{false};  ///< a round runs (in whichever thread)
  std::atomic<bool> asleep_{false};   ///< the driving thread sleeps, or is about to
  std::atomic<bool> woken_{false};    ///< a wake is on its way: one write to the eventfd is enough
  std::atomic<std::int64_t> caller_ns_{0};  ///< when `poll_once` was last called

  // Who drives. The thread sets `aside_` once it has left any sleep of its own. Only then may a
  // driver sleep: a sleeper disarms the doorbells when it wakes up.
  std::mutex turn_mutex_;
  std::condition_variable left_;     ///< the driver has left
  std::atomic<bool> driven_{false};  ///< written under the mutex
  std::atomic<bool> aside_{false};
  std::optional<steady_time> handover_at_;  ///< when the timer set by the last driver runs out
  adaptive_spin spin_;                      ///< of the thread that runs rounds

  mutable std::mutex mutex_;
  std::uint64_t last_watch_{0};
  std::unordered_map<std::uint64_t, watch_entry> watches_;
  std::map<std::pair<steady_time, std::uint64_t>, timer_entry> timers_;
  std::unordered_map<std::uint64_t, steady_time> timer_times_;
  std::uint64_t last_timer_{0};
  std::vector<std::shared_ptr<pollable>> pollers_;
  std::atomic<std::uint64_t> pollers_version_{0};
  std::atomic<std::int64_t> next_timer_ns_{INT64_MAX};

  // Of the round that runs:
  std::vector<std::shared_ptr<pollable>> round_pollers_;
  std::uint64_t round_pollers_version_{0};
  std::uint32_t rounds_since_events_{0};

  const std::shared_ptr<engine_waker> waker_{std::make_shared<engine_waker>(*this)};
  std::thread thread_;
};

/// The engines of one endpoint; links are assigned to them in turn.
class progress_pool {
 public:
  /// Creates `num_workers` engines, at least one. Without `own_thread` only `poll` drives them.
  [[nodiscard]] static result<std::unique_ptr<progress_pool>> create(
      const progress_engine::settings& with, std::uint32_t num_workers);

  [[nodiscard]] progress_engine& next() noexcept {
    return *engines_[turn_.fetch_add(1, std::memory_order_relaxed) % engines_.size()];
  }
  bool poll();
  /// `progress_engine::drive` if there is one engine. Returns false if there are more, since one
  /// caller cannot drive several at once.
  bool drive(steady_time until, int wake_fd, const std::function<bool()>& done);
  /// Ends all threads.
  void stop();

 private:
  progress_pool() = default;
  std::vector<std::unique_ptr<progress_engine>> engines_;
  std::atomic<std::size_t> turn_{0};
};

}  // namespace troupe::transport
