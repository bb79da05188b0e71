#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>

#include "two_nodes.hpp"

// A fence, or a notice, while bytes are in flight on a wire so slow that they arrive long after
// everything sent over the other one, messages included. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using namespace std::chrono_literals;
using contract::end;
using contract::t1;

constexpr std::uint64_t size = std::uint64_t{2} << 20;
constexpr std::byte next_owners{0x5c};
/// Of each packet. Long compared with what a test does meanwhile, short compared with a NIC's
/// time-out.
constexpr auto delay = 200ms;

void slow_down(std::chrono::milliseconds by) {
  const char* program = std::getenv("TROUPE_VERBS_WIRE");
  ASSERT_NE(program, nullptr);
  const auto words = std::string{program} + " slow 1 " +
                     (by == 0ms ? std::string{"0"} : std::to_string(by.count()) + "ms");
  ASSERT_EQ(std::system(words.c_str()), 0) << words;
}

/// Two nodes with a link of two lanes, one over each wire. Requests of a that the NIC does not take
/// at once wait until the test polls. The parameter: whether the nodes grant through memory
/// windows.
class rdma_slow_rail : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    make(a, 'a', 0);
    make(b, 'b', 1);
    nodes_.polls_a = true;
    nodes_.join();
  }
  void TearDown() override {
    for (const auto& lane : a.wire->stats().by_lane) EXPECT_GT(lane.bytes, 0U) << lane.device;
    slow_down(0ms);
  }

  /// Starts a batch from or to all of b's region; an earlier batch has shown that a may.
  void start(direction dir, std::vector<std::byte> frame = {}) {
    const auto rights = dir == direction::write ? access::write : access::read;
    const auto granted = std::make_shared<const remote_grant>(
        b.wire->grant(b.region, {{0, size, 0, 1}}, rights, t1).value());
    post(dir, granted, {});
    ASSERT_TRUE(nodes_.until([&] { return a.sink->completed() == 1; }));
    slow_down(delay);
    std::memset(a.memory.data(), 0xaa, size);
    std::memset(b.memory.data(), 0xbb, size);
    post(dir, granted, std::move(frame));
  }
  /// Fences at `here`; then the memory belongs to someone else.
  void fence_and_reuse(end& here) {
    const auto answer = here.wire->fence(t1);
    ASSERT_TRUE(answer == fence_state::quiescent ||
                nodes_.until([&] { return here.sink->is_quiescent(t1); }));
    std::memset(here.memory.data(), static_cast<int>(next_owners), size);
    nodes_.drive_for(4 * delay);  // the bytes in flight have arrived
  }
  /// Expects that requests that had not reached the NIC when they were fenced were never started.
  void expect_rest_given_up(errc code) {
    ASSERT_TRUE(nodes_.until([&] { return a.sink->completed() == 2; }));
    const auto done = a.sink->outcome_of(2);
    ASSERT_TRUE(done.failure);
    EXPECT_EQ(done.failure->code, code) << to_string(*done.failure);
    EXPECT_LT(done.bytes, size);
  }
  [[nodiscard]] static bool only_next_owners(const end& here) {
    return std::ranges::all_of(here.memory, [](std::byte one) { return one == next_owners; });
  }
  [[nodiscard]] static bool none_of_next_owners(const end& there) {
    return std::ranges::find(there.memory, next_owners) == there.memory.end();
  }
  void expect_link_to_be_fine() const {
    EXPECT_FALSE(a.sink->is_broken()) << to_string(*a.sink->broken);
    EXPECT_FALSE(b.sink->is_broken()) << to_string(*b.sink->broken);
  }

  two_nodes nodes_;
  end& a{nodes_.a};
  end& b{nodes_.b};

 private:
  static void make(end& e, char side, std::uint32_t workers) {
    auto options = two_nodes::options_of(side);
    options.rdma.device = std::string{"rxe0"} + side + ",rxe1" + side;
    options.num_workers = workers;
    options.rdma.memory_windows = GetParam();
    options.rdma.fence_patience = contract::longer_than_any_wait;
    two_nodes::create(e, std::move(options));
    e.region = e.place->allocate(size, "test").value();
    e.memory = e.place->bytes(e.region).value();
  }
  void post(direction dir, const std::shared_ptr<const remote_grant>& granted,
            std::vector<std::byte> frame) {
    batch work{.id = batch_id{++last_},
               .transfer = t1,
               .dir = dir,
               .pieces = {},
               .frame = std::move(frame)};
    work.pieces.push_back(
        {a.region, granted, {{.local_offset = 0, .remote_offset = 0, .length = size}}});
    const auto ok = a.wire->post(std::move(work));
    ASSERT_TRUE(ok) << to_string(ok.error());
  }
  std::uint64_t last_{0};
};

}  // namespace

TEST_P(rdma_slow_rail, a_readers_fence_waits_for_the_bytes_that_are_on_their_way_to_it) {
  start(direction::read);
  fence_and_reuse(a);
  EXPECT_TRUE(only_next_owners(a));
  expect_rest_given_up(errc::aborted);
  expect_link_to_be_fine();
}

TEST_P(rdma_slow_rail, a_writers_fence_waits_until_its_memory_is_not_read_any_more) {
  start(direction::write);
  fence_and_reuse(a);
  EXPECT_TRUE(none_of_next_owners(b));
  expect_rest_given_up(errc::aborted);
  expect_link_to_be_fine();
}

TEST_P(rdma_slow_rail, a_targets_fence_waits_for_what_an_honest_writer_has_under_way) {
  start(direction::write);
  fence_and_reuse(b);
  EXPECT_TRUE(only_next_owners(b));
  expect_rest_given_up(errc::grant_revoked);
  expect_link_to_be_fine();
}

TEST_P(rdma_slow_rail, a_targets_fence_waits_for_what_an_honest_reader_has_under_way) {
  start(direction::read);
  fence_and_reuse(b);
  EXPECT_TRUE(none_of_next_owners(a));
  expect_rest_given_up(errc::grant_revoked);
  expect_link_to_be_fine();
}

TEST_P(rdma_slow_rail, a_notice_comes_after_the_bytes_of_every_lane) {
  std::atomic<bool> whole{false};
  b.sink->when_frame = [&](const std::string&) { whole = std::ranges::equal(a.memory, b.memory); };
  start(direction::write, {std::byte{'x'}});
  ASSERT_TRUE(nodes_.until([&] { return b.sink->framed() == 1; }));
  EXPECT_TRUE(whole);
  expect_link_to_be_fine();
}

INSTANTIATE_TEST_SUITE_P(over, rdma_slow_rail, ::testing::Bool(), [](const auto& one) {
  return std::string{one.param ? "windows" : "no_windows"};
});

}  // namespace troupe::transport::rdma
