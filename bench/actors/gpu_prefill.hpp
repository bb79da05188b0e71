#pragma once

/// A prefill engine that computes on a GPU layer by layer, and pushes each layer after its kernel.

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "troupe/transport/xgmi/gpu_site.hpp"

#include "cluster.hpp"
#include "gpu_cache.hpp"

namespace troupe::bench {

struct request_shape {
  std::uint32_t tokens{0};
  std::vector<block_id> blocks{};  ///< of the prefill side's cache
};

/// The prefill side's measurements of one round.
struct prefill_times {
  clock_type::time_point began{};  ///< before the first kernel, or before the layers were ready
  double host{0};      ///< microseconds until the last kernel had ended, as seen by the host
  double gpu{0};       ///< the same from the first kernel to the last, by the GPU's clock
  double enqueued{0};  ///< until the host had launched and reported everything
};

/// A request's layers on a GPU of this process; its orders are below.
class gpu_prefill final : public prefill_work {
 public:
  gpu_prefill(engine& node, bool polling, std::uint32_t gpu, request_shape request);
  void obey(char command, const control& parent) override;

 private:
  void fill(const control& parent);
  void compute(const control& parent);
  void push(const control& parent, bool behind_kernels);
  /// Launches all layers; those of a `send` are reported as ready after their kernels.
  void launch(std::optional<operation_id> send);
  void progress();

  engine& node_;
  const bool polling_;
  const std::uint32_t gpu_;
  const request_shape request_;
  const gpu_cache cache_;
  const std::shared_ptr<transport::xgmi::gpu_site> site_;
  transport::xgmi::gpu_stream stream_;
  transport::xgmi::gpu_event computed_;
  void* first_;
  void* last_;
  std::vector<const std::uint64_t*> places_;  ///< by layer, on the GPU
  std::uint32_t runs_{0};                     ///< of each layer
  std::uint64_t seed_{0};
  std::uint32_t steps_{0};
  bool unpinned_{false};
};

/// Orders to the `gpu_prefill` of a cluster, from its decode process.
class gpu_prefill_orders {
 public:
  explicit gpu_prefill_orders(bench_cluster& cluster) : cluster_{cluster} {}
  /// Fills the whole cache with pattern `seed`.
  void fill(std::uint64_t seed);
  /// Fills all layers with pattern `seed`, with `steps` of arithmetic each; nothing is moved.
  [[nodiscard]] prefill_times compute(std::uint64_t seed, std::uint32_t steps);
  struct pushed {
    prefill_times prefill;
    double until_done{0};  ///< microseconds from `began` until the decode engine had `event_done`
  };
  /// Moves request `name` into `blocks`: the present cache, all layers at once.
  [[nodiscard]] pushed push(const std::string& name, const receive_spec& into);
  /// The same, each layer after the kernels that compute it.
  [[nodiscard]] pushed push_behind(const std::string& name, const receive_spec& into,
                                   std::uint64_t seed, std::uint32_t steps);

 private:
  [[nodiscard]] pushed carry_out(const std::string& name, const receive_spec& into);
  bench_cluster& cluster_;
};

}  // namespace troupe::bench
