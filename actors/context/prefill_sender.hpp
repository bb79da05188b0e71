#pragma once

#include <optional>
#include <vector>

#include "troupe/actors/context/session_shell.hpp"
#include "troupe/actors/transfer/send_session.hpp"

namespace troupe::actors {

/// Adopts the destination that a request names; a request to read names none. `out_of_range`: other
/// blocks than its tokens need, a block that is named twice, or not a grant for each region.
/// `layout_mismatch`: no slot for its state.
[[nodiscard]] result<void> adopt_destination(transfer_context& basis, transfer_request& request);

struct prefill_sender_options {
  transfer_context basis;  ///< with the destination
  transfer_request request;
  std::vector<std::uint32_t> ready;  ///< per layer, the first token that is not ready yet
  std::optional<std::uint32_t> sealed_tokens;
  std::vector<std::byte> aux;
  time_point deadline;
};

/// The prefill side of one transfer: feeds `send_session` and carries out what it returns. The
/// runner makes it when a request meets its source; it ends when the transfer is quiescent.
class prefill_sender final : public session_shell<send_session> {
 public:
  explicit prefill_sender(prefill_sender_options options);

  [[nodiscard]] const char* name() const override { return "prefill_sender"; }

 private:
  session_actions start() override;
  planned_batch plan(post_slice& post) override;
  void offer(send_offer& order) override;
  session_actions heard(session_message& message) override;
  session_actions grew(source_progress& more) override;
  session_actions complete(source_sealed& seal) override;

  // until it begins
  transfer_request request_;
  std::vector<std::uint32_t> ready_;
  std::optional<std::uint32_t> sealed_tokens_;
  std::vector<std::byte> aux_;
  time_point deadline_;
};

}  // namespace troupe::actors
