#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "troupe/actors/context/node_context.hpp"
#include "troupe/actors/context/session.hpp"

namespace troupe::actors {

/// The reply to a peer's operation on our keyed values if one frame is enough for it. Otherwise
/// empty, and a `value_server` must handle the operation.
[[nodiscard]] std::optional<session_message> answer_value(node_context& context,
                                                          session_message& message);

/// The answer to an operation that is refused.
[[nodiscard]] store_reply refused_value(std::uint64_t op, const troupe::error& why);

struct value_server_options {
  context_ptr context;
  link_handle link;
  session_message message;  ///< a store_put or store_get that `answer_value` did not answer
};

/// Serves one put (takes the value, or reads it from the peer, and stores it when the peer says so)
/// or one large get (keeps the value pinned while the peer reads it). A live reader may take its
/// time; a reader that is gone loses its link, and with it the pin. Once the link is made again, the
/// peer asks again, with the same operation.
///
///   state    event                      next     actions
///   -------  -------------------------  -------  -------
///   reading  the put has arrived        held     send store_held
///   held     store_commit               stored   commit, send the reply; fencing if it is refused
///   held     store_commit, but late     held     send store_held again, once
///   held     store_put, link was back   held     send store_held again
///   stored   store_commit, link was     stored   send the reply again
///            back
///   any      store_release or an abort, fencing  fence; a value that is not stored is dropped
///            link lost
///   fencing  quiescent                  -        send the refusal, if any, and quit
class value_server final : public session {
 public:
  explicit value_server(value_server_options options);

  void begin(session_surroundings& around) override;
  void handle(session_event& event) override;
  [[nodiscard]] const char* name() const override { return "value_server"; }
  [[nodiscard]] std::shared_ptr<const void> touched() const override { return memory_; }

 private:
  enum class phase : std::uint8_t { reading, held, stored, lending, fencing };

  /// What reads of ours, or the peer, may touch until the fence.
  struct touched_memory {
    std::optional<value_store::reservation> room;  ///< of a put
    /// For a get, the pins of the value: one more each time it is asked for over a new link, because
    /// the value granted over the former link must stay in place. For a put that was read again, its
    /// value's.
    std::vector<std::shared_ptr<const void>> pins;
  };

  void serve_put(store_put& put);
  void serve_get(const store_get& get);
  void say_held();
  /// Whether the peer may have declared us lost, and told its caller so, since we last said
  /// `store_held`. The peer heard us then, and declares us lost after `peer_silence` without a
  /// word.
  [[nodiscard]] bool may_count_as_lost() const;
  void store();
  /// Stores the value. After a second read it is pinned: even if it is removed before this session
  /// ends, late bytes of the former read must not land in another value.
  [[nodiscard]] result<void> commit();
  void refuse(const troupe::error& why);
  void finish();

  void on_session_message(session_message& message);
  void on_completion(const transport::completion& outcome);
  void on_transfer_fenced();
  void on_link_is_lost();
  void on_abort_session(const abort_session& refused);

  session_surroundings* around_{nullptr};
  const context_ptr context_;
  link_handle link_;
  session_message message_;  ///< that it begins with
  transfer_id transfer_;
  phase phase_{phase::fencing};
  std::string key_;             ///< of a put
  std::uint64_t read_over_{0};  ///< the link epoch of the read in progress
  bool read_again_{false};      ///< read again over a new link: the first read may still write
  time_point said_held_;
  bool asked_again_{false};  ///< `store_held` was repeated because `store_commit` was late
  const std::shared_ptr<touched_memory> memory_{std::make_shared<touched_memory>()};
  std::optional<store_reply> reply_;  ///< to send once quiescent
};

}  // namespace troupe::actors
