#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "two_nodes.hpp"

// What happens when a port goes down: briefly, for long, and seen from either end of the wire. In
// the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using namespace std::chrono_literals;
using contract::end;
using contract::t1;

void wire(const std::string& words) {
  const char* program = std::getenv("TROUPE_VERBS_WIRE");
  ASSERT_NE(program, nullptr);
  ASSERT_EQ(std::system((std::string{program} + " " + words).c_str()), 0) << words;
}

/// The sentences that an endpoint has reported.
struct notices {
  void add(const std::string& sentence) {
    const std::lock_guard lock{mutex};
    said.push_back(sentence);
  }
  [[nodiscard]] bool has(const std::string& part) {
    const std::lock_guard lock{mutex};
    return std::ranges::any_of(
        said, [&](const auto& one) { return one.find(part) != std::string::npos; });
  }
  std::mutex mutex;
  std::vector<std::string> said;
};

struct notices_of_both {
  notices said_a, said_b;
};

/// Two nodes and their notices, which outlive them.
class joined : public notices_of_both, public two_nodes {
 public:
  static constexpr std::uint64_t size = std::uint64_t{4} << 20;

  /// `timeout` as in `rdma_options`: with 6 retries, 14 bridges half a second, 18 seven seconds.
  explicit joined(std::uint8_t timeout, std::chrono::milliseconds probe_interval = 500ms) {
    make(a, said_a, 'a', timeout, probe_interval);
    make(b, said_b, 'b', timeout, probe_interval);
    join();
  }
  ~joined() {
    wire("lose 0 0");
    wire("restore 0 a");
    wire("restore 0 b");
  }
  /// Grants a write access to all of b's region; returns once a can write.
  void grant() {
    auto given = b.wire->grant(b.region, {{0, size, 0, 1}}, access::write, t1);
    ASSERT_TRUE(given) << to_string(given.error());
    granted_ = std::make_shared<const remote_grant>(std::move(*given));
    write();
    ASSERT_TRUE(until([&] { return b.sink->framed() == 1 && a.sink->completed() == 1; }));
    a.sink->forget();
    b.sink->forget();
    contract::fill(a.memory, 77);
  }
  /// Writes everything from a to b, with a frame behind it.
  void write() {
    batch work{.id = batch_id{++last_},
               .transfer = t1,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back(
        {a.region, granted_, {{.local_offset = 0, .remote_offset = 0, .length = size}}});
    const auto ok = a.wire->post(std::move(work));
    ASSERT_TRUE(ok) << to_string(ok.error());
  }

 private:
  static void make(end& e, notices& said, char side, std::uint8_t timeout,
                   std::chrono::milliseconds probe_interval) {
    auto options = two_nodes::options_of(side);
    options.rdma.timeout = timeout;
    options.rdma.probe_interval = probe_interval;
    options.notice = [&said](const std::string& sentence) { said.add(sentence); };
    two_nodes::create(e, std::move(options));
    e.region = e.place->allocate(size, "test").value();
    e.memory = e.place->bytes(e.region).value();
    contract::fill(e.memory, static_cast<std::uint32_t>(side));
  }
  std::uint64_t last_{0};
  std::shared_ptr<const remote_grant> granted_;
};

}  // namespace

TEST(rdma_port_events, a_transfer_survives_the_far_port_going_down_for_a_moment_and_it_is_told) {
  // While its own port is down, Soft-RoCE fails a send at once, where a NIC waits. So b sends
  // nothing.
  joined two{18, 10s};
  two.grant();
  wire("cut 0 b");
  two.write();
  std::this_thread::sleep_for(100ms);
  EXPECT_EQ(two.b.sink->framed(), 0U);
  wire("restore 0 b");
  ASSERT_TRUE(two.until([&] { return two.b.sink->framed() == 1 && two.a.sink->completed() == 1; }));
  EXPECT_FALSE(two.a.sink->completions[0].failure);
  EXPECT_TRUE(std::ranges::equal(two.a.memory, two.b.memory));
  EXPECT_FALSE(two.a.sink->is_broken());
  EXPECT_TRUE(two.until([&] { return two.said_b.has("rxe0b port 1 went down"); }));
  ASSERT_TRUE(two.until([&] {
    const auto lanes = two.b.wire->stats().by_lane;
    return lanes.size() == 2 && lanes[0].port_downs == 1 && lanes[0].port_up;
  }));
}

TEST(rdma_port_events, a_link_that_breaks_of_its_own_port_says_so_soon) {
  joined two{14};
  wire("cut 0 a");
  ASSERT_TRUE(two.until([&] { return two.a.sink->is_broken(); }));
  EXPECT_NE(two.a.sink->broken->message.find("rxe0a port 1 was down for"), std::string::npos)
      << to_string(*two.a.sink->broken);
  EXPECT_TRUE(two.until([&] { return two.said_a.has("RDMA device rxe0a port 1 went down"); }));
  wire("restore 0 a");
  EXPECT_TRUE(two.until([&] { return two.said_a.has("RDMA device rxe0a port 1 is up again"); }));
}

TEST(rdma_port_events, other_addresses_of_a_port_are_told_and_break_no_link) {
  joined two{20};
  ASSERT_EQ(std::system("ip address add 10.78.0.1/24 dev wire0a"), 0);
  EXPECT_TRUE(two.until([&] { return two.said_a.has("rxe0a port 1 has other addresses"); }));
  EXPECT_TRUE(two.until([&] { return two.a.wire->stats().by_lane.at(0).port_changes > 0; }));
  two.grant();
  EXPECT_EQ(std::system("ip address del 10.78.0.1/24 dev wire0a"), 0);
  EXPECT_FALSE(two.a.sink->is_broken());
}

TEST(rdma_port_events, what_a_port_sends_again_since_a_link_was_opened_is_in_its_lanes) {
  joined two{18, 10s};
  const auto retries = [&] { return two.a.wire->stats().by_lane.at(0).port_retries; };
  ASSERT_TRUE(retries());
  two.grant();
  wire("lose 0 1");
  for (int i = 0; i < 20 && *retries() == 0; ++i) {
    ASSERT_NO_FATAL_FAILURE(two.write());
    ASSERT_TRUE(two.until([&] { return two.a.sink->completed() == std::size_t(i) + 1; }));
    ASSERT_FALSE(two.a.sink->completions.back().failure);
  }
  wire("lose 0 0");
  EXPECT_GT(*retries(), 0U);
  const auto lanes = two.a.wire->stats().by_lane;
  EXPECT_EQ(lanes.at(0).port_retries, lanes.at(1).port_retries) << "it is the port's, not a lane's";
  // A new link does not inherit the old one's history.
  for (auto* e : {&two.a, &two.b}) {
    e->wire->close();
    e->sink = std::make_shared<contract::recorder>();
  }
  two.join();
  EXPECT_EQ(retries(), 0U);
}

}  // namespace troupe::transport::rdma
