#pragma once

#include <functional>

#include "hostile_peer.hpp"
#include "pair.hpp"

namespace troupe::transport::rdma {

using namespace std::chrono_literals;
using contract::recorder;
using clock = std::chrono::steady_clock;

inline constexpr transfer_id t1{0x1111};
inline constexpr transfer_id t2{0x2222};
inline constexpr std::byte pattern{0x5c};

/// A node of ours that is linked to a hostile peer.
class victim {
 public:
  static constexpr std::uint64_t size = std::uint64_t{4} << 20;

  explicit victim(const std::function<void(rdma_options&)>& adjust = {}) {
    endpoint_options options;
    options.self = incarnation{0x900d};
    options.rdma.device = "rxe0a";
    options.rdma.fence_patience = 300ms;
    contract::suit_emulation(options.rdma);
    if (adjust) adjust(options.rdma);
    place = endpoint::create(std::move(options)).value();
    region = place->allocate(size, "pool").value();
    memory = place->bytes(region).value();
    std::memset(memory.data(), static_cast<int>(pattern), memory.size());
    wire = place
               ->open(backend_kind::rdma,
                      {.role = link_role::acceptor,
                       .peer = incarnation{0xbad},
                       .lanes = hostile_peer::lanes,
                       .connect_timeout = contract::longer_than_any_wait},
                      sink)
               .value();
    EXPECT_TRUE(wire->connect(peer.offer()));
    peer.join(wire->offer());
    EXPECT_TRUE(until([&] { return sink->ups == 1; }));
  }
  ~victim() { wire->close(); }

  /// Lets the peer poll until `done` returns true. Returns false if it never does.
  bool until(const std::function<bool()>& done) { return comes_within(contract::wait_limit, done); }
  /// Like `until`, with a limit: for checking that something does not happen within it.
  bool comes_within(std::chrono::milliseconds limit, const std::function<bool()>& done) {
    for (const auto last = clock::now() + limit; !done(); peer.look()) {
      if (clock::now() > last) return false;
    }
    return true;
  }
  void look_for(std::chrono::milliseconds time) {
    for (const auto last = clock::now() + time; clock::now() < last;) peer.look();
  }
  /// The keys of a grant that the peer receives.
  grant_keys open(std::vector<extent> extents, access rights, transfer_id transfer) {
    const auto given = wire->grant(region, std::move(extents), rights, transfer).value();
    EXPECT_TRUE(until([&] { return peer.keys.contains(given.id); })) << "no keys came";
    return peer.keys[given.id];
  }
  /// Keeps eight requests of the peer in flight, on all lanes in turn.
  void keep_peer_busy(ibv_wr_opcode what, const grant_keys& given) {
    while (peer.posted - peer.statuses.size() < 8) {
      const auto lane = peer.posted % hostile_peer::lanes;
      peer.post(what, lane, given.address, given.key_at(0, lane), 256 << 10);
    }
  }
  [[nodiscard]] bool untouched(std::uint64_t begin, std::uint64_t end) const {
    return std::all_of(memory.begin() + static_cast<std::ptrdiff_t>(begin),
                       memory.begin() + static_cast<std::ptrdiff_t>(end),
                       [](std::byte b) { return b == pattern; });
  }
  void expect_link_to_break() {
    EXPECT_TRUE(until([&] { return sink->is_broken(); }));
    EXPECT_EQ(sink->broken->code, errc::link_broken) << to_string(*sink->broken);
    EXPECT_NE(sink->broken->message.find("refused"), std::string::npos) << to_string(*sink->broken);
  }

  hostile_peer peer{"rxe0b", incarnation{0xbad}};
  std::unique_ptr<endpoint> place;
  region_id region;
  std::span<std::byte> memory;
  std::shared_ptr<recorder> sink{std::make_shared<recorder>()};
  std::shared_ptr<link> wire;
};

}  // namespace troupe::transport::rdma
