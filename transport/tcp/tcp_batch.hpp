#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/grant_table.hpp"
#include "troupe/transport/region_table.hpp"
#include "troupe/transport/tcp/outgoing.hpp"

namespace troupe::transport::tcp {

/// One lane's share of a batch at its initiator.
struct batch_part {
  std::shared_ptr<const std::vector<memory_run>> runs;
  run_cursor cursor;  ///< reads: how far the data have arrived
  std::uint64_t bytes{0};
  std::uint64_t left{0};  ///< reads: bytes that are still to arrive
  std::size_t lane{0};
  bool done{false};
};

/// A batch in flight at its initiator. Whoever holds the link's batch lock may touch it; `guard`
/// anyone.
struct flying_batch {
  std::uint64_t wire{0};  ///< its number on the wire, never reused on this link
  batch_id id;
  transfer_id transfer;
  direction dir{direction::write};
  std::uint64_t bytes{0};
  std::uint32_t segments{0};
  std::vector<batch_part> parts;
  std::size_t parts_left{0};
  std::vector<std::byte> frame;  ///< reads: sent when the data are here
  std::optional<troupe::error> failure;
  std::set<std::uint32_t> bad;
  std::vector<region_use> memory;
  std::shared_ptr<revocable> guard{std::make_shared<revocable>()};

  [[nodiscard]] batch_part* part_on(std::size_t lane) noexcept {
    for (auto& part : parts) {
      if (part.lane == lane) return &part;
    }
    return nullptr;
  }
  [[nodiscard]] completion outcome() const;
};

/// A checked batch, cut into what each lane carries. Jobs and parts are in the same order.
struct planned_batch {
  std::shared_ptr<flying_batch> batch;
  std::vector<std::shared_ptr<outgoing>> jobs;
};

/// What `plan_batch` needs to know of the link.
struct plan_context {
  const region_table& regions;
  incarnation peer;
  std::size_t lanes{1};
  std::uint64_t min_stripe{std::uint64_t{256} << 10};  ///< bytes below which a batch is not divided
};

/// Checks every segment against its region and its grant (the errors of `link::post`), pins the
/// regions and divides the bytes evenly over the lanes. Lanes are numbered from 0; the caller may
/// turn a batch of one part to another lane.
[[nodiscard]] result<planned_batch> plan_batch(batch&& work, std::uint64_t wire,
                                               const plan_context& with);

}  // namespace troupe::transport::tcp
