// The cost of describing where the bytes of a transfer are: the bytes of its control messages, the
// time until both sides know the grants, and their memory; and the cost to plan and to check a
// segment, for any number of segments. No wire: the work of the two sides is done in turns here.
// Prints a JSON array of {name, ours, rival, ratio, unit, wanted, better}; where a limit is
// absolute, the rival is the limit.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <malloc.h>

#include "troupe/actors/messages/session_messages.hpp"
#include "troupe/kvcache/plan.hpp"
#include "troupe/transport/batch_check.hpp"

#include "rows.hpp"

namespace {

using namespace troupe;
using namespace troupe::bench;

constexpr int rounds = 5;
constexpr std::uint32_t block_tokens = 16;

double us_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

template <class T>
T need(result<T> outcome) {
  if constexpr (std::is_void_v<T>) {
    if (outcome) return;
  } else {
    if (outcome) return std::move(*outcome);
  }
  std::fprintf(stderr, "control_bench: %s\n", to_string(outcome.error()).c_str());
  std::exit(2);
}

double median(std::vector<double> of) {
  std::ranges::sort(of);
  return of[of.size() / 2];
}

/// 28 layers in one region, a region for each of 28, or for the keys and the values of each of 80.
kvcache::cache_layout layout_of(std::uint32_t regions, std::uint32_t blocks) {
  kvcache::cache_shape shape;
  shape.layers = kvcache::attention_layers(regions == 160 ? 80 : 28, 8, 128);
  shape.block_tokens = block_tokens;
  shape.blocks = blocks;
  kvcache::arrangement how;
  how.kv = kvcache::kv_placement::separate;
  if (regions > 1) how.regions = kvcache::region_use::per_layer;
  auto layout = need(kvcache::make_layout(shape, how));
  if (regions == 160) {
    for (std::uint32_t layer = 0; layer < 80; ++layer) {
      auto& planes = layout.layers[layer].planes;
      planes[1].region = 80 + layer;
      planes[1].base = planes[0].base;
    }
  }
  return layout;
}

/// Blocks of a pool of twice as many, in random order.
std::vector<block_id> shuffled(std::uint32_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> pool(std::size_t{2} * count);
  std::iota(pool.begin(), pool.end(), 0U);
  std::shuffle(pool.begin(), pool.end(), std::mt19937_64{seed});
  std::vector<block_id> blocks(count);
  for (std::uint32_t i = 0; i < count; ++i) blocks[i].value = pool[i];
  return blocks;
}

struct side {
  kvcache::transfer_geometry geometry;
  std::vector<block_id> blocks;
};

// -- control messages

actors::transfer_request request_for(const side& decode, kvcache::token_range tokens) {
  actors::transfer_request request;
  request.request = std::string(36, 'r');  // a UUID
  request.token_end = static_cast<std::uint32_t>(tokens.end);
  request.blocks = kvcache::runs_of(decode.blocks);
  std::uint32_t region = 0;
  for (auto& permitted : need(decode.geometry.local_map().bytes_of(tokens, decode.blocks))) {
    transport::remote_grant grant;
    grant.region = region_id{++region};
    grant.permitted = std::move(permitted);
    grant.key.resize(16);
    request.grants.push_back(std::move(grant));
  }
  return request;
}

struct costs {
  double bytes{0}, us{0}, memory{0};
};

/// The costs of a transfer in write mode, with a batch for each layer.
costs say(const side& decode, const side& prefill, std::uint32_t layers) {
  const kvcache::token_range tokens{0, decode.blocks.size() * std::uint64_t{block_tokens}};
  costs all;
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const auto request = request_for(decode, tokens);
    const auto frame = need(actors::encode(request));
    const auto heard = std::get<actors::transfer_request>(need(actors::decode(frame)));
    const auto blocks = kvcache::blocks_of(heard.blocks);
    const auto before = ::mallinfo2().uordblks;
    const auto permitted = need(prefill.geometry.remote_map().bytes_of(tokens, blocks));
    // A difference that the allocator rounds away counts as one byte.
    all.memory = std::max(1.0, static_cast<double>(::mallinfo2().uordblks - before));
    times.push_back(us_since(begin));
    all.bytes = static_cast<double>(frame.size());
  }
  all.us = median(times);
  all.bytes += layers * static_cast<double>(need(actors::encode(actors::layers_landed{})).size());
  all.bytes += static_cast<double>(need(actors::encode(actors::transfer_release{})).size());
  return all;
}

// -- the cost of a segment

struct costs_per_segment {
  double plan{0}, check{0};  // ns
};

costs_per_segment move(std::uint32_t segments) {
  // A layer is a segment per block and plane: both shuffled, so that nothing merges.
  const auto blocks = segments / 2;
  const auto layout = layout_of(28, 2 * blocks);
  const auto flow = kvcache::data_flow::to_remote;
  const side from{need(kvcache::transfer_geometry::create(layout, layout, flow)),
                  shuffled(blocks, 1)};
  const auto to = shuffled(blocks, 2);
  const kvcache::token_range tokens{0, blocks * std::uint64_t{block_tokens}};
  const auto size = kvcache::region_sizes(layout).front();
  const transport::region local{
      {.id = region_id{1}, .bytes = {static_cast<std::byte*>(nullptr), size}, .name = "bench"}};
  auto grant = std::make_shared<transport::remote_grant>();
  grant->owner = incarnation{1};
  grant->rights = transport::access::write;
  grant->region_size = size;
  grant->permitted = need(from.geometry.remote_map().bytes_of(tokens, to)).front();
  std::vector<double> plans, checks;
  // Repeats small ones often enough for the clock.
  const auto repeat = std::max<std::uint32_t>(1, 100'000 / segments);
  for (int i = 0; i < rounds; ++i) {
    transport::batch work;
    auto begin = std::chrono::steady_clock::now();
    for (std::uint32_t r = 0; r < repeat; ++r) {
      auto plan = need(from.geometry.plan({0, 1}, tokens, from.blocks, to));
      work.pieces.clear();
      work.pieces.push_back({region_id{1}, grant, std::move(plan.pieces.front().segments)});
    }
    const auto count = static_cast<double>(work.pieces.front().segments.size()) * repeat;
    plans.push_back(1000 * us_since(begin) / count);
    begin = std::chrono::steady_clock::now();
    for (std::uint32_t r = 0; r < repeat; ++r) {
      if (auto ok = transport::check_piece(work, 0, incarnation{1}, local); !ok)
        need(std::move(ok));
    }
    checks.push_back(1000 * us_since(begin) / count);
  }
  return {median(plans), median(checks)};
}

}  // namespace

int main() {
  std::vector<row> rows;
  std::map<std::uint32_t, costs> in_one;  // region, by blocks
  for (const std::uint32_t regions : {1, 28, 160}) {
    for (const std::uint32_t blocks : {1, 32, 512, 8192}) {
      const auto layout = layout_of(regions, 2 * blocks);
      const side decode{
          need(kvcache::transfer_geometry::create(layout, layout, kvcache::data_flow::to_local)),
          shuffled(blocks, 3)};
      const side prefill{
          need(kvcache::transfer_geometry::create(layout, layout, kvcache::data_flow::to_remote)),
          shuffled(blocks, 4)};
      const auto cost = say(decode, prefill, static_cast<std::uint32_t>(layout.layers.size()));
      const auto& one = in_one.try_emplace(blocks, cost).first->second;
      const auto name = std::to_string(blocks) + " blocks, " + std::to_string(regions) + " regions";
      // The fixed cost of a grant and a batch is negligible only beside many blocks.
      const auto wanted = blocks == 8192 ? std::optional{1.0} : std::nullopt;
      rows.push_back(
          {"control bytes per block: " + name, cost.bytes / blocks, 8, wanted, "B", true});
      rows.push_back(
          {"until both sides know the grants: " + name + " vs 1", cost.us, one.us, {}, "us", true});
      rows.push_back({"memory of the grants at one side: " + name + " vs 1",
                      cost.memory / 1024,
                      one.memory / 1024,
                      {},
                      "KiB",
                      true});
    }
  }
  const auto few = move(256);
  for (const std::uint32_t segments : {4096, 65'536, 1'000'000}) {
    const auto many = move(segments);
    const auto name = std::to_string(segments) + " segments at once vs 256";
    rows.push_back({"to plan a segment: " + name, many.plan, few.plan, 3, "ns", true});
    rows.push_back({"to check a segment: " + name, many.check, few.check, 3, "ns", true});
  }
  print(rows);
}
