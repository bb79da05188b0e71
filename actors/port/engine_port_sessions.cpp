#include <algorithm>
#include <chrono>
#include <utility>

#include <caf/send.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/port/port_core.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::port {

time_point now() {
  return std::chrono::steady_clock::now();
}

void port_core::forget_deadline(time_point when, timer what, std::uint64_t id) {
  deadlines_.erase({when, what, id});
}

transfer_id port_core::new_transfer() {
  for (;;) {
    const transfer_id id{random_()};
    if (id.value != 0 && !sessions_.contains(id)) return id;
  }
}

time_point port_core::deadline_after(std::chrono::milliseconds wanted) const {
  return now() + (wanted.count() > 0 ? std::min(wanted, longest_time)
                                     : context_->settings.default_deadline);
}

result<std::shared_ptr<const kvcache::transfer_geometry>> port_core::geometry(
    const link_handle& link, kvcache::data_flow flow) {
  if (!context_->layout) {
    return fail(errc::layout_mismatch, "this node has no cache of blocks; give its stage a model");
  }
  if (!link.peer_layout) {
    return fail(errc::layout_mismatch,
                link.peer + " has no cache of blocks; give its stage a model");
  }
  auto& known = flow == kvcache::data_flow::to_remote ? send_geometry_ : receive_geometry_;
  if (const auto found = known.find(link.peer_incarnation); found != known.end()) {
    return found->second;
  }
  if (auto its = check_layout_of(context_->settings, link.peer, *link.peer_layout); !its) {
    return fail(its.error());
  }
  auto made = kvcache::transfer_geometry::create(*context_->layout, *link.peer_layout, flow);
  if (!made) return fail(made.error());
  auto shared = std::make_shared<const kvcache::transfer_geometry>(std::move(*made));
  known.emplace(link.peer_incarnation, shared);
  return shared;
}

void port_core::count_sessions() {
  const auto live = sessions_.size() - crashed_sessions_;
  context_->counters.active_transfers.store(static_cast<std::uint32_t>(live));
}

void port_core::session_begins(operation_id operation, transfer_id transfer, session_actor session,
                               const link_handle& link, transfer_report report,
                               time_point deadline) {
  report.transfer = transfer.value;
  if (deadline != no_deadline) deadlines_.emplace(deadline, timer::session, transfer.value);
  const bool served = operation == operation_id{} || sources_.contains(operation);
  if (served) ++served_count_;
  sessions_.emplace(transfer, live_session{operation, std::move(session), link.actor.id(),
                                           std::move(report), deadline, served});
  count_sessions();
}

result<void> port_core::room_to_serve() const {
  const auto most = context_->settings.max_operations;
  if (served_count_ + parked_count_ < most) return {};
  return fail(errc::overloaded, std::to_string(served_count_) +
                                    " transfers and values of peers are served here, and " +
                                    std::to_string(parked_count_) +
                                    " wait, which is limits.max_operations: ask for less at once");
}

void pass_on(const live_session& session, const link_handle& link, session_message message) {
  // A link that was rebuilt may not have said so yet: messages of its epoch would be dropped.
  tell(session.actor, session_event{link_is_back{link.epoch, link.backend}});
  tell(session.actor, session_event{std::move(message)});
}

void port_core::session_ends(transfer_id transfer) {
  const auto found = sessions_.find(transfer);
  if (found == sessions_.end()) return;
  forget_deadline(found->second.deadline, timer::session, transfer.value);
  if (found->second.served) --served_count_;
  if (found->second.crashed) --crashed_sessions_;
  sessions_.erase(found);
  count_sessions();
}

void port_core::tell_session(transfer_id transfer, session_event event) {
  if (const auto found = sessions_.find(transfer); found != sessions_.end()) {
    tell(found->second.actor, std::move(event));
  }
}

bool port_core::tell_outcome(operation_id operation,
                             std::variant<event_done, event_failed> outcome) {
  const auto* failed = std::get_if<event_failed>(&outcome);
  const auto failure = failed != nullptr ? std::optional{failed->why} : std::nullopt;
  if (!context_->operations.end(operation, failure)) return false;
  std::visit([&](auto& what) { context_->events.push({operation, std::move(what)}); }, outcome);
  return true;
}

bool port_core::tell_last_outcome(operation_id operation,
                                  decltype(value_concluded::outcome) outcome) {
  if (!context_->operations.end(operation)) return false;
  std::visit(
      [&](auto& what) {
        context_->events.push_last({operation, std::move(what)});
      },
      outcome);
  return true;
}

void port_core::count_outcome(const std::optional<troupe::error>& failure, std::uint64_t bytes) {
  auto& counters = context_->counters;
  (failure ? counters.transfers_failed : counters.transfers_done).fetch_add(1);
  counters.bytes_moved.fetch_add(bytes);
}

void port_core::wait_for_link(const std::string& peer, operation_id operation) {
  const auto [line, asks] = waiting_for_link_.try_emplace(peer);
  line->second.waiting.insert(operation);
  // Never on this thread, which may be the engine's: the node also calls the engine back.
  if (!asks) return;
  const auto former = former_lives_.find(peer);
  const auto life = former == former_lives_.end() ? 0 : former->second;
  line->second.ask = ++asks_;
  caf::anon_send(node_, node_command{need_link{peer, life, line->second.ask}});
}

void port_core::leave_link_line(const std::string& peer, operation_id operation) {
  const auto line = waiting_for_link_.find(peer);
  if (line != waiting_for_link_.end()) line->second.waiting.erase(operation);
}

transfer_report report_of(const std::string& request, const link_handle& link,
                          std::string_view side, std::string_view state) {
  transfer_report report;
  report.request = request;
  report.peer = link.peer;
  report.side = side;
  report.state = state;
  return report;
}

void port_core::unpin_blocks(const std::string& request, std::span<const block_id> blocks) {
  if (auto unpinned = context_->pool->unpin(blocks); !unpinned) {
    logger("port")->error("blocks of request {}: {}", request, to_string(unpinned.error()));
  }
}

void refuse_request(const link_handle& link, transfer_id transfer, const troupe::error& why) {
  tell(link.actor, link_command{say{make_abort(transfer, why), {}}});
}

void refuse_alone(const link_handle& link, transfer_id transfer, const troupe::error& why) {
  tell(link.actor, link_command{say{make_refusal(transfer, why), {}}});
}

}  // namespace troupe::actors::port
