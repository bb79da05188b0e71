// The other agent of a test in a process of its own, so that it can be killed and stopped.
//
//   io_peer NAME BACKEND PORT serve|write
//
// Prints its descriptor (hexadecimal, of one memory of 4 MiB), reads the test's descriptor, and
// serves. `write` also writes its whole memory of 0xbb into the test's first memory, over and over.
// Prints "failed CODE" for the first transfer that fails. Ends with its input.
#include <atomic>
#include <chrono>
#include <cstring>
#include <iostream>
#include <string_view>
#include <thread>

#include <unistd.h>

#include "troupe/io/agent.hpp"

#include "hexadecimal.hpp"

namespace {

using namespace troupe;
using namespace std::chrono_literals;

int fail_with(const std::string& what) {
  std::cerr << "io_peer: " << what << '\n';
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return fail_with("usage: io_peer NAME BACKEND PORT serve|write");
  const auto kind = transport::backend_kind_from(std::string_view{argv[2]});
  if (!kind) return fail_with("unknown backend");
  io::agent_options options;
  options.name = argv[1];
  options.backends = {*kind};
  options.port = static_cast<std::uint16_t>(std::stoul(argv[3]));
  options.peer_silence = 600s;
  auto made = io::agent::create(std::move(options));
  if (!made) return fail_with(to_string(made.error()));
  auto& self = **made;
  constexpr std::uint64_t size = std::uint64_t{4} << 20;
  const auto kv = self.allocate(size, "kv", transport::access::read_write).value();
  std::memset(self.bytes(kv)->data(), 0xbb, size);
  std::cout << testing::hexadecimal(self.describe().value()) << std::endl;
  std::string line;
  std::getline(std::cin, line);
  const auto test = self.add_peer(testing::from_hexadecimal(line));
  if (!test) return fail_with(to_string(test.error()));

  std::atomic<bool> ended{false};
  std::thread input{[&] {
    char c = 0;
    while (::read(STDIN_FILENO, &c, 1) > 0) {
    }
    ended = true;
  }};
  if (std::string_view{argv[4]} == "write") {
    const auto number = self.remote_memories(*test)->front().number;
    const auto over = self.session(kv, *test, number).value();
    bool told = false;
    while (!ended) {
      const auto sent =
          self.move(transport::direction::write, over, std::vector<segment>{{0, 0, size}}, {}, 0ms);
      if (!sent) break;
      while (!ended && self.wait({&*sent, 1}, io::wait_for::all, 10ms) == 0) {
      }
      const auto end = self.status_of(*sent).value();
      if (end.now == io::state::failed && !std::exchange(told, true)) {
        std::cout << "failed " << to_string(end.why->code) << std::endl;
      }
      static_cast<void>(self.cancel(*sent));
      static_cast<void>(self.release(*sent));
    }
  }
  input.join();
  return 0;
}
