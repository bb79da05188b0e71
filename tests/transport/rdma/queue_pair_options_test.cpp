#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/rdma/queue_pair.hpp"
#include "troupe/transport/rdma/wire.hpp"

#include "open_device.hpp"
#include "two_nodes.hpp"
#include "verbs_calls.hpp"

// The configured options, and those that the ends agreed on, reach the device for every queue pair
// of a link. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using contract::end;
using contract::t1;
/// Device and queue pair number.
using pair_id = std::pair<std::string, std::uint32_t>;

constexpr std::uint64_t size = std::uint64_t{1} << 20;

class rdma_queue_pair_options : public ::testing::Test {
 protected:
  void SetUp() override { calls_.remember(); }
  void TearDown() override { calls_.reset(); }

  /// Expects that the pair changed to that state at least once, with the same attributes each time.
  static void expect_all(const std::vector<verbs_calls::change>& changes, const pair_id& pair,
                         ibv_qp_state state, int what,
                         const std::function<void(const ibv_qp_attr&)>& check) {
    int times = 0;
    for (const auto& change : changes) {
      if (pair_id{change.device, change.queue_pair} != pair || change.to.qp_state != state)
        continue;
      SCOPED_TRACE(pair.first + " queue pair " + std::to_string(pair.second) + ", to state " +
                   std::to_string(state));
      EXPECT_EQ(change.answer, 0);
      EXPECT_EQ(change.what & what, what) << "not all of it counts";
      check(change.to);
      ++times;
    }
    EXPECT_GE(times, 1) << pair.first << " queue pair " << pair.second << " never went to state "
                        << state;
  }
  /// All queue pairs of that end: first the one for messages, then the lanes'.
  static std::vector<pair_id> pairs_of(const end& e, char side) {
    const auto body = offer_body::decode(e.wire->offer().payload).value();
    const auto device = std::string{"rxe0"} + side;
    std::vector<pair_id> all{{device, body.messages.number}};
    for (std::size_t i = 0; i < body.lanes; ++i) all.emplace_back(device, body.lane[i].number);
    EXPECT_EQ(all.size(), 3U);
    return all;
  }
  void expect_path_mtu(ibv_mtu wanted) {
    const auto changes = calls_.changes();
    for (const char side : {'a', 'b'}) {
      for (const auto& pair : pairs_of(side == 'a' ? nodes_.a : nodes_.b, side)) {
        expect_all(changes, pair, IBV_QPS_RTR, IBV_QP_PATH_MTU,
                   [&](const ibv_qp_attr& to) { EXPECT_EQ(to.path_mtu, wanted); });
      }
    }
  }

  verbs_calls& calls_{verbs_calls::of_this_process()};
  two_nodes nodes_;
};

/// Gives one end of a wire another MTU for as long as this object lives.
class other_mtu {
 public:
  other_mtu(char side, int mtu) : port_{std::string{"wire0"} + side} {
    std::ifstream{"/sys/class/net/" + port_ + "/mtu"} >> before_;
    EXPECT_GT(before_, mtu);
    set(mtu);
  }
  ~other_mtu() { set(before_); }
  other_mtu(const other_mtu&) = delete;
  other_mtu& operator=(const other_mtu&) = delete;

 private:
  void set(int mtu) const {
    const auto words = "ip link set " + port_ + " mtu " + std::to_string(mtu);
    EXPECT_EQ(std::system(words.c_str()), 0) << words;
  }
  const std::string port_;
  int before_{0};
};

/// Writes all memory of one end to the other's.
void write_all(two_nodes& nodes, end& from, end& to) {
  auto given = to.wire->grant(to.region, {{0, size, 0, 1}}, access::write, t1);
  ASSERT_TRUE(given) << to_string(given.error());
  const auto granted = std::make_shared<const remote_grant>(std::move(*given));
  contract::fill(from.memory, 11);
  contract::fill(to.memory, 12);
  batch work{.id = batch_id{1}, .transfer = t1, .dir = direction::write, .pieces = {}, .frame = {}};
  work.frame.assign(1, std::byte{'x'});
  work.pieces.push_back(
      {from.region, granted, {{.local_offset = 0, .remote_offset = 0, .length = size}}});
  const auto ok = from.wire->post(std::move(work));
  ASSERT_TRUE(ok) << to_string(ok.error());
  ASSERT_TRUE(nodes.until([&] { return to.sink->framed() == 1; }));
  EXPECT_TRUE(std::ranges::equal(from.memory, to.memory));
}

}  // namespace

TEST_F(rdma_queue_pair_options, what_is_configured_is_set_for_every_queue_pair_of_each_end) {
  std::map<char, rdma_options> wanted;
  for (const char side : {'a', 'b'}) {
    auto options = two_nodes::options_of(side);
    auto& rdma = options.rdma;
    const std::uint8_t more = side == 'a' ? 0 : 1;  // each end has its own
    rdma.traffic_class = static_cast<std::uint8_t>(106 - 2 * more);
    rdma.service_level = static_cast<std::uint8_t>(3 + more);
    rdma.hop_limit = static_cast<std::uint8_t>(2 + more);
    rdma.timeout = static_cast<std::uint8_t>(19 + 2 * more);
    rdma.retry_count = static_cast<std::uint8_t>(5 - more);
    rdma.gid_index = 0;  // by default it chooses 1
    wanted[side] = rdma;
    two_nodes::create(side == 'a' ? nodes_.a : nodes_.b, std::move(options));
  }
  nodes_.join();
  const auto changes = calls_.changes();
  for (const auto& [side, rdma] : wanted) {
    for (const auto& pair : pairs_of(side == 'a' ? nodes_.a : nodes_.b, side)) {
      expect_all(changes, pair, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT,
                 [&](const ibv_qp_attr& to) {
                   EXPECT_EQ(to.pkey_index, rdma.pkey_index);
                   EXPECT_EQ(to.port_num, 1);
                 });
      expect_all(changes, pair, IBV_QPS_RTR, IBV_QP_AV, [&](const ibv_qp_attr& to) {
        const auto& way = to.ah_attr;
        EXPECT_EQ(way.sl, rdma.service_level);
        EXPECT_EQ(way.port_num, 1);
        EXPECT_EQ(way.is_global, 1) << "else the rest does not count";
        EXPECT_EQ(way.grh.traffic_class, rdma.traffic_class);
        EXPECT_EQ(way.grh.hop_limit, rdma.hop_limit);
        EXPECT_EQ(way.grh.sgid_index, rdma.gid_index);
      });
      expect_all(changes, pair, IBV_QPS_RTS, IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT,
                 [&](const ibv_qp_attr& to) {
                   EXPECT_EQ(to.timeout, rdma.timeout);
                   EXPECT_EQ(to.retry_cnt, rdma.retry_count);
                 });
    }
  }
}

TEST_F(rdma_queue_pair_options, a_partition_key_is_set_where_the_device_takes_it) {
  const auto here = open_device("rxe0a");
  const auto completions = completion_queue::create(here, 16).value();
  const auto pair = queue_pair::create(here, *completions, {.sends = 8, .receives = 8}).value();
  ASSERT_TRUE(pair->reset({.pkey_index = 1})) << "Soft-RoCE takes any, and does not look at it";
  expect_all(calls_.changes(), {"rxe0a", pair->offer().number}, IBV_QPS_INIT, IBV_QP_PKEY_INDEX,
             [](const ibv_qp_attr& to) { EXPECT_EQ(to.pkey_index, 1); });
}

TEST_F(rdma_queue_pair_options, a_partition_key_that_the_port_does_not_have_is_refused_by_name) {
  auto options = two_nodes::options_of('a');
  options.rdma.pkey_index = 1;
  two_nodes::create(nodes_.a, std::move(options));
  const auto refused = nodes_.a.place->open(backend_kind::rdma,
                                            {.peer = incarnation{'b'}, .lanes = 2}, nodes_.a.sink);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::backend_unavailable);
  const auto& said = refused.error().message;
  EXPECT_NE(said.find("rxe0a: port 1 has no partition key at pkey_index 1"), std::string::npos)
      << said;
}

TEST_F(rdma_queue_pair_options, the_path_mtu_is_that_of_both_ends_if_they_have_the_same) {
  for (const char side : {'a', 'b'}) {
    two_nodes::create(side == 'a' ? nodes_.a : nodes_.b, two_nodes::options_of(side));
  }
  nodes_.join();
  expect_path_mtu(IBV_MTU_4096);
}

/// Which end has the smaller MTU. Its port accepts no larger packet, so a sender that ignored the
/// MTU would deliver nothing.
class rdma_path_mtu : public rdma_queue_pair_options, public ::testing::WithParamInterface<char> {};

TEST_P(rdma_path_mtu, the_path_mtu_is_the_smaller_one_of_both_ends) {
  const other_mtu small{GetParam(), 1500};
  for (const char side : {'a', 'b'}) {
    auto& e = side == 'a' ? nodes_.a : nodes_.b;
    two_nodes::create(e, two_nodes::options_of(side));
    e.region = e.place->allocate(size, "test").value();
    e.memory = e.place->bytes(e.region).value();
  }
  nodes_.join();
  expect_path_mtu(IBV_MTU_1024);
  if (HasFailure()) return;
  write_all(nodes_, nodes_.a, nodes_.b);
  write_all(nodes_, nodes_.b, nodes_.a);
}

INSTANTIATE_TEST_SUITE_P(smaller_at, rdma_path_mtu, ::testing::Values('a', 'b'),
                         [](const auto& one) { return std::string{one.param}; });

}  // namespace troupe::transport::rdma
