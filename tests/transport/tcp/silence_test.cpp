#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/owned_fd.hpp"
#include "troupe/transport/tcp/wire.hpp"

#include "lane_by_hand.hpp"
#include "waiting.hpp"

// Peers that vanish or freeze silently: no FIN, no RST.
namespace troupe::transport::tcp {

namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

constexpr incarnation us{0x1111};
constexpr incarnation them{0x2222};
constexpr std::uint64_t region_size = std::uint64_t{16} << 20;
constexpr auto silence = 2000ms;

struct recorder final : link_sink {
  void on_up() override { up = true; }
  void on_completion(completion done) override {
    if (done.failure) ++failed;
  }
  void on_frame(std::span<const std::byte>) override {}
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override {
    const std::lock_guard lock{mutex};
    reason = std::move(why);
    broken = true;
  }
  std::atomic<bool> up{false}, broken{false};
  std::atomic<int> failed{0};
  std::mutex mutex;
  troupe::error reason;
};

/// A link of ours whose other end is a bare socket that the test holds.
class silent_peer : public ::testing::Test {
 protected:
  silent_peer() {
    endpoint_options options;
    options.self = us;
    options.peer_silence = silence;
    place = endpoint::create(std::move(options)).value();
    region = place->allocate(region_size, "silence").value();
    link_options with;
    with.role = link_role::acceptor;
    with.peer = them;
    with.connect_timeout = 10 * troupe::testing::wait_limit;
    wire = place->open(backend_kind::tcp, with, sink).value();
    const auto offer = decode_offer(wire->offer().payload).value();
    offer_payload mine{.host = "127.0.0.1", .port = 1, .lanes = 1, .link = 5, .secret = {}};
    mine.secret.fill(std::byte{0x42});
    EXPECT_TRUE(wire->connect({backend_kind::tcp, them, encode(mine)}));
    dial();
    const link_secrets secrets{.acceptors = offer.secret, .dialers = mine.secret};
    const hello greeting{
        .lane = 0, .lanes = 1, .link = offer.link, .from = them, .to = us, .drawn = {}};
    const auto talk = prove(peer, greeting, secrets);
    EXPECT_TRUE(is_accepted(peer, talk, secrets));
    EXPECT_TRUE(comes_true([&] { return sink->up.load(); }));
  }
  ~silent_peer() override { wire->close(); }

  void dial() {
    peer = owned_fd{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_port = htons(place->data_port());
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(peer.get(), reinterpret_cast<sockaddr*>(&at), sizeof at), 0);
  }
  /// From now on the kernel drops packets for the peer before TCP sees them, as if its host had
  /// lost power.
  void pull_the_plug() const {
    sock_filter drop{BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog all{1, &drop};
    ASSERT_EQ(::setsockopt(peer.get(), SOL_SOCKET, SO_ATTACH_FILTER, &all, sizeof all), 0);
  }
  /// Posts more than the socket buffers hold.
  void post_much() {
    remote_grant grant;
    grant.id = 1;
    grant.owner = them;
    grant.transfer = transfer_id{9};
    grant.rights = access::write;
    grant.region_size = region_size;
    grant.permitted = {{0, region_size, 0, 1}};
    const auto given = std::make_shared<const remote_grant>(std::move(grant));
    for (std::uint64_t i = 0; i < batches; ++i) {
      batch work;
      work.id = batch_id{i + 1};
      work.transfer = transfer_id{9};
      work.pieces.push_back({region, given, {{0, 0, region_size, 0, 0, 1}}});
      ASSERT_TRUE(wire->post(std::move(work)));
    }
  }

  static constexpr std::uint64_t batches = 4;
  std::shared_ptr<recorder> sink{std::make_shared<recorder>()};
  std::unique_ptr<endpoint> place;
  region_id region;
  std::shared_ptr<link> wire;
  owned_fd peer;
};

}  // namespace

TEST_F(silent_peer, a_host_that_vanished_is_noticed_on_an_idle_lane) {
  pull_the_plug();
  ASSERT_TRUE(comes_true([&] { return sink->broken.load(); }));
  EXPECT_EQ(sink->reason.code, errc::peer_lost) << sink->reason.message;
}

TEST_F(silent_peer, a_host_that_vanishes_under_writes_fails_them) {
  pull_the_plug();
  post_much();
  ASSERT_TRUE(comes_true([&] { return sink->broken.load(); }));
  EXPECT_EQ(sink->reason.code, errc::peer_lost) << sink->reason.message;
  EXPECT_EQ(sink->failed, static_cast<int>(batches));
}

TEST_F(silent_peer, a_frozen_process_that_takes_nothing_more_fails_its_writes) {
  post_much();  // the peer's kernel still answers, with a closed window
  ASSERT_TRUE(comes_true([&] { return sink->broken.load(); }));
  EXPECT_EQ(sink->reason.code, errc::peer_lost) << sink->reason.message;
  EXPECT_EQ(sink->failed, static_cast<int>(batches));
}

TEST_F(silent_peer, one_that_is_merely_idle_is_kept) {
  std::this_thread::sleep_for(2 * silence);
  EXPECT_FALSE(sink->broken) << sink->reason.message;
}

}  // namespace troupe::transport::tcp
