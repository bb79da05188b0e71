#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include <infiniband/verbs.h>

namespace troupe::transport::rdma {

/// Stands between the links of this process and their NICs. Requests about memory windows can be
/// inspected, delayed as by a slow NIC, refused, or spoiled so that the NIC fails them. Everything
/// else passes. A delayed request must be let go or forgotten before its queue pair ends, and
/// nothing else may be posted behind it.
class window_gate {
 public:
  enum class way : std::uint8_t { pass, keep, refuse, spoil };
  struct request {
    ibv_wr_opcode what{IBV_WR_BIND_MW};
    std::uint32_t queue_pair{0};
    std::uint32_t key{0};
    std::uint64_t address{0}, bytes{0};
    unsigned rights{0};
  };

  static window_gate& of_this_process();

  /// Sets how IBV_WR_BIND_MW or IBV_WR_LOCAL_INV requests are treated from now on.
  void set(ibv_wr_opcode what, way with);
  /// All requests since `reset`.
  [[nodiscard]] std::vector<request> asked() const;
  /// How many calls are delayed. Each is for one lane, and may be about several windows.
  [[nodiscard]] std::size_t kept() const;
  /// Passes the oldest delayed call to its NIC.
  void let_one_go();
  /// Lets everything pass, and forgets the delayed calls.
  void reset();

  /// Watches a device that was opened.
  void watch(ibv_context* opened);

 private:
  struct call {
    ibv_qp* pair{nullptr};
    std::vector<ibv_send_wr> works;
    std::vector<std::uint32_t> keys;  ///< of the windows to be bound, as they were at the time
  };
  static int post(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad);
  int take(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad);
  [[nodiscard]] int pass(ibv_qp* pair, ibv_send_wr* works, ibv_send_wr** bad) const;

  mutable std::mutex mutex_;
  std::map<ibv_context*, decltype(ibv_context_ops::post_send)> originals_;
  std::map<ibv_wr_opcode, way> ways_;
  std::vector<request> asked_;
  std::deque<call> kept_;
};

}  // namespace troupe::transport::rdma
