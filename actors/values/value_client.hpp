#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/context/session.hpp"

namespace troupe::actors {

struct value_client_options {
  context_ptr context;
  link_handle link;
  transfer_id transfer;
  start_value order;
};

/// One put, get, query or remove at another node. Made by the runner.
///
///   state    event                       next     actions
///   -------  --------------------------  -------  -------
///   asked    reply (small, or no value)  fencing  fence, then the outcome
///   asked    store_held (put)            storing  send store_commit
///   asked    the peer does not reach     asked    ask again, with a copy of the value in memory that
///            the value (put)                      the peer reaches
///   asked    reply with a grant (get)    reading  post a read into scratch memory
///   reading  completed                   fencing  send store_release, fence, then the outcome
///   storing  reply                       fencing  send store_release, fence, then the outcome
///   storing  store_held                  storing  send store_commit again: the last one was late
///   storing  abort                       storing  none: the value may be stored by now
///   storing  link lost, deadline         fencing  fence, then the failure, which says that the
///                                                 result is unknown
///   asked,   abort, deadline             fencing  send store_release, fence, then the failure
///   reading
///   asked,   link lost                   fencing  fence, then the failure
///   reading
///   asked,   link back                   asked    ask again; a read in progress starts over, into
///   reading                                       other scratch memory
///   storing  link back                   storing  send store_commit again
///   fencing  quiescent                   -        outcome, quit
///
/// A failure is reported without waiting for the fence, which may take as long as the peer is
/// stalled, unless the peer may read the caller's memory (`lent_`): the outcome returns that memory
/// to the caller. So the caller's memory is lent over wire backends only, where closing the link
/// shuts a peer out whatever it does; a peer that reaches into our memory gets a copy to read.
class value_client final : public session {
 public:
  explicit value_client(value_client_options options);

  void begin(session_surroundings& around) override;
  void handle(session_event& event) override;
  [[nodiscard]] const char* name() const override { return "value_client"; }
  [[nodiscard]] std::shared_ptr<const void> touched() const override { return memory_; }

 private:
  enum class phase : std::uint8_t { asked, storing, reading, fencing };
  using outcome_type = decltype(value_concluded::outcome);
  /// What the peer, or reads of ours, may touch until the fence.
  struct touched_memory {
    touched_memory(context_ptr in, std::shared_ptr<const std::vector<std::byte>> from)
        : context{std::move(in)}, from_gpu{std::move(from)} {}
    touched_memory(const touched_memory&) = delete;
    touched_memory& operator=(const touched_memory&) = delete;
    ~touched_memory() { release(); }
    void release() noexcept;

    const context_ptr context;
    const std::shared_ptr<const std::vector<std::byte>> from_gpu;  ///< put: `start_value::copy`
    std::optional<region_id> registered;  ///< put: the value's region, while the grant lives
    std::optional<region_id> copy_apart;  ///< put: the copy's region if not in `copy`
    std::optional<value_store::reservation> copy;     ///< put: a copy, while the grant lives
    std::optional<value_store::reservation> scratch;  ///< get: the bytes
    /// Memory where reads over broken links may still land.
    std::vector<value_store::reservation> former_scratch;
  };

  void ask();
  /// A grant on a copy of the value in memory that every peer reaches.
  [[nodiscard]] result<grant_wish> grant_on_copy();
  /// A grant on the value itself, which is registered for the time of the put unless it is already.
  [[nodiscard]] result<grant_wish> grant_on_value();
  /// Asks again with a copy. The grant on the value itself ended with the link, or was never sent.
  void grant_copy_instead();
  /// Continues a put with a copy if the peer does not reach the value itself: over `shm`, memory
  /// that the endpoint has not allocated, of a process that the peer may not trace. Returns whether
  /// it does so.
  [[nodiscard]] bool asks_with_copy(const troupe::error& why);
  void store();
  void got_value(store_reply& reply);
  void read_value(store_reply& reply);

  void on_session_message(session_message& message);
  void on_completion(transport::completion& done);
  void on_transfer_fenced();
  void on_link_is_lost(link_is_lost& lost);
  void on_link_is_back(link_is_back& back);
  void on_abort_session(abort_session& abort);
  void on_deadline_reached();

  /// Tells the peer to hold nothing for us any longer, and to store nothing.
  void let_go();
  /// Ends the operation unless it is too late for that.
  void give_up(troupe::error why);
  /// Fences first: the peer must not read what the engine will reuse, nor a late read land in
  /// scratch memory.
  void end_with(outcome_type outcome);
  void end_with(troupe::error why);
  /// The error of a put whose `store_commit` was sent and not answered.
  [[nodiscard]] troupe::error in_doubt(troupe::error why) const;
  void tell_outcome();
  /// The outcome returns the value's memory to the caller: if the peer may read it, the fence comes
  /// first.
  void tell_failure();

  session_surroundings* around_{nullptr};
  const context_ptr context_;
  link_handle link_;
  const transfer_id transfer_;
  const start_value order_;
  phase phase_{phase::asked};
  bool said_again_{false};          ///< `store_commit` was repeated: the first may have arrived
  bool lent_{false};                ///< put: the grant is on the caller's memory
  std::optional<grant_wish> wish_;  ///< put: on the value or its copy
  const std::shared_ptr<touched_memory> memory_;
  std::optional<outcome_type> outcome_;
};

/// Whether the value of a put is the caller's, and the peer would reach into our memory for it. The
/// `value_client` then copies the value as soon as it runs.
[[nodiscard]] bool must_copy(const start_value& order, const link_handle& link);
/// Whether the value of a put is the caller's memory, which the peer reads unless it gets a copy: the
/// value does not fit into a frame, and no pins keep it.
[[nodiscard]] bool is_lent(const start_value& order);

/// Runs one of the four operations on this node's own store, at once.
[[nodiscard]] decltype(value_concluded::outcome) value_here(node_context& context,
                                                            const start_value& order);

}  // namespace troupe::actors
