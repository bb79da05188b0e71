/// Agents through troupe/io.h, two in one process.

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "own_agent.hpp"

namespace troupe::testing {

namespace {

using ::testing::HasSubstr;

int loopback_socket(std::uint32_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int again = 1;
  EXPECT_EQ(::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &again, sizeof again), 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(static_cast<std::uint16_t>(port));
  EXPECT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at), 0);
  return fd;
}

std::uint32_t unused_port() {
  const int fd = loopback_socket(0);
  sockaddr_in at{};
  socklen_t size = sizeof at;
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size), 0);
  ::close(fd);
  return ntohs(at.sin_port);
}

/// Accepts connections and says nothing.
struct silent_listener {
  explicit silent_listener(std::uint32_t port) : fd{loopback_socket(port)} {
    EXPECT_EQ(::listen(fd, 16), 0);
  }
  ~silent_listener() { ::close(fd); }
  silent_listener(const silent_listener&) = delete;
  silent_listener& operator=(const silent_listener&) = delete;
  const int fd;
};

class c_agents : public ::testing::Test {
 protected:
  own_agent a{"a"}, b{"b"};
  troupe_io_peer b_of_a = b.known_to(a);

  [[nodiscard]] troupe_io_plan session() const {
    troupe_io_plan over = 0;
    EXPECT_EQ(troupe_io_session(a.get(), a.kv, b_of_a, b.kv, &over), TROUPE_OK)
        << troupe_last_error();
    return over;
  }
};

TEST_F(c_agents, move_over_a_session_and_the_notice_follows_the_bytes) {
  std::iota(a.memory.begin(), a.memory.end(), static_cast<unsigned char>(0));
  const troupe_io_segment segments[] = {{0, 4096, 100, 0, 0, 0, 0}, {512, 0, 8, 16, 32, 4, 0}};
  troupe_io_transfer sent = 0;
  ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, session(), segments, 2, "moved", 5,
                             long_enough, &sent));
  troupe_io_notice notice{};
  std::size_t count = 0;
  ASSERT_DONE(troupe_io_take_notices(b.get(), &notice, sizeof notice, 1, long_enough, &count));
  ASSERT_EQ(count, 1U);
  EXPECT_STREQ(notice.from, "a");
  EXPECT_EQ(std::string(static_cast<const char*>(notice.bytes), notice.byte_count), "moved");
  EXPECT_EQ(std::memcmp(&b.memory[4096], a.memory.data(), 100), 0);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(std::memcmp(&b.memory[i * 32], &a.memory[512 + i * 16], 8), 0) << i;
  }
  troupe_io_notices_free(&notice, sizeof notice, 1);
  EXPECT_EQ(notice.bytes, nullptr);
  const auto status = a.ended(sent);
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_DONE));
  EXPECT_EQ(status.bytes, 132U);
  EXPECT_EQ(status.code, TROUPE_OK);
  EXPECT_STREQ(static_cast<const char*>(status.reason), "");
}

TEST_F(c_agents, prepared_lists_are_posted_again_and_any_of_them_can_be_waited_for) {
  const troupe_io_entry here[] = {{a.address(), 64, 0, 0, 0}, {a.address() + 64, 64, 0, 1, 0}};
  const troupe_io_entry there[] = {{b.address(), 64, 0, 0, 0}, {b.address() + 64, 64, 0, 1, 0}};
  troupe_io_plan local = 0;
  troupe_io_plan remote = 0;
  ASSERT_DONE(troupe_io_prepare_local(a.get(), here, 2, &local));
  ASSERT_DONE(troupe_io_prepare_remote(a.get(), b_of_a, there, 2, &remote));
  const std::uint32_t first[] = {0};
  const std::uint32_t second[] = {1};
  troupe_io_transfer transfers[2] = {};
  ASSERT_DONE(troupe_io_make(a.get(), TROUPE_IO_WRITE, local, first, 1, remote, second, 1, 0,
                             &transfers[0]));
  ASSERT_DONE(troupe_io_make(a.get(), TROUPE_IO_READ, local, nullptr, 0, remote, nullptr, 0,
                             TROUPE_IO_MERGE, &transfers[1]));
  std::size_t ended = 7;
  ASSERT_DONE(troupe_io_wait(a.get(), transfers, 2, TROUPE_IO_ALL, 0, &ended));
  EXPECT_EQ(ended, 2U) << "none is active";
  for (int round = 0; round < 3; ++round) {
    a.memory[0] = static_cast<unsigned char>(10 + round);
    ASSERT_DONE(troupe_io_post(a.get(), transfers[0], nullptr, 0, 0));
    ASSERT_DONE(troupe_io_wait(a.get(), transfers, 1, TROUPE_IO_ANY, long_enough, &ended));
    EXPECT_EQ(ended, 1U);
    EXPECT_EQ(b.memory[64], 10 + round);
  }
  ASSERT_DONE(troupe_io_release_plan(a.get(), local));
  ASSERT_DONE(troupe_io_post(a.get(), transfers[1], "read", 4, long_enough));
  EXPECT_EQ(a.ended(transfers[1]).bytes, 128U);
  EXPECT_EQ(a.memory[64], 12);
  ASSERT_DONE(troupe_io_release_transfer(a.get(), transfers[1]));
  EXPECT_REFUSED(troupe_io_cancel(a.get(), transfers[1]), TROUPE_NOT_FOUND, "transfer");
  EXPECT_REFUSED(troupe_io_release_plan(a.get(), local), TROUPE_NOT_FOUND, "plan");
}

TEST_F(c_agents, a_transfer_that_fails_says_why_and_which_entries) {
  const auto over = session();
  ASSERT_DONE(troupe_io_deregister(b.get(), b.kv, long_enough));
  const troupe_io_segment segments[] = {{0, 0, 8, 0, 0, 0, 0}, {8, 8, 8, 0, 0, 0, 0}};
  troupe_io_transfer sent = 0;
  ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, over, segments, 2, nullptr, 0, 0, &sent));
  const auto status = a.ended(sent);
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_FAILED));
  EXPECT_EQ(status.code, TROUPE_GRANT_REVOKED) << static_cast<const char*>(status.reason);
  EXPECT_STRNE(static_cast<const char*>(status.reason), "");
  EXPECT_EQ(status.bad_count, 2U);
  troupe_io_status again{};
  again.size = sizeof again;
  std::uint32_t bad[] = {77, 77};
  ASSERT_DONE(troupe_io_read_status(a.get(), sent, &again, bad, 1));
  EXPECT_EQ(bad[0], 0U);
  EXPECT_EQ(bad[1], 77U) << "beyond the capacity";
  EXPECT_EQ(again.bad_count, 2U);
}

TEST_F(c_agents, events_come_with_a_descriptor_to_watch) {
  int fd = -1;
  ASSERT_DONE(troupe_io_event_fd(a.get(), &fd));
  troupe_io_event event{};
  std::size_t count = 7;
  ASSERT_DONE(troupe_io_take(a.get(), &event, sizeof event, 1, 1, &count));
  EXPECT_EQ(count, 0U) << "TROUPE_OK, and none came";
  const troupe_io_segment some{0, 0, 8, 0, 0, 0, 0};
  troupe_io_transfer sent = 0;
  ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, session(), &some, 1, nullptr, 0, 0, &sent));
  pollfd readable{fd, POLLIN, 0};
  ASSERT_EQ(::poll(&readable, 1, static_cast<int>(long_enough)), 1);
  ASSERT_DONE(troupe_io_take(a.get(), &event, sizeof event, 1, long_enough, &count));
  ASSERT_EQ(count, 1U);
  EXPECT_EQ(event.kind, static_cast<std::uint32_t>(TROUPE_IO_TRANSFER_ENDED));
  EXPECT_EQ(event.transfer, sent);
  EXPECT_EQ(event.reason, nullptr);
}

TEST_F(c_agents, a_peer_whose_agent_ends_is_lost_and_the_event_says_why) {
  ASSERT_DONE(troupe_io_connect(a.get(), b_of_a, long_enough, nullptr));
  ASSERT_DONE(troupe_io_agent_close(b.get()));
  troupe_io_event event{};
  std::size_t count = 0;
  ASSERT_DONE(troupe_io_take(a.get(), &event, sizeof event, 1, long_enough, &count));
  ASSERT_EQ(count, 1U);
  EXPECT_EQ(event.kind, static_cast<std::uint32_t>(TROUPE_IO_PEER_LOST));
  EXPECT_EQ(event.peer, b_of_a);
  EXPECT_NE(event.code, TROUPE_OK);
  ASSERT_NE(event.reason, nullptr);
  EXPECT_STRNE(event.reason, "");
  troupe_io_events_free(&event, sizeof event, 1);
  EXPECT_EQ(event.reason, nullptr);
}

TEST_F(c_agents, memory_of_the_agent_is_had_described_and_taken_back) {
  troupe_io_memory own = 0;
  ASSERT_DONE(troupe_io_allocate(b.get(), 4096, "own", TROUPE_IO_MAY_READ, &own));
  troupe_memory bytes{};
  ASSERT_DONE(troupe_io_bytes(b.get(), own, &bytes));
  EXPECT_EQ(bytes.size, 4096U);
  EXPECT_EQ(static_cast<const unsigned char*>(bytes.data)[4095], 0);
  EXPECT_EQ(b.known_to(a), b_of_a);
  troupe_io_remote_memory remote[1] = {};
  std::size_t count = 0;
  ASSERT_DONE(troupe_io_remote_memories(a.get(), b_of_a, remote, 1, &count));
  EXPECT_EQ(count, 2U) << "how many there are, also beyond the capacity";
  EXPECT_EQ(remote[0].number, b.kv);
  EXPECT_EQ(remote[0].address, b.address());
  EXPECT_EQ(remote[0].length, b.memory.size());
  EXPECT_EQ(remote[0].rights, all_rights);
  ASSERT_DONE(troupe_io_deregister(b.get(), own, long_enough));
  EXPECT_REFUSED(troupe_io_bytes(b.get(), own, &bytes), TROUPE_NOT_FOUND, "memory");
  char* json = nullptr;
  ASSERT_DONE(troupe_io_report(a.get(), &json));
  EXPECT_THAT(std::string{json}, HasSubstr("\"name\": \"b\""));
  EXPECT_THAT(std::string{json}, HasSubstr("\"notices_dropped\": 0"));
  troupe_free(json);
  ASSERT_DONE(troupe_io_remove_peer(a.get(), b_of_a));
  EXPECT_REFUSED(troupe_io_notify(a.get(), b_of_a, "x", 1), TROUPE_NOT_FOUND, "peer");
}

TEST_F(c_agents, one_call_posts_waits_and_says_how_it_ended) {
  const troupe_io_entry here{a.address(), 64, 0, 0, 0};
  const troupe_io_entry there{b.address(), 64, 0, 0, 0};
  troupe_io_plan local = 0;
  troupe_io_plan remote = 0;
  ASSERT_DONE(troupe_io_prepare_local(a.get(), &here, 1, &local));
  ASSERT_DONE(troupe_io_prepare_remote(a.get(), b_of_a, &there, 1, &remote));
  troupe_io_transfer sent = 0;
  ASSERT_DONE(
      troupe_io_make(a.get(), TROUPE_IO_WRITE, local, nullptr, 0, remote, nullptr, 0, 0, &sent));
  troupe_io_status status{};
  status.size = sizeof status;
  ASSERT_DONE(troupe_io_finish(a.get(), sent, 0, &status));
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_PREPARED));
  for (int round = 0; round < 3; ++round) {
    a.memory[0] = static_cast<unsigned char>(10 + round);
    ASSERT_DONE(troupe_io_run(a.get(), sent, "look", 4, 0, long_enough, &status));
    EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_DONE));
    EXPECT_EQ(status.bytes, 64U);
    EXPECT_EQ(b.memory[0], 10 + round);
    troupe_io_notice notice{};
    std::size_t count = 0;
    ASSERT_DONE(troupe_io_take_notices(b.get(), &notice, sizeof notice, 1, long_enough, &count));
    ASSERT_EQ(count, 1U);
    EXPECT_EQ(notice.byte_count, 4U);
    troupe_io_notices_free(&notice, sizeof notice, count);
  }
  ASSERT_DONE(troupe_io_deregister(b.get(), b.kv, long_enough));
  ASSERT_DONE(troupe_io_run(a.get(), sent, nullptr, 0, 0, long_enough, &status));
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_FAILED));
  EXPECT_EQ(status.code, TROUPE_GRANT_REVOKED) << static_cast<const char*>(status.reason);
  EXPECT_EQ(status.bad_count, 1U);
  ASSERT_DONE(troupe_io_deregister(a.get(), a.kv, long_enough));
  status.bytes = 4711;
  EXPECT_REFUSED(troupe_io_run(a.get(), sent, nullptr, 0, 0, long_enough, &status), TROUPE_ABORTED,
                 "was deregistered");
  EXPECT_EQ(status.bytes, 4711U) << "nothing was posted";
}

TEST_F(c_agents, one_call_that_waited_long_enough_says_how_it_stands) {
  const own_agent silent{"silent", TROUPE_POLLING};  // never driven
  troupe_io_plan over = 0;
  ASSERT_DONE(troupe_io_session(a.get(), a.kv, silent.known_to(a), silent.kv, &over));
  const troupe_io_segment some{0, 0, 8, 0, 0, 0, 0};
  troupe_io_transfer sent = 0;
  ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, over, &some, 1, nullptr, 0, 0, &sent));
  troupe_io_status status{};
  status.size = sizeof status;
  EXPECT_REFUSED(troupe_io_finish(a.get(), sent, 1, &status), TROUPE_TIMED_OUT, "go on");
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_ACTIVE));
  ASSERT_DONE(troupe_io_cancel(a.get(), sent));
  ASSERT_DONE(troupe_io_finish(a.get(), sent, long_enough, &status));
  EXPECT_EQ(status.state, static_cast<std::uint32_t>(TROUPE_IO_CANCELLED));
}

TEST_F(c_agents, a_peer_that_answers_no_question_for_its_memory_is_given_up_after_grant_timeout) {
  auto options = agent_options("hurried");
  options.grant_timeout_ms = 50;
  troupe_io_agent* hurried = nullptr;
  ASSERT_DONE(troupe_io_agent_create(&options, &hurried));
  own_agent mute{"mute", TROUPE_POLLING};
  void* bytes = nullptr;
  std::size_t size = 0;
  troupe_io_peer peer = 0;
  troupe_io_memory own = 0;
  troupe_io_plan over = 0;
  ASSERT_DONE(troupe_io_describe(mute.get(), nullptr, 0, &bytes, &size));
  ASSERT_DONE(troupe_io_add_peer(hurried, bytes, size, &peer));
  troupe_free(bytes);
  ASSERT_DONE(troupe_io_allocate(hurried, 4096, "own", all_rights, &own));
  ASSERT_DONE(troupe_io_session(hurried, own, peer, mute.kv, &over));
  std::atomic<bool> linked{false};
  std::thread greets{[&] {
    EXPECT_EQ(troupe_io_connect(hurried, peer, long_enough, nullptr), TROUPE_OK)
        << troupe_last_error();
    linked = true;
  }};
  while (!linked) ASSERT_DONE(troupe_io_poll(mute.get(), nullptr));
  greets.join();
  // From here on nobody drives the peer.
  const troupe_io_segment some{0, 0, 8, 0, 0, 0, 0};
  troupe_io_transfer sent = 0;
  ASSERT_DONE(troupe_io_move(hurried, TROUPE_IO_WRITE, over, &some, 1, nullptr, 0, 0, &sent));
  troupe_io_status status{};
  status.size = sizeof status;
  ASSERT_DONE(troupe_io_finish(hurried, sent, long_enough, &status));
  EXPECT_EQ(status.code, TROUPE_PEER_UNREACHABLE);
  EXPECT_THAT(static_cast<const char*>(status.reason), HasSubstr("50 ms (grant_timeout)"));
  troupe_io_agent_free(hurried);
}

TEST_F(c_agents, a_wait_that_is_over_says_how_many_have_ended) {
  own_agent held{"held"};
  const auto held_of_a = held.known_to(a);
  troupe_io_plan over = 0;
  ASSERT_DONE(troupe_io_session(a.get(), a.kv, held_of_a, held.kv, &over));
  const troupe_io_segment some{0, 0, 8, 0, 0, 0, 0};
  troupe_io_transfer sent[2] = {};
  ASSERT_DONE(
      troupe_io_move(a.get(), TROUPE_IO_WRITE, session(), &some, 1, nullptr, 0, 0, &sent[0]));
  (void)a.ended(sent[0]);
  ASSERT_DONE(troupe_io_agent_close(held.get()));
  ASSERT_DONE(troupe_io_move(a.get(), TROUPE_IO_WRITE, over, &some, 1, nullptr, 0, 0, &sent[1]));
  std::size_t ended = 7;
  const auto status = troupe_io_wait(a.get(), sent, 2, TROUPE_IO_ALL, 0, &ended);
  if (status == TROUPE_OK) {
    EXPECT_EQ(ended, 2U) << "that the peer is gone was known at once";
  } else {
    EXPECT_EQ(status, TROUPE_TIMED_OUT);
    EXPECT_EQ(ended, 1U);
  }
  const auto failed = a.ended(sent[1]);
  EXPECT_EQ(failed.state, static_cast<std::uint32_t>(TROUPE_IO_FAILED));
  EXPECT_EQ(failed.code, TROUPE_PEER_UNREACHABLE) << static_cast<const char*>(failed.reason);
}

TEST_F(c_agents, who_waits_in_a_closed_agent_is_told_at_once) {
  std::atomic<int> told{0};
  std::thread waits{[&] {
    troupe_io_notice notice{};
    std::size_t count = 0;
    if (troupe_io_take_notices(b.get(), &notice, sizeof notice, 1, UINT64_MAX, &count) ==
        TROUPE_ABORTED)
      ++told;
  }};
  std::thread takes{[&] {
    troupe_io_event event{};
    std::size_t count = 0;
    if (troupe_io_take(b.get(), &event, sizeof event, 1, UINT64_MAX, &count) == TROUPE_ABORTED)
      ++told;
  }};
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  ASSERT_DONE(troupe_io_agent_close(b.get()));
  waits.join();
  takes.join();
  EXPECT_EQ(told, 2);
  EXPECT_REFUSED(troupe_io_poll(b.get(), nullptr), TROUPE_ABORTED, "closed");
  ASSERT_DONE(troupe_io_agent_close(b.get()));
}

TEST_F(c_agents, who_waits_for_a_link_in_an_agent_that_is_closed_is_told_at_once) {
  auto options = agent_options("quiet");
  troupe_io_agent* quiet = nullptr;
  void* bytes = nullptr;
  std::size_t size = 0;
  troupe_io_peer peer = 0;
  // A silent listener has its address.
  options.port = unused_port();
  ASSERT_DONE(troupe_io_agent_create(&options, &quiet));
  ASSERT_DONE(troupe_io_describe(quiet, nullptr, 0, &bytes, &size));
  troupe_io_agent_free(quiet);
  ASSERT_DONE(troupe_io_add_peer(a.get(), bytes, size, &peer));
  troupe_free(bytes);
  const silent_listener nobody{options.port};
  std::atomic<int> told{TROUPE_OK};
  std::thread waits{[&] { told = troupe_io_connect(a.get(), peer, UINT64_MAX, nullptr); }};
  std::this_thread::sleep_for(std::chrono::milliseconds{20});
  ASSERT_DONE(troupe_io_agent_close(a.get()));
  waits.join();
  EXPECT_EQ(told, TROUPE_ABORTED) << "it waited for the peer, whose silence is a deadline";
}

TEST_F(c_agents, a_forked_child_is_told_and_never_waits) {
  const auto child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const auto options = agent_options("c");
    troupe_io_agent* another = nullptr;
    if (troupe_io_poll(a.get(), nullptr) != TROUPE_STALE_INCARNATION) ::_exit(1);
    if (!std::strstr(troupe_last_error(), "forked")) ::_exit(2);
    if (troupe_io_agent_close(a.get()) != TROUPE_STALE_INCARNATION) ::_exit(3);
    if (troupe_io_agent_create(&options, &another) != TROUPE_STALE_INCARNATION) ::_exit(4);
    troupe_io_agent_free(a.get());  // only drops its copy
    ::_exit(0);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  ASSERT_DONE(troupe_io_connect(a.get(), b_of_a, long_enough, nullptr));
}

}  // namespace

}  // namespace troupe::testing
