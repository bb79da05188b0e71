#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/tcp/outgoing.hpp"

namespace troupe::transport::tcp {

/// One lane's share of a batch at its initiator.
struct batch_part {
  outgoing job;                ///< what the lane sends for it
  staging::run_cursor cursor;  ///< reads: how far the data have arrived
  std::uint64_t left{0};       ///< reads: bytes that are still to arrive
  std::size_t lane{0};
  bool done{false};
  bool all_bad{false};                          ///< it failed, and nobody knows where
  bool staged{false};                           ///< some of it lies in memory of a GPU
  std::shared_ptr<staging::copy_group> copies;  ///< reads: into that
};

/// A batch in flight at its initiator: one piece of memory with everything in it, kept by whoever
/// still sends or receives a part. Whoever holds the link's batch lock may touch it; `guard`
/// anyone; a part's `job`, once it is pushed, its lane's sender.
struct batch_in_flight {
  explicit batch_in_flight(std::size_t parts_in_it)
      : parts_left{parts_in_it},
        parts_{std::make_unique<batch_part[]>(parts_in_it)},
        parts_count_{parts_in_it} {}

  std::uint64_t wire{0};  ///< its number on the wire, never reused on this link
  batch_id id;
  transfer_id transfer;
  direction dir{direction::write};
  std::uint64_t bytes{0};
  std::uint32_t segments{0};
  std::size_t parts_left;
  std::vector<std::byte> frame;  ///< reads: sent when the data are here
  std::optional<troupe::error> failure;
  std::set<std::uint32_t> bad;  ///< segments that the peer named
  std::vector<region_use> memory;
  revocable guard;
  bool reusable{false};  ///< of a prepared batch: it goes to the link's spare ones at its end

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
  /// Of a failed one the bad segments are those that the peer named, and all of the parts that it did
  /// not acknowledge or of which it named none.
  [[nodiscard]] completion outcome() const;
  /// Makes one of one part, which nobody else has any more, as good as new. Its memory is kept.
  void renew() noexcept;
  /// Of the first part and the frame: what `renew` keeps.
  [[nodiscard]] std::size_t kept_bytes() const noexcept;

 private:
  std::unique_ptr<batch_part[]> parts_;  // NOLINT(modernize-avoid-c-arrays): fixed, never moved
  std::size_t parts_count_;
};

/// The bytes from which on a batch is divided over lanes.
inline constexpr std::uint64_t min_striped = std::uint64_t{512} << 10;

/// What `plan_batch` needs to know of the link.
struct plan_context {
  const region_table& regions;
  incarnation peer;
  std::size_t lanes{1};
  std::uint64_t min_stripe{min_striped /
                           2};  ///< bytes of a lane, below which a batch is not divided
};

/// Fills a batch of one part with the segments that are posted. False, and then it is as it was: it
/// goes another way, over several lanes or through memory of GPUs. `unknown_region`.
[[nodiscard]] result<bool> fill_prepared(batch_in_flight& batch, const prepared_batch& what,
                                         const posting& how, std::uint64_t wire,
                                         const plan_context& with);

/// Checks every segment against its region and its grant (the errors of `link::post`), keeps the
/// regions registered and divides the bytes evenly over the lanes. Lanes are numbered from 0; the
/// caller may turn a batch of one part to another lane.
[[nodiscard]] result<std::shared_ptr<batch_in_flight>> plan_batch(batch&& work, std::uint64_t wire,
                                                                  const plan_context& with);

}  // namespace troupe::transport::tcp
