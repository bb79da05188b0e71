#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <dirent.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/tcp/socket.hpp"
#include "troupe/transport/tcp/wire.hpp"

#include "sanitized.hpp"

// Strangers and liars at the data port. Throughout, a real pair of nodes goes on moving and
// checking bytes.
namespace troupe::transport::tcp {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

bool until(const std::function<bool()>& done, std::chrono::milliseconds limit = 10s) {
  const auto last = clock::now() + limit;
  while (!done()) {
    if (clock::now() > last) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  auto* folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

std::size_t resident_kib() {
  std::ifstream in{"/proc/self/statm"};
  std::size_t total = 0;
  std::size_t resident = 0;
  in >> total >> resident;
  return resident * 4;
}

struct quiet_sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) ++failed;
    ++completed;
  }
  void on_frame(std::span<const std::byte>) override { ++frames; }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override {
    const std::lock_guard lock{mutex};
    reason = why;
    broken = true;
  }
  std::atomic<bool> up{false}, broken{false};
  std::atomic<std::size_t> completed{0}, failed{0}, frames{0};
  std::mutex mutex;
  troupe::error reason;
};

constexpr std::uint64_t region_size = std::uint64_t{1} << 20;
constexpr incarnation us{0x1111};
constexpr incarnation them{0x2222};

struct node {
  explicit node(incarnation self, std::function<void(const std::string&)> notice = {}) {
    endpoint_options options;
    options.self = self;
    options.notice = std::move(notice);
    place = endpoint::create(std::move(options)).value();
    region = place->allocate(region_size, "hostile").value();
    memory = place->bytes(region).value();
  }
  std::shared_ptr<link> open(link_role role, incarnation peer, std::shared_ptr<quiet_sink> sink) {
    link_options options;
    options.role = role;
    options.peer = peer;
    return place->open(backend_kind::tcp, options, std::move(sink)).value();
  }
  std::unique_ptr<endpoint> place;
  region_id region;
  std::span<std::byte> memory;
};

/// The victim, and two honest links: writes over one of them are checked all the time.
class hostile : public ::testing::Test {
 protected:
  hostile() : victim{us, [this](const std::string&) { ++notices_; }}, friend_{them} {
    to_victim_ = friend_.open(link_role::initiator, us, friend_sink_);
    to_friend_ = victim.open(link_role::acceptor, them, victim_sink_);
    EXPECT_TRUE(to_friend_->connect(to_victim_->offer()));
    EXPECT_TRUE(to_victim_->connect(to_friend_->offer()));
    EXPECT_TRUE(until([&] { return friend_sink_->up && victim_sink_->up; }));
    grant_ = std::make_shared<const remote_grant>(
        to_friend_->grant(victim.region, {{0, region_size, 0, 1}}, access::write, transfer_id{1})
            .value());
    traffic_ = std::thread{[this] { move_bytes(); }};
  }
  ~hostile() override {
    const auto done = friend_sink_->completed.load();
    EXPECT_TRUE(until([&] { return friend_sink_->completed > done; }))
        << "the real peers stand still";
    stop_ = true;
    traffic_.join();
    EXPECT_LT(slowest_, 2s);
    EXPECT_EQ(friend_sink_->failed, 0U);
    EXPECT_FALSE(friend_sink_->broken);
    EXPECT_FALSE(victim_sink_->broken);
    to_victim_->close();
    to_friend_->close();
  }

  void move_bytes() {
    std::uint64_t id = 0;
    while (!stop_) {
      const auto pattern = static_cast<int>(id % 251);
      std::memset(friend_.memory.data(), pattern, 65'536);
      batch work;
      work.id = batch_id{++id};
      work.transfer = transfer_id{1};
      work.pieces.push_back({friend_.region, grant_, {{0, 0, 65'536, 0, 0, 1}}});
      const auto start = clock::now();
      EXPECT_TRUE(to_victim_->post(std::move(work)));
      EXPECT_TRUE(until([&] { return friend_sink_->completed == id; })) << "batch " << id;
      slowest_ = std::max(slowest_, clock::now() - start);
      EXPECT_EQ(victim.memory[65'535], static_cast<std::byte>(pattern));
      std::this_thread::sleep_for(1ms);
    }
  }

  [[nodiscard]] unique_fd dial_victim() const {
    unique_fd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(victim.place->data_port());
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    return fd;
  }
  template <class Bytes>
  static void send(const unique_fd& fd, const Bytes& bytes) {
    static_cast<void>(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  /// Whether the victim hangs up in time.
  static bool hung_up(const unique_fd& fd, std::chrono::milliseconds limit = 4s) {
    return until(
        [&] {
          char c[256];
          const auto got = ::recv(fd.get(), c, sizeof c, MSG_DONTWAIT);
          return got == 0 || (got < 0 && errno != EAGAIN);
        },
        limit);
  }

  /// A link to the victim on which we speak the protocol by hand.
  struct liar {
    unique_fd fd;
    std::shared_ptr<quiet_sink> sink{std::make_shared<quiet_sink>()};
    std::shared_ptr<link> wire;  // the victim's end
    remote_grant grant;
  };
  liar become_peer(incarnation self) {
    liar l;
    l.wire = victim.open(link_role::acceptor, self, l.sink);
    const auto offer = decode_offer(l.wire->offer().payload).value();
    offer_payload mine{.host = "127.0.0.1", .port = 1, .lanes = 1, .link = 5, .secret = {}};
    mine.secret.fill(std::byte{0x42});
    EXPECT_TRUE(l.wire->connect({backend_kind::tcp, self, encode(mine)}));
    l.fd = dial_victim();
    send(l.fd, encode(hello{.lane = 0,
                            .lanes = 1,
                            .link = offer.link,
                            .from = self,
                            .to = us,
                            .acceptor_token = offer.secret,
                            .initiator_token = mine.secret}));
    std::array<char, reply_size> reply{};
    EXPECT_EQ(::recv(l.fd.get(), reply.data(), reply.size(), MSG_WAITALL),
              static_cast<ssize_t>(reply_size));
    EXPECT_TRUE(until([&] { return l.sink->up.load(); }));
    l.grant =
        l.wire->grant(victim.region, {{region_size / 2, 4096, 0, 1}}, access::write, transfer_id{9})
            .value();
    return l;
  }
  static std::vector<std::byte> write_frame(const remote_grant& grant,
                                            std::vector<wire_entry> entries, std::uint32_t data,
                                            std::uint32_t actually) {
    std::vector<std::byte> bytes(header_size + entries.size() * entry_size + actually,
                                 std::byte{0x66});
    encode(frame_header{.type = frame_type::write,
                        .flags = flag_last,
                        .entries = static_cast<std::uint16_t>(entries.size()),
                        .parts = 1,
                        .data_size = data,
                        .batch = 1,
                        .grant = grant.id,
                        .transfer = grant.transfer.value},
           bytes.data());
    for (std::size_t i = 0; i < entries.size(); ++i) {
      encode(entries[i], bytes.data() + header_size + i * entry_size);
    }
    return bytes;
  }
  /// The status in the completion that the victim sends.
  static std::uint8_t status_from(const unique_fd& fd) {
    std::array<std::byte, header_size> head{};
    if (::recv(fd.get(), head.data(), head.size(), MSG_WAITALL) !=
        static_cast<ssize_t>(head.size()))
      return 255;
    const auto header = decode_header(head);
    if (!header || header->type != frame_type::completion) return 254;
    std::vector<std::byte> body(header->session_size);
    if (!body.empty()) static_cast<void>(::recv(fd.get(), body.data(), body.size(), MSG_WAITALL));
    return header->status;
  }

  node victim;
  node friend_;
  std::shared_ptr<quiet_sink> victim_sink_{std::make_shared<quiet_sink>()};
  std::shared_ptr<quiet_sink> friend_sink_{std::make_shared<quiet_sink>()};
  std::shared_ptr<link> to_victim_;
  std::shared_ptr<link> to_friend_;
  std::shared_ptr<const remote_grant> grant_;
  std::thread traffic_;
  std::atomic<bool> stop_{false};
  std::atomic<int> notices_{0};
  clock::duration slowest_{};
};

}  // namespace

TEST_F(hostile, wrong_magic_is_hung_up_on_at_once) {
  const auto fd = dial_victim();
  send(fd, std::string{"GET / HTTP/1.1\r\n\r\n"});
  EXPECT_TRUE(hung_up(fd, 1s));
}

TEST_F(hostile, a_wrong_token_or_an_unknown_link_is_refused) {
  auto sink = std::make_shared<quiet_sink>();
  const auto waiting = victim.open(link_role::acceptor, incarnation{77}, sink);
  const auto offer = decode_offer(waiting->offer().payload).value();
  for (const bool right_link : {true, false}) {
    const auto fd = dial_victim();
    send(fd, encode(hello{.lane = 0,
                          .lanes = 1,
                          .link = right_link ? offer.link : offer.link + 1,
                          .from = incarnation{77},
                          .to = us,
                          .acceptor_token = {},
                          .initiator_token = {}}));
    std::array<std::byte, reply_size> reply{};
    ASSERT_EQ(::recv(fd.get(), reply.data(), reply.size(), MSG_WAITALL),
              static_cast<ssize_t>(reply_size));
    EXPECT_EQ(decode_reply(reply).value().status, static_cast<std::uint8_t>(errc::unauthorized));
    EXPECT_TRUE(hung_up(fd, 1s));
  }
  EXPECT_FALSE(sink->up);
  waiting->close();
}

TEST_F(hostile, another_incarnation_with_the_right_token_is_refused) {
  const auto waiting =
      victim.open(link_role::acceptor, incarnation{77}, std::make_shared<quiet_sink>());
  const auto offer = decode_offer(waiting->offer().payload).value();
  const auto fd = dial_victim();
  send(fd, encode(hello{.lane = 0,
                        .lanes = 1,
                        .link = offer.link,
                        .from = incarnation{78},
                        .to = us,
                        .acceptor_token = offer.secret,
                        .initiator_token = {}}));
  std::array<std::byte, reply_size> reply{};
  ASSERT_EQ(::recv(fd.get(), reply.data(), reply.size(), MSG_WAITALL),
            static_cast<ssize_t>(reply_size));
  EXPECT_EQ(decode_reply(reply).value().status, static_cast<std::uint8_t>(errc::stale_incarnation));
  waiting->close();
}

TEST_F(hostile, a_greeting_that_never_ends_is_given_up) {
  const auto fd = dial_victim();
  const auto bytes = encode(hello{});
  send(fd, std::span{bytes}.first(40));
  EXPECT_TRUE(hung_up(fd, 4s));
}

TEST_F(hostile, ten_thousand_silent_connections_cost_a_bounded_number_of_descriptors) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  const auto before = open_descriptors();
  const auto memory_before = resident_kib();
  // The flood comes from another process: its descriptors are not ours.
  const auto flood = ::fork();
  if (flood == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(victim.place->data_port());
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < 10'000; ++i) {
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) != 0) ::_exit(2);
    }
    ::_exit(0);
  }
  std::size_t most = 0;
  int status = 0;
  ASSERT_TRUE(until(
      [&] {
        most = std::max(most, open_descriptors());
        return ::waitpid(flood, &status, WNOHANG) == flood;
      },
      60s));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the flood did not get through";
  EXPECT_LE(most, before + 64 + 8);
  if (!troupe::testing::sanitized) {
    EXPECT_LE(resident_kib(), memory_before + 8 * 1024);
  }
  EXPECT_LE(notices_, 70) << "one line a second, no more";
  EXPECT_GE(notices_, 1);
  // A real peer gets in meanwhile and afterwards.
  auto dialer_sink = std::make_shared<quiet_sink>();
  auto door_sink = std::make_shared<quiet_sink>();
  const auto dialer = friend_.open(link_role::initiator, us, dialer_sink);
  const auto door = victim.open(link_role::acceptor, them, door_sink);
  ASSERT_TRUE(door->connect(dialer->offer()));
  ASSERT_TRUE(dialer->connect(door->offer()));
  EXPECT_TRUE(until([&] { return dialer_sink->up && door_sink->up; }, 2s));
  dialer->close();
  door->close();
}

TEST_F(hostile, a_real_peer_gets_in_while_the_port_is_flooded) {
  std::atomic<bool> enough{false};
  std::thread flood{[&] {
    std::vector<unique_fd> held;
    while (!enough) {
      held.push_back(dial_victim());
      if (held.size() > 400) held.clear();
    }
  }};
  for (int i = 0; i < 5; ++i) {
    auto dialer_sink = std::make_shared<quiet_sink>();
    auto door_sink = std::make_shared<quiet_sink>();
    const auto dialer = friend_.open(link_role::initiator, us, dialer_sink);
    const auto door = victim.open(link_role::acceptor, them, door_sink);
    ASSERT_TRUE(door->connect(dialer->offer()));
    ASSERT_TRUE(dialer->connect(door->offer()));
    EXPECT_TRUE(until([&] { return dialer_sink->up && door_sink->up; }, 2s));
    dialer->close();
    door->close();
  }
  enough = true;
  flood.join();
}

TEST_F(hostile, random_bytes_at_the_port_do_nothing) {
  const char* asked = std::getenv("TROUPE_HOSTILE_SECONDS");
  const auto time = std::chrono::seconds{asked != nullptr ? std::atoi(asked) : 2};
  const auto before = open_descriptors();
  std::mt19937 random{4711};
  const auto last = clock::now() + time;
  while (clock::now() < last) {
    const auto fd = dial_victim();
    std::vector<std::byte> bytes(random() % 3000);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    if (random() % 2 == 0) {  // half of them begin like a greeting
      const auto start = encode(hello{});
      std::ranges::copy(
          std::span{start}.first(std::min<std::size_t>(bytes.size(), 10 + random() % 70)),
          bytes.begin());
    }
    send(fd, bytes);
  }
  EXPECT_TRUE(until([&] { return open_descriptors() <= before + 2; }, 5s));
}

// -- a peer with a token that lies

TEST_F(hostile, a_token_holders_bad_ranges_are_refused_before_memory_is_touched) {
  std::memset(victim.memory.data() + region_size / 2, 0x77, region_size / 2);
  auto l = become_peer(incarnation{99});
  const auto base = region_size / 2;
  const std::vector<wire_entry> lies{
      {.offset = base - 1, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = base + 4095, .stride = 0, .length = 2, .count = 1, .index = 0},
      {.offset = UINT64_MAX, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = UINT64_MAX - 50, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = std::uint64_t{1} << 31, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = std::uint64_t{1} << 63, .stride = 0, .length = 100, .count = 1, .index = 0},
      {.offset = base, .stride = std::uint64_t{1} << 63, .length = 10, .count = 10, .index = 0},
      {.offset = base, .stride = UINT64_MAX - 4, .length = 10, .count = 10, .index = 0},
      {.offset = base, .stride = 4096, .length = 10, .count = 10, .index = 0},
  };
  for (const auto& lie : lies) {
    const auto data = lie.length * lie.count;
    send(l.fd, write_frame(l.grant, {lie}, data, data));
    std::array<std::byte, trailer_size> trailer{};
    encode_trailer(0, trailer.data());
    send(l.fd, trailer);
    EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(errc::out_of_range));
  }
  for (auto grant : {l.grant}) {  // a grant of another link, and rights that were not given
    grant.id = grant_->id;
    send(l.fd, write_frame(grant, {{.offset = 0, .stride = 0, .length = 8, .count = 1, .index = 0}},
                           8, 8));
    std::array<std::byte, trailer_size> trailer{};
    encode_trailer(0, trailer.data());
    send(l.fd, trailer);
    EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(errc::grant_revoked));
  }
  for (std::size_t i = region_size / 2; i < region_size; ++i) {
    ASSERT_EQ(victim.memory[i], std::byte{0x77});
  }
  // And an honest write on the same link still works.
  send(l.fd,
       write_frame(l.grant, {{.offset = base, .stride = 0, .length = 64, .count = 1, .index = 0}},
                   64, 64));
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  send(l.fd, trailer);
  EXPECT_EQ(status_from(l.fd), 0);
  EXPECT_EQ(victim.memory[base], std::byte{0x66});
  l.wire->close();
}

TEST_F(hostile, frames_against_the_protocol_break_only_the_liars_link) {
  const auto memory_before = resident_kib();
  const auto patched = [](std::size_t at, std::uint32_t value) {
    std::vector<std::byte> bytes(header_size);
    encode(frame_header{.type = frame_type::session}, bytes.data());
    std::memcpy(bytes.data() + at, &value, sizeof value);
    return bytes;
  };
  std::vector<std::vector<std::byte>> attacks{
      patched(12, 0x8000'0000U),  // a session of 2 GiB
      patched(12, 0xffff'ffffU),  //
      patched(8, 0x8000'0000U),   // data of 2 GiB
      patched(4, 0xffff'ffffU),   // 65,535 entries
      patched(0, 0),              // no magic
      patched(2, 200),            // unknown type
      patched(40, 1),             // reserved
  };
  remote_grant none;
  attacks.push_back(write_frame(
      none, {{.offset = 0, .stride = 0, .length = 0xffff'ffffU, .count = 0xffff'ffffU, .index = 0}},
      100, 0));
  attacks.push_back(
      write_frame(none, {{.offset = 0, .stride = 0, .length = 10, .count = 1, .index = 0}}, 11, 0));
  std::uint64_t self = 1000;
  for (const auto& attack : attacks) {
    auto l = become_peer(incarnation{++self});
    send(l.fd, attack);
    EXPECT_TRUE(until([&] { return l.sink->broken.load(); }, 2s)) << "attack " << self - 1001;
    {
      const std::lock_guard lock{l.sink->mutex};
      EXPECT_EQ(l.sink->reason.code, errc::link_broken) << to_string(l.sink->reason);
    }
    l.wire->close();
  }
  if (!troupe::testing::sanitized) {
    EXPECT_LE(resident_kib(), memory_before + 8 * 1024);
  }
}

TEST_F(hostile, a_truncated_frame_held_open_holds_up_nobody) {
  auto l = become_peer(incarnation{99});
  const auto base = region_size / 2;
  send(l.fd,
       write_frame(l.grant, {{.offset = base, .stride = 0, .length = 4096, .count = 1, .index = 0}},
                   4096, 100));
  const auto done = friend_sink_->completed.load();
  EXPECT_TRUE(until([&] { return friend_sink_->completed > done + 20; }));
  // The fence does not wait for the rest of the frame, and what then comes does not land.
  EXPECT_EQ(l.wire->fence(transfer_id{9}), fence_state::quiescent);
  std::memset(victim.memory.data() + base, 0x31, 4096);
  send(l.fd, std::vector<std::byte>(3996, std::byte{0x66}));
  std::array<std::byte, trailer_size> trailer{};
  encode_trailer(0, trailer.data());
  send(l.fd, trailer);
  EXPECT_EQ(status_from(l.fd), static_cast<std::uint8_t>(errc::grant_revoked));
  for (std::size_t i = 0; i < 4096; ++i) ASSERT_EQ(victim.memory[base + i], std::byte{0x31});
  l.wire->close();
}

TEST_F(hostile, random_frames_from_a_token_holder_never_touch_what_was_not_granted) {
  std::memset(victim.memory.data() + region_size / 2, 0x77, region_size / 2);
  std::mt19937_64 random{99};
  for (std::uint64_t round = 0; round < 100; ++round) {
    auto l = become_peer(incarnation{5000 + round});
    for (int i = 0; i < 20; ++i) {
      std::vector<std::byte> bytes(header_size + random() % 200);
      for (auto& b : bytes) b = static_cast<std::byte>(random());
      encode(frame_header{.type = static_cast<frame_type>(1 + random() % 9),
                          .flags = static_cast<std::uint8_t>(random() % 8),
                          .entries = static_cast<std::uint16_t>(random() % 3),
                          .parts = static_cast<std::uint8_t>(1 + random() % 3),
                          .data_size = static_cast<std::uint32_t>(random() % 64),
                          .session_size = static_cast<std::uint32_t>(random() % 64),
                          .batch = random() % 4,
                          .grant = random() % 2 == 0 ? l.grant.id : random(),
                          .transfer = 9},
             bytes.data());
      send(l.fd, bytes);
    }
    l.wire->close();
  }
  // The grant covers the first 4096 bytes of the half; all else is as it was.
  for (std::size_t i = region_size / 2 + 4096; i < region_size; ++i) {
    ASSERT_EQ(victim.memory[i], std::byte{0x77});
  }
}

TEST_F(hostile, a_peer_that_asks_for_more_reads_than_it_may_is_cut_off) {
  auto l = become_peer(incarnation{99});
  const auto readable =
      l.wire->grant(victim.region, {{0, region_size, 0, 1}}, access::read, transfer_id{10}).value();
  std::vector<std::byte> request(header_size + entry_size);
  encode(frame_header{.type = frame_type::read_request,
                      .flags = flag_last,
                      .entries = 1,
                      .batch = 1,
                      .grant = readable.id,
                      .transfer = 10},
         request.data());
  encode(wire_entry{.offset = 0, .stride = 0, .length = region_size, .count = 1, .index = 0},
         request.data() + header_size);
  for (int i = 0; i < 2000 && !l.sink->broken; ++i) send(l.fd, request);  // and reads nothing
  EXPECT_TRUE(until([&] { return l.sink->broken.load(); }, 3s));
  l.wire->close();
}

TEST(listener_test, a_taken_port_and_a_foreign_address_fail_at_start_with_their_name) {
  endpoint_options options;
  options.self = us;
  const auto first = endpoint::create(options).value();
  options.data_port = first->data_port();
  const auto second = endpoint::create(options);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, errc::invalid_config);
  EXPECT_NE(second.error().message.find(std::to_string(options.data_port)), std::string::npos);
  options.data_port = 0;
  for (const char* host : {"0.0.0.0", "192.0.2.1", "no such host"}) {
    options.host = host;
    const auto refused = endpoint::create(options);
    ASSERT_FALSE(refused) << host;
    EXPECT_NE(refused.error().message.find(host), std::string::npos) << refused.error().message;
  }
}

}  // namespace troupe::transport::tcp
