#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "troupe/io/agent.hpp"

using namespace troupe;
using namespace std::chrono_literals;

/// Two processes, writer and reader: `pair NAME OWN OTHER`. The file OWN gets its descriptor.
int main(int, char** words) try {
  const std::string name = words[1], own = words[2], other = words[3];
  const auto agent = io::agent::create({.name = name}).value();
  std::vector<std::byte> memory(1 << 20, std::byte{name == "writer"});
  const auto kv = agent->register_memory(memory, "kv", transport::access::read_write).value();
  const auto mine = agent->describe().value();
  std::ofstream{own + ".part"}.write(reinterpret_cast<const char*>(mine.data()),
                                     static_cast<std::streamsize>(mine.size()));
  std::filesystem::rename(own + ".part", own);
  while (!std::filesystem::exists(other)) std::this_thread::sleep_for(10ms);
  std::ifstream file{other};
  const std::string theirs{std::istreambuf_iterator{file}, {}};
  const auto peer = agent->add_peer(std::as_bytes(std::span{theirs})).value();
  if (name == "writer") {
    const auto number = agent->remote_memories(peer).value().front().number;
    const auto over = agent->session(kv, peer, number).value();
    const std::vector<segment> all{{0, 0, memory.size()}};
    const auto sent = agent->move(transport::direction::write, over, all, mine, 10s).value();
    agent->wait({&sent, 1}, io::wait_for::all, 10s);
    std::cout << to_string(agent->status_of(sent).value().now) << "\n";
  } else {
    while (agent->take_notices(1).empty()) std::this_thread::sleep_for(1ms);  // it is all there
  }
  std::cout << name << ": " << std::to_integer<int>(memory.back()) << "\n";
} catch (const std::exception& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
