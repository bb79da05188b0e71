#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/link/link_parts.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/runtime/inline_executor.hpp"

// A link, or the device below it, has room for so many grants. Words that need more wait until others
// have ended, in the order in which they came: their sessions give up at their deadlines.

namespace troupe::actors::link_parts {

namespace {

/// Between two looks. The link hears of its own fences at once; a device also serves other links.
constexpr std::chrono::milliseconds look_again{20};

/// What of the grants is not given yet, as far as there is room: `overloaded` behind that.
result<void> give_grants(link_state& st, link_state::words_with_grants& words) {
  const auto& wishes = words.order.grants;
  while (words.given.size() < wishes.size()) {
    const auto& wish = wishes[words.given.size()];
    auto grant =
        st.link->grant(wish.region, wish.permitted, wish.rights, route_of(words.order.message));
    if (!grant) return fail(grant.error());
    words.given.push_back(std::move(*grant));
  }
  return {};
}

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

void wait_for_room(self_pointer self) {
  auto& st = self->state;
  if (std::exchange(st.looks_for_room, true)) return;
  self->delayed_send(self, look_again, link_command{look_for_room{}});
}

}  // namespace

void say_with_grants(self_pointer self, say order) {
  auto& st = self->state;
  st.for_room.push_back({std::move(order), {}});
  // Whoever came first is served first.
  if (st.for_room.size() == 1) serve_room(self);
}

void serve_room(self_pointer self) {
  auto& st = self->state;
  while (!st.for_room.empty() && st.link && st.now == link_state::phase::up) {
    auto& words = st.for_room.front();
    const auto transfer = route_of(words.order.message);
    if (auto given = give_grants(st, words); !given) {
      if (given.error().code == errc::overloaded) {
        if (!std::exchange(words.said_why, true)) {
          logger("link")->warn("{} {:016x} to {} waits for {} of its {} grants: {}",
                               type_name(words.order.message), transfer.value, st.peer.name,
                               words.order.grants.size() - words.given.size(),
                               words.order.grants.size(), given.error().message);
        }
        wait_for_room(self);
        return;
      }
      st.for_room.pop_front();
      failed_to_say(self, transfer, given.error());
      continue;
    }
    auto order = std::move(words.order);
    put_in(order.message, std::move(words.given));
    st.for_room.pop_front();
    auto frame = encode(order.message);
    auto sent = frame ? st.link->send_frame(*frame) : result<void>{fail(frame.error())};
    if (!sent) failed_to_say(self, transfer, sent.error());
  }
}

void leave_room(link_state& st, transfer_id transfer) {
  std::erase_if(st.for_room, [&](const link_state::words_with_grants& words) {
    return route_of(words.order.message) == transfer;
  });
}

void on_look_for_room(self_pointer self) {
  self->state.looks_for_room = false;
  serve_room(self);
}

}  // namespace troupe::actors::link_parts
