/// What a process does that embeds Troupe and leaves the memory of the cache to it (`pair.cpp` brings
/// its own, and is shorter). It stands for an inference engine of yours; where one would run a kernel,
/// this one writes or compares a pattern.
///
///     example_engine deployment.yaml prefill-0 [SUPERVISOR_PORT]
///     example_engine deployment.yaml decode-0 [SUPERVISOR_PORT]
///
/// Each serves one request and ends: 0 when the cache arrived and is what was sent.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "troupe/actors/engine.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/config/parse.hpp"

namespace {

using namespace std::chrono_literals;

/// What stands in for the keys and values of a layer at a token.
std::byte value_of(std::uint32_t layer, std::uint32_t token) {
  return static_cast<std::byte>(layer * 31 + token * 7 + 1);
}

/// Calls `visit(bytes, layer, token)` for each head of K and V of a layer.
template <class Visit>
void for_each_head(troupe::engine& node, const std::vector<troupe::block_id>& blocks,
                   std::uint32_t layer, std::uint32_t tokens, Visit visit) {
  const auto& planes = node.layout().layers[layer].planes;
  for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
    for (std::uint32_t token = 0; token < tokens; ++token) {
      for (std::uint32_t head = 0; head < planes[plane].heads; ++head) {
        const auto at =
            troupe::kvcache::locate(node.layout(), blocks, {layer, plane, token, head}).value();
        visit(node.region(at.region).value().subspan(at.offset, at.length), layer, token);
      }
    }
  }
}

void compute_layer(troupe::engine& node, const std::vector<troupe::block_id>& blocks,
                   std::uint32_t layer, std::uint32_t tokens) {
  for_each_head(node, blocks, layer, tokens, [](auto bytes, auto of_layer, auto token) {
    for (auto& byte : bytes) byte = value_of(of_layer, token);
  });
}

bool layer_is_right(troupe::engine& node, const std::vector<troupe::block_id>& blocks,
                    std::uint32_t layer, std::uint32_t tokens) {
  bool right = true;
  for_each_head(node, blocks, layer, tokens, [&](auto bytes, auto of_layer, auto token) {
    for (const auto byte : bytes) right = right && byte == value_of(of_layer, token);
  });
  return right;
}

// [docs: integration]
/// Computes the cache of a request layer by layer and hands it to whichever decode engine asks.
troupe::result<std::uint64_t> prefill(troupe::engine& node, const std::string& request,
                                      std::uint32_t tokens) {
  const auto per_block = node.layout().block_tokens;
  const auto mine = node.allocate_blocks((tokens + per_block - 1) / per_block);
  if (!mine) return troupe::fail(mine.error());
  troupe::send_spec what;
  what.request = request;
  what.blocks = mine->blocks;
  const auto send = node.send(what);
  if (!send) return troupe::fail(send.error());
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  troupe::result<void> told;
  for (std::uint32_t layer = 0; told && layer < layers; ++layer) {
    compute_layer(node, mine->blocks, layer, tokens);  // your kernels; when they have ended:
    told = node.layers_ready(*send, layer, layer + 1, tokens);  // this layer may travel
  }
  if (told) told = node.seal(*send, tokens, {std::byte{42}});  // aux: the first token, say
  if (!told) (void)node.abort(*send, troupe::to_string(told.error()));
  const auto done = node.wait(*send);
  if (auto freed = node.free_blocks(mine->owner, mine->blocks); !freed)
    return troupe::fail(freed.error());
  if (!done) return troupe::fail(done.error());
  return done->bytes;
}

/// Asks the supervisor where the request's prefill is, and takes the cache from there.
troupe::result<std::uint64_t> decode(troupe::engine& node, const std::string& request,
                                     std::uint32_t tokens) {
  const auto place = node.place({request, "prefill", "decode", 10'000});
  if (!place) return troupe::fail(place.error());
  const auto placed = node.wait(*place);
  if (!placed) return troupe::fail(placed.error());

  // Nodes, mode, and what a stale placement is refused by. No blocks: the node's pool gives some.
  const auto what = troupe::receive_spec::of(placed->where, tokens);
  const auto receive = node.receive(what);
  const auto done = receive ? node.wait(*receive) : troupe::fail(receive.error());
  node.placed_request_ended(request);
  if (!done) return troupe::fail(done.error());

  bool right = done->aux == std::vector{std::byte{42}};
  const auto layers = static_cast<std::uint32_t>(node.layout().layers.size());
  for (std::uint32_t layer = 0; layer < layers; ++layer)
    right = right && layer_is_right(node, done->blocks.blocks, layer, tokens);  // your attention
  if (auto freed = node.free_blocks(done->blocks.owner, done->blocks.blocks); !freed)
    return troupe::fail(freed.error());
  if (!right)
    return troupe::fail(troupe::errc::internal, "the cache that arrived is not the one sent");
  return done->bytes;
}

int run(const std::string& file, const std::string& name, std::uint16_t supervisor_port) {
  auto deployment = troupe::config::load(file);
  if (!deployment.value) {
    std::cerr << troupe::config::to_string(deployment.issues) << "\n";
    return 2;
  }
  if (supervisor_port != 0) deployment.value->supervisor.port = supervisor_port;
  troupe::actors::log_options log;  // where the lines of Troupe in this process go
  log.node = name;                  // stands in each of them
  log.level = "info";               // trace, debug, info, warn, error, off
  log.file = "";                    // empty: standard error; else rotated at log.file_bytes
  if (auto logs = troupe::actors::init_logging(log); !logs) {
    std::cerr << name << ": " << troupe::to_string(logs.error()) << "\n";
    return 2;
  }
  const auto node = troupe::engine::start(*deployment.value, name);
  if (!node) {
    std::cerr << name << ": " << troupe::to_string(node.error()) << "\n";
    return 1;
  }
  const bool prefills = name.starts_with("prefill");
  constexpr std::uint32_t tokens = 100;
  auto moved = [&]() -> troupe::result<std::uint64_t> {
    if (auto here = (*node)->wait_registered(10s); !here) return troupe::fail(here.error());
    return prefills ? prefill(**node, "request-1", tokens) : decode(**node, "request-1", tokens);
  }();
  (*node)->stop();
  if (!moved) {
    std::cerr << name << ": " << troupe::to_string(moved.error()) << "\n";
    return 1;
  }
  std::cout << name << ": " << *moved << " bytes " << (prefills ? "sent" : "arrived") << "\n";
  return 0;
}
// [docs: end]

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: example_engine FILE NAME [SUPERVISOR_PORT]\n";
    return 2;
  }
  const auto port = argc > 3 ? std::atoi(argv[3]) : 0;
  return run(argv[1], argv[2], static_cast<std::uint16_t>(port));
}
