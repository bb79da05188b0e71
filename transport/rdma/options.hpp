#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace troupe::transport {

/// How the rdma backend chooses and sets up its devices. What is left as it is here suits RoCE v2 in
/// a network that does not drop for long.
struct rdma_options {
  /// "auto": the best port that is up (`choose_places`). "mlx5_0,mlx5_1": these, in this order;
  /// lanes go over all of them. "^mlx5_2,mlx5_3": auto, but none of these.
  std::string device{"auto"};
  /// For "auto" and "^...": PCI address of the GPU whose memory is moved ("0000:17:00.0"), so that of
  /// equally fast devices the nearest to it is taken. Empty: host memory, that of the processors that
  /// this process may run on.
  std::string gpu{};
  std::uint8_t port{0};  ///< of the device, from 1; 0: its first port that is up
  /// Index into the port's table of addresses; -1: RoCE v2 before v1, IPv4 before IPv6 before link
  /// local.
  std::int32_t gid_index{-1};
  std::uint8_t traffic_class{0};
  std::uint8_t service_level{0};
  std::uint16_t pkey_index{0};
  std::uint8_t hop_limit{64};
  /// A packet that is not answered within 4.096 us * 2^`timeout` is sent again (16: 268 ms), ...
  /// Congestion or a busy host must not look like loss: what is sent again for nothing costs more.
  std::uint8_t timeout{16};
  /// ... `retry_count` times (6: 1.9 s in all); then the link breaks with `peer_lost`. At most 7, which
  /// means "for ever" to Soft-RoCE.
  std::uint8_t retry_count{6};
  /// Bytes that all lanes of a link have under way at most. More than the wire holds, and little
  /// enough that its end is answered within `timeout`, and that a fence need not wait long for what
  /// cannot be called back.
  std::uint64_t window_bytes{std::uint64_t{8} << 20};
  /// How often an idle link asks whether the peer is there.
  std::chrono::milliseconds probe_interval{500};
  /// A NIC that has not completed any of a lane's requests for so long is not waited for: some stop
  /// silently when their port goes down.
  std::chrono::milliseconds stall_limit{5000};
  /// How long a fence waits for the peer to confirm, so that a peer that keeps to the protocol has
  /// nothing refused under it. Then its windows are shut, or without windows the queue pairs are
  /// destroyed under it.
  std::chrono::milliseconds fence_patience{1000};
  /// Grants go through memory windows where every device of the link has them (type 2): the NIC then
  /// lets a peer into what it was granted, and a fence shuts it out, whatever the peer does. Without
  /// them a grant opens its whole region until the link ends, and a fence that a peer does not
  /// confirm costs the link.
  bool memory_windows{true};
  /// Bytes of a region that are registered at once, at most: a larger region is registered in pieces
  /// of so many bytes (rounded down to pages of 4 KiB). 0: what the device takes; with memory windows
  /// never more than 1 GiB.
  std::uint64_t max_registration{0};
  /// Whether devices are asked to write to registered memory in any order that suits the PCIe bus
  /// (IBV_ACCESS_RELAXED_ORDERING); one that refuses is not asked again. It costs nothing here: a
  /// completion still says that its data and all data before it are in memory (ibv_reg_mr(3), ORDERING
  /// SEMANTICS), and nobody looks at memory that no completion has spoken of. The target of a write is
  /// told by immediates, one on each lane behind the lane's writes, which it takes from completions of
  /// the very NIC that wrote; who reads waits for the completion of the read. perftest asks for it
  /// unless it is told not to, NCCL and Mooncake wherever the library knows it. Memory windows are bound
  /// without: ibv_bind_mw(3) has no such right, and a window that a device refuses to bind costs a link.
  bool relaxed_ordering{true};

  friend bool operator==(const rdma_options&, const rdma_options&) = default;
};

}  // namespace troupe::transport
