#pragma once

#include <optional>

#include "troupe/actors/context/session_shell.hpp"
#include "troupe/actors/transfer/receive_session.hpp"

namespace troupe::actors {

struct decode_receiver_options {
  transfer_context basis;
  transfer_request request;  ///< without grants, and without its two remaining times
  time_point deadline;
  std::optional<time_point> park_until{};  ///< the source may still be offered until then
};

/// The decode side of one transfer: feeds `receive_session` and carries out what it returns. The
/// runner makes it once the blocks are allocated and the link is up; it ends when the transfer
/// is quiescent.
class decode_receiver final : public session_shell<receive_session> {
 public:
  explicit decode_receiver(decode_receiver_options options);

  [[nodiscard]] const char* name() const override { return "decode_receiver"; }

 private:
  session_actions start() override;
  planned_batch plan(post_slice& post) override;
  result<say> prepare_message(send_message& order) override;
  void tell(tell_layers& layers) override;
  session_actions heard(session_message& message) override;
  session_actions whole() override;
  session_actions given_up(abort_session& abort) override;

  transfer_request request_;  ///< until it begins
  const time_point deadline_;
  const std::optional<time_point> park_until_;
};

}  // namespace troupe::actors
