#include "troupe/actors/runtime/inline_executor.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <caf/actor_system.hpp>
#include <caf/resumable.hpp>
#include <caf/scheduler/abstract_coordinator.hpp>

#include "troupe/actors/runtime/caf_thread_scope.hpp"

namespace troupe::actors {

thread_local inline_executor* inline_executor::active_ = nullptr;

void inline_executor::exec_later(caf::resumable* job) noexcept {
  if (next_ != 0 && jobs_.size() == jobs_.capacity()) {
    jobs_.erase(jobs_.begin(), jobs_.begin() + static_cast<std::ptrdiff_t>(next_));
    next_ = 0;
  }
  if (jobs_.size() == jobs_.capacity()) {
    system().scheduler().enqueue(job);
  } else {
    jobs_.push_back(job);
  }
}

caf::resumable* inline_executor::take_next() noexcept {
  auto* job = jobs_[next_++];
  if (is_idle()) {
    jobs_.clear();
    next_ = 0;
  }
  return job;
}

void inline_executor::run() {
  // Reentrancy: an actor that runs here may end up in a poll that wants to run actors; the outer
  // loop will get to them.
  if (active_ == this && is_idle()) return;
  const caf_thread_scope visit;
  scope as_active{*this};
  for (std::size_t done = 0; !is_idle(); ++done) {
    auto* job = take_next();
    if (done >= max_jobs) {
      system().scheduler().enqueue(job);
      continue;
    }
    switch (job->resume(this, throughput)) {
      case caf::resumable::resume_later: exec_later(job); break;
      case caf::resumable::awaiting_message:
      case caf::resumable::done:
      case caf::resumable::shutdown_execution_unit: caf::intrusive_ptr_release(job); break;
    }
  }
}

void inline_executor::hand_over() {
  while (!is_idle()) system().scheduler().enqueue(take_next());
}

inline_executors::inline_executors(caf::actor_system& system)
    : system_{system}, number_{[] {
        static std::atomic<std::uint64_t> last{0};
        return ++last;
      }()} {}

inline_executor& inline_executors::of_this_thread() {
  // A thread that polls asks a million times a second, so the answer is cached.
  struct answer {
    std::uint64_t of{0};
    inline_executor* unit{nullptr};
  };
  thread_local answer last;
  if (last.of == number_) return *last.unit;
  const auto id = std::this_thread::get_id();
  const std::lock_guard lock{mutex_};
  auto& unit = units_[id];
  if (!unit) unit = std::make_unique<inline_executor>(system_);
  last = {number_, unit.get()};
  return *unit;
}

}  // namespace troupe::actors
