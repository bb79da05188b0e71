#include "troupe/transport/rdma/small_batch.hpp"

#include <cstring>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "troupe/transport/rdma/message_channel.hpp"

// Writes that travel in the message of their notice: which batches may, and how messages are
// checked.
namespace troupe::transport::rdma {

namespace {

constexpr std::size_t room = message_channel::max_payload;

/// Batches over a region of this process.
class small_batches : public ::testing::Test {
 protected:
  static batch make(std::vector<segment> segments, std::size_t frame) {
    batch made{.id = batch_id{7},
               .transfer = transfer_id{42},
               .dir = direction::write,
               .pieces = {},
               .frame = std::vector<std::byte>(frame, std::byte{0xf0})};
    made.pieces.push_back({region_id{1}, nullptr, std::move(segments)});
    return made;
  }
  static std::uint32_t bytes_of(const batch& work) { return small_bytes_of(work, room); }

  std::vector<std::byte> memory_ = std::vector<std::byte>(65'536);
};

std::vector<std::byte> message(std::uint32_t bytes, const std::vector<small_run>& runs,
                               std::size_t frame, std::uint32_t said_runs) {
  struct {
    std::uint64_t transfer{9};
    std::uint32_t bytes{0};
    std::uint32_t runs{0};
  } head;
  head.bytes = bytes;
  head.runs = said_runs;
  std::vector<std::byte> made(sizeof head + bytes + runs.size() * sizeof(small_run) + frame);
  std::memcpy(made.data(), &head, sizeof head);
  if (!runs.empty()) {
    std::memcpy(made.data() + sizeof head + bytes, runs.data(), runs.size() * sizeof(small_run));
  }
  return made;
}

bool refused(const std::vector<std::byte>& payload) {
  const auto decoded = small_batch::decode(payload);
  return !decoded && decoded.error().code == errc::unauthorized;
}

}  // namespace

TEST_F(small_batches, only_few_bytes_with_a_notice_are_small) {
  EXPECT_EQ(bytes_of(make({{0, 0, 8, 0, 0, 1}}, 8)), 8U);
  EXPECT_EQ(bytes_of(make({{0, 0, max_small_bytes - 1, 0, 0, 1}}, 8)), max_small_bytes - 1);
  EXPECT_EQ(bytes_of(make({{0, 0, max_small_bytes, 0, 0, 1}}, 8)), max_small_bytes);
  EXPECT_EQ(bytes_of(make({{0, 0, max_small_bytes + 1, 0, 0, 1}}, 8)), 0U);
  EXPECT_EQ(bytes_of(make({{0, 0, max_small_bytes, 0, 0, 1}, {0, 0, 1, 0, 0, 1}}, 8)), 0U);
  EXPECT_EQ(bytes_of(make({{0, 0, UINT64_MAX, 0, 0, UINT32_MAX}}, 8)), 0U);
  EXPECT_EQ(bytes_of(make({{0, 0, 1ULL << 32, 0, 0, 1}}, 8)), 0U);
  EXPECT_EQ(bytes_of(make({{0, 0, 0, 0, 0, 1}}, 8)), 0U) << "nothing to land";
  EXPECT_EQ(bytes_of(make({{0, 0, 8, 0, 0, 1}}, 0)), 0U) << "nobody is told";
  auto read = make({{0, 0, 8, 0, 0, 1}}, 8);
  read.dir = direction::read;
  EXPECT_EQ(bytes_of(read), 0U);
}

TEST_F(small_batches, what_does_not_fit_into_one_message_is_not_small) {
  constexpr std::size_t fits = room - 16 - 8 - sizeof(small_run);
  EXPECT_EQ(bytes_of(make({{0, 0, 8, 0, 0, 1}}, fits)), 8U);
  EXPECT_EQ(bytes_of(make({{0, 0, 8, 0, 0, 1}}, fits + 1)), 0U);
  constexpr std::uint32_t most_runs = (room - 16 - 1) / (sizeof(small_run) + 1);
  EXPECT_EQ(bytes_of(make({{0, 0, 1, 2, 2, most_runs}}, 1)), most_runs);
  EXPECT_EQ(bytes_of(make({{0, 0, 1, 2, 2, most_runs + 1}}, 1)), 0U);
}

TEST_F(small_batches, a_message_fits_exactly_and_comes_back_as_it_was) {
  for (std::size_t i = 0; i < memory_.size(); ++i) memory_[i] = static_cast<std::byte>(i * 7);
  constexpr std::uint32_t most_runs = (room - 16 - 1) / (sizeof(small_run) + 1);
  for (const auto& segments : std::vector<std::vector<segment>>{
           {{10, 5000, 8, 0, 0, 1}},
           {{10, 5000, max_small_bytes, 0, 0, 1}},
           {{0, 0, 1, 3, 5, most_runs}},
           {{0, 9, 3, 0, 0, 1}, {7, 1, 0, 0, 0, 1}, {100, 77, 20, 30, 40, 6}}}) {
    const auto work = make(segments, 1);
    const auto bytes = bytes_of(work);
    ASSERT_NE(bytes, 0U);
    std::vector<std::byte> into(room + 8, std::byte{0xcc});
    small_writer writer{bytes, std::span{into}.first(room)};
    writer.add(segments, memory_.data(), 4711);
    const auto length = writer.end(work.transfer, work.frame).size();
    ASSERT_LE(length, room);
    EXPECT_EQ(into[length], std::byte{0xcc});
    const auto same = small_batch::decode(std::span{into}.first(length));
    ASSERT_TRUE(same) << to_string(same.error());
    EXPECT_EQ(same->transfer(), transfer_id{42});
    EXPECT_EQ(same->frame().size(), 1U);
    EXPECT_EQ(same->bytes().size(), total_bytes(segments));
    std::size_t run = 0;
    const auto* at = same->bytes().data();
    for (const auto& s : segments) {
      for (std::uint32_t n = 0; s.length != 0 && n < s.count; ++n) {
        const auto said = same->run(run++);
        EXPECT_EQ(said.grant, 4711U);
        EXPECT_EQ(said.offset, s.remote_offset + n * s.remote_stride);
        ASSERT_EQ(said.bytes, s.length);
        EXPECT_EQ(std::memcmp(at, memory_.data() + s.local_offset + n * s.local_stride, s.length),
                  0);
        at += s.length;
      }
    }
    EXPECT_EQ(run, same->runs());
  }
}

TEST(small_batch, lengths_that_are_not_those_of_the_message_are_refused) {
  const small_run eight{.grant = 1, .offset = 2, .bytes = 8};
  EXPECT_FALSE(refused(message(8, {eight}, 1, 1)));
  EXPECT_TRUE(refused({}));
  EXPECT_TRUE(refused(std::vector<std::byte>(15)));
  EXPECT_TRUE(refused(message(8, {eight}, 1, 2)));
  EXPECT_TRUE(refused(message(8, {eight}, 1, UINT32_MAX)));
  EXPECT_TRUE(refused(message(8, {eight}, 1, 0))) << "bytes of no run";
  EXPECT_TRUE(refused(message(7, {eight}, 1, 1)));
  EXPECT_TRUE(refused(message(9, {eight}, 1, 1)));
  EXPECT_TRUE(refused(message(8, {eight}, 0, 1))) << "without a frame";
  EXPECT_TRUE(refused(message(max_small_bytes + 1, {{1, 2, max_small_bytes + 1, 0}}, 1, 1)));
  EXPECT_TRUE(refused(message(8, {eight, {1, 2, 0, 0}}, 1, 2))) << "an empty run";
  // Together they wrap to 8.
  EXPECT_TRUE(refused(message(8, {{1, 2, UINT32_MAX, 0}, {1, 2, 9, 0}}, 1, 2)));
  auto cut = message(8, {eight}, 0, 1);
  cut.pop_back();
  EXPECT_TRUE(refused(cut));
}

TEST(small_batch, any_bytes_are_refused_or_lie_within_their_message) {
  std::mt19937 random{1};  // NOLINT(cert-msc51-cpp): the same each time
  std::size_t good = 0;
  for (int i = 0; i < 200'000; ++i) {
    const auto below = [&](std::uint32_t most) {
      return static_cast<std::uint32_t>(random() % most);
    };
    auto bytes = message(below(40), std::vector<small_run>(below(4)), below(9), below(5));
    for (auto& b : bytes) {
      if (random() % 4 == 0) b = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    }
    // A length that is often valid.
    if (bytes.size() > 40) bytes[8] = static_cast<std::byte>(random() % 3);
    const auto decoded = small_batch::decode(bytes);
    if (!decoded) continue;
    ++good;
    std::uint64_t all = 0;
    for (std::size_t n = 0; n < decoded->runs(); ++n) all += decoded->run(n).bytes;
    ASSERT_EQ(all, decoded->bytes().size());
    const auto* end = bytes.data() + bytes.size();
    ASSERT_EQ(decoded->frame().data() + decoded->frame().size(), end);
  }
  SUCCEED() << good;
}

TEST(small_batch, a_refusal_says_why) {
  const troupe::error why{errc::grant_revoked, "no longer given"};
  const auto same = decode_refusal(encode_refusal(why));
  ASSERT_TRUE(same);
  EXPECT_EQ(*same, why);
  const auto long_one = decode_refusal(encode_refusal({errc::internal, std::string(5000, 'x')}));
  ASSERT_TRUE(long_one);
  EXPECT_LE(long_one->message.size(), 512U);
  EXPECT_FALSE(decode_refusal({}));
  EXPECT_FALSE(decode_refusal(std::vector<std::byte>{std::byte{0}}));
  EXPECT_FALSE(decode_refusal(std::vector<std::byte>{std::byte{255}}));
  EXPECT_FALSE(decode_refusal(std::vector<std::byte>(600, std::byte{1})));
}

}  // namespace troupe::transport::rdma
