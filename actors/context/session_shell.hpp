#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <caf/typed_event_based_actor.hpp>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/operations/request_tables.hpp"
#include "troupe/actors/runtime/ask_link.hpp"
#include "troupe/actors/transfer/session_actions.hpp"
#include "troupe/kvcache/overloaded.hpp"
#include "troupe/kvcache/plan.hpp"

namespace troupe::actors {

/// State that both kinds of transfer actor keep around their state machine.
struct transfer_context {
  context_ptr context;
  engine_port_actor port;
  link_handle link;
  std::shared_ptr<const kvcache::transfer_geometry> geometry;
  transfer_id transfer;
  std::string request;
  kvcache::token_range tokens;        ///< that move
  std::vector<request_table> local;   ///< all of the request
  std::vector<request_table> remote;  ///< from the block of the first token that moves on
  std::vector<std::uint64_t> kept;    ///< by group, the first token that the decode side keeps
  std::uint32_t local_state_slot{0};
  std::optional<std::uint32_t> remote_state_slot;
  std::unordered_map<std::uint32_t, std::shared_ptr<const transport::remote_grant>>
      grants;  ///< by remote region
  // for the one log line
  time_point started{std::chrono::steady_clock::now()};
  time_point first_byte{};
  time_point last_byte{};
  std::uint64_t bytes{0};
  std::uint64_t segments_before{0};
  std::uint64_t segments_after{0};
};

/// The blocks that a request or an offer names: `groups` if the layout has groups, else `blocks`.
struct named_blocks {
  std::span<const kvcache::block_run> blocks;
  std::span<const group_table> groups;
};

/// Adopts the other side's blocks and grants from a request or an offer. The remote side names its
/// regions by its own ids; its layout counts them from 0 in the order of the grants, each of which
/// permits what the blocks hold in that region. `out_of_range`: other blocks than the tokens need,
/// or not a grant for each region.
[[nodiscard]] result<void> adopt_remote(transfer_context& basis, const named_blocks& named,
                                        std::span<const std::uint32_t> state_slots,
                                        std::vector<transport::remote_grant> grants);
/// The blocks of table `number` with the tokens that move and are kept, for a request or an offer.
[[nodiscard]] std::vector<kvcache::block_run> blocks_to_name(const transfer_context& basis,
                                                             std::uint32_t number);

/// Names the blocks in such a message; without `with_blocks`, only what is kept.
template <class Message>
void name_blocks(const transfer_context& basis, Message& message, bool with_blocks = true) {
  if (basis.kept.empty()) {
    if (with_blocks) message.blocks = blocks_to_name(basis, 0);
    return;
  }
  for (std::uint32_t i = 0; i < basis.kept.size(); ++i) {
    message.groups.push_back({i, static_cast<std::uint32_t>(basis.kept[i]), {}});
    if (with_blocks) message.groups.back().blocks = blocks_to_name(basis, i);
  }
}

/// One slice as a batch, with `frame` behind its bytes. With a `failure` it cannot be posted; the
/// state machine gets that as the batch's completion, so that each post completes exactly once.
struct planned_batch {
  transport::batch work;
  std::optional<troupe::error> failure;
};
[[nodiscard]] planned_batch plan_batch(transfer_context& basis, const post_slice& post,
                                       transport::direction dir, std::vector<std::byte> frame);

/// Grants on the tokens in the local blocks (and on the state slot), one wish per region.
[[nodiscard]] result<std::vector<grant_wish>> wish_grants(const transfer_context& basis,
                                                          transport::access rights);

/// Counts all bytes of a transfer that is done. The other side may say so before the link reports
/// the last batches here; batches that landed before the link broke are never reported.
void count_delivered(transfer_context& basis);

/// "transfer 0123456789abcdef request r1 from prefill-0: done, 12 MB in 48 segments (96 before
/// merging), waited 1.2 ms, wire 4.5 ms, total 5.9 ms"
void log_outcome(const transfer_context& basis, std::string_view side,
                 const std::optional<troupe::error>& failure);

/// How many layers go into one batch so that it stays near `bytes_per_batch`: small enough to
/// overlap, large enough that the overhead of a batch does not matter.
[[nodiscard]] std::uint32_t layers_per_batch(const kvcache::transfer_geometry& geometry,
                                             std::uint32_t tokens);

// -- the actor around a machine

/// The part common to both sides of a transfer: passes each event to the machine and carries out
/// the actions that it returns. `Side` is one side's part, a struct without members of its own:
///
///     using state                                  // with `basis` and `machine`
///     static constexpr std::string_view log_name
///     planned_batch plan(state&, post_slice&)
///     result<say> prepare_message(state&, send_message&)
///     void offer(self, send_offer&)                // prefill
///     void tell(self, tell_layers&)                // decode
///     session_actions heard(state&, session_message&)
///     session_actions grew(state&, source_progress&)    // prefill
///     session_actions complete(state&, source_sealed&)  // prefill
///     session_actions whole(state&)                     // decode
///     session_actions given_up(state&, abort_session&)
template <class Side>
class session_shell {
 public:
  using state = typename Side::state;
  using self_pointer = session_actor::stateful_pointer<state>;

  template <class Order>
  static void ask_link(self_pointer self, Order&& order) {
    actors::ask_link(self, self->state.basis.link, std::forward<Order>(order));
  }

  /// Sends through the mailbox, so that the machine is not entered while its actions are carried
  /// out.
  static void later(self_pointer self, session_event event) {
    self->send(caf::actor_cast<session_actor>(self), std::move(event));
  }

  static void carry_out(self_pointer self, session_actions actions) {
    for (auto& action : actions) {
      std::visit([self](auto& what) { act(self, what); }, action);
    }
  }

  /// The behaviour, for a state that is filled in. `first` are the machine's first actions.
  static session_actor::behavior_type begin(self_pointer self, session_actions first) {
    ask_link(self,
             attach_session{self->state.basis.transfer, caf::actor_cast<session_actor>(self), 0});
    carry_out(self, std::move(first));
    return {[self](session_event& event) {
      auto& st = self->state;
      carry_out(
          self,
          std::visit(
              overloaded{[&st](session_message& x) { return on_session_message(st, x); },
                         [&st](transport::completion& x) { return on_completion(st, x); },
                         [&st](transfer_fenced&) { return st.machine->quiescent(); },
                         [&st](link_is_lost& x) { return st.machine->link_lost(std::move(x.why)); },
                         [&st](link_is_back& x) { return on_link_is_back(st, x); },
                         [&st](source_progress& x) { return Side::grew(st, x); },
                         [&st](source_blocks& x) { return on_source_blocks(st, x); },
                         [&st](source_sealed& x) { return Side::complete(st, x); },
                         [&st](abort_session& x) { return Side::given_up(st, x); },
                         [&st](deadline_reached&) {
                           return st.machine->expire(std::chrono::steady_clock::now());
                         },
                         [&st](receive_is_whole&) { return Side::whole(st); }},
              event.what));
    }};
  }

 private:
  // -- actions

  static void act(self_pointer self, post_slice& post) {
    auto& st = self->state;
    auto batch = Side::plan(st, post);
    if (!batch.failure) {
      ask_link(self, post_batch{std::move(batch.work)});
      return;
    }
    later(self, session_event{transport::completion{
                    post.id, st.basis.transfer, std::move(batch.failure), 0, {}}});
  }

  static void act(self_pointer self, send_message& order) {
    auto words = Side::prepare_message(self->state, order);
    if (words) {
      ask_link(self, std::move(*words));
    } else {
      later(self, session_event{abort_session{words.error()}});
    }
  }

  static void act(self_pointer self, send_offer& order) { Side::offer(self, order); }

  static void act(self_pointer self, fence_transfer&) {
    ask_link(self, fence_now{self->state.basis.transfer});
  }

  static void act(self_pointer self, tell_layers& layers) { Side::tell(self, layers); }

  static void act(self_pointer self, conclude& outcome) {
    auto& basis = self->state.basis;
    if (!outcome.failure) count_delivered(basis);
    log_outcome(basis, Side::log_name, outcome.failure);
    self->send(basis.port, port_event{session_concluded{basis.transfer,
                                                        std::move(outcome.failure),
                                                        std::move(outcome.aux),
                                                        basis.bytes,
                                                        {basis.first_byte, basis.last_byte,
                                                         basis.segments_after, basis.link.backend},
                                                        outcome.refused}});
  }

  static void act(self_pointer self, unpin&) {
    auto& basis = self->state.basis;
    ask_link(self, detach_session{basis.transfer});
    self->send(basis.port, port_event{session_unpinned{basis.transfer}});
    self->quit();
  }

  // -- events

  static session_actions on_session_message(state& st, session_message& message) {
    if (const auto* abort = std::get_if<transfer_abort>(&message)) {
      const troupe::error why{abort->code, abort->reason};
      return abort->refused ? st.machine->peer_refused(why) : st.machine->peer_aborted(why);
    }
    if (std::holds_alternative<transfer_quiescent>(message)) return {};
    return Side::heard(st, message);
  }
  static session_actions on_completion(state& st, transport::completion& done) {
    st.basis.bytes += done.bytes;
    st.basis.last_byte = std::chrono::steady_clock::now();
    return st.machine->batch_completed(done.id, done.failure);
  }
  static session_actions on_link_is_back(state& st, link_is_back& back) {
    if (back.epoch <= st.basis.link.epoch) return {};
    st.basis.link.epoch = back.epoch;
    st.basis.link.backend = std::move(back.backend);
    return st.machine->link_back();
  }
  static session_actions on_source_blocks(state& st, source_blocks& more) {
    auto& blocks = st.basis.local[more.group].blocks;
    blocks.insert(blocks.end(), more.blocks.begin(), more.blocks.end());
    return {};
  }
};

/// The error of `heard` for a message that only the other side of a transfer may send.
[[nodiscard]] troupe::error out_of_place(const transfer_context& basis, std::string_view sender,
                                         const session_message& message);

}  // namespace troupe::actors
