/// What troupe/io.h refuses, by name.

#include <cstddef>
#include <cstring>

#include "own_agent.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

TEST(c_io_arguments, options_that_cannot_be_accepted_are_named) {
  troupe_io_agent* agent = nullptr;
  const auto refused = [&](auto change, const char* word) {
    auto options = agent_options("a");
    change(options);
    EXPECT_REFUSED(troupe_io_agent_create(&options, &agent), TROUPE_INVALID_CONFIG, word);
  };
  const auto options = agent_options("a");
  EXPECT_REFUSED(troupe_io_agent_create(&options, nullptr), TROUPE_INVALID_CONFIG,
                 "`agent` is NULL");
  EXPECT_REFUSED(troupe_io_agent_create(nullptr, &agent), TROUPE_INVALID_CONFIG,
                 "`options` is NULL");
  refused([](auto& o) { o.size = 8; }, "`options.size` is 8");
  refused([](auto& o) { o.name = nullptr; }, "`options.name` is NULL");
  refused([](auto& o) { o.name = ""; }, "`options.name` is empty");
  const std::string long_name(257, 'n');
  refused([&](auto& o) { o.name = long_name.c_str(); }, "1 to 256");
  refused([](auto& o) { o.flags = 2; }, "`options.flags`");
  refused([](auto& o) { o.host = ""; }, "`options.host` is empty");
  refused([](auto& o) { o.port = 65'536; }, "`options.port` is 65536");
  refused([](auto& o) { o.security = 3; }, "`options.security` is 3");
  refused([](auto& o) { o.secret = "/secret"; }, "`options.secret` is given");
  refused(
      [](auto& o) {
        o.security = TROUPE_IO_SECRET;
        o.ca = "/ca";
      },
      "`options.ca` is given");
  refused([](auto& o) { o.backend_count = 1; }, "`options.backends` is NULL");
  const std::uint32_t none[] = {TROUPE_IO_TCP, 9};
  refused(
      [&](auto& o) {
        o.backends = none;
        o.backend_count = 2;
      },
      "`options.backends[1]` is 9");
  refused(
      [](auto& o) {
        o.flags = TROUPE_POLLING;
        o.threads = 1;
      },
      "`options.threads`");
  refused([](auto& o) { o.lanes = 65; }, "lanes is 65");
  refused([](auto& o) { o.reserved = 1; }, "`options.reserved` is not 0");
  EXPECT_EQ(agent, nullptr);
}

TEST(c_io_arguments, options_of_before_they_grew_mean_what_they_meant) {
  auto options = agent_options("a");
  options.size = offsetof(troupe_io_options, grant_timeout_ms);
  options.grant_timeout_ms = 1;
  options.reserved = 1;
  troupe_io_agent* agent = nullptr;
  ASSERT_DONE(troupe_io_agent_create(&options, &agent));
  troupe_io_agent_free(agent);
}

TEST(c_io_arguments, every_null_and_every_number_out_of_range_is_named) {
  EXPECT_REFUSED(troupe_io_agent_close(nullptr), TROUPE_INVALID_CONFIG, "`agent` is NULL");
  EXPECT_REFUSED(troupe_io_poll(nullptr, nullptr), TROUPE_INVALID_CONFIG, "`agent` is NULL");
  const own_agent own{"a"};
  auto* const agent = own.get();
  std::uint64_t id = 0;
  std::size_t count = 0;
  char byte = 0;
  constexpr auto bad = TROUPE_INVALID_CONFIG;
  EXPECT_REFUSED(troupe_io_register(agent, nullptr, 1, "", 3, &id), bad, "`data` is NULL");
  EXPECT_REFUSED(troupe_io_register(agent, &byte, 0, "", 3, &id), bad, "`size` is 0");
  EXPECT_REFUSED(troupe_io_register(agent, &byte, 1, "", 0, &id), bad, "`rights` is 0");
  EXPECT_REFUSED(troupe_io_register(agent, &byte, 1, "", 4, &id), bad, "`rights` is 4");
  EXPECT_REFUSED(troupe_io_register(agent, &byte, 1, "", 3, nullptr), bad, "`memory` is NULL");
  EXPECT_REFUSED(troupe_io_allocate(agent, 0, nullptr, 3, &id), bad, "`size` is 0");
  EXPECT_REFUSED(troupe_io_bytes(agent, own.kv, nullptr), bad, "`bytes` is NULL");
  EXPECT_REFUSED(troupe_io_deregister(agent, 4711, 0), TROUPE_NOT_FOUND, "no memory 4711");
  EXPECT_REFUSED(troupe_io_describe(agent, nullptr, 1, nullptr, &count), bad,
                 "`descriptor` is NULL");
  void* out = nullptr;
  EXPECT_REFUSED(troupe_io_describe(agent, nullptr, 1, &out, &count), bad, "`only` is NULL");
  EXPECT_REFUSED(troupe_io_add_peer(agent, nullptr, 1, &id), bad, "`descriptor` is NULL");
  EXPECT_REFUSED(troupe_io_add_peer(agent, "no descriptor", 13, &id), bad, "");
  EXPECT_REFUSED(troupe_io_connect(agent, 4711, 0, nullptr), TROUPE_NOT_FOUND, "no peer 4711");
  EXPECT_REFUSED(troupe_io_remote_memories(agent, 4711, nullptr, 1, &count), bad,
                 "`memories` is NULL");
  EXPECT_REFUSED(troupe_io_remote_memories(agent, 4711, nullptr, 0, nullptr), bad,
                 "`count` is NULL");
  EXPECT_REFUSED(troupe_io_prepare_local(agent, nullptr, 1, &id), bad, "`entries` is NULL");
  EXPECT_REFUSED(troupe_io_prepare_pieces(agent, nullptr, 1, &id), bad, "`pieces` is NULL");
  const troupe_io_piece pieces[] = {{own.kv, 0, 1, 0, 1, 0}, {own.kv, 0, 1, 0, 1, 5}};
  EXPECT_REFUSED(troupe_io_prepare_pieces(agent, pieces, 2, &id), bad, "`pieces[1].reserved`");
  const troupe_io_piece beyond{own.kv, std::uint64_t{1} << 20, 1, 0, 1, 0};
  EXPECT_REFUSED(troupe_io_prepare_pieces(agent, &beyond, 1, &id), TROUPE_OUT_OF_RANGE, "");
  EXPECT_REFUSED(troupe_io_make(agent, 3, 1, nullptr, 0, 2, nullptr, 0, 0, &id), bad,
                 "`direction` is 3");
  EXPECT_REFUSED(troupe_io_make(agent, 1, 1, nullptr, 0, 2, nullptr, 0, 2, &id), bad, "`flags`");
  EXPECT_REFUSED(troupe_io_make(agent, 1, 1, nullptr, 3, 2, nullptr, 0, 0, &id), bad,
                 "`local_index` is NULL");
  EXPECT_REFUSED(troupe_io_post(agent, 4711, nullptr, 1, 0), bad, "`notice` is NULL");
  EXPECT_REFUSED(troupe_io_move(agent, 0, 1, nullptr, 0, nullptr, 0, 0, &id), bad,
                 "`direction` is 0");
  EXPECT_REFUSED(troupe_io_move(agent, 1, 1, nullptr, 1, nullptr, 0, 0, &id), bad,
                 "`segments` is NULL");
  EXPECT_REFUSED(troupe_io_wait(agent, nullptr, 1, 0, 0, nullptr), bad, "`transfers` is NULL");
  EXPECT_REFUSED(troupe_io_wait(agent, &id, 1, 2, 0, nullptr), bad, "`how_many` is 2");
  troupe_io_status status{};
  EXPECT_REFUSED(troupe_io_read_status(agent, 4711, nullptr, nullptr, 0), bad, "`status` is NULL");
  EXPECT_REFUSED(troupe_io_read_status(agent, 4711, &status, nullptr, 0), bad,
                 "`status.size` is 0");
  status.size = sizeof status;
  EXPECT_REFUSED(troupe_io_read_status(agent, 4711, &status, nullptr, 1), bad, "`bad` is NULL");
  EXPECT_REFUSED(troupe_io_read_status(agent, 4711, &status, nullptr, 0), TROUPE_NOT_FOUND, "4711");
  EXPECT_REFUSED(troupe_io_finish(agent, 4711, 0, nullptr), bad, "`status` is NULL");
  EXPECT_REFUSED(troupe_io_finish(agent, 4711, 0, &status), TROUPE_NOT_FOUND, "4711");
  EXPECT_REFUSED(troupe_io_run(agent, 4711, nullptr, 0, 0, 0, nullptr), bad, "`status` is NULL");
  EXPECT_REFUSED(troupe_io_run(agent, 4711, nullptr, 1, 0, 0, &status), bad, "`notice` is NULL");
  EXPECT_REFUSED(troupe_io_run(agent, 4711, nullptr, 0, 0, 0, &status), TROUPE_NOT_FOUND, "4711");
  EXPECT_REFUSED(troupe_io_notify(agent, 4711, nullptr, 1), bad, "`bytes` is NULL");
  EXPECT_REFUSED(troupe_io_event_fd(agent, nullptr), bad, "`fd` is NULL");
  EXPECT_REFUSED(troupe_io_report(agent, nullptr), bad, "`json` is NULL");
  EXPECT_EQ(id, 0U);
}

TEST(c_io_arguments, arrays_to_fill_in_have_the_size_of_their_structs) {
  const own_agent own{"a"};
  troupe_io_event event{};
  troupe_io_notice notice{};
  std::size_t count = 7;
  constexpr auto bad = TROUPE_INVALID_CONFIG;
  EXPECT_REFUSED(troupe_io_take(own.get(), nullptr, sizeof event, 1, 0, &count), bad,
                 "`events` is NULL");
  EXPECT_REFUSED(troupe_io_take(own.get(), &event, 8, 1, 0, &count), bad, "`event_size`");
  EXPECT_REFUSED(troupe_io_take(own.get(), &event, sizeof event, 0, 0, &count), bad,
                 "`capacity` is 0");
  EXPECT_REFUSED(troupe_io_take_notices(own.get(), &notice, sizeof notice, 1, 0, nullptr), bad,
                 "`count` is NULL");
  EXPECT_REFUSED(troupe_io_take_notices(own.get(), &notice, 5000, 1, 0, &count), bad,
                 "`notice_size`");
  EXPECT_EQ(count, 7U);
  ASSERT_DONE(troupe_io_take(own.get(), &event, sizeof event, 1, 0, &count));
  EXPECT_EQ(count, 0U);
}

TEST(c_io_arguments, what_is_freed_may_be_null) {
  troupe_io_agent_free(nullptr);
  troupe_io_notices_free(nullptr, sizeof(troupe_io_notice), 3);
  troupe_io_events_free(nullptr, sizeof(troupe_io_event), 3);
}

}  // namespace

}  // namespace troupe::testing
