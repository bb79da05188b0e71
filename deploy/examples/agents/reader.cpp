#include <cstdio>
#include <iostream>

#include "troupe/io/agent.hpp"

using namespace troupe;

/// Lends a megabyte, which it describes on its output, and waits for who writes: reader | writer
int main() {
  const auto agent = io::agent::create({.name = "reader"}).value();
  std::vector<std::byte> memory(1 << 20);
  agent->register_memory(memory, "kv", transport::access::write).value();
  const auto mine = agent->describe().value();
  std::fwrite(mine.data(), 1, mine.size(), stdout);
  std::fclose(stdout);
  if (!agent->wait_for_notices(std::chrono::seconds{10})) return 1;
  const auto notice = agent->take_notices(1).front();  // every byte is there
  std::cerr << notice.from << " wrote " << std::to_integer<int>(memory.back()) << "\n";
}
