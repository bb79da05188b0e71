#pragma once

/// One process of the xgmi benchmark: its GPU, its memory, its ends of links.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "troupe/transport/endpoint.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

#include "processes.hpp"
#include "xgmi_pattern.hpp"

namespace troupe::bench {

/// The size of each of a process's two large regions: the one that is read and the one that is
/// written.
inline constexpr std::uint64_t pool_bytes = std::uint64_t{1} << 30;
/// Regions that are parts of one allocation, 64 MiB apart.
inline constexpr std::uint32_t parts = 40;
inline constexpr std::uint64_t part_distance = std::uint64_t{64} << 20;
inline constexpr std::uint64_t part_bytes = std::uint64_t{1} << 20;

/// The memory of a process on its GPU.
struct gpu_memory {
  std::shared_ptr<transport::xgmi::gpu_site> site;
  std::uint32_t gpu{0};
  std::byte* source{nullptr};
  std::byte* target{nullptr};
  std::byte* allocation{nullptr};  ///< that contains the parts

  /// The first GPU of this process, or the last.
  [[nodiscard]] static gpu_memory take(bool last);
  /// Fills sources with the pattern `seed`, targets with poison.
  void prepare(std::uint64_t seed) const;
};

enum class which : std::uint32_t { source, target, first_part };

/// One end of a link and its resources.
struct gpu_end {
  struct sink;
  std::unique_ptr<transport::endpoint> place;
  std::shared_ptr<sink> said;
  std::shared_ptr<transport::link> wire;
  std::vector<region_id> regions;  ///< by `which`, the parts at the end
  std::vector<std::shared_ptr<const transport::remote_grant>> theirs;

  /// Makes an endpoint and a link to the other process, which does the same.
  [[nodiscard]] static gpu_end join(const control& peer, const gpu_memory& memory, bool dials,
                                    const transport::xgmi_options& options);
  /// Posts all and polls until each has completed; microseconds from the first post to the last
  /// completion. A failure ends the process.
  double run(std::vector<transport::batch> work, double* posting = nullptr);
  void close();
};

struct gpu_end::sink final : transport::link_sink {
  void on_up() override { up = true; }
  void on_completion(transport::completion done) override;
  void on_frame(std::span<const std::byte>) override { ++frames; }
  void on_quiescent(transfer_id) override {}
  void on_broken(troupe::error why) override;
  bool up{false};
  bool closing{false};
  std::uint64_t completed{0};
  std::uint64_t frames{0};
};

/// Blocks scattered on both sides, equal in both processes for equal numbers.
struct shape {
  std::uint64_t length{0};
  std::uint32_t count{0};
  std::uint32_t from_shift{0};  ///< bytes by which the blocks are off a multiple of 64
  std::uint32_t to_shift{0};
  std::uint32_t mixed{0};    ///< 1: lengths between 1 and `length`
  std::uint32_t strided{0};  ///< 1: each block is 16 rows of a head slice
  std::uint32_t batches{1};  ///< in which the blocks are posted
  std::uint64_t seed{1};
};
[[nodiscard]] std::vector<segment> segments_of(const shape& of);
/// The source and the target of the segments.
[[nodiscard]] std::vector<moved_range> moved_by(std::span<const segment> segments,
                                                transport::direction dir);

/// The segments in `count` batches between the source here and the target there (writes), or the
/// other way round (reads).
[[nodiscard]] std::vector<transport::batch> batches_of(const gpu_end& end,
                                                       std::span<const segment> segments,
                                                       std::uint32_t count,
                                                       transport::direction dir);

}  // namespace troupe::bench
