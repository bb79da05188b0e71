#include "troupe/transport/shm/ring.hpp"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "noise.hpp"

namespace troupe::transport::shm {
namespace {

using troupe::testing::noise_of;

/// A ring as in a new memfd: all zeros.
struct fixture {
  std::unique_ptr<ring_memory> memory = std::make_unique<ring_memory>();
  ring_producer producer{*memory};
  ring_consumer consumer{*memory};
};

TEST(ring, frames_of_every_size_come_out_as_they_went_in_over_many_laps) {
  fixture f;
  std::mt19937_64 random{7};
  std::vector<std::byte> out;
  for (std::uint64_t i = 0; i < 20'000; ++i) {
    const auto frame = noise_of(random() % (i % 50 == 0 ? 100'000 : 300), i);
    const auto pushed = f.producer.push(frame);
    ASSERT_TRUE(pushed && *pushed);
    const auto popped = f.consumer.pop(out);
    ASSERT_TRUE(popped && *popped);
    ASSERT_EQ(out, frame) << i;
  }
  EXPECT_FALSE(f.consumer.ready());
}

TEST(ring, a_full_ring_refuses_and_takes_again_what_was_made_room_for) {
  fixture f;
  const auto frame = noise_of(1000, 1);
  std::size_t held = 0;
  while (true) {
    const auto pushed = f.producer.push(frame);
    ASSERT_TRUE(pushed);
    if (!*pushed) break;
    ++held;
  }
  EXPECT_EQ(held, ring_cells / cells_of(1000));
  EXPECT_FALSE(f.producer.wait_for_room());
  EXPECT_FALSE(f.consumer.must_wake_producer() && held == 0);
  std::vector<std::byte> out;
  ASSERT_TRUE(*f.consumer.pop(out));
  EXPECT_TRUE(f.producer.wait_for_room());
  EXPECT_TRUE(*f.producer.push(frame));
}

TEST(ring, a_frame_longer_than_the_ring_goes_through_in_parts) {
  fixture f;
  const auto frame = noise_of(max_ring_frame, 3);
  std::vector<std::byte> out;
  std::size_t done = 0;
  bool whole = false;
  for (int round = 0; round < 100 && !whole; ++round) {
    const auto now = f.producer.push_part(frame, done);
    ASSERT_TRUE(now);
    done = *now;
    const auto popped = f.consumer.pop(out);
    ASSERT_TRUE(popped);
    whole = *popped;
  }
  EXPECT_TRUE(whole);
  EXPECT_EQ(out, frame);
}

TEST(ring, a_consumer_that_prepares_to_sleep_never_misses_a_record) {
  fixture f;
  EXPECT_TRUE(f.consumer.prepare_sleep());
  ASSERT_TRUE(*f.producer.push(noise_of(10, 1)));
  EXPECT_TRUE(f.producer.must_wake_consumer());
  EXPECT_FALSE(f.producer.must_wake_consumer());  // already asked for
  EXPECT_FALSE(f.consumer.prepare_sleep());
}

TEST(ring, two_threads_exchange_frames_in_order_while_the_ring_overflows) {
  fixture f;
  constexpr std::uint64_t count = 30'000;
  std::thread producer{[&] {
    for (std::uint64_t i = 0; i < count;) {
      const auto frame = noise_of(8 + i % 500, i);
      const auto pushed = f.producer.push(frame);
      ASSERT_TRUE(pushed);
      if (*pushed) {
        ++i;
      } else {
        std::this_thread::yield();
      }
    }
  }};
  std::vector<std::byte> out;
  for (std::uint64_t i = 0; i < count;) {
    const auto popped = f.consumer.pop(out);
    ASSERT_TRUE(popped);
    if (!*popped) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(out, noise_of(8 + i % 500, i));
    ++i;
  }
  producer.join();
}

/// A hostile peer may write anything to every word of the shared page.
TEST(ring, garbage_in_the_shared_page_is_an_error_or_a_frame_within_bounds_and_nothing_else) {
  std::mt19937_64 random{11};
  for (int round = 0; round < 300; ++round) {
    fixture f;
    std::vector<std::byte> out;
    for (int i = 0; i < 20; ++i) static_cast<void>(f.producer.push(noise_of(random() % 2000, 5)));
    for (int i = 0; i < 200; ++i) {
      auto& cell = f.memory->cells[random() % ring_cells];
      const auto lap = random() % 3 == 0 ? random() : std::uint64_t{1} << 32;
      cell.header.store(lap | (random() & 0xffff'ffff), std::memory_order_relaxed);
    }
    f.memory->words.taken.store(random(), std::memory_order_relaxed);
    for (int i = 0; i < 5000; ++i) {
      const auto popped = f.consumer.pop(out);
      if (!popped) {
        EXPECT_EQ(popped.error().code, errc::link_broken);
        break;
      }
      if (!*popped) break;
      ASSERT_LE(out.size(), max_ring_frame);
    }
  }
}

TEST(ring, a_read_position_that_cannot_be_is_an_error_for_the_producer) {
  for (const std::uint64_t wrong : {std::uint64_t{1} << 63, std::uint64_t{ring_cells} + 1}) {
    fixture f;
    f.memory->words.taken.store(wrong, std::memory_order_relaxed);
    bool failed = false;
    for (std::size_t i = 0; i < ring_cells + 1 && !failed; ++i) {
      const auto pushed = f.producer.push({});
      failed = !pushed;
    }
    EXPECT_TRUE(failed);
  }
}

TEST(ring, a_length_beyond_a_part_is_an_error) {
  fixture f;
  f.memory->cells[0].header.store(std::uint64_t{1} << 32 | (max_record + 1) << 1);
  std::vector<std::byte> out;
  const auto popped = f.consumer.pop(out);
  ASSERT_FALSE(popped);
  EXPECT_EQ(popped.error().code, errc::link_broken);
}

TEST(ring, parts_without_an_end_are_an_error_at_the_bound_of_a_frame) {
  fixture f;
  const std::vector<std::byte> part(max_record);
  std::vector<std::byte> out;
  std::vector<std::byte> endless(max_ring_frame * 2);
  std::size_t done = 0;
  for (int i = 0; i < 1000; ++i) {
    const auto now = f.producer.push_part(endless, done);
    ASSERT_TRUE(now);
    done = *now;
    const auto popped = f.consumer.pop(out);
    if (!popped) {
      EXPECT_EQ(popped.error().code, errc::link_broken);
      return;
    }
    ASSERT_FALSE(*popped);
  }
  FAIL() << "took a frame of more than the bound";
}

}  // namespace
}  // namespace troupe::transport::shm
