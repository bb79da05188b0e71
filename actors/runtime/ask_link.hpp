#pragma once

#include <utility>

#include "troupe/actors/messages/local_messages.hpp"

namespace troupe::actors {

/// Sends an order to a session's link, stamped with the epoch that the session knows.
template <class Self, class Order>
void ask_link(Self self, const link_handle& link, Order&& order) {
  if constexpr (requires { order.epoch; }) order.epoch = link.epoch;
  self->send(link.actor, link_command{std::forward<Order>(order)});
}

/// Same, for an actor whose state has its `link`.
template <class Self, class Order>
void ask_link(Self self, Order&& order) {
  ask_link(self, self->state.link, std::forward<Order>(order));
}

}  // namespace troupe::actors
