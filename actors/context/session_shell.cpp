#include "troupe/actors/context/session_shell.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include <spdlog/spdlog.h>

#include "troupe/actors/logging.hpp"
#include "troupe/kvcache/block_list.hpp"

namespace troupe::actors {

namespace {

/// Layers are grouped into batches of up to so many bytes.
constexpr std::uint64_t bytes_per_batch = 8u << 20;

double in_milliseconds(time_point from, time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

result<void> add_pieces(transfer_context& basis, kvcache::transfer_plan plan,
                        std::vector<transport::piece>& pieces) {
  for (auto& part : plan.pieces) {
    const auto grant = basis.grants.find(part.remote_region);
    if (grant == basis.grants.end()) {
      return fail(errc::unauthorized,
                  "the peer gave no grant for its region " + std::to_string(part.remote_region));
    }
    if (part.local_region >= basis.context->regions.size()) {
      return fail(errc::unknown_region, "the layout names region " +
                                            std::to_string(part.local_region) +
                                            ", which is not registered here");
    }
    pieces.push_back(
        {basis.context->regions[part.local_region], grant->second, std::move(part.segments)});
  }
  basis.segments_before += plan.segments_before;
  basis.segments_after += plan.segments_after;
  return {};
}

}  // namespace

result<void> adopt_remote(transfer_context& basis, const named_blocks& named,
                          std::span<const std::uint32_t> state_slots,
                          std::vector<transport::remote_grant> grants) {
  std::vector<std::span<const kvcache::block_run>> runs{named.blocks};
  if (!basis.kept.empty()) runs.clear();
  for (const auto& group : named.groups) runs.emplace_back(group.blocks);
  std::vector<request_table> tables;
  for (std::uint32_t i = 0; i < runs.size(); ++i) {
    const auto block_tokens = basis.geometry->block_tokens(i);
    const auto tokens = kept_tokens(basis.tokens, basis.kept, i);
    const auto needed = kvcache::blocks_in(tokens, block_tokens);
    // Checked before anything is allocated: a few bytes can name any number of blocks.
    if (!basis.kept.empty() && needed > basis.link.peer_layout->blocks) {
      return fail(errc::out_of_range,
                  "tokens " + std::to_string(tokens.begin) + " to " + std::to_string(tokens.end) +
                      " are in " + std::to_string(needed) + " blocks, the cache of " +
                      basis.link.peer + " has " + std::to_string(basis.link.peer_layout->blocks));
    }
    if (const auto count = kvcache::count_blocks(runs[i]); count != needed) {
      return fail(errc::out_of_range, basis.link.peer + " names " + std::to_string(count) +
                                          " blocks for tokens " + std::to_string(tokens.begin) +
                                          " to " + std::to_string(tokens.end) + ", which are in " +
                                          std::to_string(needed));
    }
    tables.push_back({tokens.begin / block_tokens, kvcache::blocks_of(runs[i])});
  }
  basis.remote = std::move(tables);
  basis.remote_state_slot.reset();
  if (!state_slots.empty()) basis.remote_state_slot = state_slots.front();
  basis.grants.clear();
  if (basis.tokens.begin >= basis.tokens.end) return {};
  auto permitted = basis.geometry->remote_map().bytes_of(
      basis.tokens, as_block_tables(basis.remote, basis.kept), basis.remote_state_slot);
  if (!permitted) {
    return fail(permitted.error().code, basis.link.peer + ": " + permitted.error().message);
  }
  if (grants.size() < permitted->size()) {
    return fail(errc::out_of_range, basis.link.peer + " gives " + std::to_string(grants.size()) +
                                        " grants, its layout has " +
                                        std::to_string(permitted->size()) + " regions");
  }
  for (std::uint32_t index = 0; index < permitted->size(); ++index) {
    grants[index].permitted = std::move((*permitted)[index]);
    basis.grants[index] = std::make_shared<const transport::remote_grant>(std::move(grants[index]));
  }
  return {};
}

std::vector<kvcache::block_run> blocks_to_name(const transfer_context& basis,
                                               std::uint32_t number) {
  const auto& table = basis.local[number];
  const auto block_tokens = basis.geometry->block_tokens(number);
  const auto tokens = kept_tokens(basis.tokens, basis.kept, number);
  const std::span all{table.blocks};
  const auto first = std::min(tokens.begin / block_tokens - table.first, all.size());
  const auto count = std::min(kvcache::blocks_in(tokens, block_tokens), all.size() - first);
  return kvcache::runs_of(all.subspan(first, count));
}

planned_batch plan_batch(const session_surroundings& around, transfer_context& basis,
                         const post_slice& post, transport::direction dir,
                         std::vector<std::byte> frame) {
  planned_batch out;
  out.work.id = post.id;
  out.work.transfer = basis.transfer;
  out.work.dir = dir;
  out.work.frame = std::move(frame);
  auto planned = [&]() -> result<void> {
    // Without layers and tokens, only the state tensors are left to send.
    if (post.slice.layer_begin != post.slice.layer_end) {
      auto plan = basis.geometry->plan({post.slice.layer_begin, post.slice.layer_end},
                                       {post.slice.token_begin, post.slice.token_end},
                                       as_block_tables(basis.local, basis.kept),
                                       as_block_tables(basis.remote, basis.kept));
      if (!plan) return fail(plan.error());
      if (auto added = add_pieces(basis, std::move(*plan), out.work.pieces); !added) return added;
    }
    if (!post.state || !basis.geometry->has_state()) return {};
    if (!basis.remote_state_slot) {
      return fail(errc::layout_mismatch,
                  "the model has state tensors, and the peer named no slot for this request");
    }
    auto state = basis.geometry->plan_state(basis.local_state_slot, *basis.remote_state_slot);
    if (!state) return fail(state.error());
    return add_pieces(basis, std::move(*state), out.work.pieces);
  }();
  if (!planned) out.failure = planned.error();
  if (basis.first_byte == time_point{}) basis.first_byte = around.now();
  return out;
}

result<std::vector<grant_wish>> wish_grants(const transfer_context& basis,
                                            transport::access rights) {
  const auto& layout = *basis.context->layout;
  std::optional<std::uint32_t> slot;
  if (!layout.states.empty()) slot = basis.local_state_slot;
  auto permitted = basis.geometry->local_map().bytes_of(
      basis.tokens, as_block_tables(basis.local, basis.kept), slot);
  if (!permitted) return fail(permitted.error());
  std::vector<grant_wish> wishes;
  // One wish per region, in the layout's order and without gaps: the peer knows regions by their
  // index.
  for (std::uint32_t index = 0; index < basis.context->regions.size(); ++index) {
    byte_set permits;
    if (index < permitted->size()) permits = std::move((*permitted)[index]);
    // A region that holds nothing of this request still takes its place, with a grant of no bytes.
    if (permits.hull().length == 0) permits = {{0, 0, 0, 1}};
    wishes.push_back({basis.context->regions[index], std::move(permits), rights});
  }
  return wishes;
}

void count_delivered(transfer_context& basis, time_point now) {
  if (basis.tokens.begin >= basis.tokens.end) return;
  const auto& geometry = *basis.geometry;
  auto all = geometry.bytes_of({0, geometry.layers()}, basis.tokens, basis.kept);
  if (basis.remote_state_slot && geometry.has_state()) {
    const auto state = geometry.plan_state(basis.local_state_slot, *basis.remote_state_slot);
    if (state) all += state->bytes;
  }
  basis.bytes = std::max(basis.bytes, all);
  if (basis.last_byte < basis.first_byte) basis.last_byte = now;
}

void log_outcome(const transfer_context& basis, std::string_view side,
                 const std::optional<troupe::error>& failure, time_point now) {
  const auto first = basis.first_byte == time_point{} ? now : basis.first_byte;
  const auto last = basis.last_byte == time_point{} ? first : basis.last_byte;
  const auto log = logger(side);
  const auto level = failure ? spdlog::level::warn : spdlog::level::info;
  if (!log->should_log(level)) return;
  // The side that does not post has no segments.
  const auto segments = basis.segments_before == 0
                            ? std::string{}
                            : " in " + std::to_string(basis.segments_after) + " segments (" +
                                  std::to_string(basis.segments_before) + " before merging)";
  log->log(level,
           "transfer {:016x} request {} peer {}: {}, {} bytes{}, waited {:.3f} ms, wire {:.3f} ms, "
           "total {:.3f} ms",
           basis.transfer.value, basis.request, basis.link.peer,
           failure ? to_string(*failure) : "done", basis.bytes, segments,
           in_milliseconds(basis.started, first), in_milliseconds(first, last),
           in_milliseconds(basis.started, now));
}

troupe::error out_of_place(const transfer_context& basis, std::string_view sender,
                           const session_message& message) {
  std::string sentence{"the "};
  sentence += sender;
  sentence += " side of " + basis.link.peer + " sent ";
  sentence += type_name(message);
  sentence += ", which only the other side of a transfer may send";
  return {errc::internal, std::move(sentence)};
}

std::uint32_t layers_per_batch(const kvcache::transfer_geometry& geometry, std::uint32_t tokens) {
  const auto layers = std::max<std::uint32_t>(geometry.layers(), 1);
  const auto all = geometry.bytes_of({0, layers}, {0, std::max<std::uint32_t>(tokens, 1)});
  const auto per_layer = all / layers;
  if (per_layer == 0) return layers;
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(bytes_per_batch / per_layer, 1, layers));
}

}  // namespace troupe::actors
