#include "troupe/io/plans.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>

namespace troupe::io {

namespace {

std::string words_of(const entry& what) {
  return std::to_string(what.count) + " x " + std::to_string(what.length) + " bytes at address " +
         std::to_string(what.address);
}

/// The length from the first byte to the last.
result<std::uint64_t> hull_of(const entry& what) {
  if (what.length == 0 || what.count == 0) {
    return fail(errc::out_of_range, words_of(what) + ": an entry has at least 1 byte");
  }
  if (what.count == 1) return what.length;
  if (what.stride < what.length) {
    return fail(errc::out_of_range, words_of(what) + " with a stride of " +
                                        std::to_string(what.stride) + " overlap themselves");
  }
  const auto steps = std::uint64_t{what.count} - 1;
  if (what.stride > (UINT64_MAX - what.length) / steps) {
    return fail(errc::out_of_range, words_of(what) + " wrap around");
  }
  return steps * what.stride + what.length;
}

const memory_part& part_at(const described_memory& where, std::uint64_t address) {
  const auto after = std::ranges::upper_bound(where.parts, address, {}, &memory_part::address);
  return *std::prev(after);
}

/// Adds one repetition, cut at the borders of parts.
void add_cut(placed_list& to, const described_memory& where, std::uint64_t address,
             std::uint64_t length) {
  while (length > 0) {
    const auto& part = part_at(where, address);
    const auto inside = address - part.address;
    const auto here = std::min(length, part.length - inside);
    to.runs.push_back({.memory = where.number,
                       .region = part.region,
                       .offset = part.offset + inside,
                       .length = here});
    address += here;
    length -= here;
  }
}

/// Runs of an entry whose first bytes are already paired.
struct rest_of_runs {
  std::span<const region_run> runs;
  std::uint32_t repetition{0};
  std::uint64_t done{0};  ///< paired bytes of the repetition

  [[nodiscard]] bool over() const noexcept { return runs.empty(); }
  [[nodiscard]] const region_run& now() const noexcept { return runs.front(); }
  [[nodiscard]] bool untouched() const noexcept { return repetition == 0 && done == 0; }
  [[nodiscard]] std::uint64_t offset() const noexcept {
    return now().offset + repetition * now().stride + done;
  }
  [[nodiscard]] std::uint64_t left() const noexcept { return now().length - done; }
  void take(std::uint64_t bytes) noexcept {
    done += bytes;
    if (done < now().length) return;
    done = 0;
    if (++repetition < now().count) return;
    take_run();
  }
  void take_run() noexcept {
    repetition = 0;
    runs = runs.subspan(1);
  }
};

std::uint64_t bytes_of(std::span<const region_run> runs) noexcept {
  std::uint64_t sum = 0;
  for (const auto& run : runs) sum += run.length * run.count;
  return sum;
}

bool goes_on(const segment& before, const segment& next) noexcept {
  return before.count == 1 && next.count == 1 &&
         before.local_offset + before.length == next.local_offset &&
         before.remote_offset + before.length == next.remote_offset;
}

class batch_builder {
 public:
  explicit batch_builder(merge_entries merge) : merge_{merge} {}

  void add_pair(std::uint32_t number, std::span<const region_run> local,
                std::span<const region_run> remote) {
    rest_of_runs here{local};
    rest_of_runs there{remote};
    // Two entries cut differently, with many repetitions, make more segments than either has runs.
    while (!here.over() && !there.over() && segments_ <= max_runs) {
      const auto& from = here.now();
      const auto& to = there.now();
      if (here.untouched() && there.untouched() && from.length == to.length &&
          from.count == to.count) {
        const bool once = from.count == 1;
        add(number, from, to,
            {from.offset, to.offset, from.length, once ? 0 : from.stride, once ? 0 : to.stride,
             from.count});
        here.take_run();
        there.take_run();
        continue;
      }
      const auto bytes = std::min(here.left(), there.left());
      add(number, from, to, {here.offset(), there.offset(), bytes, 0, 0, 1});
      here.take(bytes);
      there.take(bytes);
    }
  }
  [[nodiscard]] std::size_t segments() const noexcept { return segments_; }
  [[nodiscard]] planned_batch take() {
    for (auto* memories : {&made_.local_memories, &made_.remote_memories}) {
      std::ranges::sort(*memories);
      memories->erase(std::unique(memories->begin(), memories->end()), memories->end());
    }
    return std::move(made_);
  }

 private:
  planned_batch::group& group_for(const region_run& local, const region_run& remote) {
    const auto fits = [&](const planned_batch::group& one) {
      return one.local == local.region && one.remote == remote.region &&
             one.remote_memory == remote.memory;
    };
    if (last_ < made_.groups.size() && fits(made_.groups[last_])) return made_.groups[last_];
    const auto [known, is_new] = groups_.try_emplace(
        {local.region.value, remote.memory, remote.region.value}, made_.groups.size());
    last_ = known->second;
    if (is_new) {
      made_.groups.push_back({.local = local.region,
                              .remote_memory = remote.memory,
                              .remote = remote.region,
                              .segments = {}});
    }
    return made_.groups[last_];
  }

  void add(std::uint32_t number, const region_run& local, const region_run& remote,
           const segment& next) {
    if (made_.local_memories.empty() || made_.local_memories.back() != local.memory) {
      made_.local_memories.push_back(local.memory);
    }
    if (made_.remote_memories.empty() || made_.remote_memories.back() != remote.memory) {
      made_.remote_memories.push_back(remote.memory);
    }
    made_.bytes += next.length * next.count;
    made_.entries = number + 1;
    auto& group = group_for(local, remote);
    // A segment serves a contiguous range of entries; an entry in between belongs to another group.
    if (!group.segments.empty() && goes_on(group.segments.back(), next) &&
        (group.entries.back().last == number ||
         (merge_ == merge_entries::yes && group.entries.back().last + 1 == number))) {
      group.segments.back().length += next.length;
      group.entries.back().last = number;
      return;
    }
    group.segments.push_back(next);
    group.entries.push_back({number, number});
    ++segments_;
  }

  const merge_entries merge_;
  planned_batch made_;
  /// Where each group is in `made_`, by its regions and memory: a transfer may have as many groups
  /// as entries.
  std::map<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>, std::size_t> groups_;
  std::size_t last_{0};
  std::size_t segments_{0};
};

result<std::uint32_t> pick(const placed_list& from, std::span<const std::uint32_t> index,
                           std::size_t i, const char* side) {
  const auto at = index.empty() ? i : index[i];
  if (at < from.entries()) return static_cast<std::uint32_t>(at);
  return fail(errc::out_of_range, "pair " + std::to_string(i) + ": index " + std::to_string(at) +
                                      " where the " + side + " plan has " +
                                      std::to_string(from.entries()) + " entries");
}

}  // namespace

result<void> add_entry(placed_list& to, const described_memory& where, const entry& what) {
  const auto hull = hull_of(what);
  if (!hull) return fail(hull.error());
  const auto inside = what.address - where.address();
  if (what.address < where.address() || inside > where.length() ||
      *hull > where.length() - inside) {
    return fail(errc::out_of_range, words_of(what) + " are not within memory " +
                                        std::to_string(where.number) + " of " +
                                        std::to_string(where.length()) + " bytes");
  }
  const auto& part = part_at(where, what.address);
  if (*hull <= part.length - (what.address - part.address)) {
    to.runs.push_back({.memory = where.number,
                       .region = part.region,
                       .offset = part.offset + (what.address - part.address),
                       .length = what.length,
                       .stride = what.count == 1 ? 0 : what.stride,
                       .count = what.count});
  } else {
    for (std::uint32_t i = 0; i < what.count && to.runs.size() <= max_runs; ++i) {
      add_cut(to, where, what.address + i * what.stride, what.length);
    }
  }
  if (to.runs.size() > max_runs) {
    return fail(errc::overloaded, "a plan has at most " + std::to_string(max_runs) + " places");
  }
  to.ends.push_back(static_cast<std::uint32_t>(to.runs.size()));
  return {};
}

result<void> check_within(const planned_batch::group& what, const described_memory& where) {
  const auto part = std::ranges::find(where.parts, what.remote, &memory_part::region);
  const auto before = [&](const segment& one) { return one.remote_offset < part->offset; };
  if (part == where.parts.end() || std::ranges::any_of(what.segments, before)) {
    return fail(errc::out_of_range, "memory " + std::to_string(where.number) +
                                        " does not lie where its descriptor says");
  }
  return check_remote(what.segments, part->offset + part->length);
}

result<planned_batch> pair_up(const placed_list& local, std::span<const std::uint32_t> local_index,
                              const placed_list& remote,
                              std::span<const std::uint32_t> remote_index, merge_entries merge) {
  const auto count = local_index.empty() ? local.entries() : local_index.size();
  const auto others = remote_index.empty() ? remote.entries() : remote_index.size();
  if (count != others || count == 0) {
    return fail(errc::out_of_range,
                std::to_string(count) + " local entries and " + std::to_string(others) +
                    " remote ones; a transfer needs as many of each, and at least one");
  }
  batch_builder made{merge};
  for (std::size_t i = 0; i < count; ++i) {
    const auto here = pick(local, local_index, i, "local");
    if (!here) return fail(here.error());
    const auto there = pick(remote, remote_index, i, "remote");
    if (!there) return fail(there.error());
    const auto from = local.runs_of(*here);
    const auto to = remote.runs_of(*there);
    if (bytes_of(from) != bytes_of(to)) {
      return fail(errc::out_of_range, "pair " + std::to_string(i) + ": " +
                                          std::to_string(bytes_of(from)) + " local bytes and " +
                                          std::to_string(bytes_of(to)) + " remote ones");
    }
    made.add_pair(static_cast<std::uint32_t>(i), from, to);
    if (made.segments() > max_runs) {
      return fail(errc::overloaded,
                  "a transfer has at most " + std::to_string(max_runs) + " segments");
    }
  }
  return made.take();
}

std::vector<std::uint32_t> planned_batch::entries_of(
    std::span<const std::uint32_t> segments) const {
  std::vector<bool> bad(entries);
  std::vector<std::size_t> ends;  // of the groups, in segments
  ends.reserve(groups.size());
  for (const auto& one : groups) {
    ends.push_back((ends.empty() ? 0 : ends.back()) + one.segments.size());
  }
  for (const auto index : segments) {
    const auto end = std::ranges::upper_bound(ends, std::size_t{index});
    if (end == ends.end()) continue;
    const auto& one = groups[static_cast<std::size_t>(end - ends.begin())];
    const auto& serves = one.entries[index - (*end - one.segments.size())];
    for (auto i = serves.first; i <= serves.last; ++i) bad[i] = true;
  }
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 0; i < entries; ++i) {
    if (bad[i]) found.push_back(i);
  }
  return found;
}

std::vector<std::uint32_t> planned_batch::all_entries() const {
  std::vector<std::uint32_t> all(entries);
  for (std::uint32_t i = 0; i < entries; ++i) all[i] = i;
  return all;
}

}  // namespace troupe::io
