#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/node/node_core.hpp"

namespace troupe::actors::nodes {

/// Asks every child, and answers when all have replied, or after a second.
struct report_in_progress {
  node_report report;
  std::size_t waiting{0};
  caf::typed_response_promise<node_report> promise;
};

void node_core::one_less(const std::shared_ptr<report_in_progress>& progress) {
  if (--progress->waiting != 0) return;
  progress->promise.deliver(std::move(progress->report));
  reports_.erase(progress);
}

void node_core::end_reports() {
  for (const auto& progress : std::exchange(reports_, {})) {
    progress->promise.deliver(std::move(progress->report));
  }
}

caf::typed_response_promise<node_report> node_core::make_report() {
  const auto& context = *context_;
  auto progress = std::make_shared<report_in_progress>();
  progress->promise = self_->make_response_promise<node_report>();
  auto& report = progress->report;
  report.node = context.self;
  report.epoch = members_.epoch;
  report.supervisor_reachable = registered_;
  report.uptime_ms =
      static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                     std::chrono::steady_clock::now() - context.started)
                                     .count());
  report.transfers_done = context.counters.transfers_done.load();
  report.transfers_failed = context.counters.transfers_failed.load();
  report.bytes_moved = context.counters.bytes_moved.load();
  report.operations_open = context.operations.open();
  report.backends = backend_reports(*context.endpoint);
  constexpr auto patience = std::chrono::seconds{1};
  const auto silent = [this, progress](const caf::error&) { one_less(progress); };
  progress->waiting = 2 + links_.size();
  reports_.insert(progress);
  self_->request(runner_, patience, report_atom::value)
      .then(
          [this, progress](transfer_reports& all) {
            progress->report.transfers = std::move(all.transfers);
            progress->report.waiting_for_link = all.waiting_for_link;
            progress->report.parked = std::move(all.parked);
            one_less(progress);
          },
          silent);
  self_->request(pool_, patience, report_atom::value)
      .then(
          [this, progress](pool_report& pool) {
            progress->report.pool = std::move(pool);
            one_less(progress);
          },
          silent);
  for (const auto& [id, link] : links_) {
    self_->request(link.actor, patience, report_atom::value)
        .then(
            [this, progress](link_report& one) {
              progress->report.links.push_back(std::move(one));
              one_less(progress);
            },
            silent);
  }
  return progress->promise;
}

}  // namespace troupe::actors::nodes
