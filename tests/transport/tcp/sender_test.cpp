#include "troupe/transport/tcp/sender.hpp"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <sys/socket.h>

namespace {

std::atomic<std::uint64_t> accepted{0};

}  // namespace

// A socket whose peer reads as fast as this end sends: it is never full.
extern "C" ssize_t __wrap_sendmsg(int, const msghdr* message, int) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < message->msg_iovlen; ++i) bytes += message->msg_iov[i].iov_len;
  accepted += bytes;
  return static_cast<ssize_t>(bytes);
}

namespace troupe::transport::tcp {

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

std::shared_ptr<outgoing> write_of(std::vector<std::byte>& memory, revocable& guard) {
  auto job = std::make_shared<outgoing>();
  job->guard = &guard;
  job->runs.push_back({memory.data(), memory.size(), 0, 1});
  job->remote.push_back({});
  job->bytes = memory.size();
  return job;
}

}  // namespace

TEST(lane_sender, stops_after_some_mib_however_fast_the_peer_reads_and_goes_on_later) {
  std::vector<bool> asked;  // to be told when the socket is writable
  lane_sender sender{-1, 1024, [&](bool writable) { asked.push_back(writable); }};
  std::vector<std::byte> memory(64 * mib);
  revocable guard;
  sender.push_write(write_of(memory, guard));
  std::uint64_t before = accepted;
  EXPECT_EQ(sender.flush(), lane_sender::outcome::blocked);
  EXPECT_GE(accepted - before, lane_sender::flush_budget);
  EXPECT_LE(accepted - before, lane_sender::flush_budget + 4 * mib);
  EXPECT_TRUE(sender.blocked());
  EXPECT_EQ(asked, std::vector{true});
  int flushes = 1;
  for (; sender.blocked() && flushes < 100; ++flushes) sender.flush();
  EXPECT_LE(flushes, 9);
  EXPECT_EQ(sender.queued_bytes(), 0U);
  EXPECT_EQ(sender.payload_sent(), memory.size());
  EXPECT_EQ(asked, (std::vector{true, false}));
}

TEST(lane_sender, is_not_blocked_after_what_it_sends_at_once) {
  bool asked = false;
  lane_sender sender{-1, 1024, [&](bool) { asked = true; }};
  std::vector<std::byte> memory(4 * mib);
  revocable guard;
  sender.push_write(write_of(memory, guard));
  EXPECT_EQ(sender.flush(), lane_sender::outcome::idle);
  EXPECT_EQ(sender.payload_sent(), memory.size());
  EXPECT_FALSE(asked);
}

}  // namespace troupe::transport::tcp
