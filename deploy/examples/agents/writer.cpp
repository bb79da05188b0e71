#include <iostream>
#include <iterator>

#include "troupe/io/agent.hpp"

using namespace troupe;
using namespace std::chrono_literals;

/// Writes a megabyte into the memory that its input describes.
int main() {
  const std::string theirs{std::istreambuf_iterator{std::cin}, {}};
  const auto agent = io::agent::create({.name = "writer"}).value();
  std::vector<std::byte> memory(1 << 20, std::byte{7});
  const auto kv = agent->register_memory(memory, "kv", transport::access::read).value();
  const auto peer = agent->add_peer(std::as_bytes(std::span{theirs})).value();
  const auto there = agent->remote_memories(peer).value().front();
  const auto over = agent->session(kv, peer, there.number).value();
  const std::vector<segment> all{{0, 0, memory.size()}};
  const auto notice = std::as_bytes(std::span{"all", 3});
  const auto sent = agent->move(transport::direction::write, over, all, notice, 10s).value();
  agent->wait({&sent, 1}, io::wait_for::all, 1h);
  std::cout << "writer: " << to_string(agent->status_of(sent).value().now) << "\n";
}
