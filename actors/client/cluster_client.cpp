#include "troupe/actors/cluster_client.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include <caf/send.hpp>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/discovery/supervisor_search.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/room_to_start.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;

constexpr std::size_t max_cached_nodes = 1024;

std::string name_of(const node_info& node) {
  return "node '" + node.name + "' at " + node.host + ":" + std::to_string(node.port);
}

/// Turns a reply that says `failed` into an error.
template <class Reply>
result<Reply> unless_refused(result<Reply> reply) {
  if (reply && reply->failed != 0) return fail(refusal(*reply));
  return reply;
}

result<placement> with_known_mode(result<placement> reply) {
  if (!reply) return reply;
  if (auto wrong = wrong_mode(*reply)) return fail(std::move(*wrong));
  return reply;
}

bool connection_is_useless(const troupe::error& e) {
  return e.code == errc::peer_lost || e.code == errc::deadline;
}

}  // namespace

class cluster_client::connections {
 public:
  explicit connections(const cluster_client_options& options)
      : place_{{options.host, options.port, 0, 0}, options.find},
        timeout_{options.timeout},
        host_{options.actors} {}

  [[nodiscard]] result<supervisor_actor> supervisor(milliseconds timeout);
  [[nodiscard]] std::string supervisor_address() const { return place_.text(); }

  template <class Reply, class... Args>
  [[nodiscard]] result<Reply> ask_supervisor(const answer_wait& bounds, Args... args) {
    auto whom = supervisor(std::min(bounds.timeout, timeout_));
    if (!whom) return fail(whom.error());
    return ask_supervisor_at<Reply>(*whom, bounds, std::move(args)...);
  }

  /// Asks a handle that `supervisor` gave.
  template <class Reply, class... Args>
  [[nodiscard]] result<Reply> ask_supervisor_at(const supervisor_actor& whom,
                                                const answer_wait& bounds, Args... args) {
    auto reply = or_error("the supervisor cannot be asked", [&] {
      return ask<Reply>(host_.system(), whom, "the supervisor", bounds, std::move(args)...);
    });
    if (!reply && connection_is_useless(reply.error())) forget_supervisor();
    return reply;
  }

  [[nodiscard]] result<node_actor> reach(const node_info& node);

  /// Asks a node that `reach` gave.
  template <class Reply, class... Args>
  [[nodiscard]] result<Reply> ask_node(const node_info& node, const node_actor& whom,
                                       const answer_wait& bounds, Args... args) {
    auto reply = or_error("a node cannot be asked", [&] {
      return ask<Reply>(host_.system(), whom, name_of(node), bounds, std::move(args)...);
    });
    if (!reply && connection_is_useless(reply.error())) forget(node);
    return reply;
  }

 private:
  void forget(const node_info& node);
  void forget_supervisor();

  supervisor_place place_;
  milliseconds timeout_;
  actor_host host_;
  std::mutex mutex_;
  supervisor_actor supervisor_;
  std::map<std::uint64_t, node_actor> nodes_;  ///< by incarnation
};

cluster_client::cluster_client(cluster_client_options options)
    : options_{std::move(options)}, connections_{std::make_unique<connections>(options_)} {}

cluster_client::~cluster_client() = default;

result<std::unique_ptr<cluster_client>> cluster_client::connect(cluster_client_options options) {
  using connected = result<std::unique_ptr<cluster_client>>;
  return or_error("no connection to a cluster", [&]() -> connected {
    if (auto room = check_room(room_of_a_client); !room) return fail(room.error());
    auto client = unconnected(std::move(options));
    if (auto there = client->connections_->supervisor(client->options_.timeout); !there)
      return fail(there.error());
    return client;
  });
}

std::unique_ptr<cluster_client> cluster_client::unconnected(cluster_client_options options) {
  return std::unique_ptr<cluster_client>{new cluster_client{std::move(options)}};
}

std::string cluster_client::supervisor_address() const {
  return connections_->supervisor_address();
}

// -- calls

result<membership> cluster_client::members() {
  return connections_->ask_supervisor<membership>(options_.timeout, members_atom_v);
}

result<placement> cluster_client::place(const placement_request& request) {
  return unless_refused(with_known_mode(connections_->ask_supervisor<placement>(
      options_.timeout + milliseconds{request.timeout_ms}, place_atom_v, request)));
}

result<placement> cluster_client::ask_placement(const placement_request& request,
                                                milliseconds patience, std::stop_token given_up) {
  return with_known_mode(connections_->ask_supervisor<placement>(
      answer_wait{patience, std::move(given_up)}, place_atom_v, request));
}

result<event_page> cluster_client::events(const event_query& query) {
  return connections_->ask_supervisor<event_page>(options_.timeout, events_atom_v, query);
}

result<void> cluster_client::finished(const std::string& request) {
  auto whom = connections_->supervisor(options_.timeout);
  if (!whom) return fail(whom.error());
  caf::anon_send(*whom, placed_request_ended_atom_v, request);
  // `finished` has no answer. A query behind it on the same connection has one (no events), which
  // confirms it.
  const event_query nothing{std::numeric_limits<std::uint64_t>::max(), 1};
  const auto heard =
      connections_->ask_supervisor_at<event_page>(*whom, options_.timeout, events_atom_v, nothing);
  if (!heard) return fail(heard.error());
  return {};
}

result<drain_reply> cluster_client::drain(const drain_request& request) {
  return unless_refused(
      connections_->ask_supervisor<drain_reply>(options_.timeout, drain_atom_v, request));
}

result<node_report> cluster_client::report(const std::string& node) {
  const auto found = find(node);
  if (!found) return fail(found.error());
  return report(*found);
}

result<node_report> cluster_client::report(const node_info& node) {
  const auto whom = connections_->reach(node);
  if (!whom) return fail(whom.error());
  return connections_->ask_node<node_report>(node, *whom, options_.timeout, report_atom_v);
}

result<std::vector<std::uint8_t>> cluster_client::call(const std::string& node,
                                                       const call_request& request) {
  const auto found = find(node);
  if (!found) return fail(found.error());
  return call(*found, request);
}

result<std::vector<std::uint8_t>> cluster_client::call(const node_info& node,
                                                       const call_request& request) {
  return call_outcome_of(node, request).answer;
}

call_outcome cluster_client::call_outcome_of(const node_info& node, const call_request& request,
                                             std::stop_token given_up) {
  if (request.payload.size() > max_call_bytes) {
    return {fail(errc::out_of_range,
                 "a call carries at most " + std::to_string(max_call_bytes) + " bytes, this has " +
                     std::to_string(request.payload.size()) + "; put bulk data on an edge")};
  }
  const auto whom = connections_->reach(node);
  if (!whom) return {fail(whom.error()), call_reach::unreachable};
  if (given_up.stop_requested()) {
    return {fail(errc::aborted, "the call was given up before it was made"),
            call_reach::unreachable};
  }
  // The node enforces the deadline itself; ours is later, for a node that cannot answer at all.
  call_request sent = request;
  auto timeout = options_.timeout;
  if (sent.timeout_ms == 0) {
    sent.timeout_ms = static_cast<std::uint32_t>(options_.timeout.count());
    timeout += milliseconds{500};
  } else {
    timeout += milliseconds{sent.timeout_ms};
  }
  auto reply = connections_->ask_node<call_reply>(
      node, *whom, answer_wait{timeout, std::move(given_up)}, std::move(sent));
  if (!reply) return {fail(reply.error()), call_reach::lost};
  if (reply->failed != 0) return {fail(refusal(*reply))};
  return {std::move(reply->payload)};
}

result<std::vector<member>> cluster_client::find_label(const std::string& key,
                                                       const std::string& value) {
  auto list = members();
  if (!list) return fail(list.error());
  std::erase_if(list->members, [&](const member& m) {
    const auto& labels = m.node.labels;
    const node_label wanted{key, value};
    return std::ranges::find(labels, wanted) == labels.end() ||
           node_state_from(m.state) == node_state::down;
  });
  return std::move(list->members);
}

result<node_info> cluster_client::find(const std::string& node) {
  const auto list = members();
  if (!list) return fail(list.error());
  if (const member* found = find_member(*list, node)) return found->node;
  return fail(errc::not_found, "no node '" + node + "' has registered with cluster '" +
                                   list->cluster + "'; start it, or check its name");
}

// -- connections

result<supervisor_actor> cluster_client::connections::supervisor(milliseconds timeout) {
  {
    const std::lock_guard lock{mutex_};
    if (supervisor_) return supervisor_;
  }
  auto made = or_error("it cannot be connected to", [&]() -> result<supervisor_actor> {
    const auto at = place_.now(timeout);
    if (!at) return fail(at.error());
    return host_.connect<supervisor_actor>(at->host, at->port, timeout);
  });
  if (!made) {
    return fail(made.error().code, "no supervisor: " + made.error().message);
  }
  const std::lock_guard lock{mutex_};
  supervisor_ = *made;
  return supervisor_;
}

result<node_actor> cluster_client::connections::reach(const node_info& node) {
  {
    const std::lock_guard lock{mutex_};
    if (const auto it = nodes_.find(node.incarnation); it != nodes_.end()) return it->second;
  }
  auto made = or_error("it cannot be connected to",
                       [&] { return host_.connect<node_actor>(node.host, node.port, timeout_); });
  if (!made) return fail(made.error().code, "node '" + node.name + "': " + made.error().message);
  const std::lock_guard lock{mutex_};
  if (nodes_.size() >= max_cached_nodes) nodes_.clear();
  nodes_[node.incarnation] = *made;
  return *made;
}

void cluster_client::connections::forget(const node_info& node) {
  const std::lock_guard lock{mutex_};
  nodes_.erase(node.incarnation);
}

void cluster_client::connections::forget_supervisor() {
  const std::lock_guard lock{mutex_};
  supervisor_ = nullptr;
}

}  // namespace troupe::actors
