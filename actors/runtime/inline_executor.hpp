#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <caf/abstract_actor.hpp>
#include <caf/actor_cast.hpp>
#include <caf/execution_unit.hpp>
#include <caf/fwd.hpp>
#include <caf/mailbox_element.hpp>
#include <caf/message_id.hpp>

namespace troupe::actors {

/// Runs actors on the thread that made them runnable, instead of waking a scheduler thread for each
/// hop. A progress thread that took a frame from the wire runs the link's actor, the transfer's
/// actor and the next post in one go; an engine that polls does the same on its own core. CAF still
/// guarantees that an actor runs on one thread at a time.
class inline_executor final : public caf::execution_unit {
 public:
  explicit inline_executor(caf::actor_system& system) : caf::execution_unit{&system} {
    jobs_.reserve(max_jobs);
  }

  /// Needs no memory: CAF would never run an actor again that could not be added. While `max_jobs`
  /// actors are runnable, more go to the scheduler.
  void exec_later(caf::resumable* job) noexcept override;

  /// Runs all runnable actors, and those that they make runnable. After `max_jobs` the rest goes to
  /// the scheduler, so that a thread which must also move bytes is not held up.
  void run();

  /// The unit with which the calling thread runs actors now; null: none, use the scheduler.
  [[nodiscard]] static inline_executor* active() noexcept { return active_; }

  /// Makes it the calling thread's active one for as long as the thread lives.
  void adopt_this_thread() noexcept { active_ = this; }

  /// Makes a unit the calling thread's active one for the lifetime of the scope. Actors that are
  /// still runnable at its end go to the scheduler: the thread may never come back.
  class scope {
   public:
    explicit scope(inline_executor& unit) noexcept : before_{std::exchange(active_, &unit)} {}
    ~scope() {
      if (before_ != active_) active_->hand_over();
      active_ = before_;
    }
    scope(const scope&) = delete;
    scope& operator=(const scope&) = delete;

   private:
    inline_executor* before_;
  };

 private:
  void hand_over();
  [[nodiscard]] bool is_idle() const noexcept { return next_ == jobs_.size(); }
  [[nodiscard]] caf::resumable* take_next() noexcept;

  static constexpr std::size_t max_jobs = 256;
  static constexpr std::size_t throughput = 32;  ///< messages per turn of one actor
  static thread_local inline_executor* active_;
  std::vector<caf::resumable*> jobs_;  ///< runnable from `next_` on
  std::size_t next_{0};
};

/// One unit per thread that feeds actors; they live until the actor system is gone, since an actor
/// may remember the unit it last ran on.
class inline_executors {
 public:
  explicit inline_executors(caf::actor_system& system);
  [[nodiscard]] inline_executor& of_this_thread();

 private:
  caf::actor_system& system_;
  const std::uint64_t number_;  ///< never used again in this process, unlike an address
  std::mutex mutex_;
  std::unordered_map<std::thread::id, std::unique_ptr<inline_executor>> units_;
};

/// Sends without a sender; runs on this thread if it has an active unit, else on the scheduler.
template <class Handle, class... Ts>
void tell(const Handle& receiver, Ts&&... xs) {
  if (receiver) {
    caf::actor_cast<caf::abstract_actor*>(receiver)->eq_impl(
        caf::make_message_id(), nullptr, inline_executor::active(), std::forward<Ts>(xs)...);
  }
}

/// A message that has its memory before it is sent: for news that must not be lost when memory runs
/// out.
template <class Message>
class ready_message {
 public:
  explicit ready_message(Message message)
      : element_{
            caf::make_mailbox_element(nullptr, caf::make_message_id(), {}, std::move(message))} {}

  /// To be changed before it is sent.
  [[nodiscard]] Message& content() {
    return element_->content().template get_mutable_as<Message>(0);
  }
  /// Sends it like `tell`, once.
  template <class Handle>
  void tell_to(const Handle& receiver) {
    caf::actor_cast<caf::abstract_actor*>(receiver)->enqueue(std::move(element_),
                                                             inline_executor::active());
  }

 private:
  caf::mailbox_element_ptr element_;
};

}  // namespace troupe::actors
