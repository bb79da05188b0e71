#include <algorithm>
#include <chrono>
#include <utility>

#include <caf/send.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/context/engine_checks.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/port/engine_port_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::port {

time_point now() {
  return std::chrono::steady_clock::now();
}

void forget_deadline(engine_port_state& st, time_point when, timer what, std::uint64_t id) {
  st.deadlines.erase({when, what, id});
}

transfer_id new_transfer(engine_port_state& st) {
  for (;;) {
    const transfer_id id{st.random()};
    if (id.value != 0 && !st.sessions.contains(id)) return id;
  }
}

time_point deadline_after(const engine_port_state& st, std::chrono::milliseconds wanted) {
  return now() + (wanted.count() > 0 ? std::min(wanted, longest_time)
                                     : st.context->settings.default_deadline);
}

result<std::shared_ptr<const kvcache::transfer_geometry>> geometry(engine_port_state& st,
                                                                   const link_handle& link,
                                                                   kvcache::data_flow flow) {
  if (!st.context->layout) {
    return fail(errc::layout_mismatch, "this node has no cache of blocks; give its stage a model");
  }
  if (!link.peer_layout) {
    return fail(errc::layout_mismatch,
                link.peer + " has no cache of blocks; give its stage a model");
  }
  auto& known = flow == kvcache::data_flow::to_remote ? st.send_geometry : st.receive_geometry;
  if (const auto found = known.find(link.peer_incarnation); found != known.end()) {
    return found->second;
  }
  if (auto its = check_layout_of(st.context->settings, link.peer, *link.peer_layout); !its) {
    return fail(its.error());
  }
  auto made = kvcache::transfer_geometry::create(*st.context->layout, *link.peer_layout, flow);
  if (!made) return fail(made.error());
  auto shared = std::make_shared<const kvcache::transfer_geometry>(std::move(*made));
  known.emplace(link.peer_incarnation, shared);
  return shared;
}

void count_sessions(engine_port_state& st) {
  const auto live = st.sessions.size() - st.crashed_sessions;
  st.context->counters.active_transfers.store(static_cast<std::uint32_t>(live));
}

void session_begins(engine_port_state& st, operation_id operation, transfer_id transfer,
                    session_actor session, const link_handle& link, transfer_report report,
                    time_point deadline) {
  report.transfer = transfer.value;
  if (deadline != no_deadline) st.deadlines.emplace(deadline, timer::session, transfer.value);
  const bool served = operation == operation_id{} || st.sources.contains(operation);
  if (served) ++st.served_count;
  st.sessions.emplace(transfer, live_session{operation, std::move(session), link.actor.id(),
                                             std::move(report), deadline, served});
  count_sessions(st);
}

result<void> room_to_serve(const engine_port_state& st) {
  const auto most = st.context->settings.max_operations;
  if (st.served_count + st.parked_count < most) return {};
  return fail(errc::overloaded, std::to_string(st.served_count) +
                                    " transfers and values of peers are served here, and " +
                                    std::to_string(st.parked_count) +
                                    " wait, which is limits.max_operations: ask for less at once");
}

void pass_on(const live_session& session, const link_handle& link, session_message message) {
  // A link that was made again since may not have said so yet: what is of its epoch would be dropped.
  tell(session.actor, session_event{link_is_back{link.epoch, link.backend}});
  tell(session.actor, session_event{std::move(message)});
}

void session_ends(engine_port_state& st, transfer_id transfer) {
  const auto found = st.sessions.find(transfer);
  if (found == st.sessions.end()) return;
  forget_deadline(st, found->second.deadline, timer::session, transfer.value);
  if (found->second.served) --st.served_count;
  if (found->second.crashed) --st.crashed_sessions;
  st.sessions.erase(found);
  count_sessions(st);
}

void tell_session(engine_port_state& st, transfer_id transfer, session_event event) {
  if (const auto found = st.sessions.find(transfer); found != st.sessions.end()) {
    tell(found->second.actor, std::move(event));
  }
}

bool tell_outcome(engine_port_state& st, operation_id operation,
                  std::variant<event_done, event_failed> outcome) {
  const auto* failed = std::get_if<event_failed>(&outcome);
  const auto failure = failed != nullptr ? std::optional{failed->why} : std::nullopt;
  if (!st.context->operations.end(operation, failure)) return false;
  std::visit([&](auto& what) { st.context->events.push({operation, std::move(what)}); }, outcome);
  return true;
}

bool tell_last_outcome(engine_port_state& st, operation_id operation,
                       decltype(value_concluded::outcome) outcome) {
  if (!st.context->operations.end(operation)) return false;
  std::visit(
      [&](auto& what) {
        st.context->events.push_last({operation, std::move(what)});
      },
      outcome);
  return true;
}

void count_outcome(engine_port_state& st, const std::optional<troupe::error>& failure,
                   std::uint64_t bytes) {
  auto& counters = st.context->counters;
  (failure ? counters.transfers_failed : counters.transfers_done).fetch_add(1);
  counters.bytes_moved.fetch_add(bytes);
}

void wait_for_link(engine_port_state& st, const std::string& peer, operation_id operation) {
  const auto [line, asks] = st.waiting_for_link.try_emplace(peer);
  line->second.waiting.insert(operation);
  // Never on this thread, which may be the engine's: the node also calls the engine back.
  if (!asks) return;
  const auto former = st.former_lives.find(peer);
  const auto life = former == st.former_lives.end() ? 0 : former->second;
  line->second.ask = ++st.asks;
  caf::anon_send(st.node, node_command{need_link{peer, life, line->second.ask}});
}

void leave_link_line(engine_port_state& st, const std::string& peer, operation_id operation) {
  const auto line = st.waiting_for_link.find(peer);
  if (line != st.waiting_for_link.end()) line->second.waiting.erase(operation);
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

void unpin_blocks(engine_port_state& st, const std::string& request,
                  std::span<const block_id> blocks) {
  if (auto unpinned = st.context->pool->unpin(blocks); !unpinned) {
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
