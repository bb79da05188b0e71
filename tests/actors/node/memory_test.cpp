// Transfers leave no memory behind in the two processes.

#include <string>

#include "troupe/actors/cluster_client.hpp"

#include "process_memory.hpp"
#include "ways.hpp"

namespace troupe::testing {
namespace {

// Beyond the bound of remembered ended requests, so that this memory has filled up.
constexpr int warm_up = 4500;
constexpr int total = 9000;
constexpr int at_once = 16;
constexpr std::uint32_t tokens = 16;

std::string request(int number) {
  return std::string{"m"}.append(std::to_string(number));
}

/// Offers requests on order, "FIRST COUNT" at a time, and answers with its memory use.
int offering_prefill(engine& node, line_channel& channel) {
  listener events{node};
  auto blocks = node.allocate_blocks(1);
  if (!blocks) return 1;
  while (auto line = channel.order()) {
    if (*line == "end") return 0;
    std::istringstream words{*line};
    int first = 0, count = 0;
    words >> first >> count;
    std::vector<operation_id> sends;
    for (int i = first; i < first + count; ++i) {
      auto send = node.send({request(i), blocks->blocks});
      if (!send || !node.seal(*send, tokens)) return 2;
      sends.push_back(*send);
    }
    for (const auto send : sends) {
      if (!events.unpinned(send)) return 3;
      events.forget(send);
    }
    channel.say(std::to_string(resident_bytes()));
  }
  return 0;
}

class memory : public ::testing::TestWithParam<way> {};

TEST_P(memory, is_after_many_transfers_what_it_was_after_the_first_few_thousand) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps freed memory";
#endif
  cluster c{unhurried(options_of(GetParam()))};
  auto prefill = c.spawn("prefill-0", offering_prefill);
  cluster::quiet("decode");
  auto decode = c.start("decode-0");
  ASSERT_TRUE(decode);
  listener events{*decode};
  const auto blocks = decode->allocate_blocks(1);
  ASSERT_TRUE(blocks);
  std::uint64_t here = 0, there = 0, here_at_first = 0, there_at_first = 0;
  for (int first = 0; first < total; first += at_once) {
    prefill->channel().say(std::to_string(first) + " " + std::to_string(at_once));
    std::vector<operation_id> receives;
    for (int i = first; i < first + at_once; ++i) {
      auto receive = decode->receive(
          {request(i), {"prefill-0"}, mode_of(GetParam()), tokens, 0, blocks->blocks});
      ASSERT_TRUE(receive) << to_string(receive.error());
      receives.push_back(*receive);
    }
    for (const auto receive : receives) {
      ASSERT_TRUE(events.unpinned(receive));
      ASSERT_EQ(events.of(receive).done, 1) << to_string(events.of(receive).why);
      events.forget(receive);
    }
    const auto said = prefill->channel().hear();
    ASSERT_TRUE(said);
    here = resident_bytes();
    there = std::stoull(*said);
    if (first <= warm_up) {
      here_at_first = here;
      there_at_first = there;
    }
  }
  EXPECT_LT(here, here_at_first + here_at_first / 20) << "decode";
  EXPECT_LT(there, there_at_first + there_at_first / 20) << "prefill";
}

INSTANTIATE_TEST_SUITE_P(over, memory,
                         ::testing::Values(way{"shm", "write"}, way{"shm", "read"},
                                           way{"tcp", "write"}, way{"tcp", "read"}),
                         name_of);

/// The supervisor keeps nothing of a question once it has answered.
TEST(memory_of_a_frontend, is_after_many_questions_what_it_was_after_the_first_few_thousand) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer keeps freed memory";
#endif
  const cluster c{unhurried()};
  const auto client =
      actors::cluster_client::connect({"127.0.0.1", static_cast<std::uint16_t>(c.port())});
  ASSERT_TRUE(client) << to_string(client.error());
  const auto ask = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const auto members = (*client)->members();
      ASSERT_TRUE(members) << to_string(members.error());
    }
  };
  ask(3000);
  const auto at_first = resident_bytes();
  ask(20'000);
  EXPECT_LT(resident_bytes(), at_first + (std::size_t{6} << 20));
}

}  // namespace
}  // namespace troupe::testing
