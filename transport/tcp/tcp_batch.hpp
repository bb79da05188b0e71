#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/tcp/outgoing.hpp"

namespace troupe::transport::tcp {

/// One lane's part of a batch at its initiator.
struct batch_part {
  outgoing job;                ///< what the lane sends for this part
  staging::run_cursor cursor;  ///< reads: position of the arriving data
  std::uint64_t left{0};       ///< reads: bytes still to arrive
  std::size_t lane{0};
  bool done{false};
  bool all_bad{false};                          ///< failed, with the bad segments unknown
  bool staged{false};                           ///< some of its memory is on a GPU
  std::shared_ptr<staging::copy_group> copies;  ///< reads: the copies into GPU memory
};

/// A batch in flight at its initiator, in one piece of memory shared by all that still send or
/// receive a part. Guarded by the link's batch lock, except for `guard`, which is thread-safe, and
/// a part's `job`, which belongs to its lane's sender once it is pushed.
struct batch_in_flight {
  explicit batch_in_flight(std::size_t parts_in_it)
      : parts_left{parts_in_it},
        parts_{std::make_unique<batch_part[]>(parts_in_it)},
        parts_count_{parts_in_it} {}

  std::uint64_t wire{0};  ///< number on the wire, never reused on this link
  batch_id id;
  transfer_id transfer;
  direction dir{direction::write};
  std::uint64_t bytes{0};
  std::uint32_t segments{0};
  std::size_t parts_left;
  std::vector<std::byte> frame;  ///< reads: sent once the data have arrived
  std::optional<troupe::error> failure;
  std::set<std::uint32_t> bad;  ///< segments that the peer named
  std::vector<region_use> memory;
  revocable guard;
  bool reusable{false};  ///< made for a prepared batch; the link keeps it for reuse

  [[nodiscard]] std::span<batch_part> parts() noexcept { return {parts_.get(), parts_count_}; }
  [[nodiscard]] std::span<const batch_part> parts() const noexcept {
    return {parts_.get(), parts_count_};
  }
  [[nodiscard]] batch_part* part_on(std::size_t lane) noexcept {
    for (auto& part : parts()) {
      if (part.lane == lane) return &part;
    }
    return nullptr;
  }
  /// If the batch failed, the bad segments are those that the peer named, and all segments of parts
  /// that it did not acknowledge or for which it named none.
  [[nodiscard]] completion outcome() const;
  /// Resets a batch of one part, to which nobody else has a reference. Keeps its memory.
  void renew() noexcept;
  /// Bytes of memory that `renew` keeps: of the first part and the frame.
  [[nodiscard]] std::size_t kept_bytes() const noexcept;

 private:
  std::unique_ptr<batch_part[]> parts_;  // NOLINT(modernize-avoid-c-arrays): fixed, never moved
  std::size_t parts_count_;
};

/// Batches of at least this many bytes are divided over lanes.
inline constexpr std::uint64_t min_striped = std::uint64_t{512} << 10;

/// What `plan_batch` needs from the link.
struct plan_context {
  const region_table& regions;
  incarnation peer;
  std::size_t lanes{1};
  std::uint64_t min_stripe{min_striped / 2};  ///< the fewest bytes per lane of a divided batch
};

/// Fills a batch of one part with the posted segments. Returns false, with the batch unchanged, if
/// it must go over several lanes or through GPU memory. `unknown_region`.
[[nodiscard]] result<bool> fill_prepared(batch_in_flight& batch, const prepared_batch& what,
                                         const posting& how, std::uint64_t wire,
                                         const plan_context& with);

/// Checks every segment against its region and its grant (the errors of `link::post`), keeps the
/// regions registered and divides the bytes evenly over the lanes. Lanes are numbered from 0; the
/// caller may move a batch of one part to another lane.
[[nodiscard]] result<std::shared_ptr<batch_in_flight>> plan_batch(batch&& work, std::uint64_t wire,
                                                                  const plan_context& with);

}  // namespace troupe::transport::tcp
