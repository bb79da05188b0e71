/// The smallest engine there is: what a process does that embeds Troupe. It stands for an inference
/// engine of yours; where one would run a kernel, this one writes or compares a pattern.
///
///     example_engine deployment.yaml prefill-0 [SUPERVISOR_PORT]
///     example_engine deployment.yaml decode-0 [SUPERVISOR_PORT]
///
/// Each serves one request and ends: 0 when the cache arrived and is what was sent.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
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

/// Calls `visit(bytes, layer, token)` for each head of K and V of a layer: where things lie in the
/// regions is arithmetic on the layout.
template <class Visit>
void for_each_head(troupe::engine& node, const std::vector<troupe::block_id>& blocks,
                   std::uint32_t layer, std::uint32_t tokens, Visit visit) {
  const auto& layout = node.layout();
  for (const auto& plane : layout.layers[layer].planes) {
    const auto memory = node.region(plane.region);
    if (!memory) return;
    for (std::uint32_t token = 0; token < tokens; ++token) {
      const auto at = plane.base + blocks[token / layout.block_tokens].value * plane.block_stride +
                      token % layout.block_tokens * plane.token_stride;
      for (std::uint32_t head = 0; head < plane.heads; ++head) {
        visit(memory->subspan(at + head * plane.head_stride, plane.head_bytes), layer, token);
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

// [readme: integration]
/// Waits for the one outcome of an operation. It comes within the operation's deadline.
troupe::result<troupe::event_done> outcome_of(troupe::engine& node, troupe::operation_id operation,
                                              auto on_other_event) {
  for (;;) {
    for (auto& event : node.wait(1s)) {  // or put node.event_fd() into your poll loop, and take()
      if (event.operation != operation) continue;
      if (auto* done = std::get_if<troupe::event_done>(&event.what)) return std::move(*done);
      if (auto* failed = std::get_if<troupe::event_failed>(&event.what))
        return troupe::fail(failed->why);
      on_other_event(event);
    }
  }
}

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
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    compute_layer(node, mine->blocks, layer, tokens);  // your kernels; when they have ended:
    (void)node.layers_ready(*send, layer, layer + 1, tokens);  // this layer may travel
  }
  (void)node.seal(*send, tokens, {std::byte{42}});  // aux: the first token, say
  // Given back at once, reused not before the transfer can touch them no more.
  (void)node.free_blocks(mine->owner, mine->blocks);
  const auto done = outcome_of(node, *send, [](const troupe::event&) {});
  if (!done) return troupe::fail(done.error());
  return done->bytes;
}

/// Asks the supervisor where the request's prefill is, and takes the cache from there.
troupe::result<std::uint64_t> decode(troupe::engine& node, const std::string& request,
                                     std::uint32_t tokens) {
  troupe::actors::placement where;
  const auto place = node.place({request, "prefill", "decode", 10'000});
  if (!place) return troupe::fail(place.error());
  for (bool placed = false; !placed;) {
    for (auto& event : node.wait(1s)) {
      if (auto* failed = std::get_if<troupe::event_failed>(&event.what))
        return troupe::fail(failed->why);
      if (auto* found = std::get_if<troupe::event_placed>(&event.what)) {
        where = std::move(found->where);
        placed = true;
      }
    }
  }

  troupe::receive_spec what;
  what.request = request;
  for (const auto& rank : where.prefill) what.sources.push_back(rank.name);
  what.mode = where.mode == "read" ? troupe::actors::transfer_mode::read
                                   : troupe::actors::transfer_mode::write;
  what.tokens = tokens;
  const auto receive = node.receive(what);
  if (!receive) return troupe::fail(receive.error());

  troupe::kvcache::allocation blocks;
  bool right = true;
  const auto done = outcome_of(node, *receive, [&](troupe::event& event) {
    if (auto* got = std::get_if<troupe::event_allocated>(&event.what))
      blocks = std::move(got->blocks);
    if (const auto* layers = std::get_if<troupe::event_layers>(&event.what)) {
      // These layers are complete up to slice.token_end: attention over them may start.
      for (auto layer = layers->slice.layer_begin; layer < layers->slice.layer_end; ++layer)
        right = right && layer_is_right(node, blocks.blocks, layer, layers->slice.token_end);
    }
  });
  node.placed_request_ended(request);
  if (!blocks.blocks.empty()) (void)node.free_blocks(blocks.owner, blocks.blocks);
  if (!done) return troupe::fail(done.error());
  if (!right || done->aux != std::vector{std::byte{42}})
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
// [readme: end]

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: example_engine FILE NAME [SUPERVISOR_PORT]\n";
    return 2;
  }
  const auto port = argc > 3 ? std::atoi(argv[3]) : 0;
  return run(argv[1], argv[2], static_cast<std::uint16_t>(port));
}
