#include <array>
#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <thread>

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "troupe/transport/shm/wire.hpp"
#include "troupe/transport/xgmi/grant_key.hpp"

#include "engine_stream.hpp"
#include "two_nodes.hpp"
#include "waiting.hpp"

// Memory of a peer that cannot be closed yet, and when the peer is told that it is closed.
namespace troupe::transport::xgmi {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;

constexpr region_id lent_region{5};

// -- the peer, another process that follows orders

enum class order : char { deregister = 'd' };
enum class news : char { shared = 's', closed = 'c' };

template <class Message>
void wait_for(int socket) {
  while (true) {
    const auto got = shm::receive_message(socket, shm::fds_allowed::yes);
    if (!got) ::_exit(1);
    const auto* said = std::get_if<shm::received>(&*got);
    if (said != nullptr && std::holds_alternative<Message>(said->body)) return;
    if (said == nullptr && std::get<shm::socket_state>(*got) == shm::socket_state::closed) {
      ::_exit(0);
    }
    std::this_thread::sleep_for(1ms);
  }
}

void say(int to, news what) {
  static_cast<void>(::send(to, &what, sizeof what, MSG_NOSIGNAL));
}

void lend(int parent) {
  gpu_double gpus;
  const auto memory = gpus.find(gpus.allocate(1, mib).value()).value();
  std::array<std::byte, 256> payload{};
  const auto size = ::recv(parent, payload.data(), payload.size(), 0);
  if (size <= 0) return;
  const auto offer =
      shm::shm_offer::decode(std::span{payload}.first(static_cast<std::size_t>(size))).value();
  const auto socket = shm::connect_to(offer.address.data()).value();
  static_cast<void>(shm::send_message(
      socket.get(),
      shm::hello_message{.acceptor_token = offer.secret, .dialer = 1, .acceptor = 2, .probe = {}}));
  wait_for<shm::welcome_message>(socket.get());
  static_cast<void>(shm::send_message(socket.get(), shm::ready_message{}));
  shm::gpu_region_shared_message said;
  said.region = lent_region.value;
  said.size = mib;
  said.allocation = memory.id;
  said.allocation_size = mib;
  said.exported = 1;
  said.handle = gpus.export_memory(memory).value();
  const auto& gpu = gpus.devices()[1].bus_id;
  std::memcpy(said.gpu.data(), gpu.data(), gpu.size());
  static_cast<void>(shm::send_message(socket.get(), said));
  say(parent, news::shared);
  order told{};
  if (::recv(parent, &told, sizeof told, 0) != sizeof told) return;
  static_cast<void>(shm::send_message(socket.get(), shm::region_gone_message{lent_region.value}));
  wait_for<shm::gpu_region_closed_message>(socket.get());
  say(parent, news::closed);
  static_cast<void>(::recv(parent, &told, sizeof told, 0));
}

/// Create it before the test has threads.
class peer {
 public:
  peer() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      lend(ends[1]);
      ::_exit(0);
    }
    ::close(ends[1]);
    fd_ = ends[0];
  }
  peer(const peer&) = delete;
  peer& operator=(const peer&) = delete;
  ~peer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    ::close(fd_);
  }
  [[nodiscard]] std::uint32_t pid() const { return static_cast<std::uint32_t>(pid_); }
  void dials(const link_offer& offer) const {
    EXPECT_GT(::send(fd_, offer.payload.data(), offer.payload.size(), MSG_NOSIGNAL), 0);
  }
  void is_told(order what) const {
    EXPECT_EQ(::send(fd_, &what, sizeof what, MSG_NOSIGNAL), ssize_t{sizeof what});
  }
  /// Whether the peer has sent that news by now.
  [[nodiscard]] bool says(news wanted) const {
    news what{};
    return ::recv(fd_, &what, sizeof what, MSG_DONTWAIT) == sizeof what && what == wanted;
  }

 private:
  pid_t pid_{-1};
  int fd_{-1};
};

// -- the end that has opened the peer's memory

struct memory_that_cannot_be_closed_yet : ::testing::Test {
  memory_that_cannot_be_closed_yet() {
    n.b.wire->close();
    n.b.sink = std::make_shared<contract::recorder>();
    two_nodes::open(n.b, n.a.self, link_role::acceptor);
    shm::shm_offer self;
    self.pid = other.pid();
    self.address[0] = 'x';
    EXPECT_TRUE(n.b.wire->connect({backend_kind::xgmi, n.a.self, self.encode()}));
    other.dials(n.b.wire->offer());
    EXPECT_TRUE(n.until([&] { return other.says(news::shared); }));
    reach();
  }
  /// Uses an invalid grant, which is only noticed once the memory is open.
  void reach() {
    const auto here = n.b.place->allocate_on_gpu(0, mib, "here").value();
    remote_grant grant;
    grant.id = 4711;
    grant.region = lent_region;
    grant.owner = n.a.self;
    grant.transfer = t1;
    grant.rights = access::read_write;
    grant.region_size = mib;
    grant.permitted = {{0, mib, 0, 1}};
    grant.key = encode_grant_key(0);
    const auto done = n.run(
        n.b,
        n.work(direction::write,
               {{here, std::make_shared<const remote_grant>(grant), {{0, 0, 4096, 0, 0, 1}}}}));
    EXPECT_TRUE(done.failure && done.failure->code == errc::grant_revoked);
    EXPECT_EQ(n.driver->open_now(), 1U);
  }
  /// Waits with a limit: for checking that the news does not come within it.
  [[nodiscard]] bool comes_within(std::chrono::milliseconds limit) {
    return n.comes_within(limit, [&] { return other.says(news::closed); });
  }

  peer other;
  two_nodes n;
};

TEST_F(memory_that_cannot_be_closed_yet, is_not_said_to_be_closed_before_it_is) {
  engine_stream engine{*n.driver};
  const auto gate = n.b.place->hold(engine.name()).value();
  other.is_told(order::deregister);
  EXPECT_FALSE(comes_within(500ms)) << "its owner would free what is open here";
  EXPECT_EQ(n.driver->open_now(), 1U);
  gate->open();
  EXPECT_TRUE(n.until([&] { return other.says(news::closed); }));
  EXPECT_EQ(n.driver->open_now(), 0U);
  EXPECT_FALSE(n.b.sink->is_broken());
}

TEST_F(memory_that_cannot_be_closed_yet, is_closed_also_when_its_link_has_ended_meanwhile) {
  engine_stream engine{*n.driver};
  const auto gate = n.b.place->hold(engine.name()).value();
  other.is_told(order::deregister);
  EXPECT_FALSE(comes_within(100ms));
  n.b.wire->close();
  n.b.wire.reset();
  EXPECT_FALSE(comes_within(100ms));
  EXPECT_EQ(n.driver->open_now(), 1U);
  gate->open();
  EXPECT_TRUE(comes_true([&] { return n.driver->open_now() == 0; }));
}

TEST_F(memory_that_cannot_be_closed_yet, is_said_to_be_closed_when_no_stream_is_held) {
  other.is_told(order::deregister);
  EXPECT_TRUE(n.until([&] { return other.says(news::closed); }));
  EXPECT_EQ(n.driver->open_now(), 0U);
}

}  // namespace
}  // namespace troupe::transport::xgmi
