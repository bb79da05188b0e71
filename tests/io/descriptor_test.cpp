#include "troupe/io/descriptor.hpp"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "troupe/io/agent.hpp"

namespace troupe::io {

namespace {

descriptor some_descriptor() {
  descriptor made;
  made.life = incarnation{0x1122334455667788};
  made.token.fill(std::byte{0x5a});
  made.port = 4711;
  made.host = "127.0.0.1";
  made.name = "prefill 0";
  made.memories.push_back(
      {.number = 7,
       .rights = transport::access::read_write,
       .parts = {{region_id{1}, 0, 0x1000, 0x100}, {region_id{2}, 64, 0x1100, 0x80}}});
  made.memories.push_back(
      {.number = 9, .rights = transport::access::read, .parts = {{region_id{3}, 0, 0x9000, 1}}});
  return made;
}

errc code_of(const result<descriptor>& what) {
  return what ? errc{} : what.error().code;
}

}  // namespace

TEST(descriptor_test, what_is_encoded_comes_back) {
  const auto sent = some_descriptor();
  const auto came = descriptor::decode(sent.encode());
  ASSERT_TRUE(came) << to_string(came.error());
  EXPECT_EQ(came->life, sent.life);
  EXPECT_EQ(came->token, sent.token);
  EXPECT_EQ(came->port, sent.port);
  EXPECT_EQ(came->host, sent.host);
  EXPECT_EQ(came->name, sent.name);
  EXPECT_EQ(came->memories, sent.memories);
}

TEST(descriptor_test, bytes_that_were_cut_are_refused_wherever_they_were_cut) {
  const auto whole = some_descriptor().encode();
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(code_of(descriptor::decode(std::span{whole}.first(size))), errc::invalid_config)
        << size;
  }
  auto longer = whole;
  longer.push_back(std::byte{0});
  EXPECT_EQ(code_of(descriptor::decode(longer)), errc::invalid_config);
}

TEST(descriptor_test, a_byte_that_changed_is_noticed_wherever_it_is) {
  const auto whole = some_descriptor().encode();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    auto damaged = whole;
    damaged[i] ^= std::byte{0x10};
    const auto code = code_of(descriptor::decode(damaged));
    EXPECT_TRUE(code == errc::invalid_config || code == errc::version_mismatch) << i;
  }
}

TEST(descriptor_test, another_version_is_named_with_both) {
  auto bytes = some_descriptor().encode();
  bytes[8] = std::byte{9};
  const auto came = descriptor::decode(bytes);
  ASSERT_EQ(code_of(came), errc::version_mismatch);
  EXPECT_THAT(came.error().message, ::testing::HasSubstr("version 9, ours is 1"));
}

TEST(descriptor_test, garbage_is_refused_and_allocates_nothing_large) {
  std::mt19937 random{7};  // NOLINT(cert-msc51-cpp): the same garbage each time
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> garbage(random() % 200);
    for (auto& byte : garbage) byte = static_cast<std::byte>(random());
    EXPECT_FALSE(descriptor::decode(garbage));
  }
  EXPECT_EQ(code_of(descriptor::decode(std::vector<std::byte>(agent::max_descriptor_size + 1))),
            errc::invalid_config);
}

TEST(descriptor_test, memories_that_make_no_sense_are_refused) {
  const auto refused = [](auto change) {
    auto made = some_descriptor();
    change(made);
    return code_of(descriptor::decode(made.encode())) == errc::invalid_config;
  };
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[0].parts.clear(); }));
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[0].parts[1].address += 1; }));  // a gap
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[1].parts[0].length = 0; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[1].parts[0].address = UINT64_MAX; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[1].parts[0].offset = UINT64_MAX; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.memories[1].rights = transport::access{8}; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.life = {}; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.port = 0; }));
  EXPECT_TRUE(refused([](descriptor& d) { d.name.clear(); }));
  EXPECT_TRUE(refused([](descriptor& d) { d.name.assign(257, 'x'); }));
  EXPECT_FALSE(refused([](descriptor& d) { d.name.assign(256, 'x'); }));
}

}  // namespace troupe::io
