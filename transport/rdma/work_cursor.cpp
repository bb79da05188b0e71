#include "troupe/transport/rdma/work_cursor.hpp"

#include <algorithm>
#include <limits>

namespace troupe::transport::rdma {

namespace {

/// Bytes from `offset` to the start of the next piece.
std::uint64_t to_border(std::uint64_t offset, std::uint64_t piece) noexcept {
  return piece == 0 ? std::numeric_limits<std::uint64_t>::max() : piece - offset % piece;
}

}  // namespace

std::uint64_t work_cursor::local_address() const noexcept {
  const auto& s = segments_[index_];
  return local_ + s.local_offset + repetition_ * s.local_stride + done_;
}

std::uint64_t work_cursor::remote_address() const noexcept {
  const auto& s = segments_[index_];
  return remote_ + s.remote_offset + repetition_ * s.remote_stride + done_;
}

void work_cursor::skip_empty() noexcept {
  while (index_ < segments_.size() &&
         (segments_[index_].length == 0 || segments_[index_].count == 0)) {
    ++index_;
  }
}

void work_cursor::advance(std::uint64_t bytes) noexcept {
  done_ += bytes;
  const auto& s = segments_[index_];
  if (done_ < s.length) return;
  done_ = 0;
  if (++repetition_ < s.count) return;
  repetition_ = 0;
  ++index_;
  skip_empty();
}

remote_run work_cursor::next(const limits& within) noexcept {
  remote_run made;
  made.address = remote_address();
  made.first_segment = segment_index();
  const auto most = static_cast<std::uint32_t>(
      std::min<std::uint64_t>(within.bytes, to_border(made.address - remote_, remote_piece_)));
  while (!at_end() && made.bytes < most && remote_address() == made.address + made.bytes) {
    const auto here = local_address();
    const auto left_here = to_border(here - local_, local_piece_);
    const bool goes_on =
        made.runs != 0 && left_here != local_piece_ &&
        here == made.local[made.runs - 1].address + made.local[made.runs - 1].bytes;
    if (!goes_on && made.runs == std::min<std::size_t>(within.runs, max_runs)) break;
    const auto left = std::min(segments_[index_].length - done_, left_here);
    const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(left, most - made.bytes));
    if (goes_on) {
      made.local[made.runs - 1].bytes += bytes;
    } else {
      made.local[made.runs++] = {here, bytes};
    }
    made.bytes += bytes;
    made.last_segment = segment_index();
    advance(bytes);
  }
  return made;
}

}  // namespace troupe::transport::rdma
