#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include <gtest/gtest.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/tcp/wire.hpp"

#include "waiting.hpp"

// Reads that were fenced before their requests were sent. Only the test drives the nodes.
namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t each = 4096;
constexpr std::uint32_t more = 100;  ///< than one lane has open at once
constexpr std::uint64_t region_size = each * (max_open_reads + more + 1);
constexpr transfer_id kept{1};
constexpr transfer_id fenced{2};

struct counting_sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) ++failed;
    ++completed;
  }
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id which) override { quiescent.insert(which.value); }
  void on_broken(troupe::error why) override { ADD_FAILURE() << to_string(why); }
  bool up{false};
  std::size_t completed{0}, failed{0};
  std::set<std::uint64_t> quiescent;
};

struct polled_node {
  explicit polled_node(std::uint64_t self_) : self{self_} {
    endpoint_options options;
    options.self = self;
    options.num_workers = 0;
    options.peer_silence = 10 * testing::wait_limit;
    place = endpoint::create(std::move(options)).value();
    region = place->allocate(region_size, "test").value();
  }
  void open(link_role role, incarnation peer) {
    wire = place
               ->open(backend_kind::tcp,
                      {.role = role,
                       .peer = peer,
                       .lanes = 1,
                       .connect_timeout = 10 * testing::wait_limit},
                      sink)
               .value();
  }
  incarnation self;
  std::unique_ptr<endpoint> place;
  region_id region;
  std::shared_ptr<counting_sink> sink{std::make_shared<counting_sink>()};
  std::shared_ptr<link> wire;
};

class fenced_reads : public ::testing::Test {
 protected:
  fenced_reads() {
    reader.open(link_role::initiator, owner.self);
    owner.open(link_role::acceptor, reader.self);
    EXPECT_TRUE(owner.wire->connect(reader.wire->offer()));
    EXPECT_TRUE(reader.wire->connect(owner.wire->offer()));
    EXPECT_TRUE(until([&] { return reader.sink->up && owner.sink->up; }));
  }
  ~fenced_reads() override {
    reader.wire->close();
    owner.wire->close();
  }
  template <class Condition>
  bool until(Condition holds) {
    for (const auto end = testing::end_of_wait(); !holds();) {
      if (std::chrono::steady_clock::now() > end) return false;
      (void)reader.place->poll();
      (void)owner.place->poll();
    }
    return true;
  }
  void read(std::uint32_t count, transfer_id transfer) {
    const auto granted = std::make_shared<const remote_grant>(
        owner.wire->grant(owner.region, {{0, region_size, 0, 1}}, access::read, transfer).value());
    for (std::uint32_t i = 0; i < count; ++i, ++posted_) {
      batch work{.id = batch_id{posted_ + 1},
                 .transfer = transfer,
                 .dir = direction::read,
                 .pieces = {},
                 .frame = {}};
      work.pieces.push_back(
          {reader.region, granted, {{posted_ * each, posted_ * each, each, 0, 0, 1}}});
      ASSERT_TRUE(reader.wire->post(std::move(work)));
    }
  }
  polled_node reader{1};
  polled_node owner{2};

 private:
  std::uint64_t posted_{0};
};

}  // namespace

TEST_F(fenced_reads, are_not_asked_for_behind_their_own_end) {
  read(max_open_reads, kept);
  read(more, fenced);
  const auto answer = reader.wire->fence(fenced);
  EXPECT_TRUE(until([&] {
    return reader.sink->completed == max_open_reads + more &&
           (answer == fence_state::quiescent || reader.sink->quiescent.contains(fenced.value));
  })) << reader.sink->completed;
  EXPECT_EQ(reader.sink->failed, more);
  // One more read, behind all others.
  read(1, kept);
  EXPECT_TRUE(until([&] { return reader.sink->completed == max_open_reads + more + 1; }));
  EXPECT_EQ(owner.wire->stats().bytes_out, each * (max_open_reads + 1))
      << "somebody asked for more";
}

}  // namespace troupe::transport::tcp
