#include <chrono>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/actors/link/peer_link.hpp"

namespace troupe::actors::links {

namespace {

/// The pause between two tries to send a last word to a peer that does not take earlier messages.
constexpr std::chrono::milliseconds room_for_last_words{20};

}  // namespace

/// The error for a session that uses a link which has ended.
troupe::error peer_link::not_up() const {
  if (lost_) return *lost_;
  return {errc::peer_lost, "the link to " + peer_.name + " is not up"};
}

bool peer_link::is_over(std::uint64_t epoch) const {
  return epoch != 0 && epoch != generation_;
}

void peer_link::to_session(transfer_id transfer, session_event event) {
  if (const auto found = sessions_.find(transfer); found != sessions_.end()) {
    around_.tell_session(transfer, found->second, std::move(event));
  }
}

void peer_link::on_say(say order) {
  const auto transfer = route_of(order.message);
  if (phase_ == phase::ending) {
    to_session(transfer, session_event{link_is_lost{not_up()}});
    return;
  }
  const bool up = phase_ == phase::up;
  const bool last = order.grants.empty() && is_final_message(order.message);
  // A message that waits for room would follow the last word and begin the transfer again.
  if (last) leave_room(transfer);
  // While the link is being rebuilt only last words are kept: the session will hear of the new
  // epoch and say the rest again.
  if (!last && (!up || is_over(order.epoch))) return;
  if (up && !order.grants.empty()) {
    say_with_grants(std::move(order));
    return;
  }
  auto frame = encode(order.message);
  result<void> sent;
  if (!frame) {
    sent = fail(frame.error());
  } else {
    if (up) sent = order.may_be_delayed ? link_->send_soon(*frame) : link_->send_frame(*frame);
    // A last word must arrive, and its session may be gone by now and cannot repeat it.
    if (last && !sent && sent.error().code == errc::overloaded) {
      around_.later(room_for_last_words, {std::move(order)});
      return;
    }
    if (last) remember(transfer, std::move(*frame));
  }
  if (!sent) failed_to_say(transfer, sent.error());
}

void peer_link::failed_to_say(transfer_id transfer, const troupe::error& why) {
  if (means_broken(why)) {
    on_link_broke(link_broke{why});
  } else {
    to_session(transfer, session_event{abort_session{why}});
  }
}

void peer_link::on_post_batch(post_batch order) {
  const auto transfer = order.work.transfer;
  const auto session_id = order.work.id;
  if (phase_ == phase::ending) {
    to_session(transfer, session_event{link_is_lost{not_up()}});
    return;
  }
  if (phase_ != phase::up || is_over(order.epoch)) return;
  // The transport takes a limited number of batches; the rest waits here.
  if (batches_.size() >= transport::link_options{}.max_batches) {
    for_posting_.push_back(std::move(order));
    return;
  }
  const auto id = next_batch_++;
  batches_.emplace(id, session_id);
  order.work.id = transport::batch_id{id};
  const auto posted = link_->post(std::move(order.work));
  if (posted) return;
  batches_.erase(id);
  if (means_broken(posted.error())) {
    on_link_broke(link_broke{posted.error()});
  } else {
    to_session(transfer,
               session_event{transport::completion{session_id, transfer, posted.error(), 0, {}}});
  }
}

void peer_link::post_waiting() {
  while (!for_posting_.empty() && batches_.size() < transport::link_options{}.max_batches) {
    auto next = std::move(for_posting_.front());
    for_posting_.pop_front();
    on_post_batch(std::move(next));
  }
}

/// Waiting batches end like posted ones that the transport fences.
void peer_link::give_up_waiting(transfer_id transfer) {
  std::erase_if(for_posting_, [&](const post_batch& waiting) {
    if (waiting.work.transfer != transfer) return false;
    const troupe::error why{errc::aborted, "the transfer was fenced here"};
    to_session(transfer,
               session_event{transport::completion{waiting.work.id, transfer, why, 0, {}}});
    return true;
  });
}

void peer_link::on_fence_now(const fence_now& order) {
  leave_room(order.transfer);
  give_up_waiting(order.transfer);
  std::unordered_set<std::uint64_t> pending;
  if (link_ && link_->fence(order.transfer) == transport::fence_state::pending) {
    pending.insert(generation_);
  }
  for (const auto& former : former_) {
    if (former.pending.contains(order.transfer)) pending.insert(former.generation);
  }
  if (pending.empty()) {
    to_session(order.transfer, session_event{transfer_fenced{}});
    serve_room();
  } else {
    fencing_[order.transfer] = std::move(pending);
    watch();
  }
}

void peer_link::on_attach_session(attach_session order) {
  switch (phase_) {
    case phase::up:
      if (is_over(order.epoch)) {
        around_.tell_session(order.transfer, order.session, {is_back()});
      }
      break;
    case phase::dialling:
    case phase::connecting: break;  // the session is told when the link is up again
    case phase::ending:
      around_.tell_session(order.transfer, order.session, {link_is_lost{not_up()}});
      break;
  }
  // A session that crashed may have another one in its place.
  sessions_.insert_or_assign(order.transfer, std::move(order.session));
  watch();
}

void peer_link::on_detach_session(const detach_session& order) {
  sessions_.erase(order.transfer);
  fencing_.erase(order.transfer);
  finish_if_idle();
}

}  // namespace troupe::actors::links
