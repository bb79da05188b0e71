#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/region_table.hpp"

/// What every initiator checks of its own requests, whatever moves the bytes: the errors of
/// `link::post` and `link::send_frame` that need no wire.
namespace troupe::transport {

/// `out_of_range`: longer than `link::max_frame`.
[[nodiscard]] result<void> check_frame(std::size_t bytes);

/// The parts of a batch that belong to no piece: its direction, its frame. `invalid_config`,
/// `out_of_range`.
[[nodiscard]] result<void> check_batch(const batch& work);

/// Whether piece `index` of the batch may move between `local` and what its grant permits: the
/// grant is of this peer's life and of this transfer, allows this direction, and every segment lies
/// in the local region, in the remote one and in what is granted. `invalid_config` (no grant),
/// `stale_incarnation`, `unauthorized`, `out_of_range`; each sentence begins with the piece.
[[nodiscard]] result<void> check_piece(const batch& work, std::size_t index, incarnation peer,
                                       const region& local);

/// What `link::prepare` asks whatever moves the bytes: the direction, grants that stand, not more
/// segments than can be counted. Segments and grants are the backend's to check. The same errors.
[[nodiscard]] result<void> check_to_prepare(direction dir, const std::vector<piece>& pieces);

/// `link::prepare` for memory that the backend finds as `regions.use` does: `check_to_prepare`, then
/// `check_piece` of each piece. Their errors, and `unknown_region`.
[[nodiscard]] result<std::shared_ptr<const prepared_batch>> prepare_checked(
    direction dir, std::vector<piece> pieces, incarnation peer, const region_table& regions);

/// Whether a posting names segments that there are, and has a frame that fits. `out_of_range`.
[[nodiscard]] result<void> check_posting(const prepared_batch& what, const posting& how);

/// "piece 3: " before the sentence.
[[nodiscard]] unexpected in_piece(std::size_t index, const troupe::error& why);

}  // namespace troupe::transport
