#pragma once

/// CAF's work-sharing scheduler with a clock that an ending actor does not wake. (Sharing wakes a
/// sleeping worker; CAF's default, stealing, polls, which costs an idle node 100 wake-ups a second
/// per worker and a busy one latency.) In CAF 0.17 each actor that ends tells the clock's thread to
/// forget its timeouts, even though most never had one: a wake-up and a context switch for every
/// transfer.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_set>
#include <utility>

#include <caf/policy/work_sharing.hpp>
#include <caf/scheduler/coordinator.hpp>

namespace troupe::actors {

/// Forwards everything to the scheduler's own clock, except `cancel_timeouts` of actors that have
/// set none since the last one. Thread-safe.
class selective_clock final : public caf::detail::thread_safe_actor_clock {
 public:
  explicit selective_clock(caf::actor_clock& real) : real_{real} {}

  void set_ordinary_timeout(time_point t, caf::abstract_actor* self, caf::atom_value type,
                            std::uint64_t id) override {
    remember(self);
    real_.set_ordinary_timeout(t, self, type, id);
  }
  void set_multi_timeout(time_point t, caf::abstract_actor* self, caf::atom_value type,
                         std::uint64_t id) override {
    remember(self);
    real_.set_multi_timeout(t, self, type, id);
  }
  void set_request_timeout(time_point t, caf::abstract_actor* self, caf::message_id id) override {
    remember(self);
    real_.set_request_timeout(t, self, id);
  }
  void cancel_ordinary_timeout(caf::abstract_actor* self, caf::atom_value type) override {
    real_.cancel_ordinary_timeout(self, type);
  }
  void cancel_request_timeout(caf::abstract_actor* self, caf::message_id id) override {
    real_.cancel_request_timeout(self, id);
  }
  void cancel_timeouts(caf::abstract_actor* self) override {
    if (forget(self)) real_.cancel_timeouts(self);
  }
  void schedule_message(time_point t, caf::strong_actor_ptr receiver,
                        caf::mailbox_element_ptr content) override {
    real_.schedule_message(t, std::move(receiver), std::move(content));
  }
  void schedule_message(time_point t, caf::group target, caf::strong_actor_ptr sender,
                        caf::message content) override {
    real_.schedule_message(t, std::move(target), std::move(sender), std::move(content));
  }
  void cancel_all() override { real_.cancel_all(); }

 private:
  void remember(caf::abstract_actor* actor) {
    const std::lock_guard lock{mutex_};
    with_timeouts_.insert(actor->id());
  }
  bool forget(caf::abstract_actor* actor) {
    const std::lock_guard lock{mutex_};
    return with_timeouts_.erase(actor->id()) != 0;
  }

  caf::actor_clock& real_;
  std::mutex mutex_;
  std::unordered_set<caf::actor_id> with_timeouts_;
};

/// Work sharing that loses no actor when memory runs short. CAF first puts a message into an actor's
/// mailbox, then the actor into this queue. If the second fails, nothing ever schedules the actor
/// again, and all that wait for its answers hang. So the nodes of the queue are kept, and an actor
/// that finds none waits for one.
class lasting_sharing : public caf::policy::work_sharing {
 public:
  struct coordinator_data : caf::policy::work_sharing::coordinator_data {
    explicit coordinator_data(caf::scheduler::abstract_coordinator* self)
        : caf::policy::work_sharing::coordinator_data{self}, spare(spare_nodes) {}
    queue_type spare;  ///< nodes that are not in the queue; guarded by `lock`
  };

  template <class Coordinator>
  void enqueue(Coordinator* self, caf::resumable* job) noexcept {
    auto& data = d(self);
    std::unique_lock<std::mutex> guard{data.lock};
    while (data.spare.empty()) {
      guard.unlock();
      auto fresh = new_node();
      guard.lock();
      data.spare.splice(data.spare.end(), fresh);
    }
    data.spare.front() = job;
    data.queue.splice(data.queue.end(), data.spare, data.spare.begin());
    data.cv.notify_one();
  }
  template <class Coordinator>
  void central_enqueue(Coordinator* self, caf::resumable* job) noexcept {
    enqueue(self, job);
  }
  template <class Worker>
  void external_enqueue(Worker* self, caf::resumable* job) noexcept {
    enqueue(self->parent(), job);
  }
  template <class Worker>
  void internal_enqueue(Worker* self, caf::resumable* job) noexcept {
    enqueue(self->parent(), job);
  }
  template <class Worker>
  void resume_job_later(Worker* self, caf::resumable* job) noexcept {
    enqueue(self->parent(), job);
  }

  template <class Worker>
  caf::resumable* dequeue(Worker* self) {
    auto& data = d(self->parent());
    std::unique_lock<std::mutex> guard{data.lock};
    data.cv.wait(guard, [&] { return !data.queue.empty(); });
    auto* const job = data.queue.front();
    data.spare.splice(data.spare.begin(), data.queue, data.queue.begin());
    return job;
  }

 private:
  static constexpr std::size_t spare_nodes = 1024;

  /// Empty if there is no memory, after a pause in which a worker may release a node.
  static queue_type new_node() noexcept {
    try {
      return queue_type(1);
    } catch (const std::bad_alloc&) {
      std::this_thread::sleep_for(std::chrono::milliseconds{10});
      return {};
    }
  }
};

class scheduler : public caf::scheduler::coordinator<lasting_sharing> {
 public:
  using super = caf::scheduler::coordinator<lasting_sharing>;
  explicit scheduler(caf::actor_system& system) : super{system}, clock_{super::clock()} {}
  selective_clock& clock() noexcept override { return clock_; }

 private:
  selective_clock clock_;
};

}  // namespace troupe::actors
