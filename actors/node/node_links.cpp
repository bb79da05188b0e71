#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/link.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/membership/placement_epochs.hpp"
#include "troupe/actors/messages/member_list.hpp"
#include "troupe/actors/node/node_core.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

namespace troupe::actors::nodes {

namespace {

/// How long to wait for news of a peer that cannot be dialled as the membership shows it. The
/// supervisor publishes changes 100 ms late, since it coalesces them; it is asked as well.
constexpr auto news_delay = std::chrono::milliseconds{300};
constexpr auto longest_question = std::chrono::milliseconds{1000};

std::optional<troupe::error> refusal_of(const node_context& context, const link_request& request) {
  // Checked first: this node may have taken over the port of the node that was asked for, and be of
  // another release or cluster.
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
    return troupe::error{errc::stale_incarnation,
                         "the peer did not say which of its incarnations asks"};
  }
  if (!is_boot_id(request.from.boot_id)) {
    return troupe::error{
        errc::invalid_config,
        "the peer gives an invalid boot id for its host; it must run this release of Troupe"};
  }
  return std::nullopt;
}

}  // namespace

link_actor node_core::spawn_link(node_info peer, std::uint64_t asked,
                                 registration_state::mark registered) {
  known_link known;
  known.registered = registered;
  known.peer = peer.name;
  known.incarnation = peer.incarnation;
  known.asked = asked;
  const auto role = asked == 0 ? transport::link_role::acceptor : transport::link_role::initiator;
  known.actor = self_->spawn<caf::monitored>(
      link_behavior, link_options{context_, runner_, std::move(peer), role, asked});
  auto actor = known.actor;
  links_.emplace(actor.id(), std::move(known));
  return actor;
}

void node_core::close_links_of(const node_info& peer, const troupe::error& why) {
  for (const auto& [id, link] : links_) {
    if (link.incarnation != peer.incarnation || link.peer != peer.name) continue;
    tell(link.actor, link_command{peer_left{why}});
  }
}

// -- lives of a peer

/// The incarnation of a node that our membership shows; 0: none.
std::uint64_t node_core::shown_life(const std::string& peer) const {
  const member* shown = find_member(members_, peer);
  return shown == nullptr ? 0 : shown->node.incarnation;
}

/// Whether that life of a node, registered at `by`, is over by our membership. A membership covers
/// all registrations up to its epoch.
bool node_core::was_replaced(const std::string& peer, std::uint64_t incarnation,
                             registration_state::mark by) const {
  if (by.supervisor_incarnation != members_.supervisor_incarnation || by.epoch > members_.epoch) {
    return false;
  }
  const auto shown = shown_life(peer);
  // A node of an open stage that is no longer shown was forgotten.
  return shown == 0 ? is_open_name(peer) : shown != incarnation;
}

/// A former life of a node, stopped and then continued, does not know that it was replaced. It must
/// neither get a link nor end those of its successor. A life that the cluster took for dead gets no
/// link either until it has registered again: its requests were carried on elsewhere.
std::optional<troupe::error> node_core::former_life(const link_request& request) const {
  const registration_state::mark by{request.supervisor_incarnation, request.registered_epoch};
  const auto& from = request.from;
  bool former = was_replaced(from.name, from.incarnation, by);
  if (!former && by.supervisor_incarnation != members_.supervisor_incarnation) {
    // Epochs of two supervisors cannot be compared, so the existing link stays: a new life that
    // registered with a new supervisor first gets its link as soon as that supervisor has told us
    // of it.
    former = std::ranges::any_of(links_, [&](const auto& known) {
      return known.second.peer == from.name && known.second.incarnation != from.incarnation;
    });
  }
  if (!former) return check_dialler(members_, request);
  return troupe::error{errc::stale_incarnation,
                       "this life of " + from.name + " was replaced by another; stop it"};
}

// -- the dialling side

/// Returns true if a link is being made or was refused, false if the peer has not been seen yet.
bool node_core::make_link(const wanted_link& wanted) {
  const auto& peer = wanted.order.peer;
  const bool early = wanted.asks || std::chrono::steady_clock::now() < wanted.since + news_delay;
  if (replaced_) {
    answer_gone(wanted.order,
                {refusal_code_, "this node no longer takes part in the cluster: " + refusal_});
    return true;
  }
  const member* found = find_member(members_, peer);
  if (found == nullptr) {
    // A node that no file names may never come. A node of the file is waited for, and so is every
    // node while a supervisor is still collecting registrations.
    if (early || members_.supervisor_incarnation == 0 || members_.collecting != 0 ||
        !is_open_name(peer)) {
      return false;
    }
    answer_gone(
        wanted.order,
        {errc::not_found, peer + " is not a member of the cluster: it has left, or never joined"});
    return true;
  }
  const auto state = node_state_from(found->state);
  switch (state.value_or(node_state::joining)) {
    case node_state::joining: return false;
    case node_state::down:
      // The next life may have registered a moment ago, and the news be on its way.
      if (early) return false;
      answer_gone(wanted.order,
                  {errc::peer_lost,
                   peer + " is down" + (found->reason.empty() ? "" : " (" + found->reason + ")")});
      return true;
    case node_state::up:
    case node_state::suspect:
    case node_state::leaving:
      // The news that this life has left may still be on its way. It is dialled if no news comes:
      // maybe only the connection was lost, not the process.
      if (early && found->node.incarnation == wanted.order.former_life) return false;
      break;
  }
  if (auto why = links_given_up(peer, found->node.incarnation)) {
    answer_gone(wanted.order, std::move(*why));
    return true;
  }
  // The runner asks once for all operations that wait for a peer. A link that is being made already
  // answers an earlier question.
  spawn_link(found->node, wanted.order.ask, {members_.supervisor_incarnation, members_.epoch});
  return true;
}

void node_core::make_wanted_links() {
  std::erase_if(wanted_, [this](const auto& one) { return make_link(one); });
}

// -- the accepting side

/// Asks the supervisor for changes that it has not published yet.
void node_core::ask_for_news(const std::string& peer) {
  if (!supervisor_) return;
  wanted_.back().asks = true;
  const auto answered = [this, peer] {
    for (auto& one : wanted_) {
      if (one.order.peer == peer) one.asks = false;
    }
  };
  // A frozen supervisor must not keep live nodes from each other.
  const auto patience = std::min<std::chrono::milliseconds>(
      2 * context_->settings.heartbeat_interval, longest_question);
  self_->request(supervisor_, patience, members_atom::value)
      .then(
          [this, answered](membership& fresh) {
            answered();
            adopt(fresh);
            make_wanted_links();  // even if that was no news
          },
          [this, answered](const caf::error&) {
            answered();
            make_wanted_links();
          });
}

void node_core::answer_gone(const need_link& question, troupe::error why) {
  tell(runner_, runner_event{link_gone{question.peer, 0, 0, question.ask, std::move(why)}});
}

void node_core::on_need_link(need_link& order) {
  auto& all = wanted_;
  const auto known =
      std::ranges::find_if(all, [&](const auto& one) { return one.order.peer == order.peer; });
  if (known != all.end()) {
    known->order = std::move(order);
    return;
  }
  wanted_link wanted{std::move(order), std::chrono::steady_clock::now()};
  if (make_link(wanted)) return;
  all.push_back(std::move(wanted));
  ask_for_news(wanted_.back().order.peer);
  self_->delayed_send(self_, news_delay, node_command{look_again{}});
}

void node_core::adopt(membership& fresh) {
  const bool older = fresh.supervisor_incarnation == members_.supervisor_incarnation &&
                     fresh.epoch < members_.epoch;
  if (older || fresh.cluster != context_->settings.cluster) return;
  members_ = std::move(fresh);
  tell(runner_, node_notice{membership_changed{std::make_shared<const membership>(members_)}});
  context_->events.see(members_);
  for (const auto& m : members_.members) {
    if (is_lost(m)) {
      close_links_of(m.node, {errc::peer_lost, m.node.name + " is down"});
    }
  }
  for (auto& [id, link] : links_) {
    if (shown_life(link.peer) == link.incarnation) {
      link.registered = {members_.supervisor_incarnation, members_.epoch};
    } else if (was_replaced(link.peer, link.incarnation, link.registered)) {
      const auto* fate = shown_life(link.peer) == 0 ? " is no longer a member" : " was restarted";
      tell(link.actor, link_command{peer_left{{errc::peer_lost, link.peer + fate}}});
    }
  }
  make_wanted_links();
}

caf::result<link_reply> node_core::accept_link(const link_request& request) {
  if (replaced_) return link_reply{static_cast<std::uint8_t>(refusal_code_), refusal_, {}, {}, {}};
  auto why = refusal_of(*context_, request);
  if (!why) why = former_life(request);
  if (!why) why = links_given_up(request.from.name, request.from.incarnation);
  if (why) {
    logger("node")->warn("refused a link with {}: {}", request.from.name, to_string(*why));
    return link_reply{static_cast<std::uint8_t>(why->code), why->message, {}, {}, {}};
  }
  // A new life of a peer ends the links with the former one.
  for (const auto& [id, link] : links_) {
    if (link.peer == request.from.name && link.incarnation != request.from.incarnation) {
      tell(link.actor,
           link_command{peer_left{{errc::peer_lost, request.from.name + " was restarted"}}});
    }
  }
  auto acceptor =
      spawn_link(request.from, 0, {request.supervisor_incarnation, request.registered_epoch});
  return self_->delegate(acceptor, request);
}

}  // namespace troupe::actors::nodes
