#include <algorithm>
#include <string>
#include <tuple>

#include "victim.hpp"
#include "window_gate.hpp"

// What a link asks of its NIC about memory windows, and what it tells the peer and its owner while
// the NIC is slow or fails. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using way = window_gate::way;

class rdma_slow_windows : public ::testing::Test {
 protected:
  rdma_slow_windows() { gate_.reset(); }
  ~rdma_slow_windows() override { gate_.reset(); }

  /// Lets a NIC be slow for as long as the test takes.
  static void patiently(rdma_options& options) {
    options.fence_patience = contract::longer_than_any_wait;
  }
  void let_all_go() {
    while (gate_.kept() != 0) gate_.let_one_go();
  }
  /// The last request to bind a window with `key`.
  [[nodiscard]] window_gate::request bound(std::uint32_t key) const {
    const auto asked = gate_.asked();
    const auto at = std::find_if(asked.rbegin(), asked.rend(), [&](const auto& one) {
      return one.what == IBV_WR_BIND_MW && one.key == key;
    });
    return at == asked.rend() ? window_gate::request{} : *at;
  }
  /// The bind requests of each queue pair, from the first byte to the last.
  [[nodiscard]] std::vector<window_gate::request> binds() const {
    auto asked = gate_.asked();
    std::erase_if(asked, [](const auto& one) { return one.what != IBV_WR_BIND_MW; });
    std::ranges::sort(asked, {}, [](const auto& one) {
      return std::tuple{one.queue_pair, one.address};
    });
    return asked;
  }

  window_gate& gate_{window_gate::of_this_process()};
};

}  // namespace

TEST_F(rdma_slow_windows, a_fence_is_answered_when_every_window_is_shut_and_not_before) {
  victim v{patiently};
  v.peer.confirms = true;
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  gate_.set(IBV_WR_LOCAL_INV, way::keep);
  ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
  ASSERT_TRUE(v.until([&] { return gate_.kept() == hostile_peer::lanes; }));
  for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
    EXPECT_FALSE(v.comes_within(100ms, [&] { return v.sink->is_quiescent(t1); }))
        << "lane " << lane << " is still open";
    EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, lane, given.address, given.key_at(0, lane), 64),
              IBV_WC_SUCCESS);
    EXPECT_EQ(v.wire->fence(t1), fence_state::pending) << "asked once more";
    const auto gone = v.place->deregister(v.region);
    ASSERT_FALSE(gone) << "the peer still reaches it";
    EXPECT_EQ(gone.error().code, errc::overloaded);
    gate_.let_one_go();
  }
  ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
  EXPECT_EQ(v.wire->fence(t1), fence_state::quiescent);
  EXPECT_FALSE(v.sink->is_broken());
  EXPECT_TRUE(v.place->deregister(v.region));
}

TEST_F(rdma_slow_windows, the_peer_hears_of_a_grant_when_every_window_of_it_is_bound) {
  victim v{patiently};
  gate_.set(IBV_WR_BIND_MW, way::keep);
  const auto id = v.wire->grant(v.region, {{0, 4096, 0, 1}}, access::write, t1).value().id;
  ASSERT_EQ(gate_.kept(), hostile_peer::lanes);
  for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
    EXPECT_FALSE(v.comes_within(100ms, [&] { return v.peer.keys.contains(id); }))
        << "it would be refused on lane " << lane;
    gate_.let_one_go();
  }
  ASSERT_TRUE(v.until([&] { return v.peer.keys.contains(id); }));
  const auto& given = v.peer.keys[id];
  for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
    EXPECT_EQ(v.peer.run(IBV_WR_RDMA_WRITE, lane, given.address, given.key_at(0, lane), 64),
              IBV_WC_SUCCESS);
  }
}

TEST_F(rdma_slow_windows, what_is_fenced_while_it_is_being_opened_is_shut_and_never_told) {
  for (const bool confirmed_before : {true, false}) {
    gate_.reset();
    victim v{patiently};
    v.peer.confirms = true;
    gate_.set(IBV_WR_BIND_MW, way::keep);
    const auto id = v.wire->grant(v.region, {{0, 4096, 0, 1}}, access::write, t1).value().id;
    ASSERT_EQ(gate_.kept(), hostile_peer::lanes);
    ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
    if (confirmed_before) {
      ASSERT_TRUE(v.until([&] { return v.peer.revocations == 1; }));
      EXPECT_FALSE(v.comes_within(100ms, [&] { return v.sink->is_quiescent(t1); }));
    }
    let_all_go();
    ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
    EXPECT_FALSE(v.comes_within(100ms, [&] { return v.peer.keys.contains(id); }));
    EXPECT_FALSE(v.sink->is_broken());
    // As if the peer had guessed the key.
    const auto window = binds().front();
    for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
      v.peer.post(IBV_WR_RDMA_WRITE, lane, window.address, window.key, 64);
    }
    EXPECT_TRUE(v.until([&] { return v.peer.statuses.size() == hostile_peer::lanes; }));
    for (const auto status : v.peer.statuses) EXPECT_NE(status, IBV_WC_SUCCESS);
    EXPECT_TRUE(v.untouched(0, victim::size));
  }
}

// Soft-RoCE does not hold a peer to the range of a window (windows_test.cpp); hardware does. So
// this test examines the requests to the NIC, not only their effect.
TEST_F(rdma_slow_windows, windows_open_what_was_granted_and_no_byte_or_right_beside_it) {
  const std::vector<extent> extents{{8192, 100, 0, 1}, {200'000, 50, 1000, 3}};
  constexpr std::uint64_t begin = 8192;
  constexpr std::uint64_t end = 202'050;
  for (const std::uint64_t piece : {std::uint64_t{0}, std::uint64_t{65'536}}) {
    for (const auto rights : {access::read, access::write, access::read_write}) {
      gate_.reset();
      victim v{[&](rdma_options& options) { options.max_registration = piece; }};
      const auto given = v.open(extents, rights, t1);
      const auto windows = binds();
      ASSERT_EQ(windows.size(), hostile_peer::lanes * (piece == 0 ? 1 : 4));
      const auto per_lane = windows.size() / hostile_peer::lanes;
      const auto base = reinterpret_cast<std::uintptr_t>(v.memory.data());
      for (std::size_t i = 0; i < windows.size(); ++i) {
        const auto& here = windows[i];
        const auto within = i % per_lane;
        EXPECT_EQ(here.queue_pair, windows[i - within].queue_pair);
        EXPECT_EQ(here.address,
                  within == 0 ? base + begin : windows[i - 1].address + windows[i - 1].bytes);
        if (within + 1 == per_lane) {
          EXPECT_EQ(here.address + here.bytes, base + end);
        }
        unsigned wanted = 0;
        if (permits(rights, access::write)) wanted |= IBV_ACCESS_REMOTE_WRITE;
        if (permits(rights, access::read)) wanted |= IBV_ACCESS_REMOTE_READ;
        EXPECT_EQ(here.rights, wanted);
      }
      EXPECT_NE(windows.front().queue_pair, windows.back().queue_pair);
      EXPECT_EQ(given.keys.size(), windows.size());
      for (const auto key : given.keys) EXPECT_NE(bound(key).bytes, 0U);
    }
  }
}

TEST_F(rdma_slow_windows, a_nic_that_does_not_shut_a_window_loses_the_link_and_nothing_lands) {
  for (const auto fails : {way::refuse, way::spoil}) {
    gate_.reset();
    victim v{patiently};
    v.peer.confirms = true;
    const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
    gate_.set(IBV_WR_LOCAL_INV, fails);
    ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
    ASSERT_TRUE(v.until([&] { return v.sink->is_quiescent(t1); }));
    std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
    ASSERT_TRUE(v.until([&] { return v.sink->is_broken(); }));
    EXPECT_EQ(v.sink->broken->code, errc::link_broken) << to_string(*v.sink->broken);
    if (fails == way::refuse) {
      EXPECT_NE(v.sink->broken->message.find("refused a request about a memory window"),
                std::string::npos)
          << to_string(*v.sink->broken);
    }
    for (std::size_t lane = 0; lane < hostile_peer::lanes; ++lane) {
      v.peer.post(IBV_WR_RDMA_WRITE, lane, given.address, given.key_at(0, lane), 4096);
    }
    v.look_for(100ms);
    EXPECT_TRUE(v.untouched(0, victim::size));
  }
}

TEST_F(rdma_slow_windows, a_nic_that_binds_no_window_loses_the_link_and_nothing_is_open) {
  victim v;
  gate_.set(IBV_WR_BIND_MW, way::refuse);
  const auto refused = v.wire->grant(v.region, {{0, 4096, 0, 1}}, access::write, t1);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::link_broken) << to_string(refused.error());
  EXPECT_TRUE(v.sink->is_broken());
  EXPECT_EQ(v.wire->fence(t1), fence_state::quiescent);
  EXPECT_TRUE(v.place->deregister(v.region));
}

}  // namespace troupe::transport::rdma
