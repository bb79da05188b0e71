#include "troupe/transport/shm/peer_process.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <thread>

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/shm/copy_job.hpp"

#include "memory_reach.hpp"
#include "waiting.hpp"

namespace troupe::transport::shm {

namespace {

struct child {
  pid_t pid{::fork()};
  child() {
    if (pid == 0) {
      while (true) ::pause();
    }
  }
  ~child() { end(); }
  void end() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
    pid = 0;
  }
};

TEST(peer_process, a_process_is_alive_until_it_ends) {
  child other;
  const auto peer = peer_process::open(static_cast<std::uint32_t>(other.pid));
  EXPECT_TRUE(peer.alive());
  other.end();
  EXPECT_FALSE(peer.alive());
}

/// A handled signal interrupts every blocking call, even one with a zero time-out.
TEST(peer_process, a_signal_of_this_process_makes_no_other_one_look_dead) {
  child other;
  const auto peer = peer_process::open(static_cast<std::uint32_t>(other.pid));
  static std::atomic<std::uint64_t> signals{0};
  struct sigaction counts {
  }, before{};
  counts.sa_handler = [](int) { ++signals; };
  ASSERT_EQ(::sigaction(SIGUSR2, &counts, &before), 0);
  std::atomic<bool> over{false};
  std::thread sender{[&over, to = ::pthread_self()] {
    while (!over) ::pthread_kill(to, SIGUSR2);
  }};
  std::uint64_t dead = 0;
  for (const auto end = testing::end_of_wait();
       signals < 20'000 && dead == 0 && std::chrono::steady_clock::now() < end;) {
    for (int i = 0; i < 100; ++i) dead += peer.alive() ? 0 : 1;
  }
  over = true;
  sender.join();
  ASSERT_EQ(::sigaction(SIGUSR2, &before, nullptr), 0);
  EXPECT_EQ(dead, 0U);
  EXPECT_GT(signals, 0U);
}

TEST(peer_process, only_the_one_that_told_the_number_shows_it) {
  if (const auto why = testing::why_memory_is_out_of_reach()) GTEST_SKIP() << *why;
  std::uint64_t value = 0x1234'5678'9abc'def0;
  const auto address = reinterpret_cast<std::uintptr_t>(&value);
  const auto self = peer_process::open(static_cast<std::uint32_t>(::getpid()));
  EXPECT_TRUE(self.shows({address, value}));
  EXPECT_FALSE(self.shows({address, value + 1}));
  EXPECT_FALSE(self.shows({8, value}));
}

/// A peer that has ended, and whose pid now belongs to another process: this one.
struct reused_number : ::testing::Test {
  static peer_process take_over() {
    child other;
    const auto pidfd = ::syscall(SYS_pidfd_open, other.pid, 0);
    other.end();
    return {static_cast<std::uint32_t>(::getpid()), owned_fd{static_cast<int>(pidfd)}};
  }
  /// A copy of one block from the pool to `stranger` or back, through the kernel.
  std::unique_ptr<copy_job> job(direction dir) {
    auto job = std::make_unique<copy_job>();
    auto& made = *job;
    made.work.dir = dir;
    made.work.pieces.push_back({pool_id, nullptr, {{0, 0, 4096, 0, 0, 1}}});
    job_piece piece;
    piece.local = *regions.use(pool_id);
    piece.remote_address = reinterpret_cast<std::uintptr_t>(stranger.data());
    piece.slot = &slot;
    piece.grant = 7;
    made.pieces.push_back(std::move(piece));
    made.total = 4096;
    return job;
  }

  region_table regions{4};
  region_id pool_id{*regions.allocate(4096, "pool")};
  std::array<std::byte, 4096> stranger{};
  grant_slot slot{};
};

TEST_F(reused_number, nothing_is_written_into_a_stranger) {
  const auto peer = take_over();
  std::ranges::fill(*regions.bytes(pool_id), std::byte{1});
  slot.id = 7;
  auto work = job(direction::write);
  EXPECT_EQ(job_runner(peer, -1).step(*work).state, job_runner::progress::done);
  ASSERT_TRUE(work->failure);
  EXPECT_EQ(work->failure->code, errc::peer_lost);
  EXPECT_EQ(work->moved, 0U);
  EXPECT_TRUE(std::ranges::all_of(stranger, [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(reused_number, nothing_of_a_stranger_is_taken_for_the_peers) {
  const auto peer = take_over();
  std::ranges::fill(stranger, std::byte{2});
  slot.id = 7;
  auto work = job(direction::read);
  EXPECT_EQ(job_runner(peer, -1).step(*work).state, job_runner::progress::done);
  ASSERT_TRUE(work->failure);
  EXPECT_EQ(work->failure->code, errc::peer_lost);
  EXPECT_EQ((*regions.bytes(pool_id))[0], std::byte{0});
}

}  // namespace

}  // namespace troupe::transport::shm
