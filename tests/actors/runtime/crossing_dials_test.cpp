// Two processes that dial each other at the same time stay connected. CAF lets each process close
// the connection that it dialled when it finds the other one made, so both may be lost. In the
// first tests the peer is this test, which speaks CAF's protocol in the required order.

#include <array>
#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <caf/binary_deserializer.hpp>
#include <caf/binary_serializer.hpp>
#include <caf/defaults.hpp>
#include <caf/io/basp/header.hpp>
#include <caf/io/basp/version.hpp>
#include <caf/node_id.hpp>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "troupe/actors/door/door.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "cluster_peer.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using namespace std::chrono_literals;
using caf::io::basp::header;
using caf::io::basp::message_type;
using troupe::testing::end_of_wait;
using troupe::testing::wait_limit;

std::uint16_t publish(actor_host& host) {
  const auto bound = host.publish(spawn_supervisor(host.system(), three_nodes()), "127.0.0.1", 0);
  EXPECT_TRUE(bound) << to_string(bound.error());
  return bound.value_or(0);
}

result<membership> members_of(actor_host& host, const supervisor_actor& supervisor) {
  return ask<membership>(host.system(), supervisor, "the supervisor", wait_limit, members_atom_v);
}

/// One connection of a peer that exists only in this test.
class spoken_connection {
 public:
  spoken_connection(caf::actor_system& system, door_socket socket)
      : system_{system}, socket_{socket} {}
  ~spoken_connection() { hang_up(); }
  spoken_connection(const spoken_connection&) = delete;
  spoken_connection& operator=(const spoken_connection&) = delete;

  void hang_up() {
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }

  template <class... Body>
  void say(message_type what, std::uint8_t flags, caf::actor_id whom, Body... body) {
    std::vector<char> text;
    std::vector<char> message;
    caf::binary_serializer said{system_, text};
    EXPECT_EQ(said(body...), caf::none);
    caf::binary_serializer head{system_, message};
    const std::uint64_t data = what == message_type::server_handshake ? caf::io::basp::version : 0;
    EXPECT_EQ(head(header{what, flags, static_cast<std::uint32_t>(text.size()), data, 0, whom}),
              caf::none);
    message.insert(message.end(), text.begin(), text.end());
    EXPECT_EQ(::send(socket_, message.data(), message.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(message.size()));
  }

  /// Whether the other side sends such a message, after any others, before it closes.
  bool hears(message_type what) {
    for (header head{};;) {
      if (!read(caf::io::basp::header_size)) return false;
      caf::binary_deserializer heard{system_, read_};
      EXPECT_EQ(heard(head), caf::none);
      if (!read(head.payload_len)) return false;
      if (head.operation == what) return true;
    }
  }

  bool is_closed() {
    for (const auto end = end_of_wait(); std::chrono::steady_clock::now() < end && read(1);)
      continue;
    return ended_;
  }

 private:
  bool read(std::size_t bytes) {
    read_.resize(bytes);
    const auto end = end_of_wait();
    for (std::size_t got = 0; got < bytes;) {
      const auto n = ::recv(socket_, read_.data() + got, bytes - got, MSG_DONTWAIT);
      if (n > 0) {
        got += static_cast<std::size_t>(n);
        continue;
      }
      ended_ = n == 0 || (errno != EAGAIN && errno != EINTR);
      if (ended_ || std::chrono::steady_clock::now() >= end) return false;
      pollfd ready{socket_, POLLIN, 0};
      ::poll(&ready, 1, 100);
    }
    return true;
  }

  caf::actor_system& system_;
  door_socket socket_;
  std::vector<char> read_;
  bool ended_{false};
};

class crossing_dials : public ::testing::Test {
 protected:
  actor_host host{{.network_heartbeat = 20ms, .connection_timeout = wait_limit}};
  std::unique_ptr<door> peer;
  std::promise<door_socket> guest;
  std::unique_ptr<spoken_connection> dialled_by_us, dialled_by_it;
  std::future<result<supervisor_actor>> found;
  const caf::node_id name{caf::make_node_id(7, {1, 2, 3})};

  /// Both sides have dialled, and neither has sent a CAF message.
  void SetUp() override {
    auto made = door::create({});
    ASSERT_TRUE(made) << to_string(made.error());
    peer = std::move(*made);
    const auto port = publish(host);
    const auto bound = peer->listen("127.0.0.1", 0, [this](door_socket s) { guest.set_value(s); });
    ASSERT_TRUE(bound) << to_string(bound.error());
    found = std::async(std::launch::async, [this, to = *bound] {
      return host.connect<supervisor_actor>("127.0.0.1", to, wait_limit);
    });
    dialled_by_it = std::make_unique<spoken_connection>(host.system(), guest.get_future().get());
    std::promise<result<door_socket>> outcome;
    peer->connect("127.0.0.1", port, end_of_wait(),
                  [&](result<door_socket> how) { outcome.set_value(std::move(how)); });
    auto through = outcome.get_future().get();
    ASSERT_TRUE(through) << to_string(through.error());
    dialled_by_us = std::make_unique<spoken_connection>(host.system(), *through);
  }
  void TearDown() override { peer.reset(); }

  /// The host knows of our connection once it speaks over it.
  void greet_as_who_dialled() {
    dialled_by_us->say(message_type::client_handshake, 0, 0, name);
    ASSERT_TRUE(dialled_by_us->hears(message_type::direct_message));
  }
  void choose_what_was_dialled() {
    dialled_by_us->say(message_type::client_handshake, header::select_connection_flag, 0, name);
    // This message is answered after the handshake, since there is no such actor.
    dialled_by_us->say(message_type::monitor_message, 0, 4711, name, host.system().node());
    ASSERT_TRUE(dialled_by_us->hears(message_type::down_message));
  }
  void greet_as_who_was_dialled() {
    dialled_by_it->say(message_type::server_handshake, 0, 0, name,
                       caf::defaults::middleman::app_identifiers, caf::actor_id{5},
                       host.system().message_types<supervisor_actor>());
    const auto whom = found.get();
    ASSERT_TRUE(whom) << to_string(whom.error());
  }
};

TEST_F(crossing_dials, are_both_kept_while_the_peer_has_chosen_neither) {
  ASSERT_NO_FATAL_FAILURE(greet_as_who_dialled());
  ASSERT_NO_FATAL_FAILURE(greet_as_who_was_dialled());
  EXPECT_TRUE(dialled_by_it->hears(message_type::heartbeat)) << "it was closed";
  EXPECT_TRUE(dialled_by_us->hears(message_type::heartbeat));
  dialled_by_it->say(message_type::monitor_message, 0, 4711, name, host.system().node());
  EXPECT_TRUE(dialled_by_us->hears(message_type::down_message))
      << "what the peer says over either is heard";
}

TEST_F(crossing_dials, leave_one_where_the_peer_has_chosen_it) {
  ASSERT_NO_FATAL_FAILURE(greet_as_who_dialled());
  ASSERT_NO_FATAL_FAILURE(choose_what_was_dialled());
  ASSERT_NO_FATAL_FAILURE(greet_as_who_was_dialled());
  EXPECT_TRUE(dialled_by_it->is_closed());
  EXPECT_TRUE(dialled_by_us->hears(message_type::heartbeat));
}

TEST_F(crossing_dials, are_both_lost_with_the_one_that_was_spoken_over) {
  ASSERT_NO_FATAL_FAILURE(greet_as_who_dialled());
  ASSERT_NO_FATAL_FAILURE(greet_as_who_was_dialled());
  dialled_by_us->hang_up();
  EXPECT_TRUE(dialled_by_it->is_closed()) << "what was under way is lost, and nobody is told";
}

TEST_F(crossing_dials, leave_one_where_the_other_was_not_spoken_over) {
  ASSERT_NO_FATAL_FAILURE(greet_as_who_dialled());
  ASSERT_NO_FATAL_FAILURE(greet_as_who_was_dialled());
  dialled_by_it->hang_up();
  // Several heartbeats later, in whatever order the loop handled the simultaneous events.
  for (int beat = 0; beat < 10; ++beat)
    ASSERT_TRUE(dialled_by_us->hears(message_type::heartbeat)) << "beat " << beat;
}

TEST(crossing_processes, of_two_processes_let_both_through) {
  for (int round = 0; round < 5; ++round) {
    actor_host left, right;
    const auto to_left = publish(left);
    const auto to_right = publish(right);
    const auto fetch = [](actor_host& from, std::uint16_t port) {
      const auto found = from.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
      if (!found) return to_string(found.error());
      const auto members = members_of(from, *found);
      return members ? std::string{} : to_string(members.error());
    };
    auto one = std::async(std::launch::async, [&] { return fetch(left, to_right); });
    EXPECT_EQ(fetch(right, to_left), "");
    EXPECT_EQ(one.get(), "");
  }
}

TEST(crossing_processes, of_two_processes_leave_them_connected) {
  // Long enough for both sides to send something however busy the machine is. A side that is cut
  // off by the tie of the two connections sends nothing at all.
  const auto timeout = 8000ms;
  const auto cross = [timeout](int round) {
    actor_host left{{.network_heartbeat = 100ms, .connection_timeout = timeout}};
    actor_host right{{.network_heartbeat = 100ms, .connection_timeout = timeout}};
    const auto to_left = publish(left);
    const auto to_right = publish(right);
    std::atomic<bool> go{false};
    const auto fetch = [&go](actor_host& from, std::uint16_t port) {
      while (!go) std::this_thread::yield();
      return from.connect<supervisor_actor>("127.0.0.1", port, wait_limit);
    };
    auto one = std::async(std::launch::async, [&] { return fetch(left, to_right); });
    auto other = std::async(std::launch::async, [&] { return fetch(right, to_left); });
    go = true;
    const auto of_right = one.get();
    const auto of_left = other.get();
    ASSERT_TRUE(of_right) << to_string(of_right.error());
    ASSERT_TRUE(of_left) << to_string(of_left.error());
    std::this_thread::sleep_for(timeout + timeout / 2);
    const auto heard = members_of(left, *of_right);
    EXPECT_TRUE(heard) << "round " << round << ": " << to_string(heard.error());
    const auto heard_back = members_of(right, *of_left);
    EXPECT_TRUE(heard_back) << "round " << round << ": " << to_string(heard_back.error());
  };
  std::vector<std::future<void>> rounds;
  for (int round = 0; round < 3; ++round) {
    rounds.push_back(std::async(std::launch::async, cross, round));
  }
  for (auto& one : rounds) one.get();
}

}  // namespace
}  // namespace troupe::actors::testing
