#pragma once

#include <utility>

#include "troupe/actors/context/session.hpp"

namespace troupe::actors {

/// Takes the place of a session whose actor crashed: fences its transfer, and tells the runner once
/// nothing can touch the transfer's memory any more. What the peer still says is dropped.
class session_fence final : public session {
 public:
  session_fence(link_handle link, transfer_id transfer)
      : link_{std::move(link)}, transfer_{transfer} {}

  void begin(session_surroundings& around) override;
  void handle(session_event& event) override;
  [[nodiscard]] const char* name() const override { return "session_fence"; }

 private:
  session_surroundings* around_{nullptr};
  const link_handle link_;
  const transfer_id transfer_;
};

}  // namespace troupe::actors
