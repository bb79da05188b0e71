#pragma once

/// A peer for the supervisor's tests: a node actor that only records what it was told, and a
/// deployment of three nodes.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <caf/event_based_actor.hpp>
#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_place.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "waiting.hpp"

namespace troupe::actors::testing {

/// What a node actor was told. Shared by the actor and the test.
class told {
 public:
  void hear(membership m) {
    const std::lock_guard lock{mutex_};
    last_ = std::move(m);
    ++count_;
    changed_.notify_all();
  }
  void rejoin() {
    const std::lock_guard lock{mutex_};
    ++rejoins_;
    changed_.notify_all();
  }
  void order(drain_order o) {
    const std::lock_guard lock{mutex_};
    orders_.push_back(o);
    changed_.notify_all();
  }
  /// The orders of a drain, once at least `at_least` have come.
  std::vector<drain_order> orders(std::size_t at_least) {
    std::unique_lock lock{mutex_};
    changed_.wait_for(lock, troupe::testing::wait_limit,
                      [&] { return orders_.size() >= at_least; });
    return orders_;
  }
  /// Waits until `holds(last membership)`.
  template <class F>
  bool wait_for(F holds) {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, troupe::testing::wait_limit,
                             [&] { return last_ && holds(*last_); });
  }
  bool wait_for_rejoin() {
    std::unique_lock lock{mutex_};
    return changed_.wait_for(lock, troupe::testing::wait_limit, [&] { return rejoins_ > 0; });
  }
  int count() {
    const std::lock_guard lock{mutex_};
    return count_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<membership> last_;
  int count_{0};
  int rejoins_{0};
  std::vector<drain_order> orders_;
};

inline node_actor::behavior_type listening_node(node_actor::pointer self, std::shared_ptr<told> ear,
                                                node_info info) {
  set_log_handlers(*self, "node");
  return {
      [ear](members_atom, const membership& m) { ear->hear(m); },
      [ear](register_again_atom) { ear->rejoin(); },
      [ear](drain_atom, const drain_order& what) { ear->order(what); },
      [](const link_request&) { return link_reply{}; },
      [info](report_atom) {
        node_report report;
        report.node = info;
        report.uptime_ms = 12;
        return report;
      },
      [](const call_request& request) {
        call_reply reply;
        if (request.method != "echo") {
          reply.failed = static_cast<std::uint8_t>(errc::not_found);
          reply.sentence = "this engine has no method '" + request.method + "'";
        }
        reply.payload = request.payload;
        return reply;
      },
  };
}

/// What a played supervisor does differently from admitting every node and showing no members.
struct supervisor_part {
  std::function<registration()> registers = [] { return registration{}; };
  std::function<void(const heartbeat&)> hears = [](const heartbeat&) {};
  std::function<void(caf::typed_response_promise<membership>)> shows = [](auto asked) {
    asked.deliver(membership{});
  };
};

/// A supervisor that answers registrations, heartbeats and requests for the members as the test
/// says, and does nothing else.
inline supervisor_actor::behavior_type played_supervisor(supervisor_actor::pointer self,
                                                         const supervisor_part& part) {
  return {
      [part](register_atom, const registration_request&, const node_actor&) {
        return part.registers();
      },
      [part](const heartbeat& beat) {
        part.hears(beat);
        heartbeat_ack ack;
        ack.known = true;
        return ack;
      },
      [](leave_atom, const std::string&, std::uint64_t) {},
      [](place_atom, const placement_request&) { return placement{}; },
      [](placed_request_ended_atom, const std::string&) {},
      [self, part](members_atom) {
        auto asked = self->make_response_promise<membership>();
        part.shows(asked);
        return asked;
      },
      [](drain_atom, const drain_request&) { return drain_reply{}; },
      [](lease_name_atom, const name_request&) { return name_lease{}; },
      [](events_atom, const event_query&) { return event_page{}; },
      [](tick_atom) {},
  };
}

/// Three nodes and an edge. A node is down after ten missed heartbeats. The default interval is
/// long: only tests that wait for it pass a shorter one.
inline supervisor_options three_nodes(
    std::chrono::milliseconds interval = std::chrono::milliseconds{20'000}) {
  supervisor_options o;
  o.members.cluster = "demo";
  o.members.slots = {{"prefill-0", "prefill", node_role::prefill, 0, 0, 1},
                     {"decode-0", "decode", node_role::decode, 0, 0, 1},
                     {"decode-1", "decode", node_role::decode, 1, 0, 1}};
  o.members.heartbeat_interval = interval;
  o.members.heartbeat_timeout = interval * 10;
  o.members.stall_tolerance = interval * 5;
  o.routes.edges = {{"prefill", "decode", transfer_mode::read}};
  o.tick = std::chrono::milliseconds{10};
  return o;
}

inline registration_request request_of(const std::string& name, std::uint64_t incarnation,
                                       std::uint16_t port = 1) {
  registration_request r;
  r.cluster = "demo";
  for (const expected_slot& slot : three_nodes().members.slots) {
    if (slot.name != name) continue;
    r.node.stage = slot.stage;
    r.node.role = static_cast<std::uint8_t>(slot.role);
    r.wanted_replica = slot.replica;
  }
  r.node.name = name;
  r.node.host = "127.0.0.1";
  r.node.port = port;
  r.node.incarnation = incarnation;
  r.node = placed_at(std::move(r.node), transport::host_identity::of_this_process());
  return r;
}

}  // namespace troupe::actors::testing
