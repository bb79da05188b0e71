// Bytes through an encrypted connection arrive complete, in bounded memory, and its end is seen.
#include <csignal>

#include <sys/ioctl.h>
#include <sys/wait.h>

#include "door_tls_fixture.hpp"

namespace troupe::actors {
namespace {

using namespace testing;

constexpr std::size_t mib = 1u << 20;

/// The byte at that place of a stream whose period matches no buffer size.
char byte_at(std::size_t place) {
  const auto mixed = (place ^ (place >> 11)) * 0x9E3779B97F4A7C15ull;
  return static_cast<char>(mixed >> 56);
}

/// Sends `size` bytes of the stream and shuts down the sending direction.
void send_stream(int fd, std::size_t size) {
  std::string piece;
  for (std::size_t at = 0; at < size; at += piece.size()) {
    piece.resize(std::min<std::size_t>(100'003, size - at));
    for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = byte_at(at + i);
    send_all(fd, piece);
  }
  ::shutdown(fd, SHUT_WR);
}

/// Reads to the end. Returns the number of correct bytes.
std::size_t read_stream(int fd) {
  std::string piece(65'536, '\0');
  std::size_t at = 0;
  while (readable(fd)) {
    const auto n = ::recv(fd, piece.data(), piece.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) break;
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i)
      if (piece[i] != byte_at(at + i)) return at + i;
    at += static_cast<std::size_t>(n);
  }
  return at;
}

TEST(door_pump, carries_64_mib_both_ways_at_once) {
  encrypted_pair both;
  const std::size_t size = (troupe::testing::sanitized ? 8 : 64) * mib;
  std::thread one{[&] { send_stream(both.here.get(), size); }};
  std::thread other{[&] { send_stream(both.there.get(), size); }};
  std::size_t got_here = 0;
  std::thread third{[&] { got_here = read_stream(both.here.get()); }};
  const auto got_there = read_stream(both.there.get());
  for (auto* thread : {&one, &other, &third}) thread->join();
  EXPECT_EQ(got_there, size);
  EXPECT_EQ(got_here, size);
  // Both sides have shut down and all bytes have arrived, so the connection ends.
  EXPECT_TRUE(comes_true([&] { return both.at.it->count().pumped == 0; }));
  EXPECT_TRUE(comes_true([&] { return both.from.it->count().pumped == 0; }));
}

TEST(door_pump, a_peer_that_does_not_read_stops_the_sender_and_costs_little_memory) {
  encrypted_pair both;
  const auto memory = resident_bytes();
  // Send until no byte has been accepted for half a second.
  std::string piece(65'536, '\0');
  std::size_t sent = 0;
  auto last = clock::now();
  while (clock::now() - last < 500ms && sent < 512 * mib) {
    for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = byte_at(sent + i);
    const auto n = ::send(both.here.get(), piece.data(), piece.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) {
      sent += static_cast<std::size_t>(n);
      last = clock::now();
    } else {
      std::this_thread::sleep_for(1ms);
    }
  }
  EXPECT_LT(sent, 64 * mib) << "two socket pairs, TCP's buffers and 64 KiB at each door";
  if (!troupe::testing::sanitized) {
    EXPECT_LT(resident_bytes(), memory + 4 * mib);
  }
  EXPECT_LT(busy_for(500ms), 0.5) << "who waits does not spin";
  // The other direction is not held up, and all bytes arrive in the end.
  send_all(both.there.get(), "back");
  EXPECT_EQ(read_exactly(both.here.get(), 4), "back");
  ::shutdown(both.here.get(), SHUT_WR);
  EXPECT_EQ(read_stream(both.there.get()), sent);
}

TEST(door_pump, one_end_stays_open_when_the_other_has_said_all) {
  encrypted_pair both;
  send_all(both.here.get(), "all of it");
  ::shutdown(both.here.get(), SHUT_WR);
  EXPECT_EQ(read_exactly(both.there.get(), 9), "all of it");
  EXPECT_TRUE(hangs_up(both.there.get()));
  send_all(both.there.get(), "the answer");
  EXPECT_EQ(read_exactly(both.here.get(), 10), "the answer");
  ::shutdown(both.there.get(), SHUT_WR);
  EXPECT_TRUE(hangs_up(both.here.get()));
}

TEST(door_pump, what_was_said_before_closing_arrives) {
  encrypted_pair both;
  send_all(both.here.get(), std::string(200'000, 'x'));
  both.here.reset();
  EXPECT_EQ(read_exactly(both.there.get(), 200'000).size(), 200'000u);
  EXPECT_TRUE(hangs_up(both.there.get()));
}

TEST(door_pump, what_was_said_last_arrives_although_the_peer_was_still_talking) {
  for (int round = 0; round < 10; ++round) {
    encrypted_pair both;
    // Nothing is read at `here`, so its connection has unread bytes when it is closed.
    std::thread talks{[&] { send_stream(both.there.get(), 8 * mib); }};
    std::this_thread::sleep_for(30ms);
    send_all(both.here.get(), std::string(200'000, 'x'));
    both.here.reset();
    EXPECT_EQ(read_exactly(both.there.get(), 200'000).size(), 200'000u) << "round " << round;
    EXPECT_TRUE(hangs_up(both.there.get()));
    talks.join();
  }
}

TEST(door_pump, an_end_that_is_closed_by_half_is_given_up_when_nothing_comes) {
  encrypted_pair both;
  ::shutdown(both.here.get(), SHUT_WR);
  EXPECT_TRUE(hangs_up(both.there.get()));
  for (int i = 0; i < 6; ++i) {  // for longer than a silent connection would be kept
    std::this_thread::sleep_for(1s);
    send_all(both.there.get(), "word");
    EXPECT_EQ(read_exactly(both.here.get(), 4), "word");
  }
  EXPECT_TRUE(hangs_up(both.here.get()));
  EXPECT_TRUE(comes_true([&] { return both.from.it->count().pumped == 0; }));
}

/// Resets a connection while bytes wait at the door. Returns false if the attempt proves nothing
/// because it took longer than the quarter of a second for which the door keeps bytes for a reader.
bool handed_over_after_a_reset() {
  encrypted_pair both;
  // Fill both directions, so that bytes wait at every stage and one door ends with a reset.
  const std::string piece(65'536, 'x');
  for (int i = 0; i < 400; ++i) {
    (void)::send(both.here.get(), piece.data(), piece.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    (void)::send(both.there.get(), piece.data(), piece.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    std::this_thread::sleep_for(1ms);
  }
  int taken = 0;
  EXPECT_EQ(::ioctl(both.there.get(), FIONREAD, &taken), 0);
  const auto began = clock::now();
  both.from.it.reset();
  EXPECT_LT(busy_for(50ms), 0.5) << "who waits does not spin";
  const auto all = read_exactly(both.there.get(), mib).size();
  if (clock::now() - began >= 200ms) return false;
  EXPECT_GT(all, static_cast<std::size_t>(taken));
  return true;
}

TEST(door_pump, what_came_before_a_reset_is_handed_over) {
  EXPECT_TRUE(comes_true(handed_over_after_a_reset));
}

TEST(door_pump, a_plain_end_that_closes_is_seen_at_once_at_the_other) {
  encrypted_pair both;
  both.there.reset();
  EXPECT_TRUE(hangs_up(both.here.get()));
  EXPECT_EQ(both.at.it->count().pumped, 1u) << "it was seen when the door gave the connection up";
}

TEST(door_pump, a_door_that_goes_ends_its_connections_at_once) {
  encrypted_pair both;
  both.at.it.reset();
  EXPECT_TRUE(hangs_up(both.here.get()));
  EXPECT_TRUE(hangs_up(both.there.get()));
  // The door broke the connections. After an orderly end, the other door would wait for data from
  // `here`.
  EXPECT_TRUE(comes_true([&] { return both.from.it->count().pumped == 0; }));
}

TEST(door_pump, a_killed_process_is_seen_at_once_whatever_stands_in_the_way) {
  for (const auto* state : {"idle", "its bytes not read", "nobody reads at either end"}) {
    SCOPED_TRACE(state);
    const bool full = std::string{state} != "idle";
    const bool reset = std::string{state} == "nobody reads at either end";
    const auto authority = authority_of("test");
    const node_files files{authority, node_of(authority, "test")};
    int port_pipe[2];
    ASSERT_EQ(::pipe(port_pipe), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      std::uint16_t port = 0;
      if (::read(port_pipe[0], &port, sizeof port) != sizeof port) ::_exit(1);
      auto mine = door::create(files.options());
      auto here = connect_from(**mine, port);
      if (!here) ::_exit(2);
      const std::string piece(4096, 'x');
      while (full) send_all(here->get(), piece);
      ::pause();
      ::_exit(0);
    }
    listening_door at{files.options()};
    ASSERT_EQ(::write(port_pipe[1], &at.port, sizeof at.port),
              static_cast<ssize_t>(sizeof at.port));
    const auto there = at.admitted();
    ASSERT_TRUE(there);
    if (full) std::this_thread::sleep_for(500ms);
    const std::string unread(1u << 20, 'y');
    for (int i = 0; reset && i < 300; ++i) {
      (void)::send(there.get(), unread.data(), unread.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      std::this_thread::sleep_for(1ms);
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    if (reset) {
      // The kernel resets the connection, which is noticed although there is no room to read.
      EXPECT_TRUE(comes_true([&] { return at.it->count().pumped == 0; }));
    }
    EXPECT_TRUE(hangs_up(there.get()));
    EXPECT_TRUE(comes_true([&] { return at.it->count().pumped == 0; }));
    ::close(port_pipe[0]);
    ::close(port_pipe[1]);
  }
}

TEST(door_pump, many_encrypted_connections_end_in_every_state) {
  const auto descriptors = open_descriptors();
  const auto authority = authority_of("test");
  const node_files files{authority, node_of(authority, "test")};
  for (int round = 0; round < 15; ++round) {
    listening_door at{files.options()};
    std::vector<owned_fd> ends;
    std::mutex mutex;
    std::atomic<int> told{0};
    {
      auto from = door::create(files.options());
      ASSERT_TRUE(from);
      for (int i = 0; i < 8; ++i) {
        (*from)->connect("127.0.0.1", at.port, end_of_wait(), [&](result<door_socket> how) {
          if (how) {
            const std::lock_guard lock{mutex};
            ends.emplace_back(*how);
            send_all(*how, std::string(100'000, 'x'));
          }
          ++told;
        });
      }
      std::this_thread::sleep_for(std::chrono::microseconds{round * round * 100});
      if (round % 3 == 0) at.it.reset();
    }
    EXPECT_EQ(told, 8);
  }
  EXPECT_TRUE(comes_true([&] { return open_descriptors() == descriptors; }));
}

}  // namespace
}  // namespace troupe::actors
