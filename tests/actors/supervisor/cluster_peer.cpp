// A process for the supervisor's tests, to be killed, stopped and continued:
//
//   cluster_peer node SUPERVISOR_PORT NAME INCARNATION
//       registers, prints a line, then beats every 50 ms
//   cluster_peer supervisor PORT
//       publishes a supervisor, prints "up PORT"
//
// It ends when its standard input does.

#include "cluster_peer.hpp"

#include <cstdio>
#include <cstdlib>

#include <caf/scoped_actor.hpp>
#include <poll.h>
#include <unistd.h>

namespace {

using namespace troupe::actors;
using std::chrono::milliseconds;

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

/// Returns false at the end of standard input.
bool parent_lives(milliseconds wait) {
  pollfd p{STDIN_FILENO, POLLIN, 0};
  return poll(&p, 1, static_cast<int>(wait.count())) == 0;
}

int node(std::uint16_t port, const std::string& name, std::uint64_t incarnation) {
  actor_host host;
  auto request = testing::request_of(name, incarnation);
  const auto ear = std::make_shared<testing::told>();
  const node_actor self = host.system().spawn(testing::listening_node, ear, request.node);
  const auto bound = host.publish(self, "127.0.0.1", 0);
  const auto supervisor = host.connect<supervisor_actor>("127.0.0.1", port, milliseconds{3000});
  if (!bound || !supervisor) return 2;
  request.node.port = *bound;
  request.node.pid = static_cast<std::uint32_t>(getpid());
  caf::scoped_actor me{host.system()};
  std::string outcome = "no reply";
  me->request(*supervisor, milliseconds{3000}, register_atom_v, request, self)
      .receive(
          [&](const registration& r) {
            outcome = r.failed != 0 ? "refused " + r.sentence : "registered";
          },
          [&](caf::error& e) { outcome = host.system().render(e); });
  say(outcome);
  heartbeat beat{name, incarnation, 0, {}, {}};
  while (parent_lives(milliseconds{50})) {
    ++beat.sequence;
    me->request(*supervisor, milliseconds{500}, beat)
        .receive(
            [&](const heartbeat_ack& ack) {
              if (!ack.known) say("unknown");
            },
            [&](caf::error& e) { say("lost " + host.system().render(e)); });
  }
  return 0;
}

int supervisor(std::uint16_t port) {
  actor_host host;
  const auto bound =
      host.publish(spawn_supervisor(host.system(), testing::three_nodes()), "127.0.0.1", port);
  if (!bound) {
    say(to_string(bound.error()));
    return 2;
  }
  say("up " + std::to_string(*bound));
  while (parent_lives(milliseconds{1000})) {
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  const auto number = [&](std::size_t i) { return std::strtoull(args[i].c_str(), nullptr, 10); };
  if (args.size() == 4 && args[0] == "node") {
    return node(static_cast<std::uint16_t>(number(1)), args[2], number(3));
  }
  if (args.size() == 2 && args[0] == "supervisor") {
    return supervisor(static_cast<std::uint16_t>(number(1)));
  }
  std::fprintf(stderr, "usage: cluster_peer node PORT NAME INCARNATION | supervisor PORT\n");
  return 64;
}
