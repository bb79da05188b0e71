#include "troupe/transport/shm/staged_job.hpp"

#include <algorithm>
#include <utility>

namespace troupe::transport::shm {

void staged_job::release_memory() {
  for (auto& piece : pieces) piece.local.release();
}

std::vector<std::uint32_t> staged_job::unfinished() const {
  auto runs = arrived;
  std::ranges::sort(runs, {}, &byte_range::begin);
  std::size_t last = 0;  // adjacent ranges are merged
  for (std::size_t i = 1; i < runs.size(); ++i) {
    if (runs[last].end == runs[i].begin) {
      runs[last].end = runs[i].end;
    } else {
      runs[++last] = runs[i];
    }
  }
  runs.resize(std::min(runs.size(), last + 1));
  std::vector<std::uint32_t> bad;
  std::uint32_t index = 0;
  std::uint64_t end = 0;
  auto run = runs.begin();
  for (const auto& piece : work.pieces) {
    for (const auto& s : piece.segments) {
      const auto begin = std::exchange(end, end + s.length * s.count);
      while (run != runs.end() && run->end < end) ++run;
      if (begin != end && (run == runs.end() || run->begin > begin)) bad.push_back(index);
      ++index;
    }
  }
  return bad;
}

void cut_chunk(staged_job& job, chunk_use& use) {
  use.local.clear();
  use.remote.clear();
  use.bytes = 0;
  use.first = job.given;
  auto& at = job.at;
  while (true) {  // to a piece that has bytes left
    const auto& segments = job.work.pieces[at.piece].segments;
    const auto is_empty = [](const segment& s) { return s.length == 0 || s.count == 0; };
    while (at.segment < segments.size() && is_empty(segments[at.segment])) ++at.segment;
    if (at.segment < segments.size()) break;
    at = {.piece = at.piece + 1};
  }
  use.piece = at.piece;
  const auto& segments = job.work.pieces[at.piece].segments;
  const auto& piece = job.pieces[at.piece];
  while (at.segment < segments.size() && use.bytes < chunk_size &&
         use.remote.size() < max_chunk_runs) {
    const auto& s = segments[at.segment];
    const auto room = chunk_size - use.bytes;
    std::uint64_t length = std::min(s.length - at.offset, room);
    std::uint32_t count = length == 0 ? 0 : 1;
    if (at.offset == 0 && length == s.length && length != 0) {
      count = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(s.count - at.repetition, room / length));
    }
    if (count != 0) {
      const auto local = s.local_offset + at.repetition * s.local_stride + at.offset;
      const auto remote = s.remote_offset + at.repetition * s.remote_stride + at.offset;
      const bool repeats = count > 1;
      use.local.push_back(
          {piece.base + local, length, repeats ? s.local_stride : 0, count, piece.gpu});
      use.remote.push_back({reinterpret_cast<std::byte*>(piece.by_hand.remote_address + remote),
                            length, repeats ? s.remote_stride : 0, count});
      use.bytes += length * count;
      at.offset += length;
      if (at.offset < s.length) continue;
      at.offset = 0;
      at.repetition += count;
    }
    if (at.repetition >= s.count || s.length == 0) {
      at = {.piece = at.piece, .segment = at.segment + 1};
    }
  }
  job.given += use.bytes;
}

}  // namespace troupe::transport::shm
