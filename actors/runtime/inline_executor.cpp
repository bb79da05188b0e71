#include "troupe/actors/runtime/inline_executor.hpp"

#include <atomic>
#include <cstdint>

#include <caf/actor_system.hpp>
#include <caf/resumable.hpp>
#include <caf/scheduler/abstract_coordinator.hpp>

#include "troupe/actors/runtime/caf_thread_scope.hpp"

namespace troupe::actors {

thread_local inline_executor* inline_executor::active_ = nullptr;

void inline_executor::run() {
  // Reentrancy: an actor that runs here may end up in a poll that wants to run actors; the outer
  // loop will get to them.
  if (active_ == this && jobs_.empty()) return;
  const caf_thread_scope visit;
  scope as_active{*this};
  for (std::size_t done = 0; !jobs_.empty(); ++done) {
    auto* job = jobs_.front();
    jobs_.pop_front();
    if (done >= max_jobs) {
      system().scheduler().enqueue(job);
      continue;
    }
    switch (job->resume(this, throughput)) {
      case caf::resumable::resume_later: jobs_.push_back(job); break;
      case caf::resumable::awaiting_message:
      case caf::resumable::done:
      case caf::resumable::shutdown_execution_unit: caf::intrusive_ptr_release(job); break;
    }
  }
}

void inline_executor::hand_over() {
  while (!jobs_.empty()) {
    auto* job = jobs_.front();
    jobs_.pop_front();
    system().scheduler().enqueue(job);
  }
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
