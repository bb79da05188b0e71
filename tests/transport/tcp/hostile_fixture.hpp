#pragma once

/// A victim whose data port is attacked. Throughout, a real pair of nodes goes on moving and
/// checking bytes.

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/tcp/wire.hpp"

#include "lane_by_hand.hpp"
#include "open_descriptors.hpp"
#include "process_memory.hpp"
#include "waiting.hpp"

namespace troupe::transport::tcp {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;
using troupe::testing::comes_true;
using troupe::testing::open_descriptors;
using troupe::testing::resident_bytes;
using troupe::testing::wait_limit;

struct quiet_sink final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) ++failed;
    ++completed;
  }
  void on_frame(std::span<const std::byte>) override {
    ++frames;
    while (held) std::this_thread::sleep_for(1ms);
  }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override {
    const std::lock_guard lock{mutex};
    reason = why;
    broken = true;
  }
  std::atomic<bool> up{false}, broken{false};
  std::atomic<bool> held{false};  ///< a callback for a frame blocks while set
  std::atomic<std::size_t> completed{0}, failed{0}, frames{0};
  std::mutex mutex;
  troupe::error reason;
};

inline constexpr std::uint64_t region_size = std::uint64_t{1} << 20;
inline constexpr incarnation us{0x1111};
inline constexpr incarnation them{0x2222};

struct node {
  explicit node(incarnation self, std::function<void(const std::string&)> notice = {}) {
    endpoint_options options;
    options.self = self;
    options.peer_silence = 10 * wait_limit;  // silence must not end a link here
    options.notice = std::move(notice);
    place = endpoint::create(std::move(options)).value();
    region = place->allocate(region_size, "hostile").value();
    memory = place->bytes(region).value();
  }
  std::shared_ptr<link> open(link_role role, incarnation peer, std::shared_ptr<quiet_sink> sink,
                             link_options options = {}) {
    options.role = role;
    options.peer = peer;
    options.connect_timeout = 10 * wait_limit;
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
    EXPECT_TRUE(comes_true([&] { return friend_sink_->up && victim_sink_->up; }));
    grant_ = std::make_shared<const remote_grant>(
        to_friend_->grant(victim.region, {{0, region_size, 0, 1}}, access::write, transfer_id{1})
            .value());
    traffic_ = std::thread{[this] { move_bytes(); }};
  }
  ~hostile() override {
    const auto done = friend_sink_->completed.load();
    EXPECT_TRUE(comes_true([&] { return friend_sink_->completed > done; }))
        << "the real peers stand still";
    stop_ = true;
    traffic_.join();
    EXPECT_EQ(friend_sink_->failed, 0U);
    EXPECT_FALSE(friend_sink_->broken);
    EXPECT_FALSE(victim_sink_->broken);
    to_victim_->close();
    to_friend_->close();
  }
  /// Expects a real peer to get in.
  void let_friend_in() {
    auto dialer_sink = std::make_shared<quiet_sink>();
    auto door_sink = std::make_shared<quiet_sink>();
    const auto dialer = friend_.open(link_role::initiator, us, dialer_sink);
    const auto door = victim.open(link_role::acceptor, them, door_sink);
    ASSERT_TRUE(door->connect(dialer->offer()));
    ASSERT_TRUE(dialer->connect(door->offer()));
    EXPECT_TRUE(comes_true([&] { return dialer_sink->up && door_sink->up; }));
    dialer->close();
    door->close();
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
      EXPECT_TRUE(to_victim_->post(std::move(work)));
      EXPECT_TRUE(comes_true([&] { return friend_sink_->completed == id; })) << "batch " << id;
      EXPECT_EQ(victim.memory[65'535], static_cast<std::byte>(pattern));
      std::this_thread::sleep_for(1ms);
    }
  }

  [[nodiscard]] owned_fd dial_victim() const {
    owned_fd fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(victim.place->data_port());
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
    // If the victim stays silent where it should answer, the test must fail, not hang.
    const timeval limit{wait_limit.count(), 0};
    EXPECT_EQ(::setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit), 0);
    return fd;
  }
  template <class Bytes>
  static void send(const owned_fd& fd, const Bytes& bytes) {
    static_cast<void>(::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL));
  }
  /// Whether the victim has hung up by now.
  static bool has_hung_up(const owned_fd& fd) {
    char c[256];
    const auto got = ::recv(fd.get(), c, sizeof c, MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN);
  }
  static bool hangs_up(const owned_fd& fd) {
    return comes_true([&] { return has_hung_up(fd); });
  }

  /// A link to the victim on which we speak the protocol by hand.
  struct liar {
    owned_fd fd;                   // lane 0
    std::vector<owned_fd> others;  // the further lanes
    std::shared_ptr<quiet_sink> sink{std::make_shared<quiet_sink>()};
    std::shared_ptr<link> wire;  // the victim's end
    remote_grant grant;
  };
  liar become_peer(incarnation self, const link_options& options = {}) {
    const auto lanes = static_cast<std::uint16_t>(options.lanes);
    liar l;
    l.wire = victim.open(link_role::acceptor, self, l.sink, options);
    const auto offer = decode_offer(l.wire->offer().payload).value();
    offer_payload mine{.host = "127.0.0.1", .port = 1, .lanes = lanes, .link = 5, .secret = {}};
    mine.secret.fill(std::byte{0x42});
    EXPECT_TRUE(l.wire->connect({backend_kind::tcp, self, encode(mine)}));
    const link_secrets secrets{.acceptors = offer.secret, .dialers = mine.secret};
    std::vector<lane_talk> talks;
    const auto dial = [&](std::uint16_t lane) {
      auto fd = dial_victim();
      talks.push_back(prove(
          fd,
          {.lane = lane, .lanes = lanes, .link = offer.link, .from = self, .to = us, .drawn = {}},
          secrets));
      return fd;
    };
    l.fd = dial(0);
    for (std::uint16_t lane = 1; lane < lanes; ++lane) l.others.push_back(dial(lane));
    EXPECT_TRUE(is_accepted(l.fd, talks[0], secrets));
    for (std::size_t i = 0; i < l.others.size(); ++i) {
      EXPECT_TRUE(is_accepted(l.others[i], talks[i + 1], secrets));
    }
    EXPECT_TRUE(comes_true([&] { return l.sink->up.load(); }));
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
  /// The completion that the victim sends; a status of 254 or 255 means that it sent none.
  struct victims_word {
    std::uint8_t status{255};
    completion_body body;
  };
  static victims_word word_from(const owned_fd& fd) {
    std::array<std::byte, header_size> head{};
    if (::recv(fd.get(), head.data(), head.size(), MSG_WAITALL) !=
        static_cast<ssize_t>(head.size()))
      return {};
    const auto header = decode_header(head);
    if (!header || header->type != frame_type::completion) return {.status = 254, .body = {}};
    std::vector<std::byte> body(header->session_size);
    if (!body.empty()) static_cast<void>(::recv(fd.get(), body.data(), body.size(), MSG_WAITALL));
    return {.status = header->status, .body = decode_completion_body(body).value()};
  }
  static std::uint8_t status_from(const owned_fd& fd) { return word_from(fd).status; }

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
};

}  // namespace troupe::transport::tcp
