#include "troupe/kvcache/plan.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "troupe/kvcache/layer_parts.hpp"
#include "troupe/kvcache/strided_copy.hpp"
#include "troupe/kvcache/tp_map.hpp"

namespace troupe::kvcache {
namespace {

/// One side of a moved plane: the offset of the first common head of block 0, token 0, and the
/// strides.
struct place {
  std::uint64_t base{0};
  std::uint64_t block{0};
  std::uint64_t token{0};
  std::uint64_t head{0};

  [[nodiscard]] bool same_strides(const place& other) const noexcept {
    return block == other.block && token == other.token && head == other.head;
  }
};

/// A distance on both sides at once.
struct step {
  std::uint64_t local{0};
  std::uint64_t remote{0};
  friend bool operator==(const step&, const step&) = default;
};

/// The part of one plane that moves between these two ranks.
struct moved_plane {
  std::size_t regions{0};  ///< index into the pairs of regions
  std::uint64_t heads{0};
  std::uint64_t head_bytes{0};
  place local;
  place remote;
  bool opaque{false};  ///< a block is moved whole, for any of its tokens

  /// How often its heads repeat for so many tokens of one block.
  [[nodiscard]] std::uint64_t rows(std::uint64_t tokens) const noexcept {
    return opaque ? 1 : tokens;
  }
  [[nodiscard]] bool same_form(const moved_plane& other) const noexcept {
    return opaque == other.opaque && regions == other.regions && heads == other.heads &&
           head_bytes == other.head_bytes && local.same_strides(other.local) &&
           remote.same_strides(other.remote);
  }
};

/// The distance from `a` to `b` on both sides, if `b` has the same form and lies after `a`.
std::optional<step> forward_step(const moved_plane& a, const moved_plane& b) noexcept {
  if (!a.same_form(b) || b.local.base <= a.local.base || b.remote.base <= a.remote.base) {
    return std::nullopt;
  }
  return step{b.local.base - a.local.base, b.remote.base - a.remote.base};
}

struct moved_layer {
  std::uint32_t layer{0};
  std::uint64_t bytes_of_token{0};     ///< 0 for an opaque layer
  std::uint64_t bytes_of_block{0};     ///< for an opaque layer only
  std::vector<moved_plane> planes;     ///< one or two
  std::optional<step> between_planes;  ///< from K to V
  std::optional<step> to_next;         ///< to the next moved layer, the same for all planes
};

struct moved_state {
  std::size_t regions{0};
  step base;    ///< of the first common byte in slot 0
  step stride;  ///< from slot to slot
  std::uint64_t bytes{0};
};

/// The layers that one block table serves.
struct moved_table {
  std::uint32_t block_tokens{0};
  bool shared{false};               ///< a layer of it is on both sides
  std::vector<moved_layer> layers;  ///< with something to move, ascending

  [[nodiscard]] bool serves(layer_range some) const noexcept {
    const auto first = std::ranges::lower_bound(layers, some.begin, {}, &moved_layer::layer);
    return first != layers.end() && first->layer < some.end;
  }
};

/// A run of blocks that are consecutive on both sides, and the tokens of each that move.
struct moved_run {
  std::uint64_t local{0};
  std::uint64_t remote{0};
  std::uint64_t count{0};
  std::uint64_t first_token{0};
  std::uint64_t tokens{0};
};

std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) noexcept {
  return a / b + (a % b != 0);
}

/// Contiguous copies that one block's part of a plane would take, described on its own.
std::uint64_t copies_per_block(const moved_plane& p, std::uint64_t tokens) noexcept {
  strided_copy copy{p.head_bytes};
  copy.repeat(p.heads, p.local.head, p.remote.head);
  copy.repeat(p.rows(tokens), p.local.token, p.remote.token);
  copy.simplify();
  return copy.copies();
}

result<void> check_blocks(const block_list& blocks, std::uint64_t first, std::uint64_t last,
                          std::uint64_t in_pool, const char* side) {
  if (first < blocks.first || last > blocks.end()) {
    std::string from;
    if (blocks.first != 0) from = " from number " + std::to_string(blocks.first) + " on";
    return fail(errc::out_of_range, "plan: the tokens need " + std::to_string(last) + " " + side +
                                        " blocks, but the list has " +
                                        std::to_string(blocks.blocks.size()) + from);
  }
  for (std::uint64_t i = first; i < last; ++i) {
    if (blocks[i].value >= in_pool) {
      return fail(errc::out_of_range, std::string{"plan: "} + side + " block " +
                                          std::to_string(blocks[i].value) + " at position " +
                                          std::to_string(i) + " is not among the pool's " +
                                          std::to_string(in_pool) + " blocks");
    }
  }
  return {};
}

/// Cuts the token range into runs of blocks; a block that is not moved whole is a run of its own.
std::vector<moved_run> runs_to_move(token_range tokens, std::uint64_t block_tokens,
                                    const block_list& local, const block_list& remote) {
  std::vector<moved_run> runs;
  runs.reserve(blocks_in(tokens, block_tokens));
  for (std::uint64_t at = tokens.begin; at < tokens.end;) {
    const std::uint64_t index = at / block_tokens;
    const std::uint64_t first = at % block_tokens;
    const std::uint64_t count = std::min(block_tokens - first, tokens.end - at);
    at += count;
    const bool whole = count == block_tokens;
    if (!runs.empty() && whole && runs.back().tokens == block_tokens &&
        runs.back().local + runs.back().count == local[index].value &&
        runs.back().remote + runs.back().count == remote[index].value) {
      ++runs.back().count;
    } else {
      runs.push_back({local[index].value, remote[index].value, 1, first, count});
    }
  }
  return runs;
}

unexpected named_twice(std::uint64_t block) {
  return fail(errc::invalid_config,
              "plan: destination block " + std::to_string(block) +
                  " is named twice; the blocks of a request must all be different");
}

/// Blocks [begin, begin + count) of the destination's pool.
using written_run = std::pair<std::uint64_t, std::uint64_t>;

/// Uses a bit for each block of a part of the pool that is not much larger than the request.
/// Sorting would cost more per block, the more blocks there are.
result<void> check_bits(const std::vector<written_run>& written, std::uint64_t first,
                        std::uint64_t span) {
  std::vector<bool> seen(span, false);
  for (const auto& [begin, count] : written) {
    for (auto block = begin; block < begin + count; ++block) {
      if (seen[block - first]) return named_twice(block);
      seen[block - first] = true;
    }
  }
  return {};
}

result<void> check_distinct(std::vector<written_run> written) {
  std::uint64_t first = UINT64_MAX;
  std::uint64_t end = 0;
  std::uint64_t blocks = 0;
  bool sorted = true;
  for (const auto& [begin, count] : written) {
    sorted = sorted && begin >= end;
    first = std::min(first, begin);
    end = std::max(end, begin + count);
    blocks += count;
  }
  if (sorted) return {};
  constexpr std::uint64_t bits_for_a_run = 64;
  if (end - first <= bits_for_a_run * written.size() && blocks <= bits_for_a_run * written.size()) {
    return check_bits(written, first, end - first);
  }
  std::sort(written.begin(), written.end());
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (written[i - 1].first + written[i - 1].second > written[i].first) {
      return named_twice(written[i].first);
    }
  }
  return {};
}

/// Checks the runs of all tables of one pool together.
result<void> check_distinct(std::span<const std::vector<moved_run>> runs,
                            std::span<const std::uint32_t> pools, data_flow flow) {
  for (std::size_t first = 0; first < runs.size(); ++first) {
    if (pools[first] != first) continue;  // checked with an earlier table
    std::vector<written_run> written;
    for (std::size_t table = first; table < runs.size(); ++table) {
      if (pools[table] != first) continue;
      written.reserve(written.size() + runs[table].size());
      for (const auto& run : runs[table]) {
        written.emplace_back(flow == data_flow::to_remote ? run.remote : run.local, run.count);
      }
    }
    if (auto ok = check_distinct(std::move(written)); !ok) return ok;
  }
  return {};
}

place place_of(const plane& p, std::uint64_t first_head) noexcept {
  return {p.base + first_head * p.head_stride, p.block_stride, p.token_stride, p.head_stride};
}

/// Reserves room for so many more, growing geometrically, since others may follow.
void make_room(std::vector<segment>& segments, std::size_t more) {
  const auto wanted = segments.size() + more;
  if (wanted > segments.capacity()) segments.reserve(std::max(wanted, 2 * segments.capacity()));
}

/// Gathers segments by pair of regions.
class plan_writer {
 public:
  explicit plan_writer(std::size_t pairs) : piece_of_(pairs, none) {}

  std::vector<segment>& segments(std::size_t pair,
                                 std::pair<std::uint32_t, std::uint32_t> regions) {
    if (piece_of_[pair] == none) {
      piece_of_[pair] = plan_.pieces.size();
      plan_.pieces.push_back({regions.first, regions.second, {}});
    }
    return plan_.pieces[piece_of_[pair]].segments;
  }
  void count(std::uint64_t bytes, std::uint64_t copies) {
    plan_.bytes += bytes;
    plan_.segments_before += copies;
  }
  [[nodiscard]] transfer_plan finish() && {
    for (auto& piece : plan_.pieces) {
      if (piece.segments.size() > 1) piece.segments = merge_segments(std::move(piece.segments));
      plan_.segments_after += piece.segments.size();
    }
    return std::move(plan_);
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  std::vector<std::size_t> piece_of_;
  transfer_plan plan_;
};

/// The layers and states that two layouts have in common, by their numbers in each.
struct shares {
  mapped_share local;
  mapped_share remote;

  shares(const cache_layout& here, const cache_layout& there) {
    const auto layers = shared_layers(here, there);
    if (layers.count() != 0) {
      local.layers = {layers.begin - here.first_layer, layers.end - here.first_layer};
      remote.layers = {layers.begin - there.first_layer, layers.end - there.first_layer};
    }
    for (const auto& [mine, its] : shared_states(here, there)) {
      local.states.push_back(mine);
      remote.states.push_back(its);
    }
  }
};

}  // namespace

struct transfer_geometry::prepared {
  data_flow flow{data_flow::to_remote};
  std::uint32_t layers{0};  ///< held by both sides, from these numbers on in their layouts:
  std::uint32_t first_local{0};
  std::uint32_t first_remote{0};
  bool grouped{false};  ///< layers have tables of their own
  std::uint64_t local_blocks{0};
  std::uint64_t remote_blocks{0};
  std::vector<std::pair<std::uint32_t, std::uint32_t>> region_pairs;
  std::vector<moved_table> tables;
  std::vector<std::uint32_t> pools;  ///< of the destination, by table: the first table of its pool
  std::vector<moved_state> states;
  std::vector<std::uint32_t> tokens_at_once;  ///< by layer; empty: one for each
  std::uint64_t local_slots{0xffff'ffffU};    ///< that every shared state has
  std::uint64_t remote_slots{0xffff'ffffU};
  cache_map local_map;
  cache_map remote_map;

  prepared(cache_map of_local, cache_map of_remote)
      : local_map{std::move(of_local)}, remote_map{std::move(of_remote)} {}

  std::size_t pair_index(std::uint32_t local, std::uint32_t remote) {
    const std::pair wanted{local, remote};
    // The last pair first: with a region per layer, a search from the front would be quadratic.
    if (!region_pairs.empty() && region_pairs.back() == wanted) return region_pairs.size() - 1;
    const auto found = std::find(region_pairs.begin(), region_pairs.end(), wanted);
    if (found != region_pairs.end()) return static_cast<std::size_t>(found - region_pairs.begin());
    region_pairs.push_back(wanted);
    return region_pairs.size() - 1;
  }

  void add_layers(const cache_layout& local, const cache_layout& remote, const rank_pair& ranks);
  void add_states(const cache_layout& local, const cache_layout& remote, const rank_pair& ranks);
  void link_layers();
  void append(plan_writer& out, const moved_plane& p, std::span<const moved_run> runs,
              std::uint64_t layer_count, step layer_step, std::uint64_t plane_count,
              step plane_step) const;
  void append(plan_writer& out, const moved_table& table, layer_range some,
              std::span<const moved_run> runs) const;
  [[nodiscard]] result<std::vector<moved_run>> runs_of(std::uint32_t table, token_range tokens,
                                                       const block_list& local,
                                                       const block_list& remote) const;
};

void transfer_geometry::prepared::add_layers(const cache_layout& local, const cache_layout& remote,
                                             const rank_pair& ranks) {
  for (std::uint32_t i = 0; i < layers; ++i) {
    const layer_layout& here = local.layers[first_local + i];
    const layer_layout& there = remote.layers[first_remote + i];
    auto& table = tables[table_of(local, first_local + i)];
    table.shared = table.shared || !here.planes.empty();
    const bool opaque = here.shape.kind == layer_kind::opaque;
    const bool heads_matter =
        here.shape.kind == layer_kind::attention || here.shape.unit == opaque_unit::block_head;
    const std::uint32_t heads = heads_matter ? here.shape.kv_heads : 1;
    const head_span common = heads_to_send(heads, ranks);
    if (here.planes.empty() || common.count() == 0) continue;
    const auto first_here =
        common.begin - (heads_matter ? head_range(heads, local.tp_size, local.tp_rank).begin : 0);
    const auto first_there =
        common.begin - (heads_matter ? head_range(heads, remote.tp_size, remote.tp_rank).begin : 0);
    if (opaque) {
      tokens_at_once.resize(layers, 1);
      tokens_at_once[i] = table.block_tokens;
    }
    moved_layer layer;
    layer.layer = i;
    for (std::size_t p = 0; p < here.planes.size(); ++p) {
      layer.planes.push_back({pair_index(here.planes[p].region, there.planes[p].region),
                              common.count(), here.planes[p].head_bytes,
                              place_of(here.planes[p], first_here),
                              place_of(there.planes[p], first_there), opaque});
      (opaque ? layer.bytes_of_block : layer.bytes_of_token) +=
          common.count() * here.planes[p].head_bytes;
    }
    if (layer.planes.size() == 2) {
      layer.between_planes = forward_step(layer.planes[0], layer.planes[1]);
    }
    table.layers.push_back(std::move(layer));
  }
}

/// Finds, for each layer of a table, whether the next one has the same form at a fixed distance.
void transfer_geometry::prepared::link_layers() {
  for (auto& table : tables) {
    auto& moved = table.layers;
    for (std::size_t i = 0; i + 1 < moved.size(); ++i) {
      const auto& planes = moved[i].planes;
      const auto& next = moved[i + 1].planes;
      if (planes.size() != next.size()) continue;
      const auto first = forward_step(planes[0], next[0]);
      const bool alike = planes.size() == 1 || forward_step(planes[1], next[1]) == first;
      if (alike) moved[i].to_next = first;
    }
  }
}

void transfer_geometry::prepared::add_states(const cache_layout& local, const cache_layout& remote,
                                             const rank_pair& ranks) {
  for (const auto& [local_number, remote_number] : shared_states(local, remote)) {
    const state_tensor& here = local.states[local_number];
    const state_tensor& there = remote.states[remote_number];
    local_slots = std::min<std::uint64_t>(local_slots, here.slots);
    remote_slots = std::min<std::uint64_t>(remote_slots, there.slots);
    const auto parts_here = parts_of(here);
    const auto parts_there = parts_of(there);
    step at{here.base, there.base};  // of the part, in slot 0
    for (std::size_t p = 0; p < parts_here.size(); ++p) {
      const auto bytes_here = parts_here[p].bytes;
      const auto bytes_there = parts_there[p].bytes;
      const auto begin = std::exchange(at, {at.local + bytes_here, at.remote + bytes_there});
      moved_state state;
      state.base = begin;
      state.stride = {here.slot_stride, there.slot_stride};
      if (parts_here[p].sharding == state_sharding::sliced) {
        const std::uint64_t start_here = bytes_here * local.tp_rank;
        const std::uint64_t start_there = bytes_there * remote.tp_rank;
        const std::uint64_t first = std::max(start_here, start_there);
        const std::uint64_t end = std::min(start_here + bytes_here, start_there + bytes_there);
        if (first >= end) continue;
        state.base.local += first - start_here;
        state.base.remote += first - start_there;
        state.bytes = end - first;
      } else {
        if (heads_to_send(1, ranks).count() == 0) continue;
        state.bytes = bytes_here;
      }
      state.regions = pair_index(here.region, there.region);
      states.push_back(state);
    }
  }
}

void transfer_geometry::prepared::append(plan_writer& out, const moved_plane& p,
                                         std::span<const moved_run> runs, std::uint64_t layer_count,
                                         step layer_step, std::uint64_t plane_count,
                                         step plane_step) const {
  auto& segments = out.segments(p.regions, region_pairs[p.regions]);
  make_room(segments, runs.size());
  std::optional<strided_copy> copy;
  const moved_run* shape = nullptr;  // the run that `copy` was made for
  std::uint64_t copies = 0;
  for (const auto& run : runs) {
    if (shape == nullptr || shape->tokens != run.tokens || shape->count != run.count) {
      copy.emplace(p.head_bytes);
      copy->repeat(p.heads, p.local.head, p.remote.head);
      copy->repeat(p.rows(run.tokens), p.local.token, p.remote.token);
      copy->repeat(run.count, p.local.block, p.remote.block);
      copy->repeat(plane_count, plane_step.local, plane_step.remote);
      copy->repeat(layer_count, layer_step.local, layer_step.remote);
      copy->simplify();
      if (shape == nullptr || shape->tokens != run.tokens) copies = copies_per_block(p, run.tokens);
      shape = &run;
    }
    copy->append_to(segments,
                    p.local.base + run.local * p.local.block + run.first_token * p.local.token,
                    p.remote.base + run.remote * p.remote.block + run.first_token * p.remote.token);
    const std::uint64_t repeated = run.count * plane_count * layer_count;
    out.count(repeated * p.rows(run.tokens) * p.heads * p.head_bytes, repeated * copies);
  }
}

/// Appends the layers of the range that belong to the table.
void transfer_geometry::prepared::append(plan_writer& out, const moved_table& table,
                                         layer_range some, std::span<const moved_run> runs) const {
  const auto& moved = table.layers;
  auto at = std::partition_point(moved.begin(), moved.end(), [&](const moved_layer& layer) {
    return layer.layer < some.begin;
  });
  while (at != moved.end() && at->layer < some.end) {
    // Consecutive layers at one distance form one more dimension of the copy.
    auto until = at;
    while (until->to_next && until->to_next == at->to_next && std::next(until)->layer < some.end) {
      ++until;
    }
    ++until;
    const auto count = static_cast<std::uint64_t>(until - at);
    const step layer_step = at->to_next.value_or(step{});
    if (at->between_planes) {
      append(out, at->planes[0], runs, count, layer_step, 2, *at->between_planes);
    } else {
      for (const auto& p : at->planes) append(out, p, runs, count, layer_step, 1, {});
    }
    at = until;
  }
}

result<std::vector<moved_run>> transfer_geometry::prepared::runs_of(
    std::uint32_t table, token_range tokens, const block_list& local,
    const block_list& remote) const {
  if (tokens.begin >= tokens.end) return std::vector<moved_run>{};
  const auto block_tokens = tables[table].block_tokens;
  const std::uint64_t first = tokens.begin / block_tokens;
  const std::uint64_t last = divide_up(tokens.end, block_tokens);
  if (auto ok = check_blocks(local, first, last, local_blocks, "local"); !ok) {
    return fail(ok.error());
  }
  if (auto ok = check_blocks(remote, first, last, remote_blocks, "remote"); !ok) {
    return fail(ok.error());
  }
  return runs_to_move(tokens, block_tokens, local, remote);
}

transfer_geometry::transfer_geometry(std::shared_ptr<const prepared> state)
    : state_{std::move(state)} {}

result<transfer_geometry> transfer_geometry::create(const cache_layout& local,
                                                    const cache_layout& remote, data_flow flow) {
  if (auto ok = check(local); !ok) return fail(ok.error().code, "local " + ok.error().message);
  if (auto ok = check(remote); !ok) return fail(ok.error().code, "remote " + ok.error().message);
  if (auto ok = check_compatible(local, remote); !ok) return fail(ok.error());
  const shares of{local, remote};
  auto local_map = cache_map::create(local, of.local);
  if (!local_map) return fail(local_map.error().code, "local " + local_map.error().message);
  auto remote_map = cache_map::create(remote, of.remote);
  if (!remote_map) return fail(remote_map.error().code, "remote " + remote_map.error().message);
  auto state = std::make_shared<prepared>(std::move(*local_map), std::move(*remote_map));
  state->flow = flow;
  state->layers = of.local.layers.count();
  state->first_local = of.local.layers.begin;
  state->first_remote = of.remote.layers.begin;
  state->grouped = !local.groups.empty();
  state->local_blocks = local.blocks;
  state->remote_blocks = remote.blocks;
  const bool from_here = flow == data_flow::to_remote;
  const cache_layout& source = from_here ? local : remote;
  const cache_layout& destination = from_here ? remote : local;
  const rank_pair ranks{source.tp_size, source.tp_rank, destination.tp_size, destination.tp_rank};
  state->pools = pools_of_tables(destination);
  state->tables.resize(block_tables(local));
  for (std::uint32_t i = 0; i < state->tables.size(); ++i) {
    state->tables[i].block_tokens = block_tokens_of(local, i);
  }
  state->add_layers(local, remote, ranks);
  state->link_layers();
  state->add_states(local, remote, ranks);
  return transfer_geometry{std::move(state)};
}

result<transfer_plan> transfer_geometry::plan(layer_range layers, token_range tokens,
                                              std::span<const block_table> local,
                                              std::span<const block_table> remote) const {
  const prepared& g = *state_;
  if (layers.begin > layers.end || layers.end > g.layers) {
    return fail(errc::out_of_range, "plan: layers " + std::to_string(layers.begin) + " to " +
                                        std::to_string(layers.end) + " of " +
                                        std::to_string(g.layers) + " that both sides hold");
  }
  if (tokens.begin > tokens.end) {
    return fail(errc::out_of_range, "plan: tokens from " + std::to_string(tokens.begin) + " to " +
                                        std::to_string(tokens.end) + " end before they begin");
  }
  if (local.size() != g.tables.size() || remote.size() != g.tables.size()) {
    return fail(errc::invalid_config, "plan: there are " + std::to_string(local.size()) +
                                          " local and " + std::to_string(remote.size()) +
                                          " remote block tables, the layouts have " +
                                          std::to_string(g.tables.size()));
  }
  if (layers.begin == layers.end || tokens.begin == tokens.end) return transfer_plan{};
  std::vector<std::vector<moved_run>> runs(g.tables.size());
  for (std::uint32_t i = 0; i < g.tables.size(); ++i) {
    if (g.grouped && !g.tables[i].serves(layers)) continue;
    const auto& kept = g.flow == data_flow::to_remote ? remote[i] : local[i];
    auto of = g.runs_of(i, kept.kept_of(tokens), local[i].blocks, remote[i].blocks);
    if (!of) return fail(of.error());
    runs[i] = std::move(*of);
  }
  if (auto ok = check_distinct(runs, g.pools, g.flow); !ok) return fail(ok.error());
  plan_writer out{g.region_pairs.size()};
  for (std::size_t i = 0; i < g.tables.size(); ++i) g.append(out, g.tables[i], layers, runs[i]);
  return std::move(out).finish();
}

result<transfer_plan> transfer_geometry::plan_state(std::uint32_t local_slot,
                                                    std::uint32_t remote_slot) const {
  const prepared& g = *state_;
  if (g.states.empty()) return transfer_plan{};
  const auto missing = [](const char* side, std::uint32_t slot, std::uint64_t slots) {
    return fail(errc::out_of_range, std::string{"plan: "} + side + " state slot " +
                                        std::to_string(slot) + " of " + std::to_string(slots));
  };
  if (local_slot >= g.local_slots) return missing("local", local_slot, g.local_slots);
  if (remote_slot >= g.remote_slots) return missing("remote", remote_slot, g.remote_slots);
  plan_writer out{g.region_pairs.size()};
  for (const auto& s : g.states) {
    out.segments(s.regions, g.region_pairs[s.regions])
        .push_back({s.base.local + local_slot * s.stride.local,
                    s.base.remote + remote_slot * s.stride.remote, s.bytes, 0, 0, 1});
    out.count(s.bytes, 1);
  }
  return std::move(out).finish();
}

const cache_map& transfer_geometry::local_map() const noexcept {
  return state_->local_map;
}
const cache_map& transfer_geometry::remote_map() const noexcept {
  return state_->remote_map;
}
bool transfer_geometry::moves_anything() const noexcept {
  return !state_->states.empty() ||
         std::ranges::any_of(state_->tables,
                             [](const moved_table& table) { return !table.layers.empty(); });
}
std::uint64_t transfer_geometry::bytes_of(layer_range layers, token_range tokens,
                                          std::span<const std::uint64_t> kept) const noexcept {
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < state_->tables.size(); ++i) {
    const auto& table = state_->tables[i];
    auto moved = tokens;
    if (i < kept.size()) moved.begin = std::max(moved.begin, kept[i]);
    if (moved.begin >= moved.end) continue;
    const auto blocks = blocks_in(moved, table.block_tokens);
    for (const auto& layer : table.layers) {
      if (layer.layer < layers.begin || layer.layer >= layers.end) continue;
      bytes += layer.bytes_of_token * (moved.end - moved.begin) + layer.bytes_of_block * blocks;
    }
  }
  return bytes;
}
std::uint32_t transfer_geometry::layers() const noexcept {
  return state_->layers;
}
std::uint32_t transfer_geometry::first_local_layer() const noexcept {
  return state_->first_local;
}
std::uint32_t transfer_geometry::first_remote_layer() const noexcept {
  return state_->first_remote;
}
bool transfer_geometry::shares_table(std::uint32_t table) const noexcept {
  return state_->tables[table].shared;
}
std::span<const std::uint32_t> transfer_geometry::destination_pools() const noexcept {
  return state_->pools;
}
std::uint32_t transfer_geometry::tables() const noexcept {
  return static_cast<std::uint32_t>(state_->tables.size());
}
std::uint32_t transfer_geometry::block_tokens(std::uint32_t table) const noexcept {
  return state_->tables[table].block_tokens;
}
bool transfer_geometry::has_state() const noexcept {
  return !state_->states.empty();
}
const std::vector<std::uint32_t>& transfer_geometry::tokens_at_once() const noexcept {
  return state_->tokens_at_once;
}

}  // namespace troupe::kvcache
