#include "troupe/transport/xgmi/batch_launch.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace troupe::transport::xgmi {

namespace {

/// The first part of a large batch launched on an idle GPU, while the rest is written. Each later
/// part is `part_growth` times as large, up to `most_part_bytes`, so that both lanes end at about
/// the same time.
constexpr std::uint64_t first_part_bytes = std::uint64_t{8} << 20;
constexpr std::uint64_t most_part_bytes = std::uint64_t{32} << 20;
constexpr std::uint32_t part_growth = 4;
/// For smaller batches the start of bulk copies costs more than they gain.
constexpr std::uint64_t least_bulk_bytes = std::uint64_t{128} << 10;
/// Parts end at a cache line of the GPU: a line being read must not be written any more.
constexpr std::uint32_t line_items = 16;
static_assert(sizeof(run_item) * line_items % 128 == 0 &&
              sizeof(rows_item) * line_items % 128 == 0);

}  // namespace

// -- a flight

bool flight::ended() const noexcept {
  if (on == nullptr) return true;
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (!on->lane(i).reached(marks[i])) return false;
  }
  return true;
}

std::optional<troupe::error> flight::take_failure() {
  std::optional<troupe::error> first;
  if (on == nullptr) return first;
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] == 0) continue;
    if (auto why = on->lane(i).take_failure(marks[i]); why && !first) first = std::move(why);
  }
  return first;
}

bool flight::lost() const noexcept {
  if (on == nullptr) return false;
  for (std::size_t i = 0; i < marks.size(); ++i) {
    if (marks[i] != 0 && on->lane(i).failed()) return true;
  }
  return false;
}

void flight::give_back_tables() {
  for (const auto& table : tables) on->take_back(table);
  tables.clear();
}

// -- a launch

// `first_` is written item by item before it is read.
// NOLINTNEXTLINE(cppcoreguidelines-pro-type-member-init)
batch_launch::batch_launch(device_lanes& on, const plan& how)
    : on_{on},
      how_{.chunk = how.chunk != 0 ? how.chunk : chunk_for(how.total),
           .engine_bytes = how.engine_bytes,
           .bulk = how.bulk && how.total >= least_bulk_bytes},
      share_of_gpu_{how.copy_blocks},
      blocks_{std::max<std::uint32_t>(
          1, how.copy_blocks / static_cast<std::uint32_t>(device_lanes::lane_count))},
      items_expected_{std::max(how.segments, how.total / how_.chunk + 1)},
      lane_{on.next()} {
  const auto item_bytes = std::max<std::uint64_t>(1, how.total / items_expected_);
  const auto items_of = [&](std::uint64_t bytes) {
    return static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
        bytes / item_bytes / line_items * line_items, max_inline_items, 1U << 16));
  };
  most_part_items_ = items_of(most_part_bytes);
  const bool waits = on.idle() && how.total >= 2 * first_part_bytes;
  part_items_ = waits ? items_of(first_part_bytes) : most_part_items_;
  made_.on = &on;
  for (std::size_t i = 0; i < run_ways; ++i) {
    runs_[i].items = first_[i].data();
    runs_[i].until = max_inline_items;
  }
}

void batch_launch::add(direction dir, const std::byte* local, const std::byte* remote,
                       std::span<const segment> segments) {
  // Items hold 56 bits. Regions are far smaller than the distance from 55 bits to that limit.
  constexpr auto highest = item_address >> 1;
  if (reinterpret_cast<std::uintptr_t>(local) > highest ||
      reinterpret_cast<std::uintptr_t>(remote) > highest) {
    if (!failure_) failure_ = {errc::internal, "an address of more than 55 bits"};
    return;
  }
  const auto here = reinterpret_cast<std::uintptr_t>(local);
  const auto there = reinterpret_cast<std::uintptr_t>(remote);
  while (!segments.empty()) {
    const auto done = add_plain(dir, here, there, segments);
    segments = segments.subspan(done);
    if (segments.empty()) return;
    cut_segments(how_, dir, here, there, segments.first(1), *this);
    segments = segments.subspan(1);
  }
}

/// The common case of blocks that are one item each and all alike: adds as many of the first
/// segments as are such blocks and fit, and returns their number. The cost per block here bounds a
/// link's throughput.
std::size_t batch_launch::add_plain(direction dir, std::uint64_t local, std::uint64_t remote,
                                    std::span<const segment> segments) {
  const bool writes = dir == direction::write;
  const auto& first = segments.front();
  const auto way =
      way_of(local + first.local_offset, remote + first.remote_offset, first.length, how_.bulk);
  auto& part = runs_[static_cast<std::size_t>(way)];
  auto* item = part.items + part.used;
  const auto count = std::min<std::size_t>(segments.size(), part.until - part.used);
  std::size_t i = 0;
  for (; i < count; ++i) {
    const auto& s = segments[i];
    const auto here = local + s.local_offset;
    const auto there = remote + s.remote_offset;
    if (s.count != 1 || s.length > how_.chunk || s.length == 0 ||
        way_of(here, there, s.length, how_.bulk) != way) {
      break;
    }
    *item++ = writes ? make_run_item(here, there, s.length) : make_run_item(there, here, s.length);
  }
  part.used += static_cast<std::uint32_t>(i);
  return i;
}

/// Calls `call` with the stream of the next lane. Parts and batches take turns on the lanes, so that
/// one begins while another ends.
template <class Call>
void batch_launch::give(Call call) {
  if (failure_) return;
  const auto lane = lane_++ % device_lanes::lane_count;
  made_.marks[lane] = 1;  // used; `end` sets the mark itself
  if (auto ok = call(on_.lane(lane).stream()); !ok) failure_ = std::move(ok).error();
}

template <class Item>
void batch_launch::launch(copy_way way, part_of<Item>& part) {
  const auto count = part.used - part.launched;
  if (count == 0) return;
  copy_launch what;
  what.way = way;
  what.count = count;
  what.blocks = std::min(blocks_, count);
  what.share_of_gpu = share_of_gpu_;
  if (part.table.host != nullptr) {
    what.table = part.table.device_address + part.launched * sizeof(Item);
  } else {
    what.here = part.items;
  }
  give([&](gpu_stream lane) { return on_.runtime().launch(lane, what); });
  part.launched = part.used;
}

template <class Item>
bool batch_launch::take_table(part_of<Item>& part) {
  auto table = on_.lend_table(items_expected_ * sizeof(Item));
  if (!table) {
    if (!failure_) failure_ = std::move(table).error();
    part.used = part.launched = part.until = 0;  // launch and write nothing more
    return false;
  }
  made_.tables.push_back(*table);
  part.table = *table;
  part.items = reinterpret_cast<Item*>(table->host);
  part.capacity = static_cast<std::uint32_t>(table->size / sizeof(Item)) / line_items * line_items;
  part.used = part.launched = 0;
  return true;
}

template <class Item>
void batch_launch::set_until(part_of<Item>& part) const {
  part.until = std::min(part.capacity, part.launched + part_items_);
}

/// Called when the items fill the launch, the part or the table.
bool batch_launch::make_room(copy_way way, part_of<run_item>& part) {
  if (failure_) return false;
  if (part.table.host == nullptr) {
    const auto* const before = part.items;
    if (!take_table(part)) return false;
    std::memcpy(part.items, before, max_inline_items * sizeof(run_item));
    part.used = max_inline_items;
  } else {
    launch(way, part);
    part_items_ = std::min(part_items_ * part_growth, most_part_items_);
    if (part.used == part.capacity && !take_table(part)) return false;
  }
  set_until(part);
  // If the items already fill the part, launch them together with the next ones.
  if (part.until <= part.used) part.until = std::min(part.capacity, part.used + line_items);
  return !failure_;
}

void batch_launch::rows(const rows_item& item) {
  if (failure_) return;
  if (rows_.used == rows_.until) {
    launch(copy_way::rows, rows_);
    if (rows_.used == rows_.capacity && !take_table(rows_)) return;
    set_until(rows_);
  }
  rows_.items[rows_.used++] = item;
}

void batch_launch::engine(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) {
  give([&](gpu_stream lane) { return on_.runtime().copy(lane, to, from, bytes); });
}

flight batch_launch::end() {
  for (std::size_t i = 0; i < run_ways; ++i) launch(static_cast<copy_way>(i), runs_[i]);
  launch(copy_way::rows, rows_);
  for (std::size_t i = 0; i < made_.marks.size(); ++i) {
    if (made_.marks[i] != 0) made_.marks[i] = on_.lane(i).mark();
  }
  return std::move(made_);
}

}  // namespace troupe::transport::xgmi
