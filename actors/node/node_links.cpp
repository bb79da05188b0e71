#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/context/deployment_place.hpp"
#include "troupe/actors/link/link.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/placement_epochs.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/node/node_parts.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::node_parts {

namespace {

link_actor spawn_link(self_pointer self, node_info peer, std::uint64_t asked,
                      registration_state::mark registered) {
  auto& st = self->state;
  node_state_data::known_link known;
  known.registered = registered;
  known.peer = peer.name;
  known.incarnation = peer.incarnation;
  known.asked = asked;
  const auto role = asked == 0 ? transport::link_role::acceptor : transport::link_role::initiator;
  known.actor = self->spawn<caf::monitored>(
      link_behavior, link_options{st.context, st.port, std::move(peer), role, asked});
  auto actor = known.actor;
  st.links.emplace(actor.id(), std::move(known));
  return actor;
}

void close_links_of(node_state_data& st, const node_info& peer, const troupe::error& why) {
  for (const auto& [id, link] : st.links) {
    if (link.incarnation != peer.incarnation || link.peer != peer.name) continue;
    tell(link.actor, link_command{peer_left{why}});
  }
}

// -- lives of a peer

/// The life of a node that our membership shows; 0: none.
std::uint64_t shown_life(const node_state_data& st, const std::string& peer) {
  const member* shown = find_member(st.members, peer);
  return shown == nullptr ? 0 : shown->node.incarnation;
}

/// Whether that life of a node, registered at `by`, is over by our membership: that of an epoch says
/// everything that was registered up to there.
bool was_replaced(const node_state_data& st, const std::string& peer, std::uint64_t incarnation,
                  registration_state::mark by) {
  if (by.supervisor_incarnation != st.members.supervisor_incarnation ||
      by.epoch > st.members.epoch) {
    return false;
  }
  const auto shown = shown_life(st, peer);
  // One that joined and is not shown any more was forgotten.
  return shown == 0 ? is_open_name(peer) : shown != incarnation;
}

/// A former life of a node, stopped and then continued, does not know that it was replaced. It must
/// neither get a link nor end those of its successor. Nor does one get a link that the cluster took for
/// dead, until it has registered again: what it holds was carried on elsewhere.
std::optional<troupe::error> former_life(const node_state_data& st, const link_request& request) {
  const registration_state::mark by{request.supervisor_incarnation, request.registered_epoch};
  const auto& from = request.from;
  bool former = was_replaced(st, from.name, from.incarnation, by);
  if (!former && by.supervisor_incarnation != st.members.supervisor_incarnation) {
    // Two supervisors count their epochs apart. The link that is there stays: a new life that came
    // first to a new supervisor gets its own as soon as we have heard of it there, too.
    former = std::ranges::any_of(st.links, [&](const auto& known) {
      return known.second.peer == from.name && known.second.incarnation != from.incarnation;
    });
  }
  if (!former) return taken_for_dead(st.members, request);
  return troupe::error{errc::stale_incarnation,
                       "this life of " + from.name + " was replaced by another; stop it"};
}

// -- the dialling side

/// How long is waited for news of a peer that cannot be dialled as it is shown. The supervisor
/// publishes changes 100 ms late, since it coalesces them; it is asked as well.
constexpr auto news_delay = std::chrono::milliseconds{300};
constexpr auto longest_question = std::chrono::milliseconds{1000};

/// True: a link is being made, or it was said why not. False: the peer has not been seen yet.
bool make_link(self_pointer self, const node_state_data::wanted_link& wanted) {
  auto& st = self->state;
  const auto& peer = wanted.order.peer;
  const bool early = wanted.asks || std::chrono::steady_clock::now() < wanted.since + news_delay;
  if (st.replaced) {
    answer_gone(st, wanted.order, {st.refusal_code, "this node takes part no more: " + st.refusal});
    return true;
  }
  const member* found = find_member(st.members, peer);
  if (found == nullptr) {
    // Who no file names may never come; one of the file is waited for, and so is everybody while a
    // supervisor still hears who is there.
    if (early || st.members.supervisor_incarnation == 0 || st.members.collecting != 0 ||
        !is_open_name(peer)) {
      return false;
    }
    answer_gone(
        st, wanted.order,
        {errc::not_found, peer + " is no member of the cluster: it has left, or never joined"});
    return true;
  }
  const auto state = node_state_from(found->state);
  switch (state.value_or(node_state::joining)) {
    case node_state::joining: return false;
    case node_state::down:
      // Its next life may have registered a moment ago: that news is on its way.
      if (early) return false;
      answer_gone(st, wanted.order,
                  {errc::peer_lost,
                   peer + " is down" + (found->reason.empty() ? "" : " (" + found->reason + ")")});
      return true;
    case node_state::up:
    case node_state::suspect:
    case node_state::leaving:
      // Nor is it news yet that this life has left. It is still dialled if no news comes: the
      // connection may have been lost, and not the process.
      if (early && found->node.incarnation == wanted.order.former_life) return false;
      break;
  }
  if (auto why = links_given_up(st, peer, found->node.incarnation)) {
    answer_gone(st, wanted.order, std::move(*why));
    return true;
  }
  // The port asks once for all who wait for a peer. One that is being made still answers an earlier
  // question.
  spawn_link(self, found->node, wanted.order.ask,
             {st.members.supervisor_incarnation, st.members.epoch});
  return true;
}

void make_wanted_links(self_pointer self) {
  auto& st = self->state;
  std::erase_if(st.wanted, [self](const auto& one) { return make_link(self, one); });
}

// -- the accepting side

std::optional<troupe::error> refusal_of(const node_context& context, const link_request& request) {
  // First: who was asked for may be of another release, or cluster, than this node, which has its port by now.
  if (request.to_incarnation != context.self.incarnation) {
    return troupe::error{errc::stale_incarnation,
                         context.self.name +
                             " listens at that address and is not the process that was asked for; "
                             "look its new incarnation up"};
  }
  if (request.version != protocol_version) {
    return troupe::error{errc::version_mismatch,
                         "this node speaks protocol version " + std::to_string(protocol_version) +
                             ", the peer " + std::to_string(request.version)};
  }
  if (request.cluster != context.settings.cluster) {
    return troupe::error{errc::invalid_config, "this node belongs to cluster `" +
                                                   context.settings.cluster + "`, the peer to `" +
                                                   request.cluster + "`"};
  }
  if (request.from.incarnation == 0) {
    return troupe::error{errc::stale_incarnation, "the peer did not say which life of it asks"};
  }
  if (!is_boot_id(request.from.boot_id)) {
    return troupe::error{errc::invalid_config,
                         "the peer says of its host a boot id that is none; it must run this "
                         "release of Troupe"};
  }
  return std::nullopt;
}

/// Asks the supervisor for what it has not published yet.
void ask_for_news(self_pointer self, const std::string& peer) {
  auto& st = self->state;
  if (!st.supervisor) return;
  st.wanted.back().asks = true;
  const auto answered = [self, peer] {
    for (auto& one : self->state.wanted) {
      if (one.order.peer == peer) one.asks = false;
    }
  };
  // One that stands still must not keep nodes from each other that live.
  const auto patience = std::min<std::chrono::milliseconds>(
      2 * st.context->settings.heartbeat_interval, longest_question);
  self->request(st.supervisor, patience, members_atom::value)
      .then(
          [self, answered](membership& fresh) {
            answered();
            adopt(self, fresh);
            make_wanted_links(self);  // also if that was no news
          },
          [self, answered](const caf::error&) {
            answered();
            make_wanted_links(self);
          });
}

}  // namespace

void answer_gone(node_state_data& st, const need_link& question, troupe::error why) {
  tell(st.port, port_event{link_gone{question.peer, 0, 0, question.ask, std::move(why)}});
}

void on_need_link(self_pointer self, need_link& order) {
  auto& all = self->state.wanted;
  const auto known =
      std::ranges::find_if(all, [&](const auto& one) { return one.order.peer == order.peer; });
  if (known != all.end()) {
    known->order = std::move(order);
    return;
  }
  node_state_data::wanted_link wanted{std::move(order), std::chrono::steady_clock::now()};
  if (make_link(self, wanted)) return;
  all.push_back(std::move(wanted));
  ask_for_news(self, self->state.wanted.back().order.peer);
  self->delayed_send(self, news_delay, node_command{look_again{}});
}

void on_look_again(self_pointer self) {
  make_wanted_links(self);
}

void adopt(self_pointer self, membership& fresh) {
  auto& st = self->state;
  const bool older = fresh.supervisor_incarnation == st.members.supervisor_incarnation &&
                     fresh.epoch < st.members.epoch;
  if (older || fresh.cluster != st.context->settings.cluster) return;
  st.members = std::move(fresh);
  tell(st.port, node_notice{membership_changed{std::make_shared<const membership>(st.members)}});
  st.context->events.see(st.members);
  for (const auto& m : st.members.members) {
    if (is_lost(m)) {
      close_links_of(st, m.node, {errc::peer_lost, m.node.name + " is down"});
    }
  }
  for (auto& [id, link] : st.links) {
    if (shown_life(st, link.peer) == link.incarnation) {
      link.registered = {st.members.supervisor_incarnation, st.members.epoch};
    } else if (was_replaced(st, link.peer, link.incarnation, link.registered)) {
      const auto* fate =
          shown_life(st, link.peer) == 0 ? " is no member any more" : " was restarted";
      tell(link.actor, link_command{peer_left{{errc::peer_lost, link.peer + fate}}});
    }
  }
  make_wanted_links(self);
}

caf::result<link_reply> accept_link(self_pointer self, const link_request& request) {
  auto& st = self->state;
  if (st.replaced)
    return link_reply{static_cast<std::uint8_t>(st.refusal_code), st.refusal, {}, {}, {}};
  auto why = refusal_of(*st.context, request);
  if (!why) why = former_life(st, request);
  if (!why) why = links_given_up(st, request.from.name, request.from.incarnation);
  if (why) {
    logger("node")->warn("refused a link with {}: {}", request.from.name, to_string(*why));
    return link_reply{static_cast<std::uint8_t>(why->code), why->message, {}, {}, {}};
  }
  // A new life of a peer ends the links with the former one.
  for (const auto& [id, link] : st.links) {
    if (link.peer == request.from.name && link.incarnation != request.from.incarnation) {
      tell(link.actor,
           link_command{peer_left{{errc::peer_lost, request.from.name + " was restarted"}}});
    }
  }
  auto acceptor =
      spawn_link(self, request.from, 0, {request.supervisor_incarnation, request.registered_epoch});
  return self->delegate(acceptor, request);
}

}  // namespace troupe::actors::node_parts
