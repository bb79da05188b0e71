#include "troupe/transport/tcp/wire.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace troupe::transport::tcp {

namespace {

TEST(wire_test, a_header_survives_the_wire_and_stands_where_the_protocol_says) {
  const frame_header header{.type = frame_type::write,
                            .flags = flag_last,
                            .entries = 3,
                            .parts = 2,
                            .status = 0,
                            .data_size = 0x01020304,
                            .session_size = 5,
                            .batch = 0x1122334455667788,
                            .grant = 7,
                            .transfer = 8};
  std::array<std::byte, header_size> bytes{};
  auto small = header;
  small.data_size = 0x0001'0203;
  encode(small, bytes.data());
  EXPECT_EQ(bytes[0], std::byte{'T'});
  EXPECT_EQ(bytes[1], std::byte{'P'});
  EXPECT_EQ(bytes[2], std::byte{1});
  EXPECT_EQ(bytes[8], std::byte{0x03});
  EXPECT_EQ(bytes[16], std::byte{0x88});
  const auto back = decode_header(bytes);
  ASSERT_TRUE(back) << back.error().message;
  EXPECT_EQ(back->data_size, small.data_size);
  EXPECT_EQ(back->batch, header.batch);
  EXPECT_EQ(back->parts, 2);
  EXPECT_EQ(back->transfer, 8U);
}

TEST(wire_test, every_field_beyond_its_bound_is_refused_by_name) {
  const auto refused = [](frame_header header, const char* field) {
    std::array<std::byte, header_size> bytes{};
    encode(header, bytes.data());
    const auto back = decode_header(bytes);
    ASSERT_FALSE(back) << field;
    EXPECT_THAT(back.error().message, ::testing::HasSubstr(field));
  };
  refused({.type = static_cast<frame_type>(0)}, "type");
  refused({.type = static_cast<frame_type>(10)}, "type");
  refused({.type = frame_type::session, .flags = 8}, "flags");
  refused({.type = frame_type::session, .entries = 1}, "entry count");
  refused({.type = frame_type::write, .entries = max_entries + 1, .parts = 1}, "entry count");
  refused({.type = frame_type::write, .parts = 1, .data_size = max_data + 1}, "data size");
  refused({.type = frame_type::session, .data_size = 1}, "data size");
  refused({.type = frame_type::session, .session_size = max_session + 1}, "session size");
  refused({.type = frame_type::completion, .session_size = max_completion_body + 1},
          "session size");
  refused({.type = frame_type::completion, .status = 200}, "status");
  refused({.type = frame_type::session, .status = 1}, "status");
  refused({.type = frame_type::write, .parts = 0}, "part count");
  refused({.type = frame_type::write, .parts = 65}, "part count");
  refused({.type = frame_type::read_request}, "entry count");
}

TEST(wire_test, an_offer_cut_anywhere_is_refused) {
  offer_payload offer{.host = "node7.example", .port = 4711, .lanes = 4, .link = 99, .secret = {}};
  offer.secret.fill(std::byte{9});
  const auto bytes = encode(offer);
  const auto back = decode_offer(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->host, offer.host);
  EXPECT_EQ(back->port, 4711);
  EXPECT_EQ(back->link, 99U);
  EXPECT_EQ(back->secret, offer.secret);
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_offer(std::span{bytes}.first(size)));
  }
  auto more = bytes;
  more.push_back(std::byte{0});
  EXPECT_FALSE(decode_offer(more));
}

TEST(wire_test, a_completion_body_keeps_its_bounds_and_prints_only_what_can_be_printed) {
  completion_body body{.bad = {}, .sentence = std::string(10'000, 'x')};
  for (std::uint32_t i = 0; i < 2000; ++i) body.bad.push_back(i);
  const auto bytes = encode(body);
  EXPECT_LE(bytes.size(), max_completion_body);
  const auto back = decode_completion_body(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->bad.size(), max_bad_listed);
  EXPECT_EQ(back->bad[511], 511U);
  const auto nasty = encode(completion_body{.bad = {}, .sentence = "line\nbreak\x1b[31m"});
  EXPECT_EQ(decode_completion_body(nasty)->sentence, "line?break?[31m");
  std::vector<std::byte> lies(8);
  lies[0] = std::byte{100};
  EXPECT_FALSE(decode_completion_body(lies));
}

TEST(wire_test, greetings_survive_the_wire_and_another_version_is_named) {
  hello said{.lane = 2, .lanes = 4, .link = 5, .from = {6}, .to = {7}, .drawn = {}};
  said.drawn.fill(std::byte{1});
  auto bytes = encode(said);
  const auto back = decode_hello(bytes);
  ASSERT_TRUE(back);
  EXPECT_EQ(back->lane, 2);
  EXPECT_EQ(back->to.value, 7U);
  EXPECT_EQ(back->drawn, said.drawn);
  bytes[8] = std::byte{9};
  const auto other = decode_hello(bytes);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, errc::version_mismatch);
  EXPECT_THAT(other.error().message, ::testing::HasSubstr("version 9"));
}

TEST(wire_test, a_greeting_of_another_version_is_known_from_its_first_ten_bytes) {
  auto bytes = encode(hello{});
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    EXPECT_TRUE(check_hello_start(std::span{bytes}.first(size))) << size;
  }
  bytes[8] = std::byte{1};
  EXPECT_TRUE(check_hello_start(std::span{bytes}.first(9)));
  EXPECT_EQ(check_hello_start(std::span{bytes}.first(10)).error().code, errc::version_mismatch);
  bytes[0] = std::byte{'G'};
  EXPECT_EQ(check_hello_start(std::span{bytes}.first(1)).error().code, errc::unauthorized);
}

TEST(wire_test, a_greeting_with_a_reserved_field_set_is_refused) {
  for (const std::size_t at : {14U, 15U, 72U, 79U}) {
    auto bytes = encode(hello{});
    bytes[at] = std::byte{1};
    EXPECT_FALSE(decode_hello(bytes)) << at;
  }
}

TEST(wire_test, replies_survive_the_wire_and_say_one_thing_only) {
  hello_reply said{.kind = reply_kind::challenge, .status = 0, .body = {}};
  said.body.fill(std::byte{3});
  const auto back = decode_reply(encode(said));
  ASSERT_TRUE(back);
  EXPECT_EQ(back->kind, reply_kind::challenge);
  EXPECT_EQ(back->body, said.body);
  const auto no = decode_reply(refusal_of(errc::unauthorized));
  ASSERT_TRUE(no);
  EXPECT_EQ(no->kind, reply_kind::refusal);
  EXPECT_EQ(no->status, static_cast<std::uint8_t>(errc::unauthorized));
  for (const auto& [at, value] : {std::pair{0U, 1U}, {8U, 1U}, {10U, 5U}, {11U, 3U}, {12U, 1U}}) {
    auto bytes = encode(said);
    bytes[at] = static_cast<std::byte>(value);
    EXPECT_FALSE(decode_reply(bytes)) << at;
  }
  auto refuses_nothing = refusal_of(errc::unauthorized);
  refuses_nothing[10] = std::byte{0};
  EXPECT_FALSE(decode_reply(refuses_nothing));
  auto newer = refusal_of(errc::unauthorized);
  newer[10] = std::byte{255};
  EXPECT_EQ(decode_reply(newer)->status, static_cast<std::uint8_t>(errc::internal));
}

}  // namespace

}  // namespace troupe::transport::tcp
