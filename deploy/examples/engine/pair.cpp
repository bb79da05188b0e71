#include <iostream>
#include <stdexcept>

#include "troupe/actors/engine.hpp"
#include "troupe/config/parse.hpp"

using namespace troupe;
using namespace troupe::kvcache;

/// Two engines with caches of their own. Each `value()` is a check: it throws what went wrong.
int main(int count, char** words) try {
  const std::string name = count > 2 ? words[2] : throw std::runtime_error("usage: pair FILE NAME");
  const auto deployment = config::load(words[1]);
  if (!deployment.value) throw std::runtime_error(config::to_string(deployment.issues));

  engine_options options;
  options.layout = make_layout({.layers = attention_layers(4, 2, 64), .blocks = 32}, {}).value();
  std::vector<std::byte> memory(region_sizes(*options.layout).front());
  options.regions = {memory};
  const auto node = engine::start(*deployment.value, name, options).value();
  node->wait_registered(std::chrono::seconds{10}).value();

  const std::uint32_t tokens = 100;
  const std::vector<block_id> blocks{{9}, {4}, {5}, {6}, {0}, {21}, {3}};  // 16 tokens each
  if (name.starts_with("prefill")) {
    const auto send = node->send({.request = "r", .blocks = blocks}).value();
    memory.assign(memory.size(), std::byte{7});  // your kernels; each layer, once it is computed:
    for (std::uint32_t i = 0; i < 4; ++i) node->layers_ready(send, i, i + 1, tokens).value();
    node->seal(send, tokens).value();
    std::cout << name << ": " << node->wait(send).value().bytes << " bytes sent\n";
  } else {
    const auto placed = node->place({"r", "prefill", "decode", 10'000}).value();
    const auto receive = receive_spec::of(node->wait(placed).value().where, tokens, blocks);
    const auto bytes = node->wait(node->receive(receive).value()).value().bytes;
    const auto last = locate(*options.layout, blocks, {3, 1, tokens - 1, 1}).value();
    node->placed_request_ended("r");
    if (memory[last.offset] != std::byte{7}) throw std::runtime_error("another cache arrived");
    std::cout << name << ": " << bytes << " bytes arrived\n";
  }
} catch (const std::exception& e) {
  std::cerr << e.what() << "\n";
  return 1;
}
