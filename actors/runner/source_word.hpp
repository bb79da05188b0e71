#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "troupe/actors/context/session.hpp"

namespace troupe::actors {

struct source_word_options {
  link_handle link;
  transfer_id transfer;
  source_verb verb{source_verb::release};
  std::string request;
  std::uint64_t life{0};  ///< of the source; 0: any
};

/// One `release` or `hold` at one source of its request. Made by the runner. Nothing is
/// granted to a peer and nothing posted, so there is nothing to fence: it ends with its outcome.
///
///   event                        next   actions
///   ---------------------------  -----  -------
///   begin, link back             asked  send transfer_forget (release) or transfer_hold (hold)
///   transfer_release             ended  done: the source has ended, or there is none
///   transfer_abort               ended  failed: why it goes on, or how the held source ended
///   abort                        ended  failed; of a hold, send transfer_abort
///   receive_is_whole             ended  done; of a hold, send transfer_abort: it was asked for
///   link lost                    ended  failed
class source_word final : public session {
 public:
  explicit source_word(source_word_options options);

  void begin(session_surroundings& around) override;
  void handle(session_event& event) override;
  [[nodiscard]] const char* name() const override { return "source_word"; }

 private:
  void ask();
  void end(std::optional<troupe::error> failure);
  /// Tells the source that we no longer hold it.
  void let_go(const troupe::error& why);
  void on_session_message(session_message& message);
  void on_link_is_back(const link_is_back& back);
  void on_abort_session(abort_session& abort);
  void on_receive_is_whole();

  session_surroundings* around_{nullptr};
  link_handle link_;
  const transfer_id transfer_;
  const source_verb verb_;
  const std::string request_;
  const std::uint64_t life_;
  bool ended_{false};
};

}  // namespace troupe::actors
