#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "troupe/actors/engine.hpp"

#include "processes.hpp"

namespace troupe::bench {

/// One block of the benchmark's own model has `segments_per_block` segments of `segment_bytes`.
inline constexpr std::size_t segments_per_block = 4;
inline constexpr std::size_t segment_bytes = 4096;
inline constexpr std::uint32_t pool_blocks = 4096;

/// Additional work of the prefill process for a benchmark.
class prefill_work {
 public:
  prefill_work() = default;
  prefill_work(const prefill_work&) = delete;
  prefill_work& operator=(const prefill_work&) = delete;
  virtual ~prefill_work() = default;
  /// Handles a letter that the cluster does not know, while none of the cluster's sends is live.
  /// Sends that it begins have ended when it returns.
  virtual void obey(char command, const control& parent) = 0;
};

struct cluster_options {
  std::string backend{"shm"};
  bool polling{false};
  std::string model{"{layers: 4, kv_heads: 2, head_dim: 32, dtype: fp16, block_tokens: 16}"};
  std::uint32_t tokens_per_request{16};  ///< one block of them, in the cluster's offers
  std::uint32_t blocks{pool_blocks};     ///< of the benchmark, in each pool
  std::uint64_t pool_bytes{std::uint64_t{64} << 20};
  std::string prefill_device{"cpu"};
  std::string decode_device{"cpu"};
  std::string transport_more{};  ///< e.g. ", xgmi: {copy_blocks: 16}"
  std::string deadline{"300s"};
  std::function<std::unique_ptr<prefill_work>(engine&)> work{};
};

/// A supervisor, a prefill node and a decode node, each in a process of its own. The calling
/// process becomes the decode node. A failure of any operation ends the benchmark.
class bench_cluster {
 public:
  explicit bench_cluster(const cluster_options& options);
  ~bench_cluster();
  bench_cluster(const bench_cluster&) = delete;
  bench_cluster& operator=(const bench_cluster&) = delete;

  [[nodiscard]] engine& node() { return *node_; }
  /// The prefill process, for orders to its `prefill_work`.
  [[nodiscard]] const control& peer() const { return peer_; }
  /// Makes progress until a message of the peer waits.
  void until_heard();
  /// Makes progress for this time.
  void rest(std::chrono::milliseconds time);
  /// Has the prefill engine offer requests `first` to `first + count - 1`; returns when it has.
  void offer(std::uint64_t first, std::uint64_t count, bool sealed = true);
  /// Waits until none of the prefill engine's sends is live.
  void drain();
  [[nodiscard]] std::uint64_t peer_resident();
  /// Lets a polling peer spin, or sleep while something else is measured.
  void spin(bool on);
  /// Starts to receive request `number` into `block`.
  void receive(std::uint64_t number, actors::transfer_mode mode, std::uint32_t block);
  /// Microseconds from `receive` to `done` of requests `first` to `first + count - 1`, one after
  /// the other, into blocks 0 and on: the median.
  [[nodiscard]] double one_by_one(actors::transfer_mode mode, std::uint64_t first, int count);
  /// Takes events until `done` or `unpinned` has reached the count.
  void until_done(std::uint64_t outcomes);
  void until_unpinned(std::uint64_t operations);

  std::uint64_t done{0};
  std::uint64_t unpinned{0};
  value_view last_value;

 private:
  void take(std::chrono::milliseconds timeout);

  const cluster_options options_;
  control supervisor_;
  control peer_;
  std::unique_ptr<engine> node_;
};

}  // namespace troupe::bench
