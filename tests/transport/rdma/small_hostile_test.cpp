#include <vector>

#include "victim.hpp"

// What the link refuses: a peer that writes by message where it has no grant, and a peer that
// answers messages that were not sent. In the machine of tests/verbs.
namespace troupe::transport::rdma {

namespace {

std::vector<std::byte> small_message(transfer_id transfer, const std::vector<small_run>& runs) {
  struct {
    std::uint64_t transfer{0};
    std::uint32_t bytes{0};
    std::uint32_t runs{0};
  } head;
  head.transfer = transfer.value;
  head.runs = static_cast<std::uint32_t>(runs.size());
  for (const auto& run : runs) head.bytes += run.bytes;
  std::vector<std::byte> made(sizeof head + head.bytes + runs.size() * sizeof(small_run) + 1,
                              std::byte{0xbb});
  std::memcpy(made.data(), &head, sizeof head);
  std::memcpy(made.data() + sizeof head + head.bytes, runs.data(), runs.size() * sizeof(small_run));
  return made;
}

/// Sends the message and waits for the answer: the refusal, or empty when it landed.
std::optional<errc> write(victim& v, transfer_id transfer, const std::vector<small_run>& runs) {
  const auto answered = v.peer.landed;
  const auto refused = v.peer.refused.size();
  v.peer.say(message_kind::small, small_message(transfer, runs));
  EXPECT_TRUE(v.until([&] { return v.peer.landed == answered + 1; })) << "no answer";
  if (v.peer.refused.size() == refused) return std::nullopt;
  return v.peer.refused.back().code;
}

}  // namespace

TEST(rdma_small, what_was_not_granted_is_refused_and_nothing_else_is_disturbed) {
  victim v;
  const auto given = v.open({{0, 4096, 0, 1}, {8192, 4096, 0, 1}}, access::write, t1);
  const auto to_read = v.open({{1 << 20, 4096, 0, 1}}, access::read, t1);
  const auto of_other = v.open({{2 << 20, 4096, 0, 1}}, access::write, t2);
  const auto id = given.grant;
  EXPECT_EQ(write(v, t1, {{id ^ 1, 0, 8, 0}}), errc::grant_revoked) << "never given";
  EXPECT_EQ(write(v, t1, {{id, 4090, 8, 0}}), errc::out_of_range) << "between two extents";
  EXPECT_EQ(write(v, t1, {{id, victim::size - 4, 8, 0}}), errc::out_of_range);
  EXPECT_EQ(write(v, t1, {{id, UINT64_MAX - 3, 8, 0}}), errc::out_of_range) << "it would wrap";
  EXPECT_EQ(write(v, t1, {{to_read.grant, 1 << 20, 8, 0}}), errc::unauthorized);
  EXPECT_EQ(write(v, t1, {{of_other.grant, 2 << 20, 8, 0}}), errc::unauthorized);
  EXPECT_EQ(write(v, t2, {{id, 0, 8, 0}}), errc::unauthorized);
  EXPECT_EQ(write(v, t1, {{id, 0, 8, 0}, {id, 8192, 8, 0}, {id, 5000, 8, 0}}), errc::out_of_range)
      << "all of it or nothing";
  EXPECT_TRUE(v.untouched(0, victim::size));
  EXPECT_EQ(v.sink->framed(), 0U) << "the notice of what did not land";
  EXPECT_EQ(v.wire->stats().refused, 8U);
  EXPECT_EQ(write(v, t1, {{id, 4088, 8, 0}, {id, 8192, 8, 0}}), std::nullopt);
  EXPECT_EQ(v.memory[4095], std::byte{0xbb});
  EXPECT_TRUE(v.until([&] { return v.sink->framed() == 1; }));
  EXPECT_FALSE(v.sink->is_broken());
}

TEST(rdma_small, one_behind_a_refusal_that_had_to_wait_is_answered_as_well) {
  victim v;
  const auto given = v.open({{0, 4096, 0, 1}}, access::write, t1);
  const auto answered = v.peer.landed;
  // More than the peer takes without polling: the refusal queues behind it.
  const std::vector<std::byte> word(8);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(v.wire->send_frame(word));
  v.peer.say(message_kind::small, small_message(t1, {{given.grant, 8192, 8, 0}}));
  v.peer.say(message_kind::small, small_message(t1, {{given.grant, 0, 8, 0}}));
  EXPECT_TRUE(testing::comes_true([&] { return v.sink->framed() != 0; }));
  std::this_thread::sleep_for(100ms);  // its thread finds nothing more to do
  EXPECT_TRUE(v.until([&] { return v.peer.landed == answered + 2; })) << "no answer";
  EXPECT_EQ(v.peer.refused.size(), 1U);
  EXPECT_EQ(v.memory[0], std::byte{0xbb});
}

TEST(rdma_small, nothing_lands_after_a_fence_that_the_peer_never_confirmed) {
  victim v;
  const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
  const auto message = small_message(t1, {{given.grant, 0, 64, 0}, {given.grant, 4096, 64, 0}});
  const auto keep_writing = [&](std::size_t most) {
    for (std::size_t i = 0; i < most; ++i) v.peer.say(message_kind::small, message);
  };
  keep_writing(10);
  ASSERT_TRUE(v.until([&] { return v.sink->framed() == 10; }));
  ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
  ASSERT_TRUE(v.until([&] {
    if (v.peer.refused.size() < 50) keep_writing(1);
    return v.sink->is_quiescent(t1);
  }));
  std::memset(v.memory.data(), static_cast<int>(pattern), v.memory.size());
  const auto framed = v.sink->framed();
  EXPECT_TRUE(v.until([&] {
    keep_writing(1);
    return v.peer.refused.size() > 100 || v.sink->is_broken();
  }));
  EXPECT_TRUE(v.untouched(0, victim::size));
  EXPECT_EQ(v.sink->framed(), framed);
  ASSERT_FALSE(v.peer.refused.empty());
  EXPECT_EQ(v.peer.refused[0].code, errc::grant_revoked);
}

TEST(rdma_small, a_message_with_lengths_that_cannot_be_ends_the_link) {
  for (const int which : {0, 1, 2}) {
    victim v;
    const auto given = v.open({{0, 1 << 20, 0, 1}}, access::write, t1);
    auto message = small_message(t1, {{given.grant, 0, 64, 0}});
    if (which == 0) message.resize(12);
    if (which == 1) message[8] = std::byte{0xff};   // more bytes than there are
    if (which == 2) message[12] = std::byte{0xff};  // more runs
    v.peer.say(message_kind::small, message);
    EXPECT_TRUE(v.until([&] { return v.sink->is_broken(); }));
    EXPECT_EQ(v.sink->broken->code, errc::unauthorized) << to_string(*v.sink->broken);
    EXPECT_TRUE(v.untouched(0, victim::size));
  }
}

TEST(rdma_small, a_peer_that_answers_what_it_was_not_sent_loses_the_link) {
  for (const auto kind : {message_kind::credit, message_kind::refused}) {
    victim v;
    const bool refuses = kind == message_kind::refused;
    const auto why = encode_refusal({errc::aborted, "so"});
    v.peer.say(kind, refuses ? std::span<const std::byte>{why} : std::span<const std::byte>{},
               {.taken = 0, .landed = refuses ? 0U : 1U});
    EXPECT_TRUE(v.until([&] { return v.sink->is_broken(); }));
    EXPECT_EQ(v.sink->broken->code, errc::unauthorized) << to_string(*v.sink->broken);
  }
}

TEST(rdma_small, a_peer_that_repeats_its_confirmation_does_not_keep_a_fence_waiting) {
  victim v;
  remote_grant given;
  given.id = 7;
  given.region = region_id{1};
  given.owner = incarnation{0xbad};
  given.transfer = t1;
  given.rights = access::write;
  given.region_size = 4096;
  given.permitted = {{0, 4096, 0, 1}};
  given.key = grant_key{.link = 0xbad, .grant = given.id, .host = 1}.encode();
  batch work{.id = batch_id{1},
             .transfer = t1,
             .dir = direction::write,
             .pieces = {},
             .frame = {std::byte{'x'}}};  // without one it is no small batch
  work.pieces.push_back(
      {v.region, std::make_shared<const remote_grant>(given), {{0, 0, 64, 0, 0, 1}}});
  ASSERT_TRUE(v.wire->post(std::move(work)));
  ASSERT_EQ(v.wire->fence(t1), fence_state::pending);
  auto next = clock::now();
  EXPECT_TRUE(v.until([&] {
    if (clock::now() > next) {
      v.peer.say(message_kind::revoked, std::as_bytes(std::span{&t1.value, 1}));
      next = clock::now() + 100ms;  // less than the fence's patience
    }
    return v.sink->is_quiescent(t1);
  })) << "the fence is pending still";
  ASSERT_EQ(v.sink->completed(), 1U);
  const auto ended = v.sink->outcome_of(1);
  ASSERT_TRUE(ended.failure);
  EXPECT_EQ(ended.failure->code, errc::aborted) << to_string(*ended.failure);
  EXPECT_FALSE(v.sink->is_broken());
}

}  // namespace troupe::transport::rdma
