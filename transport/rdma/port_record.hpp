#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// The events that a device has reported for one of its ports since this process opened it.
/// Thread-safe.
///
/// A port that goes down does not break its links. A replugged cable or a restarted switch port is
/// back before the NIC's retries run out (`timeout`, `retry_count`), and breaking the link would
/// fail transfers that are merely late. If the port stays down the link breaks anyway: the NIC
/// gives up and its requests fail, or the link's probes and `stall_limit` catch a NIC that does not
/// give up. The owner then makes the link again. Port events are only counted, logged, and named in
/// the reason of a broken link.
class port_record {
 public:
  using clock = std::chrono::steady_clock;

  struct view {
    bool up{true};
    std::uint32_t downs{0};    ///< how often it went down
    std::uint32_t changes{0};  ///< changes of its addresses and partition keys
  };

  /// Returns whether the event changed the record: some drivers report every event twice.
  bool note(ibv_event_type what, clock::time_point now);
  [[nodiscard]] view now() const;
  /// Why a link made at `since` may have broken: "down for 2100 ms" (and still down), "down 2100 ms
  /// ago and up again". Empty if the port was up all the time.
  [[nodiscard]] std::string trouble_since(clock::time_point since, clock::time_point now) const;

 private:
  mutable std::mutex mutex_;
  view view_;
  std::optional<clock::time_point> went_down_;  ///< the last time
};

/// "went down", "is up again", "has other addresses (GIDs)"; empty for other events.
[[nodiscard]] std::string port_event_text(ibv_event_type what);

}  // namespace troupe::transport::rdma
