#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/context/session.hpp"
#include "troupe/actors/operations/request_tables.hpp"
#include "troupe/actors/transfer/session_actions.hpp"
#include "troupe/kvcache/overloaded.hpp"
#include "troupe/kvcache/plan.hpp"

namespace troupe::actors {

/// What both sides of a transfer keep around their state machine.
struct transfer_context {
  context_ptr context;
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
  time_point started{};
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
[[nodiscard]] planned_batch plan_batch(const session_surroundings& around, transfer_context& basis,
                                       const post_slice& post, transport::direction dir,
                                       std::vector<std::byte> frame);

/// Grants on the tokens in the local blocks (and on the state slot), one wish per region.
[[nodiscard]] result<std::vector<grant_wish>> wish_grants(const transfer_context& basis,
                                                          transport::access rights);

/// Counts all bytes of a transfer that is done. The other side may say so before the link reports
/// the last batches here; batches that landed before the link broke are never reported.
void count_delivered(transfer_context& basis, time_point now);

/// "transfer 0123456789abcdef request r1 from prefill-0: done, 12 MB in 48 segments (96 before
/// merging), waited 1.2 ms, wire 4.5 ms, total 5.9 ms"
void log_outcome(const transfer_context& basis, std::string_view side,
                 const std::optional<troupe::error>& failure, time_point now);

/// How many layers go into one batch so that it stays near `bytes_per_batch`: small enough to
/// overlap, large enough that the overhead of a batch does not matter.
[[nodiscard]] std::uint32_t layers_per_batch(const kvcache::transfer_geometry& geometry,
                                             std::uint32_t tokens);

// -- the session around a machine

/// The part common to both sides of a transfer: passes each event to the state machine and carries
/// out the actions that it returns. One side derives from it.
template <class Machine>
class session_shell : public session {
 public:
  void begin(session_surroundings& around) final {
    around_ = &around;
    auto first = start();
    ask_link(around, basis_.link, attach_session{basis_.transfer, around.this_session()});
    carry_out(std::move(first));
  }

  void handle(session_event& event) final {
    carry_out(std::visit(
        overloaded{[this](session_message& x) { return on_session_message(x); },
                   [this](transport::completion& x) { return on_completion(x); },
                   [this](transfer_fenced&) { return machine_->quiescent(); },
                   [this](link_is_lost& x) { return machine_->link_lost(std::move(x.why)); },
                   [this](link_is_back& x) { return on_link_is_back(x); },
                   [this](source_progress& x) { return grew(x); },
                   [this](source_blocks& x) { return on_source_blocks(x); },
                   [this](source_sealed& x) { return complete(x); },
                   [this](abort_session& x) { return given_up(x); },
                   [this](deadline_reached&) { return machine_->expire(around_->now()); },
                   [this](receive_is_whole&) { return whole(); }},
        event.what));
  }

 protected:
  session_shell(std::string_view log_name, transfer_context basis)
      : basis_{std::move(basis)}, log_name_{log_name} {}

  session_surroundings* around_{nullptr};
  transfer_context basis_;
  std::optional<Machine> machine_;

 private:
  // -- one side's part

  /// Makes `machine_`. Returns its first actions.
  virtual session_actions start() = 0;
  virtual planned_batch plan(post_slice& post) = 0;
  virtual result<say> prepare_message(send_message& order) {
    return say{std::move(order.message), {}};
  }
  virtual void offer(send_offer&) {}  // prefill
  virtual void tell(tell_layers&) {}  // decode
  virtual session_actions heard(session_message& message) = 0;
  virtual session_actions grew(source_progress&) { return {}; }    // prefill
  virtual session_actions complete(source_sealed&) { return {}; }  // prefill
  virtual session_actions whole() { return {}; }                   // decode
  virtual session_actions given_up(abort_session& abort) {
    return machine_->local_abort(std::move(abort.why));
  }

  // -- actions

  void carry_out(session_actions actions) {
    for (auto& action : actions) std::visit([this](auto& what) { this->act(what); }, action);
  }

  /// Failures go through the mailbox, so that the machine is not entered while its actions are
  /// carried out.
  void act(post_slice& post) {
    auto batch = plan(post);
    if (!batch.failure) {
      ask_link(*around_, basis_.link, post_batch{std::move(batch.work)});
      return;
    }
    around_->tell_itself(
        {transport::completion{post.id, basis_.transfer, std::move(batch.failure), 0, {}}});
  }

  void act(send_message& order) {
    auto words = prepare_message(order);
    if (words) {
      ask_link(*around_, basis_.link, std::move(*words));
    } else {
      around_->tell_itself({abort_session{words.error()}});
    }
  }

  void act(send_offer& order) { offer(order); }

  void act(fence_transfer&) { ask_link(*around_, basis_.link, fence_now{basis_.transfer}); }

  void act(tell_layers& layers) { tell(layers); }

  void act(conclude& outcome) {
    const auto now = around_->now();
    if (!outcome.failure) count_delivered(basis_, now);
    log_outcome(basis_, log_name_, outcome.failure, now);
    around_->tell_runner({session_concluded{
        basis_.transfer,
        std::move(outcome.failure),
        std::move(outcome.aux),
        basis_.bytes,
        {basis_.first_byte, basis_.last_byte, basis_.segments_after, basis_.link.backend},
        outcome.refused}});
  }

  void act(unpin&) {
    ask_link(*around_, basis_.link, detach_session{basis_.transfer});
    around_->tell_runner({session_unpinned{basis_.transfer}});
    around_->finish();
  }

  // -- events

  session_actions on_session_message(session_message& message) {
    if (const auto* abort = std::get_if<transfer_abort>(&message)) {
      const troupe::error why{abort->code, abort->reason};
      return abort->refused ? machine_->peer_refused(why) : machine_->peer_aborted(why);
    }
    if (std::holds_alternative<transfer_quiescent>(message)) return {};
    return heard(message);
  }
  session_actions on_completion(transport::completion& done) {
    basis_.bytes += done.bytes;
    basis_.last_byte = around_->now();
    return machine_->batch_completed(done.id, done.failure);
  }
  session_actions on_link_is_back(link_is_back& back) {
    if (back.epoch <= basis_.link.epoch) return {};
    basis_.link.epoch = back.epoch;
    basis_.link.backend = std::move(back.backend);
    return machine_->link_back();
  }
  session_actions on_source_blocks(source_blocks& more) {
    auto& blocks = basis_.local[more.group].blocks;
    blocks.insert(blocks.end(), more.blocks.begin(), more.blocks.end());
    return {};
  }

  const std::string_view log_name_;
};

/// The error of `heard` for a message that only the other side of a transfer may send.
[[nodiscard]] troupe::error out_of_place(const transfer_context& basis, std::string_view sender,
                                         const session_message& message);

}  // namespace troupe::actors
