#include "troupe/kvcache/byte_set.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "troupe/kvcache/byte_range.hpp"

namespace troupe {
namespace {

constexpr std::uint64_t no_end = std::numeric_limits<std::uint64_t>::max();

/// Repeating ranges are kept as they are if writing them out would make this many times more
/// ranges.
constexpr std::uint64_t worth_writing_out = 4;

bool is_worth_writing_out(const std::vector<extent>& extents) {
  std::uint64_t total = 0;
  for (const auto& e : extents) total += e.count;
  return total <= worth_writing_out * (extents.size() + 16);
}

/// Writes all repetitions out as ranges, sorted, and merged where they touch.
std::vector<byte_range> written_out(const std::vector<extent>& extents) {
  std::vector<byte_range> flat;
  for (const auto& e : extents) {
    for (std::uint32_t i = 0; i < e.count; ++i) {
      const auto begin = e.offset + i * e.stride;
      if (e.length != 0 && begin <= no_end - e.length) flat.push_back({begin, begin + e.length});
    }
  }
  sort_and_join(flat);
  return flat;
}

}  // namespace

// -- places

place_list::place_list(std::vector<std::uint32_t> places) {
  std::ranges::sort(places);
  for (const auto place : places) {
    if (!runs_.empty() && place - runs_.back().last <= 1) {
      runs_.back().last = place;
    } else {
      runs_.push_back({place, place});
    }
  }
  if (runs_.size() < 2) return;
  runs_.shrink_to_fit();
  const std::uint64_t span = last() - first();
  while ((span >> shift_) >= runs_.size()) ++shift_;
  stretches_.resize((span >> shift_) + 1);
  std::uint32_t at = 0;
  for (std::size_t i = 0; i < stretches_.size(); ++i) {
    while (runs_[at].last - first() < (std::uint64_t{i} << shift_)) ++at;
    stretches_[i] = at;
  }
}

std::uint64_t place_list::run_at(std::uint64_t place) const noexcept {
  if (runs_.empty() || place < first() || place > last()) return 0;
  auto from = runs_.begin();
  auto until = runs_.end();
  if (!stretches_.empty()) {
    const auto stretch = (place - first()) >> shift_;
    from += stretches_[stretch];
    // The first run that ends in a later stretch may begin in this one.
    if (stretch + 1 < stretches_.size()) until = runs_.begin() + stretches_[stretch + 1] + 1;
  }
  const auto at = std::partition_point(from, until, [&](const run& r) { return r.last < place; });
  return at == until || at->begin > place ? 0 : std::uint64_t{at->last} - place + 1;
}

place_form::place_form(std::vector<piece> pieces, std::uint64_t places) {
  std::erase_if(pieces, [](const piece& p) { return p.length == 0; });
  std::ranges::sort(pieces, {}, &piece::offset);
  for (const auto& p : pieces) {
    if (!groups_.empty()) {
      auto& last = groups_.back();
      const auto offset = p.offset - last.base;
      if (last.stride == p.stride && offset + p.length <= last.stride) {
        auto& before = last.parts.back();
        if (before.offset + before.length == offset) {
          before.length += p.length;
        } else {
          last.parts.push_back({offset, p.length});
        }
        continue;
      }
    }
    // With a single place the stride has no meaning, but it must not be 0 below.
    groups_.push_back({p.offset, std::max(p.stride, p.length), {{0, p.length}}});
  }
  for (std::size_t i = 0; i + 1 < groups_.size(); ++i) {
    const auto& g = groups_[i];
    const auto end = g.base + (std::max<std::uint64_t>(places, 1) - 1) * g.stride + g.width();
    apart_ = apart_ && end <= groups_[i + 1].base;
  }
}

std::uint64_t place_form::run_in(const group& in, std::uint64_t offset,
                                 const place_list& places) noexcept {
  const auto distance = offset - in.base;
  const auto place = distance / in.stride;
  const auto within = distance % in.stride;
  auto at = std::ranges::upper_bound(in.parts, within, {}, &part::offset);
  if (at == in.parts.begin()) return 0;
  --at;
  const auto end = at->offset + at->length;
  if (within >= end) return 0;
  const auto run = places.run_at(place);
  if (run == 0) return 0;
  // Places without gaps between them form one range.
  const bool dense = in.parts.size() == 1 && end == in.stride;
  return end - within + (dense ? (run - 1) * in.stride : 0);
}

std::uint64_t place_form::run_at(std::uint64_t offset, const place_list& places) const noexcept {
  if (!apart_) {
    for (const auto& g : groups_) {
      if (g.base > offset) break;
      if (const auto run = run_in(g, offset, places); run != 0) return run;
    }
    return 0;
  }
  const auto after = std::ranges::upper_bound(groups_, offset, {}, &group::base);
  return after == groups_.begin() ? 0 : run_in(*std::prev(after), offset, places);
}

extent place_form::hull(const place_list& places) const noexcept {
  std::uint64_t begin = no_end;
  std::uint64_t end = 0;
  for (const auto& g : groups_) {
    begin = std::min(begin, g.base + places.first() * g.stride);
    end = std::max(end, g.base + places.last() * g.stride + g.width());
  }
  return {begin, end - begin, 0, 1};
}

// -- the set

struct byte_set::parts {
  std::vector<extent> extents;  ///< sorted by offset
  bool is_flat{true};           ///< `flat` holds the extents, too
  std::vector<byte_range> flat;
  std::vector<placed> places;  ///< none of them empty

  parts(std::vector<extent> list, bool with_places) : extents{std::move(list)} {
    if (!std::ranges::is_sorted(extents, {}, &extent::offset)) {
      std::ranges::sort(extents, {}, &extent::offset);
    }
    is_flat = with_places || is_worth_writing_out(extents);
    if (is_flat) flat = written_out(extents);
  }

  /// Length of a run of bytes from `offset` on, as far as one lookup finds it.
  [[nodiscard]] std::uint64_t run_at(std::uint64_t offset) const noexcept {
    for (const auto& [form, list] : places) {
      if (const auto run = form->run_at(offset, *list); run != 0) return run;
    }
    const auto after = std::ranges::upper_bound(flat, offset, {}, &byte_range::begin);
    if (after == flat.begin()) return 0;
    const auto& at = *std::prev(after);
    return offset < at.end ? at.end - offset : 0;
  }

  /// Length of the run of bytes from `offset` on, searched up to `wanted` bytes.
  [[nodiscard]] std::uint64_t run_of(std::uint64_t offset, std::uint64_t wanted) const noexcept {
    auto all = run_at(offset);
    for (auto more = all; more != 0 && all < wanted; all += more) more = run_at(offset + all);
    return all;
  }
};

byte_set::byte_set() {
  static const auto none = std::make_shared<const parts>(std::vector<extent>{}, false);
  parts_ = none;
}

byte_set::byte_set(std::vector<extent> extents)
    : parts_{std::make_shared<const parts>(std::move(extents), false)} {}

byte_set::byte_set(std::initializer_list<extent> extents)
    : byte_set{std::vector<extent>(extents)} {}

byte_set::byte_set(std::vector<placed> places, std::vector<extent> extents) {
  std::erase_if(places, [](const placed& one) { return one.form->empty() || one.places->empty(); });
  // A single dense run of bytes is stored as one extent, for which checks are fastest.
  if (extents.empty() && places.size() == 1) {
    const auto& [form, list] = places.front();
    const auto all = form->hull(*list);
    if (form->run_at(all.offset, *list) == all.length) {
      parts_ = std::make_shared<const parts>(std::vector<extent>{all}, false);
      return;
    }
  }
  auto made = std::make_shared<parts>(std::move(extents), true);
  made->places = std::move(places);
  parts_ = std::move(made);
}

bool byte_set::covers(const extent& range) const noexcept {
  if (!check_range(range, no_end)) return false;
  if (range.length == 0) return true;
  const auto& p = *parts_;
  if (!p.is_flat) return covered(range, p.extents);
  auto offset = range.offset;
  for (std::uint64_t left = range.count;;) {
    const auto run = p.run_of(offset, range.length);
    if (run < range.length) return false;
    if (left == 1) return true;
    const auto done = std::min(left, (run - range.length) / range.stride + 1);
    left -= done;
    if (left == 0) return true;
    offset += done * range.stride;
  }
}

result<void> byte_set::check_within(std::uint64_t size) const {
  for (std::size_t i = 0; i < parts_->extents.size(); ++i) {
    if (auto ok = check_range(parts_->extents[i], size); !ok) {
      return fail(ok.error().code, "extent " + std::to_string(i) + ": " + ok.error().message);
    }
  }
  for (const auto& [form, list] : parts_->places) {
    if (auto ok = check_range(form->hull(*list), size); !ok) {
      return fail(ok.error().code, "places " + std::to_string(list->first()) + " to " +
                                       std::to_string(list->last()) + ": " + ok.error().message);
    }
  }
  return {};
}

extent byte_set::hull() const noexcept {
  std::uint64_t begin = no_end;
  std::uint64_t end = 0;
  for (const auto& e : parts_->extents) {
    if (e.length == 0 || e.count == 0) continue;
    begin = std::min(begin, e.offset);
    end = std::max(end, e.offset + (e.count - 1) * e.stride + e.length);
  }
  for (const auto& [form, list] : parts_->places) {
    const auto all = form->hull(*list);
    begin = std::min(begin, all.offset);
    end = std::max(end, all.offset + all.length);
  }
  if (end == 0) return {0, 0, 0, 1};
  return {begin, end - begin, 0, 1};
}

const std::vector<extent>& byte_set::extents() const noexcept {
  return parts_->extents;
}

bool byte_set::is_listed() const noexcept {
  return parts_->places.empty();
}

const extent* byte_set::whole() const noexcept {
  const auto& list = parts_->extents;
  return parts_->places.empty() && list.size() == 1 && list.front().count == 1 ? &list.front()
                                                                               : nullptr;
}

bool operator==(const byte_set& a, const byte_set& b) {
  return a.parts_ == b.parts_ ||
         (a.parts_->extents == b.parts_->extents && a.parts_->places == b.parts_->places);
}

}  // namespace troupe
