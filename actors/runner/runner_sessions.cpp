#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runner/operation_runner.hpp"

namespace troupe::actors::operations {

void operation_runner::forget_deadline(time_point when, timer what, std::uint64_t id) {
  deadlines_.erase({when, what, id});
}

transfer_id operation_runner::new_transfer() {
  for (;;) {
    const transfer_id id{around_.draw()};
    if (id.value != 0 && !sessions_.contains(id)) return id;
  }
}

time_point operation_runner::deadline_after(std::chrono::milliseconds wanted) const {
  return around_.now() + (wanted.count() > 0 ? std::min(wanted, longest_time)
                                             : context_->settings.default_deadline);
}

result<std::shared_ptr<const kvcache::transfer_geometry>> operation_runner::geometry(
    const link_handle& link, kvcache::data_flow flow) {
  if (!context_->layout) {
    return fail(errc::layout_mismatch, "this node has no cache of blocks; give its stage a model");
  }
  if (!link.peer_layout) {
    return fail(errc::layout_mismatch,
                link.peer + " has no cache of blocks; give its stage a model");
  }
  auto& known = flow == kvcache::data_flow::to_remote ? send_geometry_ : receive_geometry_;
  const auto found = known.find(link.peer_incarnation);
  // A peer may claim another's incarnation.
  if (found != known.end() &&
      (found->second.of == link.peer_layout || *found->second.of == *link.peer_layout))
    return found->second.maps;
  if (auto its = check_layout_of(context_->settings, link.peer, *link.peer_layout); !its) {
    return fail(its.error());
  }
  auto made = kvcache::transfer_geometry::create(*context_->layout, *link.peer_layout, flow);
  if (!made) return fail(made.error());
  auto shared = std::make_shared<const kvcache::transfer_geometry>(std::move(*made));
  known.insert_or_assign(link.peer_incarnation, known_geometry{link.peer_layout, shared});
  return shared;
}

void operation_runner::count_sessions() {
  const auto live = sessions_.size() - crashed_sessions_;
  context_->counters.active_transfers.store(static_cast<std::uint32_t>(live));
}

void operation_runner::session_begins(operation_id operation, transfer_id transfer,
                                      session_actor actor, const link_handle& link,
                                      transfer_report report, time_point deadline,
                                      std::shared_ptr<const void> touched) {
  report.transfer = transfer.value;
  if (deadline != no_deadline) deadlines_.emplace(deadline, timer::session, transfer.value);
  const bool served = operation == operation_id{} || sources_.contains(operation);
  if (served) ++served_count_;
  sessions_.emplace(
      transfer, live_session{operation, std::move(actor), link, std::move(report), deadline, served,
                             false, around_.now(), std::move(touched)});
  count_sessions();
}

result<void> operation_runner::room_to_serve() const {
  const auto most = context_->settings.max_operations;
  if (served_count_ + parked_count_ < most) return {};
  return fail(errc::overloaded, std::to_string(served_count_) +
                                    " transfers and values of peers are served here, and " +
                                    std::to_string(parked_count_) +
                                    " wait, which is limits.max_operations: ask for less at once");
}

void operation_runner::pass_on(transfer_id transfer, const link_handle& link,
                               session_message message) {
  // A link that was rebuilt may not have said so yet: messages of its epoch would be dropped.
  tell_session(transfer, session_event{link_is_back{link.epoch, link.backend}});
  tell_session(transfer, session_event{std::move(message)});
}

void operation_runner::session_ends(transfer_id transfer) {
  const auto found = sessions_.find(transfer);
  if (found == sessions_.end()) return;
  forget_deadline(found->second.deadline, timer::session, transfer.value);
  if (found->second.served) --served_count_;
  if (found->second.crashed) --crashed_sessions_;
  sessions_.erase(found);
  count_sessions();
}

void operation_runner::tell_session(transfer_id transfer, session_event event) {
  if (const auto found = sessions_.find(transfer); found != sessions_.end()) {
    around_.tell_session(transfer, found->second.actor, std::move(event));
  }
}

bool operation_runner::tell_outcome(operation_id operation,
                                    std::variant<event_done, event_failed> outcome) {
  return std::visit(
      [&](auto& what) {
        return context_->events.conclude({operation, std::move(what)}, false);
      },
      outcome);
}

bool operation_runner::tell_last_outcome(operation_id operation,
                                         decltype(value_concluded::outcome) outcome) {
  return std::visit(
      [&](auto& what) {
        return context_->events.conclude({operation, std::move(what)});
      },
      outcome);
}

void operation_runner::count_outcome(const std::optional<troupe::error>& failure,
                                     std::uint64_t bytes) {
  auto& counters = context_->counters;
  (failure ? counters.transfers_failed : counters.transfers_done).fetch_add(1);
  counters.bytes_moved.fetch_add(bytes);
}

void operation_runner::wait_for_link(const std::string& peer, operation_id operation) {
  const auto [line, asks] = waiting_for_link_.try_emplace(peer);
  line->second.waiting.insert(operation);
  if (!asks) return;
  const auto former = former_lives_.find(peer);
  const auto life = former == former_lives_.end() ? 0 : former->second;
  line->second.ask = ++asks_;
  around_.need_link({peer, life, line->second.ask});
}

void operation_runner::leave_link_line(const std::string& peer, operation_id operation) {
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

void operation_runner::unpin_blocks(const std::string& request, std::span<const block_id> blocks) {
  if (auto unpinned = context_->pool->unpin(blocks); !unpinned) {
    logger("operations")->error("blocks of request {}: {}", request, to_string(unpinned.error()));
  }
}

void operation_runner::say_over(const link_handle& link, session_message message) {
  around_.tell_link(link, link_command{say{std::move(message), {}}});
}

void operation_runner::refuse_request(const link_handle& link, transfer_id transfer,
                                      const troupe::error& why) {
  say_over(link, make_abort(transfer, why));
}

void operation_runner::refuse_alone(const link_handle& link, transfer_id transfer,
                                    const troupe::error& why) {
  say_over(link, make_refusal(transfer, why));
}

}  // namespace troupe::actors::operations
