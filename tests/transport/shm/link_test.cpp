#include <algorithm>
#include <array>
#include <atomic>
#include <ctime>
#include <iostream>
#include <optional>
#include <thread>

#include <signal.h>
#include <sys/mman.h>

#include "memory_reach.hpp"
#include "pair.hpp"

namespace troupe::transport::shm_test {
namespace {

constexpr transfer_id transfer{77};

void fill(std::span<std::byte> memory, unsigned seed) {
  for (std::size_t i = 0; i < memory.size(); ++i) {
    memory[i] = static_cast<std::byte>((i * 2654435761u + seed) >> 13);
  }
}

TEST(shm_link, a_write_lands_before_its_frame_is_delivered) {
  pair both;
  const auto from = both.dialer.allocate(1 << 20);
  const auto to = both.acceptor.allocate(1 << 20);
  fill(both.dialer.memory(from), 1);
  auto grant =
      both.acceptor.to_peer->grant(to, {{.offset = 0, .length = 1 << 20}}, access::write, transfer);
  ASSERT_TRUE(grant) << grant.error().message;
  auto posted = both.dialer.to_peer->post(
      simple_batch(1, direction::write, from, *grant,
                   {{.local_offset = 4096, .remote_offset = 8192, .length = 65536}}, "landed"));
  ASSERT_TRUE(posted) << posted.error().message;
  ASSERT_TRUE(eventually([&] { return both.acceptor.said->frames().size() == 1; }));
  EXPECT_EQ(both.acceptor.said->frames().front(), "landed");
  EXPECT_TRUE(std::ranges::equal(both.dialer.memory(from).subspan(4096, 65536),
                                 both.acceptor.memory(to).subspan(8192, 65536)));
  const auto done = both.dialer.said->completions();
  ASSERT_EQ(done.size(), 1u);
  EXPECT_FALSE(done[0].failure);
  EXPECT_EQ(done[0].bytes, 65536u);
  EXPECT_EQ(both.dialer.to_peer->fence(transfer), fence_state::quiescent);
  EXPECT_EQ(both.acceptor.to_peer->fence(transfer), fence_state::quiescent);
}

TEST(shm_link, a_large_strided_read_is_copied_by_the_progress_thread) {
  pair both;
  const std::uint64_t size = 8 << 20;
  const auto into = both.dialer.allocate(size);
  const auto from = both.acceptor.allocate(size);
  fill(both.acceptor.memory(from), 2);
  auto grant =
      both.acceptor.to_peer->grant(from, {{.offset = 0, .length = size}}, access::read, transfer);
  ASSERT_TRUE(grant) << grant.error().message;
  const segment strided{.local_offset = 0,
                        .remote_offset = 100,
                        .length = 1000,
                        .local_stride = 1000,
                        .remote_stride = 2000,
                        .count = 4000};
  ASSERT_TRUE(
      both.dialer.to_peer->post(simple_batch(1, direction::read, into, *grant, {strided}, "read")));
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 1; }));
  EXPECT_FALSE(both.dialer.said->completions()[0].failure);
  for (std::size_t i = 0; i < 4000; ++i) {
    ASSERT_TRUE(std::ranges::equal(both.dialer.memory(into).subspan(i * 1000, 1000),
                                   both.acceptor.memory(from).subspan(100 + i * 2000, 1000)))
        << i;
  }
  EXPECT_TRUE(eventually([&] { return both.acceptor.said->frames().size() == 1; }));
}

TEST(shm_link, memory_of_the_engine_moves_through_the_kernel_both_ways) {
  if (const auto why = testing::why_memory_is_out_of_reach()) GTEST_SKIP() << *why;
  pair both;
  std::vector<std::byte> theirs(3 << 20);
  fill(theirs, 3);
  auto remote = both.acceptor.place->register_memory(theirs, "engine");
  ASSERT_TRUE(remote);
  const auto local = both.dialer.allocate(3 << 20);
  auto grant = both.acceptor.to_peer->grant(*remote, {{.offset = 0, .length = theirs.size()}},
                                            access::read_write, transfer);
  ASSERT_TRUE(grant) << grant.error().message;
  const std::vector<segment> all{{.local_offset = 0, .remote_offset = 0, .length = theirs.size()}};
  ASSERT_TRUE(both.dialer.to_peer->post(simple_batch(1, direction::read, local, *grant, all)));
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 1; }));
  EXPECT_FALSE(both.dialer.said->completions()[0].failure);
  EXPECT_TRUE(std::ranges::equal(both.dialer.memory(local), theirs));
  fill(both.dialer.memory(local), 4);
  ASSERT_TRUE(both.dialer.to_peer->post(simple_batch(2, direction::write, local, *grant, all)));
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 2; }));
  EXPECT_TRUE(std::ranges::equal(both.dialer.memory(local), theirs));
  EXPECT_EQ(both.acceptor.to_peer->fence(transfer), fence_state::quiescent);
  EXPECT_TRUE(both.acceptor.place->deregister(*remote));
}

TEST(shm_link, a_revoked_grant_refuses_what_comes_after) {
  pair both;
  const auto from = both.dialer.allocate(4096);
  const auto to = both.acceptor.allocate(4096);
  auto grant =
      both.acceptor.to_peer->grant(to, {{.offset = 0, .length = 4096}}, access::write, transfer);
  ASSERT_TRUE(grant);
  EXPECT_EQ(both.acceptor.to_peer->fence(transfer), fence_state::quiescent);
  fill(both.dialer.memory(from), 5);
  ASSERT_TRUE(both.dialer.to_peer->post(
      simple_batch(1, direction::write, from, *grant, {{.length = 4096}}, "never")));
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 1; }));
  const auto done = both.dialer.said->completions()[0];
  ASSERT_TRUE(done.failure);
  EXPECT_EQ(done.failure->code, errc::grant_revoked);
  EXPECT_EQ(done.bad_segments, std::vector<std::uint32_t>{0});
  EXPECT_TRUE(
      std::ranges::all_of(both.acceptor.memory(to), [](auto b) { return b == std::byte{0}; }));
  std::this_thread::sleep_for(20ms);
  EXPECT_TRUE(both.acceptor.said->frames().empty());
  EXPECT_EQ(both.acceptor.to_peer->stats().refused, 1u);
}

TEST(shm_link, answers_a_fence_that_meets_a_write_which_it_refuses) {
  pair both;
  const auto from = both.dialer.allocate(4096);
  const auto to = both.acceptor.allocate(4096);
  int met = 0;
  std::uint64_t batch_number = 0;
  std::uint32_t round = 0;
  const auto end = testing::end_of_wait();
  const auto rounds = testing::tries(200U);
  for (; round < rounds || (met == 0 && std::chrono::steady_clock::now() < end); ++round) {
    const transfer_id ended{1000 + round};
    auto grant =
        both.acceptor.to_peer->grant(to, {{.offset = 0, .length = 4096}}, access::write, ended);
    ASSERT_TRUE(grant);
    std::atomic<int> posted{0};
    std::thread writer{[&] {
      for (; posted < 300; ++posted) {
        EXPECT_TRUE(both.dialer.to_peer->post(
            simple_batch(++batch_number, direction::write, from, *grant, {{.length = 64}})));
      }
    }};
    while (posted < 20) std::this_thread::yield();
    const auto state = both.acceptor.to_peer->fence(ended);
    writer.join();
    if (state == fence_state::quiescent) continue;
    ++met;
    ASSERT_TRUE(eventually([&] { return both.acceptor.said->is_quiescent(ended); }))
        << "round " << round;
  }
  std::cout << met << " of " << round << " fences met a write\n";
  if (met == 0) GTEST_SKIP() << "no fence met a write on a machine as busy as this";
}

/// Memory whose first access blocks: the thread stops in the middle of its copy.
class gated_memory {
 public:
  static constexpr std::size_t size = std::size_t{64} << 10;

  gated_memory() {
    auto* at = ::mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bytes = {static_cast<std::byte*>(at), size};
    for (auto& one : all_) {
      gated_memory* none = nullptr;
      if (one.compare_exchange_strong(none, this)) break;
    }
    struct sigaction action {};
    action.sa_sigaction = &gated_memory::on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    ::sigaction(SIGSEGV, &action, &before_);
  }
  ~gated_memory() {
    ::sigaction(SIGSEGV, &before_, nullptr);
    for (auto& one : all_) {
      auto* mine = this;
      one.compare_exchange_strong(mine, nullptr);
    }
    ::munmap(bytes.data(), size);
  }
  gated_memory(const gated_memory&) = delete;
  gated_memory& operator=(const gated_memory&) = delete;

  void open() { open_ = true; }
  [[nodiscard]] bool somebody_waits() const { return waits_; }

  std::span<std::byte> bytes;

 private:
  static void on_fault(int, siginfo_t* info, void*) {
    const auto* const at = static_cast<std::byte*>(info->si_addr);
    for (auto& one : all_) {
      auto* const gate = one.load();
      if (gate == nullptr || at < gate->bytes.data() || at >= gate->bytes.data() + size) continue;
      gate->waits_ = true;
      constexpr timespec pause{0, 100'000};
      while (!gate->open_) ::nanosleep(&pause, nullptr);
      ::mprotect(gate->bytes.data(), size, PROT_READ | PROT_WRITE);
      return;
    }
    ::signal(SIGSEGV, SIG_DFL);  // a fault elsewhere: let it happen again and end the process
  }

  static inline std::array<std::atomic<gated_memory*>, 4> all_{};
  std::atomic<bool> open_{false}, waits_{false};
  struct sigaction before_ {};
};

/// A read by the dialer that the acceptor has granted, and that stopped in the middle of its copy.
class standing_read {
 public:
  standing_read(pair& both, region_id from, transfer_id of) {
    const auto into = both.dialer.place->register_memory(gate_.bytes, "gated");
    auto grant = both.acceptor.to_peer->grant(from, {{.offset = 0, .length = gated_memory::size}},
                                              access::read, of);
    EXPECT_TRUE(into && grant);
    if (!into || !grant) return;
    thread_ = std::thread{[this, &both, of, into = *into, grant = *grant] {
      (void)both.dialer.to_peer->post(
          simple_batch(of.value, direction::read, into, grant, {{.length = gated_memory::size}}));
      over_ = true;
    }};
    EXPECT_TRUE(eventually([this] { return gate_.somebody_waits(); }));
  }
  ~standing_read() {
    gate_.open();
    if (thread_.joinable()) thread_.join();
  }
  void go_on() { gate_.open(); }
  [[nodiscard]] bool is_over() const { return over_; }

 private:
  gated_memory gate_;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

TEST(shm_link, that_is_closed_answers_a_fence_whose_reader_left_while_it_told_of_another) {
  constexpr transfer_id first{1}, second{2}, third{3};
  // Whether the progress thread settles the link right afterwards depends on the kernel's
  // scheduling.
  for (int round = 0; round < 20; ++round) {
    pair both;
    const auto from = both.acceptor.allocate(gated_memory::size);
    std::optional<standing_read> one{std::in_place, both, from, first};
    std::optional<standing_read> other{std::in_place, both, from, second};
    both.acceptor.said->when_quiescent = [&](transfer_id which) {
      if (which != first) return;
      other->go_on();
      EXPECT_TRUE(eventually([&] { return other->is_over(); }));
      // The fence sees that the reader of the second is gone.
      EXPECT_EQ(both.acceptor.to_peer->fence(third), fence_state::quiescent);
    };
    ASSERT_EQ(both.acceptor.to_peer->fence(first), fence_state::pending);
    ASSERT_EQ(both.acceptor.to_peer->fence(second), fence_state::pending);
    both.acceptor.to_peer->close();
    EXPECT_FALSE(both.acceptor.said->is_quiescent(first));
    one->go_on();
    ASSERT_TRUE(eventually([&] { return both.acceptor.said->is_quiescent(first); }));
    ASSERT_TRUE(eventually([&] { return both.acceptor.said->is_quiescent(second); }))
        << "round " << round;
    one.reset();
    other.reset();
  }
}

TEST(shm_link, the_slot_of_an_ended_grant_does_not_serve_its_old_holder_again) {
  pair both;
  const auto from = both.dialer.allocate(4096);
  const auto to = both.acceptor.allocate(4096);
  const extent all{.offset = 0, .length = 4096};
  auto old = both.acceptor.to_peer->grant(to, {all}, access::write, transfer);
  ASSERT_TRUE(old);
  EXPECT_EQ(both.acceptor.to_peer->fence(transfer), fence_state::quiescent);
  auto fresh = both.acceptor.to_peer->grant(to, {all}, access::write, transfer_id{78});
  ASSERT_TRUE(fresh);
  ASSERT_EQ(old->key, fresh->key);  // the same slot, so that the ids alone must tell them apart
  ASSERT_TRUE(
      both.dialer.to_peer->post(simple_batch(1, direction::write, from, *old, {{.length = 4096}})));
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 1; }));
  ASSERT_TRUE(both.dialer.said->completions()[0].failure);
  EXPECT_EQ(both.dialer.said->completions()[0].failure->code, errc::grant_revoked);
}

TEST(shm_link, a_deregistered_region_is_unmapped_at_the_peer) {
  pair both;
  const auto from = both.dialer.allocate(4096);
  const auto to = both.acceptor.allocate(4096);
  auto grant =
      both.acceptor.to_peer->grant(to, {{.offset = 0, .length = 4096}}, access::write, transfer);
  ASSERT_TRUE(grant);
  ASSERT_TRUE(both.dialer.to_peer->post(
      simple_batch(1, direction::write, from, *grant, {{.length = 4096}})));
  EXPECT_FALSE(both.acceptor.place->deregister(to));
  EXPECT_EQ(both.acceptor.to_peer->fence(transfer), fence_state::quiescent);
  ASSERT_TRUE(both.acceptor.place->deregister(to));
  EXPECT_TRUE(eventually([&] {
    auto late = both.dialer.to_peer->post(
        simple_batch(2, direction::write, from, *grant, {{.length = 4096}}));
    return !late && late.error().code == errc::grant_revoked &&
           late.error().message.find("not, or no longer, shared") != std::string::npos;
  }));
}

TEST(shm_link, frames_keep_their_order_and_contents_at_every_size) {
  pair both;
  std::vector<std::string> sent;
  std::size_t total = 0;
  for (std::size_t i = 0; i < 300; ++i) {
    const std::size_t sizes[] = {0, 1, 55, 56, 57, 112, 113, 4000, 16384, 16385, 50000};
    std::string frame(sizes[i % std::size(sizes)], static_cast<char>('a' + i % 26));
    total += frame.size();
    ASSERT_TRUE(both.dialer.to_peer->send_frame(bytes_of(frame)));
    sent.push_back(std::move(frame));
  }
  std::string longest(link::max_frame, 'x');
  ASSERT_TRUE(both.dialer.to_peer->send_frame(bytes_of(longest)));
  sent.push_back(longest);
  longest += 'x';
  EXPECT_FALSE(both.dialer.to_peer->send_frame(bytes_of(longest)));
  ASSERT_TRUE(eventually([&] { return both.acceptor.said->frames().size() == sent.size(); }));
  EXPECT_EQ(both.acceptor.said->frames(), sent);
}

TEST(shm_link, a_peer_that_closes_breaks_this_end_once) {
  pair both;
  both.acceptor.to_peer->close();
  ASSERT_TRUE(eventually([&] { return both.dialer.said->broken().size() == 1; }));
  EXPECT_EQ(both.dialer.said->broken()[0].code, errc::link_broken);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(both.dialer.said->broken().size(), 1u);
  EXPECT_TRUE(both.acceptor.said->broken().empty());
  EXPECT_FALSE(both.dialer.to_peer->send_frame(bytes_of("late")));
}

TEST(shm_link, a_dialer_whose_acceptor_was_not_told_to_connect_fails_by_its_deadline) {
  node dialer{101};
  node acceptor{202};
  dialer.open(acceptor.self, link_role::initiator, 100ms);
  acceptor.open(dialer.self, link_role::acceptor);
  ASSERT_TRUE(dialer.to_peer->connect(acceptor.to_peer->offer()));
  ASSERT_TRUE(eventually([&] { return dialer.said->broken().size() == 1; }));
  EXPECT_EQ(dialer.said->broken()[0].code, errc::peer_unreachable);
}

TEST(shm_link, an_acceptor_that_connects_late_takes_the_dialer_that_came_before) {
  node dialer{101};
  node acceptor{202};
  dialer.open(acceptor.self, link_role::initiator);
  acceptor.open(dialer.self, link_role::acceptor);
  ASSERT_TRUE(dialer.to_peer->connect(acceptor.to_peer->offer()));
  std::this_thread::sleep_for(50ms);
  ASSERT_TRUE(acceptor.to_peer->connect(dialer.to_peer->offer()));
  EXPECT_TRUE(eventually([&] { return dialer.said->ups() == 1 && acceptor.said->ups() == 1; }));
}

TEST(shm_link, an_offer_of_another_life_is_refused_at_once) {
  node dialer{101};
  node acceptor{202};
  dialer.open(incarnation{999}, link_role::initiator);
  acceptor.open(dialer.self, link_role::acceptor);
  const auto refused = dialer.to_peer->connect(acceptor.to_peer->offer());
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::stale_incarnation);
}

TEST(shm_link, a_damaged_offer_is_refused_at_once) {
  node dialer{101};
  node acceptor{202};
  dialer.open(acceptor.self, link_role::initiator);
  acceptor.open(dialer.self, link_role::acceptor);
  auto offer = acceptor.to_peer->offer();
  offer.payload.pop_back();
  const auto refused = dialer.to_peer->connect(offer);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, errc::invalid_config);
}

TEST(shm_link, a_batch_that_runs_is_cancelled_by_a_fence_here) {
  pair both;
  const std::uint64_t size = 64 << 20;
  const auto from = both.dialer.allocate(size);
  const auto to = both.acceptor.allocate(size);
  auto grant =
      both.acceptor.to_peer->grant(to, {{.offset = 0, .length = size}}, access::write, transfer);
  ASSERT_TRUE(grant);
  for (std::uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(both.dialer.to_peer->post(
        simple_batch(i, direction::write, from, *grant, {{.length = size}}, "landed")));
  }
  const auto answer = both.dialer.to_peer->fence(transfer);
  if (answer == fence_state::pending) {
    ASSERT_TRUE(eventually([&] { return both.dialer.said->quiescent().size() == 1; }));
  }
  ASSERT_TRUE(eventually([&] { return both.dialer.said->completions().size() == 20; }));
  EXPECT_TRUE(std::ranges::any_of(both.dialer.said->completions(), [](const completion& done) {
    return done.failure && done.failure->code == errc::aborted;
  }));
  const auto late =
      both.dialer.to_peer->post(simple_batch(99, direction::write, from, *grant, {{.length = 1}}));
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, errc::grant_revoked);
}

}  // namespace
}  // namespace troupe::transport::shm_test
