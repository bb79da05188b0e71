#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "troupe/actors/supervisor/supervisor_parts.hpp"

namespace troupe::actors::supervisor_parts {

namespace {

drain_reply refused(const error& why) {
  return {static_cast<std::uint8_t>(why.code), why.message, 0};
}

}  // namespace

/// The whole replica drains: without one of its ranks it takes no requests anyway.
drain_reply supervisor_state::drain(const drain_request& request) {
  if (request.cancel != 0) return cancel_drain(request.name);
  const auto asked = table->drain(request.name);
  if (!asked) return refused(asked.error());
  const auto replica = table->replica_of(request.name);
  std::vector<drain_list::rank> ranks{{request.name, *asked}};
  for (const expected_slot& slot : replica) {
    if (slot.name == request.name) continue;
    if (const auto life = table->drain(slot.name)) ranks.push_back({slot.name, *life});
  }
  const std::chrono::milliseconds deadline{request.deadline_ms};
  drains.begin(replica.front().stage, replica.front().replica, ranks, deadline, table->epoch(),
               now());
  for (const member& m : table->view().members) {
    // The last load counts if the node was busy; a quiet node has to report that again.
    const bool busy = m.load.queue_length != 0 || m.load.active_transfers != 0;
    if (busy) drains.heard({m.node.name, m.node.incarnation, 0, m.load, {}});
  }
  const auto names = order_all(ranks, drain_step::finish);
  log->info("an operator drains {}: no new request goes there, it leaves in {} ms at the latest",
            names, std::min(deadline, max_drain_deadline).count());
  judge_drains();
  return {0, names, *asked};
}

/// The whole replica serves on, as the whole replica drained.
drain_reply supervisor_state::cancel_drain(const std::string& node) {
  forgive_standstill();
  const auto serving = table->cancel_drain(node, now());
  if (!serving) return refused(serving.error());
  const auto replica = table->replica_of(node);
  drains.cancel(replica.front().stage, replica.front().replica);
  const auto names = order_all(*serving, drain_step::resume);
  log->info("an operator cancels the drain of {}: requests go there again", names);
  return {0, names, table->incarnation_of(node).value_or(0)};
}

void supervisor_state::judge_drains() {
  const auto unfinished = [this](std::string_view stage, std::uint32_t replica) {
    return routes->unfinished(stage, replica);
  };
  for (const auto& verdict : drains.judge(unfinished, now())) {
    for (const auto& [node, incarnation] : verdict.ranks) {
      if (!verdict.leave) {
        table->draining(node, incarnation, verdict.reason);
        continue;
      }
      table->drained(node, incarnation, verdict.reason);
      const auto level =
          verdict.reason == drained_reason ? spdlog::level::info : spdlog::level::warn;
      note("drained", node, incarnation, table->epoch(), verdict.reason, level);
      order(node, {incarnation, drain_step::leave});
    }
  }
}

std::string supervisor_state::order_all(const std::vector<node_life>& nodes, drain_step step) {
  std::string names;
  for (const node_life& one : nodes) {
    names += (names.empty() ? "" : ", ") + one.name;
    order(one.name, {one.incarnation, step});
  }
  return names;
}

void supervisor_state::order(const std::string& node, const drain_order& what) {
  const auto it = peers.find(node);
  if (it == peers.end() || it->second.incarnation != what.incarnation) return;
  self->send(it->second.handle, drain_atom_v, what);
}

}  // namespace troupe::actors::supervisor_parts
