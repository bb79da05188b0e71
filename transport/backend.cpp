#include "troupe/transport/backend.hpp"

#include <algorithm>
#include <utility>

#include "troupe/transport/batch_check.hpp"

namespace troupe::transport {

prepared_batch::prepared_batch(direction dir, std::vector<piece> pieces)
    : dir_{dir}, pieces_{std::move(pieces)} {
  std::uint32_t end = 0;
  for (const auto& one : pieces_) {
    end += static_cast<std::uint32_t>(one.segments.size());
    ends_.push_back(end);
  }
}

prepared_batch::place prepared_batch::at(std::uint32_t index) const noexcept {
  const auto piece =
      static_cast<std::size_t>(std::ranges::upper_bound(ends_, index) - ends_.begin());
  const auto before = piece == 0 ? 0U : ends_[piece - 1];
  return {piece, &pieces_[piece].segments[index - before]};
}

/// For backends without a faster path.
result<void> link::post_prepared(const prepared_batch& what, const posting& how) {
  if (auto ok = check_posting(what, how); !ok) return ok;
  batch work{.id = how.id,
             .transfer = how.transfer,
             .dir = what.dir(),
             .pieces = {},
             .frame = {how.frame.begin(), how.frame.end()}};
  // Keeps the order of the posting: consecutive segments of one piece form one piece.
  auto last = SIZE_MAX;
  for (std::uint32_t i = 0, count = how.count(what); i < count; ++i) {
    const auto at = what.at(how.index(i));
    if (at.piece != last) {
      const auto& from = what.pieces()[at.piece];
      work.pieces.push_back({from.local, from.remote, {}});
      last = at.piece;
    }
    work.pieces.back().segments.push_back(*at.what);
  }
  return post(std::move(work));
}

}  // namespace troupe::transport
