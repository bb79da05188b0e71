#include "troupe/actors/inline_unit.hpp"

#include <caf/actor_system.hpp>
#include <caf/resumable.hpp>
#include <caf/scheduler/abstract_coordinator.hpp>

namespace troupe::actors {

thread_local inline_unit* inline_unit::active_ = nullptr;

void inline_unit::run() {
  // Reentrancy: an actor that runs here may end up in a poll that wants to run actors; the outer
  // loop will get to them.
  if (active_ == this && jobs_.empty()) return;
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

inline_unit& inline_units::of_this_thread() {
  const auto id = std::this_thread::get_id();
  const std::lock_guard lock{mutex_};
  auto& unit = units_[id];
  if (!unit) unit = std::make_unique<inline_unit>(system_);
  return *unit;
}

}  // namespace troupe::actors
