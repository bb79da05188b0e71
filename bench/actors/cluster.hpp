#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "troupe/actors/engine.hpp"

#include "processes.hpp"

namespace troupe::bench {

struct cluster_options {
  std::string backend{"shm"};
  bool polling{false};
};

/// One block of the benchmark's model has `segments_per_block` segments of `segment_bytes`.
inline constexpr std::size_t segments_per_block = 4;
inline constexpr std::size_t segment_bytes = 4096;
inline constexpr std::uint32_t tokens_per_request = 16;
inline constexpr std::uint32_t pool_blocks = 4096;

/// A supervisor, a prefill node and a decode node, each in a process of its own. The calling
/// process becomes the decode node. A failure of any operation ends the benchmark.
class bench_cluster {
 public:
  explicit bench_cluster(const cluster_options& options);
  ~bench_cluster();
  bench_cluster(const bench_cluster&) = delete;
  bench_cluster& operator=(const bench_cluster&) = delete;

  [[nodiscard]] engine& node() { return *node_; }
  /// The prefill engine offers requests `first` to `first + count - 1` and returns when it has.
  void offer(std::uint64_t first, std::uint64_t count, bool sealed = true);
  /// Waits until none of its sends is live.
  void drain();
  [[nodiscard]] std::uint64_t peer_resident();
  /// Lets a polling peer spin, or sleep while something else is measured.
  void spin(bool on);
  /// Starts to receive request `number` into `block`.
  void receive(std::uint64_t number, actors::transfer_mode mode, std::uint32_t block);
  /// Takes events until `done` or `unpinned` has come that far.
  void until_done(std::uint64_t outcomes);
  void until_unpinned(std::uint64_t operations);

  std::uint64_t done{0};
  std::uint64_t unpinned{0};
  value_view last_value;

 private:
  void take(std::chrono::milliseconds timeout);

  bool polling_;
  control supervisor_;
  control peer_;
  std::unique_ptr<engine> node_;
};

}  // namespace troupe::bench
