#include <chrono>
#include <memory>
#include <utility>

#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/node/node_parts.hpp"

namespace troupe::actors::node_parts {

/// Asks every child; answers when all have said something, or did not within a second.
struct report_in_progress {
  node_report report;
  std::size_t waiting{0};
  caf::typed_response_promise<node_report> promise;
};

namespace {

void one_less(self_pointer self, const std::shared_ptr<report_in_progress>& progress) {
  if (--progress->waiting != 0) return;
  progress->promise.deliver(std::move(progress->report));
  self->state.reports.erase(progress);
}

}  // namespace

void end_reports(node_state_data& st) {
  for (const auto& progress : std::exchange(st.reports, {})) {
    progress->promise.deliver(std::move(progress->report));
  }
}

caf::typed_response_promise<node_report> make_report(self_pointer self) {
  auto& st = self->state;
  const auto& context = *st.context;
  auto progress = std::make_shared<report_in_progress>();
  progress->promise = self->make_response_promise<node_report>();
  auto& report = progress->report;
  report.node = context.self;
  report.epoch = st.members.epoch;
  report.supervisor_reachable = st.registered;
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
  const auto silent = [self, progress](const caf::error&) { one_less(self, progress); };
  progress->waiting = 2 + st.links.size();
  st.reports.insert(progress);
  self->request(st.port, patience, report_atom::value)
      .then(
          [self, progress](transfer_reports& all) {
            progress->report.transfers = std::move(all.transfers);
            progress->report.waiting_for_link = all.waiting_for_link;
            progress->report.parked = std::move(all.parked);
            one_less(self, progress);
          },
          silent);
  self->request(st.pool, patience, report_atom::value)
      .then(
          [self, progress](pool_report& pool) {
            progress->report.pool = std::move(pool);
            one_less(self, progress);
          },
          silent);
  for (const auto& [id, link] : st.links) {
    self->request(link.actor, patience, report_atom::value)
        .then(
            [self, progress](link_report& one) {
              progress->report.links.push_back(std::move(one));
              one_less(self, progress);
            },
            silent);
  }
  return progress->promise;
}

}  // namespace troupe::actors::node_parts
