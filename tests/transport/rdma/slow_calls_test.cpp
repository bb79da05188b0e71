#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "two_nodes.hpp"
#include "verbs_calls.hpp"

// Registering memory and setting up a queue pair can take a real device long; meanwhile all links
// of its endpoint must go on. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

using contract::end;
using contract::t1;
using contract::t2;
using kind = verbs_calls::kind;

constexpr std::uint64_t size = std::uint64_t{256} << 10;

/// Two nodes with one progress thread each, and two links that write both ways.
class rdma_slow_calls : public ::testing::Test {
 protected:
  void SetUp() override {
    make(a, 'a');
    make(b, 'b');
    nodes_.join();
    open(other_a_, a, b.self, link_role::initiator);
    open(other_b_, b, a.self, link_role::acceptor);
    contract::join(other_a_, other_b_);
    ASSERT_TRUE(nodes_.until([&] { return other_a_.sink->ups == 1 && other_b_.sink->ups == 1; }));
    for (auto [from, to] : {std::pair{&a, &b}, std::pair{&b, &a}, std::pair{&other_a_, &other_b_},
                            std::pair{&other_b_, &other_a_}}) {
      auto granted = to->wire->grant(to->region, {{0, size, 0, 1}}, access::write, t1);
      ASSERT_TRUE(granted) << to_string(granted.error());
      writers_.push_back({from, to, std::make_shared<const remote_grant>(std::move(*granted))});
    }
    all_go_on();  // so that everything that this needs is registered
  }
  void TearDown() override {
    calls_.reset();
    for (const auto* e : {&other_a_, &other_b_}) {
      if (e->wire) e->wire->close();
    }
  }

  static void open(end& e, const end& node, incarnation peer, link_role role) {
    e.self = node.self;
    e.region = node.region;
    e.memory = node.memory;
    const link_options options{
        .role = role, .peer = peer, .lanes = 2, .connect_timeout = contract::longer_than_any_wait};
    e.wire = node.place->open(backend_kind::rdma, options, e.sink).value();
  }
  /// Memory of a's that was never used.
  region_id new_region() { return a.place->allocate(size, "new").value(); }
  [[nodiscard]] const void* address_of(region_id region) const {
    return a.place->bytes(region).value().data();
  }

  static result<void> post(const end& from, region_id local,
                           const std::shared_ptr<const remote_grant>& to, std::uint64_t id,
                           std::uint64_t bytes) {
    batch work{.id = batch_id{id},
               .transfer = to->transfer,
               .dir = direction::write,
               .pieces = {},
               .frame = {std::byte{'x'}}};
    work.pieces.push_back({local, to, {{.local_offset = 0, .remote_offset = 0, .length = bytes}}});
    return from.wire->post(std::move(work));
  }
  /// Expects writes, small and large, to complete and arrive over both links, both ways.
  void all_go_on() {
    for (const auto& one : writers_) {
      const auto completed = one.from->sink->completed();
      const auto framed = one.to->sink->framed();
      for (const auto bytes : {size, std::uint64_t{8}}) {
        const auto ok = post(*one.from, one.from->region, one.granted, ++last_, bytes);
        ASSERT_TRUE(ok) << to_string(ok.error());
      }
      ASSERT_TRUE(nodes_.until([&] {
        return one.from->sink->completed() >= completed + 2 && one.to->sink->framed() >= framed + 2;
      }));
    }
  }
  /// Expects the same while a call is held up, and the call to be held up still.
  void expect_all_go_on_meanwhile() {
    ASSERT_TRUE(nodes_.until([&] { return calls_.holds(); })) << "it was not called";
    for (int i = 0; i < 2; ++i) {
      ASSERT_NO_FATAL_FAILURE(all_go_on());
      ASSERT_TRUE(calls_.holds());
    }
  }

  verbs_calls& calls_{verbs_calls::of_this_process()};
  std::optional<std::uint8_t> timeout_;  ///< as in `rdma_options`
  two_nodes nodes_;
  end& a{nodes_.a};
  end& b{nodes_.b};
  end other_a_, other_b_;

 private:
  struct writer {
    end* from;
    end* to;
    std::shared_ptr<const remote_grant> granted;
  };
  void make(end& e, char side) const {
    auto options = two_nodes::options_of(side);
    options.num_workers = 1;
    if (timeout_) options.rdma.timeout = *timeout_;
    two_nodes::create(e, std::move(options));
    e.region = e.place->allocate(size, "test").value();
    e.memory = e.place->bytes(e.region).value();
  }
  std::vector<writer> writers_;
  std::uint64_t last_{100};
};

/// NICs that give up after half a second.
class rdma_slow_calls_of_impatient_nics : public rdma_slow_calls {
 protected:
  rdma_slow_calls_of_impatient_nics() { timeout_ = 14; }
};

}  // namespace

TEST_F(rdma_slow_calls, a_grant_that_registers_memory_holds_up_nothing_else) {
  const auto region = new_region();
  calls_.hold(kind::registers, address_of(region));
  auto giving = std::async(std::launch::async, [&] {
    return a.wire->grant(region, {{0, size, 0, 1}}, access::write, t2);
  });
  expect_all_go_on_meanwhile();
  EXPECT_TRUE(a.wire->grant(a.region, {{0, size, 0, 1}}, access::write, t2)) << "it is registered";
  EXPECT_TRUE(calls_.holds());
  calls_.let_go();
  auto granted = giving.get();
  ASSERT_TRUE(granted) << to_string(granted.error());
  const auto to = std::make_shared<const remote_grant>(std::move(*granted));
  if (HasFailure()) return;
  const auto before = b.sink->completed();
  ASSERT_TRUE(post(b, b.region, to, 1, size));
  ASSERT_TRUE(nodes_.until([&] { return b.sink->completed() == before + 1; }));
  EXPECT_FALSE(b.sink->outcome_of(1).failure);
}

TEST_F(rdma_slow_calls, a_post_that_registers_memory_holds_up_nothing_else) {
  const auto region = new_region();
  auto granted = b.wire->grant(b.region, {{0, size, 0, 1}}, access::write, t2);
  ASSERT_TRUE(granted) << to_string(granted.error());
  const auto to = std::make_shared<const remote_grant>(std::move(*granted));
  calls_.hold(kind::registers, address_of(region));
  auto posting = std::async(std::launch::async, [&] { return post(a, region, to, 1, size); });
  expect_all_go_on_meanwhile();
  const auto before = a.sink->completed();
  calls_.let_go();
  const auto posted = posting.get();
  ASSERT_TRUE(posted) << to_string(posted.error());
  if (HasFailure()) return;
  ASSERT_TRUE(nodes_.until([&] { return a.sink->completed() == before + 1; }));
  EXPECT_FALSE(a.sink->outcome_of(1).failure);
}

TEST_F(rdma_slow_calls, making_the_queue_pairs_of_a_link_holds_up_no_other) {
  end new_a;
  end new_b;
  calls_.hold(kind::makes_queue_pair);
  auto opening =
      std::async(std::launch::async, [&] { open(new_a, a, b.self, link_role::initiator); });
  expect_all_go_on_meanwhile();
  calls_.let_go();
  opening.get();
  open(new_b, b, a.self, link_role::acceptor);
  contract::join(new_a, new_b);
  EXPECT_TRUE(nodes_.until([&] { return new_a.sink->ups == 1 && new_b.sink->ups == 1; }));
  new_a.wire->close();
  new_b.wire->close();
}

TEST_F(rdma_slow_calls, joining_the_queue_pairs_of_a_link_holds_up_no_other) {
  end new_a;
  end new_b;
  open(new_a, a, b.self, link_role::initiator);
  open(new_b, b, a.self, link_role::acceptor);
  calls_.hold(kind::changes_queue_pair);
  auto joining = std::async(std::launch::async, [&] { contract::join(new_a, new_b); });
  expect_all_go_on_meanwhile();
  calls_.let_go();
  joining.get();
  EXPECT_TRUE(nodes_.until([&] { return new_a.sink->ups == 1 && new_b.sink->ups == 1; }));
  new_a.wire->close();
  new_b.wire->close();
}

TEST_F(rdma_slow_calls, a_link_whose_queue_pairs_are_just_joined_answers_and_can_be_closed) {
  end new_a;
  end new_b;
  open(new_a, a, b.self, link_role::initiator);
  open(new_b, b, a.self, link_role::acceptor);
  const auto offer = new_a.wire->offer();
  calls_.hold(kind::changes_queue_pair);
  auto joining = std::async(std::launch::async, [&] { return new_b.wire->connect(offer); });
  ASSERT_TRUE(nodes_.until([&] { return calls_.holds(); })) << "it was not called";
  EXPECT_EQ(new_b.wire->stats().lanes, 2U);
  EXPECT_EQ(new_b.wire->fence(t1), fence_state::quiescent);
  const auto said = new_b.wire->send_frame(std::vector(1, std::byte{'x'}));
  ASSERT_FALSE(said);
  EXPECT_EQ(said.error().code, errc::link_broken) << to_string(said.error());
  new_b.wire->close();
  EXPECT_TRUE(calls_.holds()) << "it all waited for that";
  calls_.let_go();
  const auto joined = joining.get();
  ASSERT_FALSE(joined) << "it is closed";
  EXPECT_EQ(joined.error().code, errc::link_broken) << to_string(joined.error());
  EXPECT_EQ(new_b.wire->stats().lanes, 0U);
  EXPECT_FALSE(new_b.sink->is_broken());
  new_a.wire->close();
  all_go_on();
}

TEST_F(rdma_slow_calls_of_impatient_nics,
       a_dialer_that_greets_again_since_the_peer_was_not_there_answers_meanwhile) {
  end new_a;
  end new_b;
  open(new_a, a, b.self, link_role::initiator);
  open(new_b, b, a.self, link_role::acceptor);
  const auto offer = new_a.wire->offer();
  ASSERT_TRUE(new_a.wire->connect(new_b.wire->offer()));
  // The peer's NIC does not answer, since its queue pairs are not joined. So the queue pair of the
  // messages is set up again.
  calls_.hold(kind::changes_queue_pair);
  ASSERT_TRUE(nodes_.until([&] { return calls_.holds(); })) << "it gave up";
  EXPECT_EQ(new_a.wire->stats().lanes, 2U);
  EXPECT_EQ(new_a.wire->fence(t1), fence_state::quiescent);
  EXPECT_TRUE(calls_.holds()) << "it all waited for that";
  ASSERT_TRUE(new_b.wire->connect(offer));
  calls_.let_go();
  EXPECT_TRUE(nodes_.until([&] { return new_a.sink->ups == 1 && new_b.sink->ups == 1; }));
  new_a.wire->close();
  new_b.wire->close();
}

TEST_F(rdma_slow_calls, a_link_whose_queue_pairs_cannot_be_joined_ends_at_once_and_says_why) {
  // Each queue pair takes four changes: both lanes first, then the messages.
  for (const auto& [passing, code, part] :
       {std::tuple{2U, errc::peer_unreachable, "finds no way to the peer's GID"},
        std::tuple{5U, errc::internal, "does not set up a queue pair"},
        std::tuple{10U, errc::peer_unreachable, "finds no way to the peer's GID"}}) {
    constexpr std::chrono::milliseconds deadline{200};
    end new_a;
    new_a.wire = a.place
                     ->open(backend_kind::rdma,
                            {.role = link_role::initiator,
                             .peer = b.self,
                             .lanes = 2,
                             .connect_timeout = deadline},
                            new_a.sink)
                     .value();
    end new_b;
    open(new_b, b, a.self, link_role::acceptor);
    calls_.refuse_change(passing);
    const auto joined = new_a.wire->connect(new_b.wire->offer());
    ASSERT_FALSE(joined);
    EXPECT_EQ(joined.error().code, code) << to_string(joined.error());
    EXPECT_NE(joined.error().message.find(part), std::string::npos) << to_string(joined.error());
    // It does not keep queue pairs that nobody needs until its deadline.
    EXPECT_EQ(new_a.wire->stats().lanes, 0U);
    const auto said = new_a.wire->send_frame(std::vector(1, std::byte{'x'}));
    ASSERT_FALSE(said);
    EXPECT_NE(said.error().message.find(part), std::string::npos) << to_string(said.error());
    EXPECT_EQ(new_a.wire->fence(t1), fence_state::quiescent);
    std::this_thread::sleep_for(2 * deadline);
    EXPECT_FALSE(new_a.sink->is_broken()) << "who called has heard of it";
    new_a.wire->close();
    new_b.wire->close();
  }
  all_go_on();
}

}  // namespace troupe::transport::rdma
