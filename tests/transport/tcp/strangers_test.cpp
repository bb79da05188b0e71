// Strangers without a token: wrong greetings, silence, floods and noise at the data port.

#include <algorithm>
#include <cstdlib>
#include <random>

#include <sys/resource.h>
#include <sys/wait.h>

#include "hostile_fixture.hpp"

namespace troupe::transport::tcp {

TEST_F(hostile, wrong_magic_is_hung_up_on_at_once) {
  // It is answered sooner than an earlier silent connection is given up, which takes two seconds. A
  // machine that stalls for so long gets another try.
  const auto at_once = [&] {
    const auto silent = dial_victim();
    const auto fd = dial_victim();
    send(fd, std::string{"GET / HTTP/1.1\r\n\r\n"});
    EXPECT_TRUE(hangs_up(fd));
    return !has_hung_up(silent);
  };
  EXPECT_TRUE(comes_true(at_once));
}

TEST_F(hostile, a_greeting_that_never_ends_is_given_up) {
  const auto fd = dial_victim();
  const auto bytes = encode(hello{});
  send(fd, std::span{bytes}.first(40));
  EXPECT_TRUE(hangs_up(fd));
}

TEST_F(hostile, ten_thousand_silent_connections_cost_a_bounded_number_of_descriptors) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const auto before = open_descriptors();
  const auto memory_before = resident_bytes();
  // The flood comes from another process, so it uses none of our descriptors.
  const auto flood = ::fork();
  if (flood == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(victim.place->data_port());
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 10'000; ++i) {
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) ::_exit(2);
    }
    ::_exit(0);
  }
  std::size_t most = 0;
  int status = 0;
  ASSERT_TRUE(comes_true([&] {
    most = std::max(most, open_descriptors());
    return ::waitpid(flood, &status, WNOHANG) == flood;
  }));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the flood did not get through";
  EXPECT_LE(most, before + 64 + 8);
  if (!troupe::testing::sanitized) {
    EXPECT_LE(resident_bytes(), memory_before + (8U << 20U));
  }
  EXPECT_LE(notices_, 70) << "one line a second, no more";
  EXPECT_GE(notices_, 1);
  // A real peer gets in, during the flood and after it.
  let_friend_in();
}

TEST_F(hostile, a_real_peer_gets_in_while_the_port_is_flooded) {
  std::atomic<bool> enough{false};
  std::thread flood{[&] {
    std::vector<owned_fd> held;
    while (!enough) {
      held.push_back(dial_victim());
      if (held.size() > 400) held.clear();
    }
  }};
  for (int i = 0; i < 5; ++i) {
    let_friend_in();
  }
  enough = true;
  flood.join();
}

TEST_F(hostile, random_bytes_at_the_port_do_nothing) {
  const char* asked = std::getenv("TROUPE_HOSTILE_SECONDS");
  const auto time = std::chrono::seconds{asked != nullptr ? std::atoi(asked) : 2};
  const auto before = open_descriptors();
  std::mt19937 random{4711};
  const auto last = clock::now() + time;
  while (clock::now() < last) {
    const auto fd = dial_victim();
    std::vector<std::byte> bytes(random() % 3000);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    if (random() % 2 == 0) {  // half of them begin like a greeting
      const auto start = encode(hello{});
      std::ranges::copy(
          std::span{start}.first(std::min<std::size_t>(bytes.size(), 10 + random() % 70)),
          bytes.begin());
    }
    send(fd, bytes);
  }
  EXPECT_TRUE(comes_true([&] { return open_descriptors() <= before + 2; }));
}

}  // namespace troupe::transport::tcp
