#pragma once

/// A runner whose only peer is a double of a link, which records what is said over it. A real
/// peer cannot be made to send invalid messages.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "dialling_node.hpp"

namespace troupe::actors::testing {

/// What the sessions of the runner say, what they grant along with it, the batches that they post
/// (with the epoch), and the sessions themselves. Answers fences at once while `fences` is true.
struct heard_words {
  std::atomic<bool> fences{true};
  inbox<session_message> said;
  inbox<grant_wish> wishes;
  inbox<std::pair<transport::batch_id, std::uint64_t>> batches;
  inbox<session_actor> sessions;
};

inline link_actor::behavior_type listening_link(link_actor::pointer,
                                                std::shared_ptr<heard_words> heard) {
  const auto by_transfer = std::make_shared<std::map<transfer_id, session_actor>>();
  return {
      [=](link_command& command) {
        if (const auto* who = std::get_if<attach_session>(&command.what)) {
          by_transfer->insert_or_assign(who->transfer, who->session);
          heard->sessions.put(who->session);
        } else if (const auto* words = std::get_if<say>(&command.what)) {
          for (const auto& wish : words->grants) heard->wishes.put(wish);
          heard->said.put(words->message);
        } else if (const auto* posted = std::get_if<post_batch>(&command.what)) {
          heard->batches.put({posted->work.id, posted->epoch});
        } else if (const auto* fence = std::get_if<fence_now>(&command.what);
                   fence != nullptr && heard->fences) {
          caf::anon_send(by_transfer->at(fence->transfer), session_event{transfer_fenced{}});
        }
      },
      [](link_event&) {},
      [](const link_request&) { return link_reply{}; },
      [](const link_notice&) {},
      [](report_atom) { return link_report{}; },
  };
}

using layout_ptr = std::shared_ptr<const kvcache::cache_layout>;

/// The layout of one rank: two layers with two heads, four blocks.
inline layout_ptr small_layout(std::uint32_t rank = 0, std::uint32_t ranks = 1) {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(2, 2, 8);
  shape.blocks = 4;
  shape.tp_rank = rank;
  shape.tp_size = ranks;
  return std::make_shared<const kvcache::cache_layout>(kvcache::make_layout(shape, {}).value());
}

class listened_runner : public ::testing::Test {
 protected:
  actor_host host;
  context_ptr context = context_of("here-0");
  std::shared_ptr<heard_words> heard = std::make_shared<heard_words>();
  runner_actor runner;
  link_handle link;

  void meet(std::string peer, layout_ptr its_layout, std::string backend = {}) {
    runner = host.system().spawn(runner_behavior, context);
    host.own(runner);
    link = {std::move(peer),
            incarnation{5},
            std::move(its_layout),
            host.system().spawn(listening_link, heard),
            1,
            std::move(backend)};
    link.id = link.actor.id();
    host.own(link.actor);
    caf::anon_send(runner, engine_command{connect_operations{}});
    caf::anon_send(runner, runner_event{link_ready{link}});
  }
  /// Delivers a message from the peer.
  void comes(session_message message) {
    caf::anon_send(runner, runner_event{unrouted_message{link, std::move(message)}});
  }
  /// Message number `index` that was said over the link; empty if there is none, or it is of
  /// another type.
  template <class Message>
  std::optional<Message> said(std::size_t index) {
    const auto message = heard->said.at(index);
    if (!message || !std::holds_alternative<Message>(*message)) return std::nullopt;
    return std::get<Message>(*message);
  }
};

}  // namespace troupe::actors::testing
