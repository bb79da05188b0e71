#pragma once

/// CAF's work-sharing scheduler with a clock that an ending actor does not wake. (Sharing wakes a
/// sleeping worker; CAF's default, stealing, polls, which costs an idle node 100 wake-ups a second
/// per worker and a busy one latency.) In CAF 0.17 each actor that ends tells the clock's thread to
/// forget its timeouts, even though most never had one: a wake-up and a context switch for every
/// transfer.

#include <cstdint>
#include <mutex>
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

class scheduler : public caf::scheduler::coordinator<caf::policy::work_sharing> {
 public:
  using super = caf::scheduler::coordinator<caf::policy::work_sharing>;
  explicit scheduler(caf::actor_system& system) : super{system}, clock_{super::clock()} {}
  selective_clock& clock() noexcept override { return clock_; }

 private:
  selective_clock clock_;
};

}  // namespace troupe::actors
