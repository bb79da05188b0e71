#pragma once

/// How a process that was started for a stage becomes one of its nodes: the supervisor decides
/// which.
///
///     auto slot = leased_name::claim(deployment, "decode", {});
///     if (!slot) return slot.error();
///     auto node = start_with_name(deployment, **slot);  // of engine.hpp
///     // ... once `wait_registered` says so:
///     slot->reset();

#include <chrono>
#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

struct claim_options {
  /// How long to keep asking while no supervisor is there or no name is free. Negative: without
  /// limit.
  std::chrono::milliseconds limit{-1};
  /// Ends the claim (`aborted`): at once while it waits or looks for a supervisor, otherwise when
  /// the question in flight is over.
  std::stop_token given_up{};
};

/// A name that this process has claimed. It stays reserved as long as the object lives: a thread of
/// the object keeps asking, since a cache of hundreds of GiB may take a while to allocate.
class leased_name {
 public:
  /// Asks the deployment's supervisor at once and then after 50 ms, doubled each time up to the
  /// heartbeat interval, which is logged. Errors: `not_found` (no such stage), `invalid_config`
  /// (none of the stage's hosts is this one; another cluster's supervisor), `version_mismatch`,
  /// `peer_unreachable` (a host is `auto`, and no route leads to the supervisor); `deadline` with
  /// the last reason at the limit; `aborted` (`given_up` was requested). With `supervisor.begin`,
  /// begins a supervisor if none lives; `not_found` if there is no `troupe` command to begin it
  /// with.
  [[nodiscard]] static result<std::unique_ptr<leased_name>> claim(
      const config::deployment& deployment, const std::string& stage, const claim_options& options);
  /// Releases the name. A node that was admitted under it does not need the claim any more.
  virtual ~leased_name() = default;

  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  /// The incarnation that the node has to register with.
  [[nodiscard]] virtual std::uint64_t incarnation() const noexcept = 0;
};

}  // namespace troupe::actors
