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

/// The GPUs of one process and everything opened on them. Shared by all endpoints of the process,
/// since drivers account per process.
struct gpu_site {
  explicit gpu_site(std::unique_ptr<gpu_runtime> with)
      : runtime{std::move(with)}, gates{*runtime}, opened{*runtime, gates}, events{*runtime} {}

  [[nodiscard]] std::vector<std::string> bus_ids() const;
  /// The index of the GPU with this bus id. Empty if this process does not see it.
  [[nodiscard]] std::optional<std::uint32_t> index_of(const std::string& bus_id) const;
  /// Whether our GPU `device` can access memory of a peer's GPU, even one that this process does
  /// not see.
  [[nodiscard]] usability reaches(std::uint32_t device, const std::string& bus_id) const;

  /// Looks for GPUs at the first call.
  [[nodiscard]] static std::shared_ptr<gpu_site> of_process();
  /// Replaces what `of_process` creates at its first call, for tests.
  static void set_maker(std::function<std::shared_ptr<gpu_site>()> make);

  const std::unique_ptr<gpu_runtime> runtime;
  gate_words gates;
  opened_allocations opened;
  opened_events events;
};

}  // namespace troupe::transport::xgmi
