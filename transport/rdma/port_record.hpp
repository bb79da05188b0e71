#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// What a device has said of one of its ports, unasked, since this process opened it. Thread-safe.
///
/// A port that goes down ends no link by itself. A cable that is plugged again, or a switch that
/// restarts one of its ports, is back within what the NIC's retries bridge (`timeout`,
/// `retry_count`), and breaking the link would fail transfers that are merely late. If the port stays
/// down the link breaks without our doing: requests that the NIC gives up fail, a NIC that gives none
/// up is seen through by the link's probes and by `stall_limit`, and its owner makes the link again.
/// What is done here is to count, to log, and to name the port in the reason of a link that breaks.
class port_record {
 public:
  using clock = std::chrono::steady_clock;

  struct view {
    bool up{true};
    std::uint32_t downs{0};    ///< how often it went down
    std::uint32_t changes{0};  ///< of its addresses and partition keys
  };

  /// True: it is news. Some drivers say everything twice.
  bool note(ibv_event_type what, clock::time_point now);
  [[nodiscard]] view now() const;
  /// What a link that was made at `since` may have broken of: "down for 2100 ms" (and still is), "down
  /// 2100 ms ago and up again"; empty if it was up all the time.
  [[nodiscard]] std::string trouble_since(clock::time_point since, clock::time_point now) const;

 private:
  mutable std::mutex mutex_;
  view view_;
  std::optional<clock::time_point> went_down_;  ///< last
};

/// "went down", "is up again", "has other addresses (GIDs)"; empty for events that are not a port's.
[[nodiscard]] std::string port_event_text(ibv_event_type what);

}  // namespace troupe::transport::rdma
