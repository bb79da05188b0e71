// A connection that ends at a bad moment of CAF's loop is still closed. If CAF registers and
// withdraws interest in a socket within one turn of its loop, it never tells the socket's owner.

#include <array>
#include <thread>

#include <caf/io/basp_broker.hpp>
#include <caf/io/middleman.hpp>
#include <caf/send.hpp>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "troupe/actors/runtime/network_stream.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/actors/supervisor/supervisor.hpp"

#include "cluster_peer.hpp"
#include "held_loop.hpp"
#include "own_connections.hpp"
#include "waiting.hpp"

namespace troupe::actors::testing {
namespace {

using namespace std::chrono_literals;
using troupe::testing::comes_true;
using troupe::testing::connections_towards;
using troupe::testing::reset_connections;
using troupe::testing::wait_limit;
using broker_atom = caf::atom_constant<caf::atom("BASP")>;

constexpr int descriptors = 1024;

/// Identifies a socket for the machine's uptime, unlike its descriptor. 0 if it is no socket.
ino_t name_of(int descriptor) {
  struct stat about {};
  return ::fstat(descriptor, &about) == 0 && S_ISSOCK(about.st_mode) ? about.st_ino : 0;
}

bool is_closed(ino_t socket) {
  for (int fd = 0; fd < descriptors; ++fd) {
    if (name_of(fd) == socket) return false;
  }
  return true;
}

TEST(closed_connection, is_closed_though_something_was_to_leave_when_it_broke) {
  actor_host there, here;
  const auto port = there.publish(spawn_supervisor(there.system(), three_nodes()), "127.0.0.1", 0);
  ASSERT_TRUE(port) << to_string(port.error());
  const auto boss = here.connect<supervisor_actor>("127.0.0.1", *port, wait_limit);
  ASSERT_TRUE(boss) << to_string(boss.error());
  ASSERT_TRUE(comes_true([&] { return connections_towards(*port).size() == 1; }))
      << "who made it has a descriptor of it for a moment longer";
  const auto socket = name_of(connections_towards(*port).front());
  ASSERT_TRUE(ask<membership>(here.system(), *boss, "the supervisor", wait_limit, members_atom_v));
  // The loop must be idle, with no pending socket events, so that it handles the message before the
  // break.
  std::this_thread::sleep_for(50ms);
  { const one_turn nothing_left{here.system()}; }
  {
    const one_turn turn{here.system()};
    caf::anon_send(*boss, members_atom_v);
    // Broken without a shutdown: the loop sees an error and nothing to read.
    ASSERT_EQ(reset_connections(*port), 1);
  }
  EXPECT_TRUE(comes_true([&] { return is_closed(socket); }));
}

TEST(closed_connection, is_closed_though_it_was_made_when_its_owner_ended) {
  actor_host host;
  const auto broker =
      host.system().middleman().named_broker<caf::io::basp_broker>(broker_atom::value);
  const auto streams = std::make_shared<open_streams>();
  std::array<int, 2> ends{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends.data()), 0);
  const auto socket = name_of(ends[0]);
  {
    const one_turn turn{host.system()};
    caf::anon_send(
        broker, caf::connect_atom::value,
        streams->open(host.system(), transport::owned_fd{ends[0]}, open_streams::side::dialled),
        std::uint16_t{1});
    caf::anon_send_exit(broker, caf::exit_reason::user_shutdown);
  }
  EXPECT_TRUE(comes_true([&] { return is_closed(socket); }));
  ::close(ends[1]);
}

}  // namespace
}  // namespace troupe::actors::testing
