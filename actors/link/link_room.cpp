#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/peer_link.hpp"
#include "troupe/actors/logging.hpp"

// A link, or the device below it, has room for a limited number of grants. Messages that need more
// wait in order of arrival until other grants have ended, or their sessions' deadlines have come.

namespace troupe::actors::links {

namespace {

/// The pause between two looks. The link learns of its own fences at once, but a device also serves
/// other links.
constexpr std::chrono::milliseconds look_again{20};

void put_in(session_message& message, std::vector<transport::remote_grant> given) {
  if (auto* request = std::get_if<transfer_request>(&message)) {
    request->grants = std::move(given);
  } else if (auto* offer = std::get_if<transfer_offer>(&message)) {
    offer->grants = std::move(given);
  } else if (auto* put = std::get_if<store_put>(&message)) {
    put->source = std::move(given.front());
  } else if (auto* reply = std::get_if<store_reply>(&message)) {
    reply->source = std::move(given.front());
  }
}

}  // namespace

/// Gives the missing grants of a message as far as there is room, else returns `overloaded`.
result<void> peer_link::give_grants(words_with_grants& words) {
  const auto& wishes = words.order.grants;
  while (words.given.size() < wishes.size()) {
    const auto& wish = wishes[words.given.size()];
    auto grant =
        link_->grant(wish.region, wish.permitted, wish.rights, route_of(words.order.message));
    if (!grant) return fail(grant.error());
    words.given.push_back(std::move(*grant));
  }
  return {};
}

void peer_link::wait_for_room() {
  if (std::exchange(looks_for_room_, true)) return;
  around_.later(look_again, {look_for_room{}});
}

void peer_link::say_with_grants(say order) {
  for_room_.push_back({std::move(order), {}});
  // First come, first served.
  if (for_room_.size() == 1) serve_room();
}

void peer_link::serve_room() {
  while (!for_room_.empty() && link_ && phase_ == phase::up) {
    auto& words = for_room_.front();
    const auto transfer = route_of(words.order.message);
    if (auto given = give_grants(words); !given) {
      if (given.error().code == errc::overloaded) {
        if (!std::exchange(words.said_why, true)) {
          logger("link")->warn("{} {:016x} to {} waits for {} of its {} grants: {}",
                               type_name(words.order.message), transfer.value, peer_.name,
                               words.order.grants.size() - words.given.size(),
                               words.order.grants.size(), given.error().message);
        }
        wait_for_room();
        return;
      }
      for_room_.pop_front();
      failed_to_say(transfer, given.error());
      continue;
    }
    auto order = std::move(words.order);
    put_in(order.message, std::move(words.given));
    for_room_.pop_front();
    auto frame = encode(order.message);
    auto sent = frame ? link_->send_frame(*frame) : result<void>{fail(frame.error())};
    if (!sent) failed_to_say(transfer, sent.error());
  }
}

void peer_link::leave_room(transfer_id transfer) {
  std::erase_if(for_room_, [&](const words_with_grants& words) {
    return route_of(words.order.message) == transfer;
  });
}

void peer_link::on_look_for_room() {
  looks_for_room_ = false;
  serve_room();
}

}  // namespace troupe::actors::links
