#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/link/backend_reports.hpp"
#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"

namespace troupe::actors::links {

namespace {

/// The pause before the first retry; doubled with each further one.
constexpr auto first_pause = std::chrono::milliseconds{20};

/// Adds the name of the peer, since the sentence of `why` names only the address. A process there
/// that speaks another version is `peer_unreachable` as well: every member speaks our version, so
/// that process has taken the port of one that is gone.
troupe::error unreachable(const node_info& peer, const troupe::error& why) {
  return {why.code == errc::unauthorized ? why.code : errc::peer_unreachable,
          "cannot reach " + peer.name + " at " + peer.host + ":" + std::to_string(peer.port) +
              " (" + why.message + ")"};
}

/// Whether another backend could help after this refusal.
bool worth_another_backend(errc code) {
  switch (code) {
    case errc::backend_unavailable:
    case errc::no_device:
    case errc::peer_unreachable:
    case errc::link_broken:
    case errc::deadline:
    case errc::overloaded:
    case errc::internal: return true;
    case errc::invalid_config:
    case errc::layout_mismatch:
    case errc::version_mismatch:
    case errc::unknown_region:
    case errc::out_of_range:
    case errc::grant_revoked:
    case errc::pool_exhausted:
    case errc::not_found:
    case errc::already_exists:
    case errc::peer_lost:
    case errc::aborted:
    case errc::lease_expired:
    case errc::stale_incarnation:
    case errc::unauthorized: return false;
  }
  return false;
}

}  // namespace

/// While a link is being rebuilt, every attempt lasts `connect_timeout`, even if it fails at once:
/// the cause of the break may take a while to be mended. News of a peer's death arrives meanwhile.
std::chrono::milliseconds peer_link::pause_before_next() const {
  const std::chrono::milliseconds pause = first_pause * (1u << std::min(attempts_, 6u));
  if (!broke_) return pause;
  const auto rest = attempt_began_ + context_->settings.connect_timeout - around_.now();
  return std::max(pause, std::chrono::duration_cast<std::chrono::milliseconds>(rest));
}

bool peer_link::was_given_up(transport::backend_kind kind) const {
  return std::ranges::find(failed_, kind, &failed_backend::kind) != failed_.end();
}

/// The membership says where the peer is, the acceptor's reply names the GPUs of its cache, and
/// each side refuses a backend that cannot reach the other. `auto` skips backends that are unusable
/// here or cannot join the two nodes, and asks for the others in order of preference.
std::optional<transport::backend_kind> peer_link::next_kind() const {
  const auto& settings = context_->settings;
  const auto tried = [&](transport::backend_kind kind) { return was_given_up(kind); };
  if (settings.backend) {
    if (!tried(*settings.backend)) return settings.backend;
  } else {
    for (const auto& here : context_->endpoint->backends()) {  // the best comes first
      if (here.state.usable && !tried(here.kind) && !why_unusable(here.kind)) {
        return here.kind;
      }
    }
  }
  for (const auto kind : settings.fallback) {
    if (!settings.backend && why_unusable(kind)) continue;
    if (!tried(kind)) return kind;
  }
  return std::nullopt;
}

/// "; xgmi failed: no answer; shm failed: another host"
std::string peer_link::failures() const {
  std::string text;
  for (const auto& failed : failed_) {
    text += "; " + std::string{transport::to_string(failed.kind)} + " failed: " + failed.why;
  }
  return text;
}

/// "; xgmi: not built; shm: another host": the backends that `auto` skips.
std::string peer_link::left_out() const {
  std::string text;
  for (const auto& other : context_->endpoint->backends()) {
    const auto name = "; " + std::string{transport::to_string(other.kind)} + ": ";
    if (!other.state.usable) {
      text += name;
      // `troupe info` prints the advice.
      text += without_advice(other.state.reason);
    } else if (const auto why = why_unusable(other.kind); why && !was_given_up(other.kind)) {
      text += name + why->message;
    }
  }
  return text;
}

std::string peer_link::reason_for(transport::backend_kind kind) const {
  if (context_->settings.backend == kind) return "configured" + failures();
  return "best that both sides can use" + failures() + left_out();
}

/// The error when no backend is left.
troupe::error peer_link::none_joins() const {
  const bool automatic = !context_->settings.backend;
  return {errc::peer_unreachable, "no backend joins this node with " + peer_.name + failures() +
                                      (automatic ? left_out() : "")};
}

troupe::error peer_link::unanswered(const no_answer& none) const {
  return {errc::peer_unreachable,
          peer_.name + " did not answer the link request (" + none.why + ")"};
}

/// Gives the other end up. The next request goes to the peer's node, which makes another end.
void peer_link::part_from_other_end(const std::string& why) {
  around_.notify(other_end_, {link_fate::ended, why});
  around_.stop_monitoring(std::exchange(other_end_, {}));
}

/// Tells the acceptor of a failed attempt not to wait until its time is over; the next attempt gets
/// its own acceptor. An acceptor that may have come up may have sessions and is asked again.
void peer_link::dismiss_acceptor(const std::string& why) {
  if (!broke_ && !may_be_up_there_ && other_end_) part_from_other_end(why);
}

void peer_link::got_reply(const link_reply& reply) {
  if (reply.failed != 0) {
    backend_failed(refusal(reply));
    return;
  }
  auto fits = adopt_layout(reply.layout);
  if (fits) fits = adopt_gpus(reply.gpus);
  if (!fits) {
    end_link(fits.error());
    return;
  }
  if (auto joined = judge(reply.gpus); !joined) {
    backend_failed(joined.error());
    return;
  }
  const transport::link_offer offer{choice_.kind, incarnation{peer_.incarnation},
                                    from_bytes(reply.offer)};
  phase_ = phase::connecting;
  may_be_up_there_ = true;
  if (auto started = link_->connect(offer); !started) backend_failed(started.error());
}

/// A late answer to an attempt counts neither in the pause after it nor for the next attempt, which
/// may use another backend.
std::function<bool()> peer_link::over_with() const {
  return [this, attempt = generation_] {
    return generation_ != attempt || phase_ != phase::dialling || !link_;
  };
}

/// The request for the attempt whose transport is open.
link_request peer_link::request_of_attempt() const {
  link_request request;
  request.cluster = context_->settings.cluster;
  request.from = context_->self;
  request.to_incarnation = peer_.incarnation;
  const auto registered = context_->registration.last();
  request.supervisor_incarnation = registered.supervisor_incarnation;
  request.registered_epoch = registered.epoch;
  request.backend = static_cast<std::uint8_t>(choice_.kind);
  request.lanes = context_->settings.lanes;
  request.gpus = cache_gpus(*context_);
  request.offer = to_bytes(link_->offer().payload);
  request.layout = to_bytes(context_->encoded_layout);
  request.reason = choice_.reason;
  return request;
}

void peer_link::ask_node() {
  around_.ask_node(request_of_attempt(), [this, is_over = over_with()](const link_answer& answer) {
    if (is_over()) return;
    if (const auto* none = std::get_if<no_answer>(&answer)) {
      end_link(unanswered(*none));
      return;
    }
    const auto& reply = std::get<link_reply>(answer);
    if (reply.failed == 0) meet(around_.sender());
    got_reply(reply);
  });
}

/// Asks the actor of the peer's end, not the node, so that both sides' sessions keep their link.
void peer_link::ask_other_end() {
  const auto got = [this, over = over_with(), end = other_end_](const link_answer& answer) {
    if (over() || other_end_ != end) return;
    const bool may_have_another = !broke_ && !leaving_;
    if (const auto* none = std::get_if<no_answer>(&answer)) {
      if (!none->late && may_have_another) {
        ask_node_instead();
      } else if (none->late && may_have_another && std::exchange(unanswered_, true)) {
        end_link(unanswered(*none));  // as if the node did not answer
      } else {
        backend_failed(unanswered(*none));
      }
      return;
    }
    const auto& reply = std::get<link_reply>(answer);
    unanswered_ = false;
    const bool ends = reply.failed == static_cast<std::uint8_t>(errc::peer_lost);
    if (ends && may_have_another) {
      ask_node_instead();
    } else {
      got_reply(reply);
    }
  };
  around_.ask_end(other_end_, request_of_attempt(), got);
}

void peer_link::try_next_backend() {
  const auto kind = next_kind();
  if (!kind) {
    if (broke_) {
      end_link(given_up({errc::link_broken, why_ended_}));
      return;
    }
    end_link(none_joins());
    return;
  }
  choice_ = {*kind, reason_for(*kind)};
  chose_ = true;
  attempt_began_ = around_.now();
  if (broke_) ++tries_;
  if (const auto why = why_unusable(*kind)) {
    backend_failed(*why);
    return;
  }
  if (auto opened = open_transport(); !opened) {
    backend_failed(opened.error());
    return;
  }
  if (other_end_) {
    ask_other_end();
  } else {
    ask_node();
  }
}

void peer_link::ask_node_instead() {
  part_from_other_end("it ends already");
  ask_node();
}

void peer_link::backend_failed(const troupe::error& why) {
  if (phase_ == phase::ending) return;
  if (leaving_) {
    end_link(*leaving_);
    return;
  }
  if (link_) {
    link_->close();
    link_.reset();
  }
  if (!worth_another_backend(why.code)) {
    end_link(broke_ ? given_up(why) : why);
    return;
  }
  // The caller reads the sentence of the last failure if no backend is left.
  why_ended_ = to_string(why);
  phase_ = phase::dialling;
  dismiss_acceptor(why_ended_);
  // A backend that is unusable at either side will not become usable in a moment, and the peer does
  // not wait for ever. But the device port of a link that was up may come back.
  const bool hopeless =
      why.code == errc::backend_unavailable || (!broke_ && why.code == errc::no_device);
  const bool again = !hopeless && attempts_ < context_->settings.max_reconnects;
  logger("link")->warn("link to {} over {} failed: {}; {}", peer_.name,
                       transport::to_string(choice_.kind), why_ended_,
                       again ? "trying again" : "giving this backend up");
  if (again) {
    const auto pause = pause_before_next();
    ++attempts_;
    around_.later(pause, {dial_again{}});
    return;
  }
  failed_.push_back({choice_.kind, why_ended_});
  attempts_ = 0;
  try_next_backend();
}

void peer_link::on_node_reached(const std::optional<troupe::error>& failed) {
  if (phase_ == phase::ending) return;
  if (failed) {
    end_link(unreachable(peer_, *failed));
    return;
  }
  reached_node_ = true;
  try_next_backend();
}

void peer_link::on_dial_again() {
  if (phase_ != phase::dialling || link_ || leaving_) return;
  if (reached_node_) {
    try_next_backend();
  } else {
    around_.reach_node();
  }
}

}  // namespace troupe::actors::links
