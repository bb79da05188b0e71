// The door and those who have no business there: nothing of theirs is admitted, and they cost nothing.
#include "door_fixture.hpp"

namespace troupe::actors {
namespace {

using namespace testing;

door_options patient_for(std::chrono::milliseconds time, std::uint32_t strangers = 256) {
  door_options options;
  options.patience = time;
  options.max_strangers = strangers;
  return options;
}

/// What nobody is cut for in its test.
constexpr auto for_ever = 1h;

std::unique_ptr<door> friend_of() {
  auto made = door::create({});
  EXPECT_TRUE(made);
  return std::move(*made);
}

TEST(door_strangers, who_says_nothing_is_gone_after_patience_and_not_before) {
  listening_door at{patient_for(400ms)};
  const auto began = clock::now();
  const auto fd = dial_raw(at.port);
  ASSERT_TRUE(fd);
  ASSERT_TRUE(comes_true([&] {
    const auto seen = at.it->count();
    return seen.strangers + seen.refused == 1;
  }));
  EXPECT_TRUE(hangs_up(fd.get()));
  EXPECT_GE(clock::now() - began, 390ms);
  EXPECT_TRUE(comes_true([&] { return at.it->count().strangers == 0; }));
  EXPECT_EQ(at.it->count().refused, 1u);
  EXPECT_TRUE(at.noticed("said nothing in time"));
}

TEST(door_strangers, who_speaks_slowly_is_cut_at_patience_all_the_same) {
  listening_door at{patient_for(600ms)};
  const std::string hello =
      "\x89TROUPE\n" + std::string{"\1\0\0\0\0\0\0\0", 8} + std::string(32, 'n');
  const auto fd = dial_raw(at.port);
  std::size_t sent = 0;
  while (sent < hello.size() && !readable(fd.get(), 100ms)) {
    send_all(fd.get(), hello.substr(sent, 1));
    ++sent;
  }
  EXPECT_LT(sent, hello.size());
  EXPECT_TRUE(hangs_up(fd.get()));
  EXPECT_FALSE(at.admits_another());
}

TEST(door_strangers, a_thousand_silent_ones_leave_it_working_and_its_memory_flat) {
  listening_door at{patient_for(for_ever, 64)};
  const auto began = clock::now();
  const auto from = friend_of();
  ASSERT_TRUE(connect_from(*from, at.port));
  const auto memory = resident_bytes();
  std::vector<unique_fd> silent;
  for (int i = 0; i < 1000; ++i) {
    silent.push_back(dial_raw(at.port));
    ASSERT_TRUE(silent.back());
    if (i % 100 == 50) {
      const auto here = connect_from(*from, at.port);
      EXPECT_TRUE(here) << i << ": " << (here ? "" : to_string(here.error()));
    }
  }
  EXPECT_TRUE(comes_true([&] { return at.it->count().refused >= 1000 - 64; }));
  EXPECT_LE(at.it->count().strangers, 64u);
  EXPECT_TRUE(connect_from(*from, at.port));
  EXPECT_TRUE(hangs_up(silent.front().get())) << "the oldest goes first";
  if (!troupe::testing::sanitized) {
    EXPECT_LT(resident_bytes(), memory + (8u << 20));
  }
  const auto said = at.notices().size();
  EXPECT_LE(said, 2u + static_cast<std::size_t>((clock::now() - began) / 1s))
      << "at most one sentence a second";
}

TEST(door_strangers, two_hundred_silent_ones_cost_no_cpu) {
  listening_door at{patient_for(for_ever)};
  std::vector<unique_fd> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(dial_raw(at.port));
  ASSERT_TRUE(comes_true([&] { return at.it->count().strangers == 200; }));
  std::this_thread::sleep_for(100ms);
  EXPECT_LT(busy_for(1s), 0.1);
}

/// What was able to crash, hijack or fill a node whose port CAF itself listened at.
std::vector<std::pair<std::string, std::string>> attacks() {
  const std::string header_start{"\0\0\0\0\0\0\0\0", 8};
  std::string nested;
  for (int i = 0; i < 60'000; ++i) nested += std::string{"\x02\x00\x00\x00\x00\x00\x00\x01", 8};
  std::string random(65'536, '\0');
  std::uint32_t number = 1;
  for (auto& one : random)
    one = static_cast<char>((number = number * 1664525u + 1013904223u) >> 24u);
  return {
      {"a handshake header without payload", std::string(32, '\0')},
      {"60,000 nested messages", nested},
      {"a length of 1.5 GiB",
       header_start + std::string{"\x00\x00\x00\x60", 4} + std::string(20, '\0')},
      {"random bytes", random},
      {"HTTP", "GET / HTTP/1.1\r\nHost: x\r\n\r\n"},
      {"a TLS greeting",
       std::string{"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11} + std::string(505, 'r')},
      {"our first bytes, then random ones", "\x89TROUPE\n" + random},
      {"our head, then no proof",
       "\x89TROUPE\n" + std::string{"\1\0\0\0\0\0\0\0", 8} + std::string(32 + 40, 'p')},
      {"a hello that is sent again and again",
       [] {
         std::string all;
         for (int i = 0; i < 1000; ++i)
           all += "\x89TROUPE\n" + std::string{"\1\0\0\0\0\0\0\0", 8} + std::string(32, 'n');
         return all;
       }()},
  };
}

TEST(door_strangers, nothing_that_could_crash_or_fill_a_node_is_admitted) {
  listening_door at{patient_for(for_ever)};
  const auto from = friend_of();
  ASSERT_TRUE(connect_from(*from, at.port));
  const auto memory = resident_bytes();
  std::uint64_t refused = 0;
  for (const auto& [what, said] : attacks()) {
    SCOPED_TRACE(what);
    const auto fd = dial_raw(at.port);
    ASSERT_TRUE(fd);
    send_all(fd.get(), said);
    EXPECT_TRUE(hangs_up(fd.get())) << "it would have been listened to for an hour";
    EXPECT_TRUE(comes_true([&] { return at.it->count().refused == refused + 1; }));
    refused = at.it->count().refused;
    EXPECT_EQ(at.it->count().strangers, 0u);
    EXPECT_EQ(at.it->count().admitted, 1u);
  }
  if (!troupe::testing::sanitized) {
    EXPECT_LT(resident_bytes(), memory + (4u << 20));
  }
  EXPECT_TRUE(connect_from(*from, at.port));
}

TEST(door_strangers, a_stranger_gets_48_bytes_at_most_before_its_proof_and_8_after_a_wrong_one) {
  listening_door at;
  const auto fd = dial_raw(at.port);
  const std::string head = "\x89TROUPE\n" + std::string{"\1\0\0\0\0\0\0\0", 8};
  send_all(fd.get(), head + std::string(32, 'n'));
  EXPECT_EQ(read_exactly(fd.get(), 48).size(), 48u);
  send_all(fd.get(), std::string(8, '\0') + std::string(32, 'p'));
  const auto verdict = read_exactly(fd.get(), 100);
  EXPECT_EQ(verdict, (std::string{"\3\0\0\0\0\0\0\0", 8}));
}

TEST(door_strangers, a_host_that_sends_many_displaces_its_own) {
  auto options = patient_for(for_ever);
  options.max_strangers = 8;
  listening_door at{options};
  const unique_fd elsewhere{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(INADDR_LOOPBACK + 1);
  ASSERT_EQ(::bind(elsewhere.get(), reinterpret_cast<const sockaddr*>(&from), sizeof from), 0);
  ASSERT_TRUE(connect_raw(elsewhere, at.port));
  const auto talks = dial_raw(at.port);
  send_all(talks.get(), "\x89");
  ASSERT_TRUE(comes_true([&] { return at.it->count().strangers == 2; }));
  std::vector<unique_fd> many;
  for (int i = 0; i < 40; ++i) many.push_back(dial_raw(at.port));
  EXPECT_TRUE(comes_true([&] { return at.it->count().refused == 34; }));
  EXPECT_EQ(at.it->count().strangers, 8u);
  EXPECT_FALSE(readable(elsewhere.get(), 0ms)) << "it came first, from another host";
  EXPECT_FALSE(readable(talks.get(), 0ms)) << "it has said something";
}

TEST(door_strangers, without_descriptors_it_drops_who_comes_and_works_again_later) {
  listening_door at{patient_for(for_ever)};
  const auto from = friend_of();
  std::vector<unique_fd> all;
  for (int i = 0; i < 30; ++i) all.push_back(dial_raw(at.port));
  ASSERT_TRUE(comes_true([&] { return at.it->count().strangers == 30; }));
  std::vector<unique_fd> late;
  for (int i = 0; i < 10; ++i) late.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none_left = before;
  {
    const unique_fd next_free{::dup(0)};
    none_left.rlim_cur = static_cast<rlim_t>(next_free.get());
  }
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none_left), 0);
  for (const auto& fd : late) connect_raw(fd, at.port);
  EXPECT_TRUE(at.noticed("out of file descriptors"));
  EXPECT_LT(busy_for(500ms), 0.5) << "it must not spin";
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  all.clear();
  late.clear();
  EXPECT_TRUE(comes_true([&] { return at.it->count().strangers == 0; }));
  EXPECT_TRUE(connect_from(*from, at.port));
}

}  // namespace
}  // namespace troupe::actors
