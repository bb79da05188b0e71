#include "troupe/transport/batch_check.hpp"

#include <algorithm>
#include <span>
#include <string>
#include <utility>

namespace troupe::transport {

namespace {

/// Whether every segment surely lies in its local and its remote region. Decides the common case in
/// a few instructions; if false, the slower checks decide and word the error.
bool plainly_inside(std::span<const segment> segments, std::uint64_t local_size,
                    std::uint64_t remote_size) noexcept {
  return std::ranges::all_of(segments, [&](const segment& s) {
    return s.count == 1 && s.local_offset <= local_size &&
           s.length <= local_size - s.local_offset && s.remote_offset <= remote_size &&
           s.length <= remote_size - s.remote_offset;
  });
}

/// As `plainly_inside`, and also inside the grant, which must be one range. The cost per block here
/// bounds the throughput of a link, so each segment is read once and without a branch. Only the
/// furthest ends are compared; numbers so large that an end could wrap go through the other checks.
/// False decides nothing.
bool plainly_granted(std::span<const segment> segments, std::uint64_t local_size,
                     const remote_grant& grant) noexcept {
  const auto* range = grant.permitted.whole();
  if (range == nullptr) return false;
  const auto& whole = *range;
  if (whole.offset > grant.region_size || whole.length > grant.region_size - whole.offset) {
    return false;
  }
  constexpr std::uint64_t never_wraps = std::uint64_t{1} << 62;
  std::uint64_t numbers = 0;
  std::uint32_t not_one = 0;
  std::uint64_t local_end = 0;
  std::uint64_t remote_end = 0;
  std::uint64_t remote_begin = UINT64_MAX;
  for (const auto& s : segments) {
    numbers |= s.local_offset | s.remote_offset | s.length;
    not_one |= s.count ^ 1;
    local_end = std::max(local_end, s.local_offset + s.length);
    remote_end = std::max(remote_end, s.remote_offset + s.length);
    remote_begin = std::min(remote_begin, s.remote_offset);
  }
  return numbers < never_wraps && not_one == 0 && local_end <= local_size &&
         remote_begin >= whole.offset && remote_end <= whole.offset + whole.length;
}

result<void> check_grant(const batch& work, const remote_grant& grant, incarnation peer) {
  if (grant.owner != peer) {
    return fail(errc::stale_incarnation, "its grant is of incarnation " +
                                             std::to_string(grant.owner.value) +
                                             ", this link's peer is " + std::to_string(peer.value));
  }
  if (!grant.serves(work.transfer)) {
    return fail(errc::unauthorized, "its grant was given for transfer " +
                                        std::to_string(grant.transfer.value) + ", not " +
                                        std::to_string(work.transfer.value));
  }
  const auto wanted = work.dir == direction::write ? access::write : access::read;
  if (!permits(grant.rights, wanted)) {
    return fail(errc::unauthorized, wanted == access::write ? "its grant does not permit writing"
                                                            : "its grant does not permit reading");
  }
  return {};
}

result<void> check_segments(std::span<const segment> segments, const remote_grant& grant,
                            std::uint64_t local_size) {
  if (plainly_granted(segments, local_size, grant)) return {};
  if (!plainly_inside(segments, local_size, grant.region_size)) {
    if (auto ok = check_local(segments, local_size); !ok) {
      return fail(ok.error().code, ok.error().message + " (local region)");
    }
    if (auto ok = check_remote(segments, grant.region_size); !ok) {
      return fail(ok.error().code, ok.error().message + " (remote region)");
    }
  }
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const auto& s = segments[i];
    if (grant.permitted.covers({s.remote_offset, s.length, s.remote_stride, s.count})) continue;
    return fail(errc::out_of_range, "segment " + std::to_string(i) + ": remote offset " +
                                        std::to_string(s.remote_offset) + ", length " +
                                        std::to_string(s.length) +
                                        " is not within what the grant permits");
  }
  return {};
}

}  // namespace

unexpected in_piece(std::size_t index, const troupe::error& why) {
  return fail(why.code, "piece " + std::to_string(index) + ": " + why.message);
}

result<void> check_frame(std::size_t bytes) {
  if (bytes <= link::max_frame) return {};
  return fail(errc::out_of_range, "a frame has at most " + std::to_string(link::max_frame) +
                                      " bytes, found " + std::to_string(bytes));
}

result<void> check_batch(const batch& work) {
  if (work.dir != direction::write && work.dir != direction::read) {
    return fail(errc::invalid_config, "a batch writes or reads");
  }
  return check_frame(work.frame.size());
}

result<void> check_piece(const batch& work, std::size_t index, incarnation peer,
                         const region& local) {
  const auto& piece = work.pieces[index];
  if (!piece.remote) return in_piece(index, {errc::invalid_config, "it has no grant"});
  if (auto ok = check_grant(work, *piece.remote, peer); !ok) {
    return in_piece(index, std::move(ok).error());
  }
  if (auto ok = check_segments(piece.segments, *piece.remote, local.size()); !ok) {
    return in_piece(index, std::move(ok).error());
  }
  return {};
}

result<void> check_to_prepare(direction dir, const std::vector<piece>& pieces) {
  if (dir != direction::write && dir != direction::read) {
    return fail(errc::invalid_config, "a batch writes or reads");
  }
  std::uint64_t segments = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& one = pieces[i];
    if (!one.remote) return in_piece(i, {errc::invalid_config, "it has no grant"});
    if (!one.remote->standing) {
      return in_piece(
          i, {errc::unauthorized, "its grant is for one transfer; a prepared batch is for many"});
    }
    segments += one.segments.size();
  }
  if (segments <= UINT32_MAX) return {};
  return fail(errc::out_of_range, "the batch has too many segments");
}

result<std::shared_ptr<const prepared_batch>> prepare_checked(direction dir,
                                                              std::vector<piece> pieces,
                                                              incarnation peer,
                                                              const region_table& regions) {
  if (auto ok = check_to_prepare(dir, pieces); !ok) return fail(std::move(ok).error());
  batch work{.id = {}, .transfer = {}, .dir = dir, .pieces = std::move(pieces), .frame = {}};
  for (std::size_t i = 0; i < work.pieces.size(); ++i) {
    const auto used = regions.use(work.pieces[i].local);
    if (!used) return in_piece(i, used.error());
    if (auto ok = check_piece(work, i, peer, **used); !ok) return fail(ok.error());
  }
  return std::make_shared<const prepared_batch>(dir, std::move(work.pieces));
}

result<void> check_posting(const prepared_batch& what, const posting& how) {
  if (auto ok = check_frame(how.frame.size()); !ok) return ok;
  const auto segments = what.segments();
  for (const auto index : how.which) {
    if (index < segments) continue;
    return fail(errc::out_of_range, "segment " + std::to_string(index) +
                                        " of a prepared batch that has " +
                                        std::to_string(segments));
  }
  return {};
}

}  // namespace troupe::transport
