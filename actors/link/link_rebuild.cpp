#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"

namespace troupe::actors::links {

namespace {

/// The pause before the first attempt. If the peer has died, the news arrives meanwhile.
constexpr auto first_rebuild_pause = std::chrono::milliseconds{20};
/// A link that was up for longer than this gets all its attempts back.
constexpr auto steady_after = std::chrono::seconds{10};
/// Longer than the longest pause of the dialling side.
constexpr auto spare_time = std::chrono::seconds{3};
/// Many times the number that can be on its way when a link breaks; some 100 bytes each.
constexpr std::size_t max_last_words = 1024;

}  // namespace

bool peer_link::is_dialler() const {
  return role_ == transport::link_role::initiator;
}

bool peer_link::is_made_for_the_first_time() const {
  return is_dialler() && !broke_ && phase_ != phase::up;
}

/// Why a link broke that the peer reports as broken. The state of this end's own backend says more
/// than what the peer saw, and this end's own report of the break may still be on its way.
troupe::error peer_link::cause_of(const std::string& said) const {
  for (const auto& here : context_->endpoint->backends()) {
    if (here.kind == choice_.kind && !here.state.usable) {
      return {errc::link_broken, here.state.reason};
    }
  }
  return {errc::link_broken, peer_.name + " says that it broke: " + said};
}

void peer_link::meet(far_end other) {
  if (!other) return;
  other_end_ = other;
  may_be_up_there_ = unanswered_ = false;
  around_.monitor(other_end_);
}

void peer_link::drop_transport() {
  if (!link_) return;
  const auto generation = generation_++;
  former_link former{generation, std::move(link_), {}};
  link_.reset();
  batches_.clear();
  for_room_.clear();  // the sessions say these messages again
  for_posting_.clear();
  former.link->close();
  for (const auto& [transfer, session] : sessions_) {
    if (former.link->fence(transfer) == transport::fence_state::pending) {
      former.pending.insert(transfer);
      continue;
    }
    const auto asked = fencing_.find(transfer);
    if (asked == fencing_.end() || asked->second.erase(generation) == 0) continue;
    if (!asked->second.empty()) continue;
    fencing_.erase(asked);
    around_.tell_session(transfer, session, {transfer_fenced{}});
  }
  if (!former.pending.empty()) former_.push_back(std::move(former));
}

void peer_link::break_link(const troupe::error& why) {
  const auto& peer = peer_.name;
  if (const auto& known = leaving_ ? leaving_ : peer_leaves_) {
    end_link(*known);
    return;
  }
  if (!other_end_) {
    end_link({errc::peer_lost, "the link to " + peer + " broke (" + to_string(why) + ")"});
    return;
  }
  logger("link")->warn("link to {} ({:016x}) over {} broke: {}; making it again", peer,
                       peer_.incarnation, transport::to_string(choice_.kind), to_string(why));
  phase_ = phase::dialling;
  broke_ = why;
  last_break_ = to_string(why);
  count_.broke();
  drop_transport();
  pulse_.begin(around_.now());
  watch();
  if (!is_dialler()) {
    tries_ = 0;
    around_.notify(other_end_, {link_fate::broke, last_break_});
    wait_for_dialler();
    return;
  }
  if (around_.now() - up_since_ > steady_after) attempts_ = tries_ = 0;
  if (++attempts_ > context_->settings.max_reconnects) {
    attempts_ = context_->settings.max_reconnects;
    backend_failed({errc::link_broken, to_string(why)});
    return;
  }
  around_.later(first_rebuild_pause, {dial_again{}});
}

void peer_link::wait_for_dialler() {
  const auto patience = 2 * context_->settings.connect_timeout + spare_time;
  around_.later(patience, {look_for_dialler{++alarm_}});
}

void peer_link::on_look_for_dialler(const look_for_dialler& order) {
  const bool waits = phase_ == phase::dialling || phase_ == phase::connecting;
  if (!waits || !broke_ || order.alarm != alarm_) return;
  end_link(given_up({errc::deadline, peer_.name + " did not dial again"}));
}

troupe::error peer_link::given_up(const troupe::error& last) const {
  return {errc::peer_lost, "the link to " + peer_.name + " broke (" + last_break_ +
                               ") and could not be made again in " + std::to_string(tries_) +
                               " attempts; last: " + to_string(last)};
}

// -- last words

void peer_link::remember(transfer_id transfer, std::vector<std::byte> frame) {
  if (words_.size() == max_last_words) words_.pop_front();
  words_.push_back({transfer, std::move(frame)});
}

bool peer_link::resend_final_messages(transfer_id transfer) {
  bool any = false;
  for (const auto& word : words_) {
    if (word.transfer != transfer) continue;
    any = true;
    (void)link_->send_frame(word.frame);  // if the link broke, the next one repeats the words
  }
  return any;
}

link_is_back peer_link::is_back() const {
  return {generation_, std::string{transport::to_string(choice_.kind)}};
}

void peer_link::resume_sessions() {
  for (const auto& word : words_) (void)link_->send_frame(word.frame);
  for (const auto& [transfer, session] : sessions_) {
    around_.tell_session(transfer, session, {is_back()});
  }
}

// -- the other end

void peer_link::other_end_ended(std::string why, bool is_gone) {
  if (leaving_) {
    end_link(*leaving_);
    return;
  }
  if (!is_made_for_the_first_time()) {
    on_peer_left(peer_left{{errc::peer_lost, std::move(why)}});
    return;
  }
  // The acceptor may hear first that the attempt failed. The next attempt has another acceptor.
  const bool was_asked = phase_ == phase::dialling && link_;
  if (was_asked && is_gone) ask_node_instead();
  if (was_asked) return;  // an acceptor not yet gone may still answer; a refusal tells more
  around_.stop_monitoring(std::exchange(other_end_, {}));
  if (phase_ == phase::connecting) backend_failed({errc::link_broken, std::move(why)});
}

void peer_link::hear(const link_notice& notice) {
  if (!other_end_ || around_.sender() != other_end_) return;
  on_process_answered();
  const auto ended = peer_.name + " ended the link: " + notice.why;
  switch (notice.fate) {
    case link_fate::broke:
      if (!is_dialler()) return;
      if (phase_ == phase::up) break_link(cause_of(notice.why));
      // The link of this attempt had already come up at the peer.
      if (phase_ == phase::connecting) backend_failed(cause_of(notice.why));
      return;
    case link_fate::node_stops:
      if (leaving_) break;  // both nodes leave, and the peer knows
      on_peer_left(peer_left{{errc::peer_lost, ended}});
      return;
    case link_fate::ended: break;
  }
  // A fate unknown to this release also counts as the end of the link.
  other_end_ended(ended, false);
}

}  // namespace troupe::actors::links
