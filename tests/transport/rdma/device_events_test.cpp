#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>

#include "played_events.hpp"
#include "two_nodes.hpp"

// Queues and devices that fail, as their devices report it. Soft-RoCE reports no such failure, so
// the tests play the events (played_events.hpp) on real queues. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using contract::end;
using contract::t1;
using ::testing::HasSubstr;

constexpr std::uint64_t size = std::uint64_t{256} << 10;
constexpr const char* device_of_a = "rxe0a";

/// Two nodes with two links. Played events come from a's device.
class rdma_device_events : public ::testing::Test {
 protected:
  void SetUp() override {
    events_.reset();
    make(a, 'a');
    make(b, 'b');
    nodes_.join();
    other_a_.self = a.self;
    other_b_.self = b.self;
    open(other_a_, a, b.self, link_role::initiator);
    open(other_b_, b, a.self, link_role::acceptor);
    contract::join(other_a_, other_b_);
    ASSERT_TRUE(nodes_.until([&] { return other_a_.sink->ups == 1 && other_b_.sink->ups == 1; }));
  }
  void TearDown() override {
    for (const auto* e : {&other_a_, &other_b_}) {
      if (e->wire) e->wire->close();
    }
    events_.reset();
  }

  static void open(end& e, const end& node, incarnation peer, link_role role) {
    e.wire = node.place->open(backend_kind::rdma, options_for(peer, role), e.sink).value();
  }
  static link_options options_for(incarnation peer, link_role role) {
    return {
        .role = role, .peer = peer, .lanes = 2, .connect_timeout = contract::longer_than_any_wait};
  }
  /// Expects bytes from a to b over that link to arrive.
  void expect_works(const end& from, const end& to) {
    auto granted = to.wire->grant(b.region, {{0, size, 0, 1}}, access::write, t1);
    ASSERT_TRUE(granted) << to_string(granted.error());
    batch work{.id = batch_id{++last_},
               .transfer = t1,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back({a.region,
                           std::make_shared<const remote_grant>(std::move(*granted)),
                           {{.local_offset = 0, .remote_offset = 0, .length = size}}});
    const auto framed = to.sink->framed();
    const auto posted = from.wire->post(std::move(work));
    ASSERT_TRUE(posted) << to_string(posted.error());
    EXPECT_TRUE(nodes_.until([&] { return to.sink->framed() == framed + 1; }));
    EXPECT_FALSE(from.sink->is_broken());
    EXPECT_FALSE(to.sink->is_broken());
  }
  void say_of_pair(ibv_event_type what, ibv_qp* pair) {
    ibv_async_event event{};
    event.event_type = what;
    event.element.qp = pair;
    say(event);
  }
  void say(ibv_async_event event) {
    events_.play(device_of_a, event);
    played_events::ring(device_of_a);
  }
  /// The queue pair that was made last: that of the other link's second lane.
  ibv_qp* lane_of_other() { return events_.queue_pairs(device_of_a).back(); }
  void expect_only_other_breaks_of(const std::string& event) {
    ASSERT_TRUE(nodes_.until([&] { return other_a_.sink->is_broken(); })) << event;
    const auto& why = *other_a_.sink->broken;
    EXPECT_EQ(why.code, errc::link_broken);
    EXPECT_THAT(why.message, HasSubstr("RDMA device rxe0a "));
    EXPECT_THAT(why.message, HasSubstr(event));
    EXPECT_TRUE(nodes_.until([&] { return other_b_.sink->is_broken(); })) << "the peer hears of it";
    EXPECT_EQ(events_.acknowledged(), 1U);
    expect_works(a, b);
    EXPECT_TRUE(rdma_of_a().usable) << "the device is none the worse";
  }
  [[nodiscard]] usability rdma_of_a() const {
    for (const auto& backend : a.place->backends()) {
      if (backend.kind == backend_kind::rdma) return backend.state;
    }
    return {};
  }
  [[nodiscard]] std::size_t said(const std::string& part) {
    const std::lock_guard lock{mutex_};
    return static_cast<std::size_t>(std::ranges::count_if(
        said_, [&](const auto& one) { return one.find(part) != std::string::npos; }));
  }
  /// Expects both links of a to have broken for this reason, and its device to carry nothing any
  /// more.
  void expect_device_is_out_of_service(const std::string& why) {
    for (const auto* e : {&a, &other_a_}) {
      ASSERT_TRUE(nodes_.until([&] { return e->sink->is_broken(); }));
      EXPECT_EQ(e->sink->broken->code, errc::link_broken);
      EXPECT_THAT(e->sink->broken->message, HasSubstr("RDMA device rxe0a " + why));
    }
    const auto state = rdma_of_a();
    EXPECT_FALSE(state.usable);
    EXPECT_THAT(state.reason, HasSubstr("RDMA device rxe0a " + why));
    const auto opened =
        a.place->open(backend_kind::rdma, options_for(b.self, link_role::initiator), a.sink);
    ASSERT_FALSE(opened);
    EXPECT_EQ(opened.error().code, errc::backend_unavailable);
    EXPECT_THAT(opened.error().message, HasSubstr(why));
    // Another backend takes over, and reports the reason.
    auto elsewhere = b.place->identity();
    elsewhere.boot_id = "another host";
    const auto choice = a.place->choose(elsewhere, std::nullopt);
    ASSERT_TRUE(choice) << to_string(choice.error());
    EXPECT_EQ(choice->kind, backend_kind::tcp);
    EXPECT_THAT(choice->reason, HasSubstr("rdma: RDMA device rxe0a " + why));
    EXPECT_EQ(said("RDMA device rxe0a " + why), 1U);
  }

  played_events& events_{played_events::of_this_process()};
  std::mutex mutex_;
  std::vector<std::string> said_;  ///< by a
  two_nodes nodes_;
  end& a{nodes_.a};
  end& b{nodes_.b};
  end other_a_, other_b_;

 private:
  void make(end& e, char side) {
    auto options = two_nodes::options_of(side);
    if (side == 'a') {
      options.notice = [this](const std::string& sentence) {
        const std::lock_guard lock{mutex_};
        said_.push_back(sentence);
      };
    }
    two_nodes::create(e, std::move(options));
    e.region = e.place->allocate(size, "test").value();
    e.memory = e.place->bytes(e.region).value();
  }
  std::uint64_t last_{0};
};

}  // namespace

TEST_F(rdma_device_events, a_queue_pair_that_its_nic_gave_up_breaks_its_link_alone) {
  say_of_pair(IBV_EVENT_QP_FATAL, lane_of_other());
  expect_only_other_breaks_of("IBV_EVENT_QP_FATAL");
}

TEST_F(rdma_device_events, so_does_one_that_it_ended_for_a_wrong_request) {
  say_of_pair(IBV_EVENT_QP_REQ_ERR, lane_of_other());
  expect_only_other_breaks_of("IBV_EVENT_QP_REQ_ERR");
}

TEST_F(rdma_device_events, so_does_one_that_it_ended_for_a_forbidden_access) {
  say_of_pair(IBV_EVENT_QP_ACCESS_ERR, lane_of_other());
  expect_only_other_breaks_of("IBV_EVENT_QP_ACCESS_ERR");
}

TEST_F(rdma_device_events, a_completion_queue_that_failed_breaks_its_link_alone) {
  ibv_async_event event{};
  event.event_type = IBV_EVENT_CQ_ERR;
  event.element.cq = events_.completion_queues(device_of_a).back();
  say(event);
  expect_only_other_breaks_of("IBV_EVENT_CQ_ERR");
}

TEST_F(rdma_device_events, what_ends_nothing_is_acknowledged_and_breaks_nothing) {
  std::size_t count = 0;
  for (const auto what : {IBV_EVENT_COMM_EST, IBV_EVENT_SQ_DRAINED, IBV_EVENT_QP_LAST_WQE_REACHED,
                          IBV_EVENT_PATH_MIG, IBV_EVENT_PATH_MIG_ERR}) {
    say_of_pair(what, lane_of_other());
    ++count;
    ASSERT_TRUE(nodes_.until([&] { return events_.acknowledged() == count; })) << what;
  }
  EXPECT_EQ(said("IBV_EVENT_PATH_MIG,"), 1U) << "but not without a word";
  EXPECT_EQ(said("IBV_EVENT_PATH_MIG_ERR,"), 1U);
  expect_works(a, b);
  expect_works(other_a_, other_b_);
}

TEST_F(rdma_device_events, what_is_said_of_a_queue_pair_that_is_just_destroyed_is_acknowledged) {
  events_.acknowledge_late();
  say_of_pair(IBV_EVENT_QP_FATAL, lane_of_other());
  ASSERT_TRUE(nodes_.until([&] { return events_.waiting() == 0; })) << "nobody asks";
  // The destroying thread holds the link's lock and waits, so acknowledging must not need that lock
  // first.
  other_a_.wire->close();
  EXPECT_TRUE(nodes_.until([&] { return events_.acknowledged() == 1; }));
  EXPECT_FALSE(other_a_.sink->is_broken()) << "it was closed before";
  expect_works(a, b);
}

TEST_F(rdma_device_events, a_device_that_failed_is_out_of_service_and_says_so) {
  ibv_async_event event{};
  event.event_type = IBV_EVENT_DEVICE_FATAL;
  events_.play(device_of_a, event);
  say(event);  // some drivers report everything twice
  expect_device_is_out_of_service("failed (IBV_EVENT_DEVICE_FATAL)");
  EXPECT_TRUE(nodes_.until([&] { return b.sink->is_broken() && other_b_.sink->is_broken(); }));
}

TEST_F(rdma_device_events, a_device_that_the_kernel_took_away_is_out_of_service_and_left_alone) {
  events_.take_away(device_of_a);
  played_events::ring(device_of_a);
  expect_device_is_out_of_service("is gone");
  // The device's descriptor stays ready: a thread that still polled it would do nothing else.
  const auto asked = events_.asked();
  std::this_thread::sleep_for(std::chrono::milliseconds{50});
  EXPECT_LE(events_.asked(), asked + 2);
}

}  // namespace troupe::transport::rdma
