#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/region_table.hpp"

/// The checks that every initiator, over any backend, makes of its own requests: the errors of
/// `link::post` and `link::send_frame` that need no wire.
namespace troupe::transport {

/// `out_of_range`: longer than `link::max_frame`.
[[nodiscard]] result<void> check_frame(std::size_t bytes);

/// The parts of a batch that belong to no piece: its direction, its frame. `invalid_config`,
/// `out_of_range`.
[[nodiscard]] result<void> check_batch(const batch& work);

/// Whether piece `index` of the batch may move between `local` and its granted range: the grant
/// belongs to this incarnation of the peer and to this transfer, allows this direction, and every
/// segment lies in the local region, in the remote region and in the granted range.
/// `invalid_config` (no grant), `stale_incarnation`, `unauthorized`, `out_of_range`; each sentence
/// begins with the piece.
[[nodiscard]] result<void> check_piece(const batch& work, std::size_t index, incarnation peer,
                                       const region& local);

/// The checks of `link::prepare` that every backend shares: a valid direction, standing grants, a
/// segment count that fits its type. The backend checks segments and grants. The errors of
/// `check_piece`.
[[nodiscard]] result<void> check_to_prepare(direction dir, const std::vector<piece>& pieces);

/// `link::prepare` for backends that look memory up by `regions.use`: `check_to_prepare`, then
/// `check_piece` of each piece. Their errors, and `unknown_region`.
[[nodiscard]] result<std::shared_ptr<const prepared_batch>> prepare_checked(
    direction dir, std::vector<piece> pieces, incarnation peer, const region_table& regions);

/// Whether a posting names existing segments, and has a frame that fits. `out_of_range`.
[[nodiscard]] result<void> check_posting(const prepared_batch& what, const posting& how);

/// Puts "piece 3: " before the sentence.
[[nodiscard]] unexpected in_piece(std::size_t index, const troupe::error& why);

}  // namespace troupe::transport
