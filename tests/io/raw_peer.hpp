#pragma once

#include <atomic>
#include <cerrno>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/actors/door/door.hpp"
#include "troupe/io/bytes.hpp"
#include "troupe/io/descriptor.hpp"
#include "troupe/io/wire.hpp"
#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/random.hpp"

#include "waiting.hpp"

/// Peers that say what a test wants, on the connection and over a link.
namespace troupe::io {

/// Messages over a connection that a door has admitted, sent and read by the test's thread.
class raw_channel {
 public:
  explicit raw_channel(int fd) : fd_{fd} {}
  raw_channel(const raw_channel&) = delete;
  raw_channel& operator=(const raw_channel&) = delete;
  ~raw_channel() { ::close(fd_); }

  void send(const control_message& said) const {
    const auto bytes = encode(said);
    [[maybe_unused]] const auto sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  /// The next message other than a ping; pings are answered. Empty if the connection has ended or
  /// no message comes.
  std::optional<control_message> next() {
    for (const auto end = testing::end_of_wait(); std::chrono::steady_clock::now() < end;) {
      if (auto said = take(); said && std::holds_alternative<ping>(*said)) {
        send(pong{});
      } else if (said && !std::holds_alternative<pong>(*said)) {
        return said;
      } else if (!said && !read_some()) {
        return std::nullopt;
      }
    }
    return std::nullopt;
  }
  /// The next message, if it is of this kind; else empty.
  template <class Message>
  std::optional<Message> next_of() {
    const auto said = next();
    const auto* const found = said ? std::get_if<Message>(&*said) : nullptr;
    return found == nullptr ? std::nullopt : std::optional{*found};
  }

 private:
  std::optional<control_message> take() {
    constexpr std::size_t length_size = 4;
    if (in_.size() < length_size) return std::nullopt;
    const auto size = byte_reader{in_}.take<std::uint32_t>();
    if (in_.size() < length_size + size) return std::nullopt;
    auto said = decode_control(std::span{in_}.subspan(length_size, size));
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(length_size + size));
    return said ? std::optional{std::move(*said)} : std::nullopt;
  }
  /// Returns false if the connection has ended.
  bool read_some() {
    pollfd readable{fd_, POLLIN, 0};
    if (::poll(&readable, 1, 100) <= 0) return true;
    std::byte buffer[4096];  // NOLINT(modernize-avoid-c-arrays)
    const auto got = ::recv(fd_, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got > 0) in_.insert(in_.end(), buffer, buffer + got);
    return got > 0 || (got < 0 && errno == EAGAIN);
  }

  const int fd_;
  std::vector<std::byte> in_;
};

/// One end of a link, whose frames the test sends and reads.
class raw_link final : public transport::link_sink {
 public:
  void on_up() override { up = true; }
  void on_completion(transport::completion) override {}
  void on_frame(std::span<const std::byte> bytes) override {
    const std::lock_guard lock{mutex_};
    frames_.emplace_back(bytes.begin(), bytes.end());
  }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error) override { broken = true; }

  void send(const link_frame& said) const { EXPECT_TRUE(wire->send_frame(encode_frame(said))); }
  /// The bytes of the next frame; empty if none comes.
  std::vector<std::byte> next() {
    std::vector<std::byte> found;
    EXPECT_TRUE(testing::comes_true([&] {
      const std::lock_guard lock{mutex_};
      if (frames_.empty()) return false;
      found = std::move(frames_.front());
      frames_.pop_front();
      return true;
    })) << "no frame came";
    return found;
  }

  std::shared_ptr<transport::link> wire;
  std::atomic<bool> up{false}, broken{false};

 private:
  std::mutex mutex_;
  std::deque<std::vector<std::byte>> frames_;
};

/// What both raw ends have: an incarnation, its descriptor, a door and an endpoint.
struct raw_node {
  raw_node() {
    self.life = incarnation{transport::random_id()};
    transport::random_bytes(self.token);
    self.port = 1;
    self.host = "127.0.0.1";
    self.name = "raw";
    door = actors::door::create({}).value();
  }
  /// Opens one end of a link to that incarnation.
  std::shared_ptr<raw_link> open(transport::backend_kind kind, transport::link_role role,
                                 incarnation peer) {
    if (!place) {
      transport::endpoint_options options;
      options.self = self.life;
      place = transport::endpoint::create(std::move(options)).value();
    }
    auto made = std::make_shared<raw_link>();
    transport::link_options with{.role = role, .peer = peer};
    with.connect_timeout = 10 * testing::wait_limit;
    made->wire = place->open(kind, with, made).value();
    links.push_back(made);
    return made;
  }
  raw_node(const raw_node&) = delete;
  raw_node& operator=(const raw_node&) = delete;
  ~raw_node() {
    for (const auto& one : links) one->wire->close();
    if (place) place->stop();
    for (const auto& one : links) one->wire.reset();
  }

  descriptor self;
  std::unique_ptr<actors::door> door;
  std::unique_ptr<transport::endpoint> place;
  std::vector<std::shared_ptr<raw_link>> links;
};

/// Dials an agent as another agent does, as far as the test lets it.
struct raw_dialer : raw_node {
  explicit raw_dialer(const descriptor& of) : to{of} {}

  /// Connects, and greets as `self.life`. Returns the agent's answer.
  std::optional<control_message> greet() {
    channel.reset();
    std::promise<int> connected;
    door->connect(to.host, to.port, testing::end_of_wait(),
                  [&](result<actors::door_socket> how) { connected.set_value(how ? *how : -1); });
    channel = std::make_unique<raw_channel>(connected.get_future().get());
    const auto asked = channel->next_of<challenge>();
    if (!asked) return std::nullopt;
    hello mine;
    mine.to = to.life;
    mine.from = self.life;
    transport::random_bytes(mine.nonce);
    mine.proof = prove(proof_role::dialer, to.token, asked->nonce, mine.nonce, mine.from, to.life);
    channel->send(mine);
    return channel->next();
  }
  /// Introduces itself with this descriptor. Returns the agent's answer.
  std::optional<control_message> introduce(const descriptor& as) {
    channel->send(introduction{as.encode()});
    return channel->next();
  }
  /// Greets and introduces itself. Returns false if it was refused.
  bool enter() {
    const auto welcomed = greet();
    if (!welcomed || !std::holds_alternative<welcome>(*welcomed)) return false;
    const auto answer = introduce(self);
    return answer && std::holds_alternative<accepted>(*answer);
  }
  std::shared_ptr<raw_link> link(transport::backend_kind kind = transport::backend_kind::tcp) {
    auto made = open(kind, transport::link_role::initiator, to.life);
    channel->send(link_wanted{.attempt = ++attempt, .lanes = 1, .offer = made->wire->offer()});
    const auto answer = channel->next_of<link_answer>();
    EXPECT_TRUE(answer && !answer->refused);
    if (!answer || answer->refused) return made;
    EXPECT_TRUE(made->wire->connect(answer->offer));
    EXPECT_TRUE(testing::comes_true([&] { return made->up.load(); }));
    return made;
  }

  descriptor to;
  std::uint32_t attempt{0};
  std::unique_ptr<raw_channel> channel;
};

/// Waits to be dialled by an agent that has `described()`.
struct raw_acceptor : raw_node {
  raw_acceptor() {
    self.port = door->listen(self.host, 0,
                             [this](actors::door_socket fd) {
                               const std::lock_guard lock{mutex};
                               sockets.push_back(fd);
                             })
                    .value();
  }
  ~raw_acceptor() {
    door->close(self.port);
    for (const auto fd : sockets) ::close(fd);
  }
  raw_acceptor(const raw_acceptor&) = delete;
  raw_acceptor& operator=(const raw_acceptor&) = delete;
  /// Accepts the next connection, up to its greeting.
  std::optional<hello> accept() {
    int fd = -1;
    EXPECT_TRUE(testing::comes_true([&] {
      const std::lock_guard lock{mutex};
      if (sockets.empty()) return false;
      fd = sockets.front();
      sockets.pop_front();
      return true;
    })) << "nobody dialled";
    channel = std::make_unique<raw_channel>(fd);
    challenge asked;
    transport::random_bytes(asked.nonce);
    challenged = asked.nonce;
    channel->send(asked);
    auto said = channel->next_of<hello>();
    if (said) dialer = said->from;
    return said;
  }
  [[nodiscard]] welcome welcome_for(const hello& said) const {
    welcome mine;
    mine.proof =
        prove(proof_role::acceptor, self.token, challenged, said.nonce, said.from, self.life);
    mine.where = transport::host_identity::of_this_process();
    return mine;
  }
  /// Admits the next agent. Returns false if its greeting was wrong.
  bool let_in() {
    const auto said = accept();
    if (!said) return false;
    channel->send(welcome_for(*said));
    if (!channel->next_of<introduction>()) return false;
    channel->send(accepted{.room = {64, std::size_t{1} << 20}, .received = {}, .taken = {}});
    return true;
  }
  /// Makes the link that the agent wants next; null if it wants none.
  std::shared_ptr<raw_link> link() {
    const auto wanted = channel->next_of<link_wanted>();
    if (!wanted) return nullptr;
    auto made = open(wanted->offer.kind, transport::link_role::acceptor, dialer);
    kind = wanted->offer.kind;
    const auto offer = made->wire->offer();
    EXPECT_TRUE(made->wire->connect(wanted->offer));
    channel->send(link_answer{.attempt = wanted->attempt, .refused = {}, .offer = offer});
    EXPECT_TRUE(testing::comes_true([&] { return made->up.load(); }));
    return made;
  }

  std::mutex mutex;
  std::deque<int> sockets;
  control_nonce challenged{};
  incarnation dialer;
  transport::backend_kind kind{transport::backend_kind::tcp};  ///< of the last link
  std::unique_ptr<raw_channel> channel;
};

}  // namespace troupe::io
