#include "troupe/transport/rdma/wire.hpp"

#include <gtest/gtest.h>

// Offers and keys from a peer are decoded with care.
namespace troupe::transport::rdma {

namespace {

offer_body good() {
  offer_body body;
  body.link = 42;
  body.message_buffers = 64;
  body.buffer_bytes = 4096;
  body.notices = 256;
  body.outstanding_reads = 16;
  body.rails = 2;
  body.lanes = 4;
  body.messages.number = 17;
  body.rail[0].mtu = body.rail[1].mtu = 5;
  for (std::size_t i = 0; i < body.lanes; ++i) {
    body.lane[i].number = 100 + static_cast<std::uint32_t>(i);
    body.lane[i].rail = static_cast<std::uint8_t>(i % 2);
  }
  return body;
}

void expect_refused(const offer_body& body, const char* what) {
  const auto decoded = offer_body::decode(body.encode());
  ASSERT_FALSE(decoded) << what;
  EXPECT_EQ(decoded.error().code, errc::invalid_config);
  EXPECT_NE(decoded.error().message.find("rdma offer"), std::string::npos);
}

}  // namespace

TEST(rdma_wire, an_offer_comes_back_as_it_was) {
  const auto decoded = offer_body::decode(good().encode());
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->link, 42U);
  EXPECT_EQ(decoded->lane[3].number, 103U);
  EXPECT_EQ(decoded->lane[3].rail, 1U);
}

TEST(rdma_wire, an_offer_with_numbers_that_cannot_be_is_refused) {
  const auto with = [](auto change) {
    auto body = good();
    change(body);
    return body;
  };
  expect_refused(with([](auto& b) { b.lanes = 0; }), "no lanes");
  expect_refused(with([](auto& b) { b.lanes = 65; }), "too many lanes");
  expect_refused(with([](auto& b) { b.rails = 0; }), "no rails");
  expect_refused(with([](auto& b) { b.rails = 5; }), "too many rails");
  expect_refused(with([](auto& b) { b.lane[2].rail = 2; }), "a rail that is not there");
  expect_refused(with([](auto& b) { b.lane[1].number = 0; }), "queue pair 0");
  expect_refused(with([](auto& b) { b.lane[1].number = 1U << 24; }), "25 bits");
  expect_refused(with([](auto& b) { b.messages.first_packet = 1U << 24; }), "25 bits");
  expect_refused(with([](auto& b) { b.rail[1].mtu = 6; }), "an MTU that is not");
  expect_refused(with([](auto& b) { b.rail[0].mtu = 0; }), "an MTU that is not");
  expect_refused(with([](auto& b) { b.message_buffers = 0; }), "no credits");
  expect_refused(with([](auto& b) { b.message_buffers = UINT32_MAX; }), "endless credits");
  expect_refused(with([](auto& b) { b.buffer_bytes = 16; }), "no payload");
  expect_refused(with([](auto& b) { b.notices = 0; }), "no notices");
}

TEST(rdma_wire, an_offer_that_is_cut_or_of_another_version_is_refused) {
  auto bytes = good().encode();
  auto cut = bytes;
  cut.pop_back();
  EXPECT_FALSE(offer_body::decode(cut));
  EXPECT_FALSE(offer_body::decode({}));
  bytes[4] ^= std::byte{1};
  const auto other = offer_body::decode(bytes);
  ASSERT_FALSE(other);
  EXPECT_NE(other.error().message.find("version"), std::string::npos);
}

TEST(rdma_wire, a_key_of_another_backend_is_refused) {
  grant_key key{.link = 2, .grant = 3};
  const auto same = grant_key::decode(key.encode());
  ASSERT_TRUE(same);
  EXPECT_EQ(same->grant, 3U);
  auto bytes = key.encode();
  bytes.push_back(std::byte{0});
  EXPECT_FALSE(grant_key::decode(bytes));
}

namespace {

grant_keys good_keys() {
  return {.grant = 7,
          .transfer = transfer_id{9},
          .address = 0x7f00'0000'0000,
          .begin = 5000,
          .end = 12'289,
          .piece_bytes = 4096,
          .rights = access::read,
          .lanes = 2,
          .keys = {1, 2, 3, 4, 5, 6}};
}

}  // namespace

TEST(rdma_wire, keys_to_a_grant_come_back_as_they_were) {
  const auto same = grant_keys::decode(good_keys().encode());
  ASSERT_TRUE(same) << to_string(same.error());
  EXPECT_EQ(same->pieces(), 3U);
  EXPECT_EQ(same->rights, access::read);
  EXPECT_EQ(same->transfer, transfer_id{9});
  EXPECT_EQ(same->key_at(5000, 0), 1U);
  EXPECT_EQ(same->key_at(8191, 1), 2U);
  EXPECT_EQ(same->key_at(8192, 0), 3U);
  EXPECT_EQ(same->key_at(12'288, 1), 6U);
}

TEST(rdma_wire, keys_to_a_grant_that_opens_nothing_are_none) {
  auto none = good_keys();
  none.begin = none.end = 0;
  none.keys.clear();
  EXPECT_TRUE(grant_keys::decode(none.encode()));
}

TEST(rdma_wire, keys_with_numbers_that_cannot_be_are_refused) {
  const auto refused = [](auto change) {
    auto keys = good_keys();
    change(keys);
    const auto decoded = grant_keys::decode(keys.encode());
    return !decoded && decoded.error().code == errc::unauthorized;
  };
  EXPECT_TRUE(refused([](auto& k) { k.keys.pop_back(); }));
  EXPECT_TRUE(refused([](auto& k) { k.keys.push_back(1); }));
  EXPECT_TRUE(refused([](auto& k) { k.begin = k.end + 1; }));
  EXPECT_TRUE(refused([](auto& k) { k.end = UINT64_MAX; }));
  EXPECT_TRUE(refused([](auto& k) { k.address = UINT64_MAX - 100; }));
  EXPECT_TRUE(refused([](auto& k) { k.piece_bytes = 0; }));
  EXPECT_TRUE(refused([](auto& k) { k.piece_bytes = 1; }));
  EXPECT_TRUE(refused([](auto& k) { k.lanes = 0; }));
  EXPECT_TRUE(refused([](auto& k) { k.lanes = 65; }));
  EXPECT_TRUE(refused([](auto& k) { k.rights = access{0}; }));
  EXPECT_TRUE(refused([](auto& k) { k.rights = access{4}; }));
  EXPECT_FALSE(grant_keys::decode({}));
}

}  // namespace troupe::transport::rdma
