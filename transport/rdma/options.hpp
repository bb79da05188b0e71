#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace troupe::transport {

/// How the rdma backend chooses and sets up its devices. The defaults suit RoCE v2 in a network
/// without long outages.
struct rdma_options {
  /// "auto": the best port that is up (`choose_places`). "mlx5_0,mlx5_1": these, in this order;
  /// lanes go over all of them. "^mlx5_2,mlx5_3": auto, but none of these.
  std::string device{"auto"};
  /// For "auto" and "^...": PCI address of the GPU whose memory is moved ("0000:17:00.0"); among
  /// equally fast devices the nearest to it is chosen. Empty: host memory of the processors that
  /// this process may run on.
  std::string gpu{};
  std::uint8_t port{0};  ///< of the device, from 1; 0 selects its first port that is up
  /// Index into the port's table of addresses; -1: RoCE v2 before v1, IPv4 before IPv6 before link
  /// local.
  std::int32_t gid_index{-1};
  std::uint8_t traffic_class{0};
  std::uint8_t service_level{0};
  std::uint16_t pkey_index{0};
  std::uint8_t hop_limit{64};
  /// A packet that is not answered within 4.096 us * 2^`timeout` (16: 268 ms) is sent again, ...
  /// Congestion or a busy host must not look like loss: needless retransmission costs more.
  std::uint8_t timeout{16};
  /// ... up to `retry_count` times (6: 1.9 s in all); then the link breaks with `peer_lost`. At
  /// most 7, which Soft-RoCE takes as "for ever".
  std::uint8_t retry_count{6};
  /// The most bytes in flight on all lanes of a link: more than the wire holds, but few enough that
  /// the last byte is answered within `timeout` and that a fence does not wait long for requests
  /// that cannot be recalled.
  std::uint64_t window_bytes{std::uint64_t{8} << 20};
  /// How often an idle link probes its peer.
  std::chrono::milliseconds probe_interval{500};
  /// The link breaks if the NIC completes none of a lane's requests for this long: some NICs stop
  /// silently when their port goes down.
  std::chrono::milliseconds stall_limit{5000};
  /// How long a fence waits for the peer to confirm. No request of a peer that keeps to the
  /// protocol is refused in that time. Afterwards the windows are invalidated, or, without windows,
  /// the queue pairs are destroyed.
  std::chrono::milliseconds fence_patience{1000};
  /// Whether to grant through memory windows if every device of the link has them (type 2). The NIC
  /// then admits a peer only to what it was granted, and a fence ends that access whatever the peer
  /// does. Without windows a grant opens its whole region until the link ends, and a fence that the
  /// peer does not confirm breaks the link.
  bool memory_windows{true};
  /// The most bytes per registration: a larger region is registered in pieces of this size (rounded
  /// down to pages of 4 KiB). 0: as much as the device accepts. Never more than 1 GiB with memory
  /// windows.
  std::uint64_t max_registration{0};
  /// Whether devices may write to registered memory in any order that suits the PCIe bus
  /// (IBV_ACCESS_RELAXED_ORDERING). A device that refuses is not asked again. It is safe here: a
  /// completion still guarantees that its data and all earlier data are in memory (ibv_reg_mr(3),
  /// ORDERING SEMANTICS), and nobody looks at memory before its completion. The target of a write
  /// is notified by immediates, one on each lane behind the lane's writes, which complete on the
  /// same NIC that wrote; the initiator of a read waits for its completion. perftest requests it by
  /// default, NCCL and Mooncake wherever the library knows it. Memory windows are bound without it:
  /// ibv_bind_mw(3) has no such right, and a window that a device refuses to bind breaks a link.
  bool relaxed_ordering{true};

  friend bool operator==(const rdma_options&, const rdma_options&) = default;
};

}  // namespace troupe::transport
