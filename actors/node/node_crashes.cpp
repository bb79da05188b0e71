#include <algorithm>
#include <chrono>
#include <utility>

#include <caf/send.hpp>
#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/actors/node/node_end.hpp"
#include "troupe/actors/node/node_parts.hpp"
#include "troupe/actors/runtime/crash.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::node_parts {

namespace {

/// Peers whose links crashed; more names than this no deployment has.
constexpr std::size_t max_remembered = 1024;

/// The node takes part no more: who else holds on to it is told, once.
void give_this_node_up(self_pointer self, const troupe::error& why) {
  auto& st = self->state;
  if (st.replaced) return;
  st.replaced = true;
  st.refusal = to_string(why);
  st.refusal_code = why.code;
  if (st.supervisor) {
    heartbeat last;
    last.name = st.context->self.name;
    last.incarnation = st.context->self.incarnation;
    last.sequence = ++st.beats;
    last.failure = why.message;
    self->request(st.supervisor, st.context->settings.heartbeat_interval, std::move(last))
        .then([](const heartbeat_ack&) {}, [](const caf::error&) {});  // it may hear of it or not
  }
  st.registered = false;
  fail_placements(st, why);
  for (auto& [id, call] : st.calls) {
    call.promise.deliver(call_reply{static_cast<std::uint8_t>(why.code), why.message, {}});
  }
  st.calls.clear();
  for (const auto& [id, link] : st.links) tell(link.actor, link_command{close_link{why}});
}

/// Whether that is the life of the peer that our membership shows.
bool is_shown(const node_state_data& st, const std::string& peer, std::uint64_t incarnation) {
  return std::ranges::any_of(st.members.members, [&](const member& m) {
    return m.node.name == peer && m.node.incarnation == incarnation;
  });
}

}  // namespace

void watch_essentials(self_pointer self) {
  auto& st = self->state;
  if (st.port) self->monitor(st.port);
  if (st.pool) self->monitor(st.pool);
}

bool essential_ended(self_pointer self, const caf::down_msg& down) {
  auto& st = self->state;
  const bool port = st.port && down.source == st.port.address();
  if (!port && !(st.pool && down.source == st.pool.address())) return false;
  if (crashed(down.reason)) {
    give_this_node_up(self, {errc::internal, std::string{port ? "the engine's port" : "the pool"} +
                                                 " of " + st.context->self.name + " crashed"});
  }
  return true;
}

void link_crashed(self_pointer self, const node_state_data::known_link& link) {
  auto& all = self->state.crashed_links;
  if (!all.contains(link.peer) && all.size() >= max_remembered) all.erase(all.begin());
  auto& of = all[link.peer];
  if (of.incarnation != link.incarnation) {
    // What is heard late of a former life says nothing of the present one.
    if (of.incarnation != 0 && is_shown(self->state, link.peer, of.incarnation)) return;
    of = {link.incarnation};
  }
  if (of.given_up || of.limit.allows(std::chrono::steady_clock::now())) return;
  of.given_up = true;
  logger("node")->error(
      "links with {} ({:016x}) crashed {} times within {} s: none is made any more "
      "with this life of it",
      link.peer, link.incarnation, of.limit.ends(),
      std::chrono::floor<std::chrono::seconds>(of.limit.within()).count());
}

std::optional<troupe::error> links_given_up(const node_state_data& st, const std::string& peer,
                                            std::uint64_t incarnation) {
  const auto found = st.crashed_links.find(peer);
  if (found == st.crashed_links.end() || !found->second.given_up) return std::nullopt;
  if (found->second.incarnation != incarnation) return std::nullopt;
  return troupe::error{errc::internal, "links between " + st.context->self.name + " and " + peer +
                                           " keep crashing and are given up; see the log of " +
                                           st.context->self.name +
                                           ", and start one of the two again"};
}

}  // namespace troupe::actors::node_parts
