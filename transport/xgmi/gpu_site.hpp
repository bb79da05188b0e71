#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "troupe/transport/xgmi/gate_words.hpp"
#include "troupe/transport/xgmi/gpu_runtime.hpp"
#include "troupe/transport/xgmi/opened_allocations.hpp"
#include "troupe/transport/xgmi/opened_events.hpp"

namespace troupe::transport::xgmi {

/// The GPUs of one process and what it has open on them. One for all endpoints of the process, since
/// a driver counts by process.
struct gpu_site {
  explicit gpu_site(std::unique_ptr<gpu_runtime> with)
      : runtime{std::move(with)}, gates{*runtime}, opened{*runtime, gates}, events{*runtime} {}

  [[nodiscard]] std::vector<std::string> bus_ids() const;
  /// The index of the GPU with that bus id; empty: this process does not see it.
  [[nodiscard]] std::optional<std::uint32_t> index_of(const std::string& bus_id) const;
  /// Whether our GPU `device` may touch memory of a peer's, which this process need not see.
  [[nodiscard]] usability reaches(std::uint32_t device, const std::string& bus_id) const;

  /// Looks for GPUs at the first call.
  [[nodiscard]] static std::shared_ptr<gpu_site> of_process();
  /// What `of_process` makes at its first call instead, for tests.
  static void set_maker(std::function<std::shared_ptr<gpu_site>()> make);

  const std::unique_ptr<gpu_runtime> runtime;
  gate_words gates;
  opened_allocations opened;
  opened_events events;
};

}  // namespace troupe::transport::xgmi
