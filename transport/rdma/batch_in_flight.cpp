#include "troupe/transport/rdma/batch_in_flight.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::transport::rdma {

void batch_in_flight::enter_piece() {
  const auto& place = places[piece];
  const auto& segments = work.pieces[piece].segments;
  entered_ = true;
  if (!place.remote) {  // no request is cut from this piece
    cursor = work_cursor{segments, 0, 0};
    return;
  }
  const auto& here = *place.registered;
  const auto& there = *place.remote;
  cursor = work_cursor{segments, here.address(), there.address,
                       here.pieces() == 1 ? 0 : here.piece_bytes(),
                       there.in_one() ? 0 : there.piece_bytes};
}

bool batch_in_flight::at_end() noexcept {
  for (; piece < places.size(); ++piece, entered_ = false) {
    if (!entered_) enter_piece();
    if (!cursor.at_end()) return false;
  }
  return true;
}

bool batch_in_flight::next(const work_cursor::limits& within, remote_run& run,
                           const placed_piece*& place) {
  if (at_end()) return false;
  place = &places[piece];
  run = cursor.next(within);
  return true;
}

void batch_in_flight::give_up(troupe::error why) {
  if (!failure) failure = std::move(why);
  if (!cut) {
    for (; piece < places.size(); ++piece, entered_ = false) {
      if (!entered_) enter_piece();
      const auto count = static_cast<std::uint32_t>(work.pieces[piece].segments.size());
      for (auto i = cursor.segment_index(); i < count; ++i) {
        bad.insert(places[piece].first_segment + i);
      }
    }
  }
  cut = true;
  notices_left = 0;
}

bool batch_in_flight::keeps_to_grants() {
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto& said = *places[i].remote;
    const auto wanted = work.dir == direction::write ? access::write : access::read;
    const bool allowed = permits(said.rights, wanted);
    const auto& segments = work.pieces[i].segments;
    for (std::size_t n = 0; n < segments.size(); ++n) {
      const auto& s = segments[n];
      if (s.length == 0 || s.count == 0) continue;
      const auto last = s.remote_offset + (s.count - 1) * s.remote_stride;
      const bool inside = std::min(s.remote_offset, last) >= said.begin &&
                          std::max(s.remote_offset, last) + s.length <= said.end;
      if (allowed && inside) continue;
      bad.insert(places[i].first_segment + static_cast<std::uint32_t>(n));
      if (failure) continue;
      const auto where = "piece " + std::to_string(i) + ": segment " + std::to_string(n);
      failure = allowed ? troupe::error{errc::out_of_range,
                                        where + " is not within what the peer has opened, bytes " +
                                            std::to_string(said.begin) + " to " +
                                            std::to_string(said.end) + " of its region"}
                        : troupe::error{errc::unauthorized,
                                        where + ": the peer has not permitted this direction"};
    }
  }
  if (failure) cut = true;
  return !failure;
}

completion batch_in_flight::outcome() const {
  completion made{.id = work.id,
                  .transfer = work.transfer,
                  .failure = failure,
                  .bytes = done,
                  .bad_segments = {}};
  if (failure) made.bad_segments.assign(bad.begin(), bad.end());
  return made;
}

}  // namespace troupe::transport::rdma
