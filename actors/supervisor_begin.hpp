#pragma once

/// The supervisor of a deployment with `supervisor.begin`, which nobody has to start: a process
/// that needs it and finds none on the supervisor's host begins one, as a separate process that
/// outlives it. Engines (`engine::start`, `leased_name::claim`) and the C library do so by
/// themselves. A frontend in C++:
///
///     cluster_client_options options;
///     options.find = look_for_supervisor(deployment, missing_supervisor::is_begun);
///     auto cluster = cluster_client::connect(options);
///
/// All of these processes belong to one user on one machine: they find the supervisor by a file of
/// that user (supervisor_notice.hpp). The process that begins it runs the `troupe` command, which
/// is looked for at $TROUPE_COMMAND; then as this process's own program; then beside the library or
/// the program that contains this code, and in ../bin of it; then in $PATH.

#include <chrono>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "troupe/config/deployment.hpp"
#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Where a supervisor listens.
struct found_supervisor {
  std::string host;
  std::uint16_t port{0};
  /// Of its process and of its life; 0 if the address is only the deployment's.
  std::uint32_t pid{0};
  std::uint64_t incarnation{0};

  friend bool operator==(const found_supervisor&, const found_supervisor&) = default;
};

/// What to do if no supervisor is found.
enum class missing_supervisor : std::uint8_t { is_an_error, is_begun };

/// How long a supervisor that was begun may take until it listens.
inline constexpr std::chrono::milliseconds begin_patience{15'000};

/// What is needed to find and begin the supervisor of a deployment, read once: a later look does
/// not read the environment again, which the program may have changed meanwhile.
struct begun_terms {
  config::deployment deployment;
  bool is_here{false};                   ///< the supervisor's host is this machine
  result<std::string> folder;            ///< of the supervisor's notice; an error if unknown
  std::vector<std::string> environment;  ///< of the process to begin: "NAME=value" each
};
[[nodiscard]] begun_terms begun_terms_of(const config::deployment& of);

/// The supervisor that lives now. If the supervisor's host is not this machine: the deployment's
/// address, without checking that a supervisor is there. Waits a moment for a supervisor that is
/// about to say where it listens. Errors: `not_found` (none lives), `deadline` (one lives but does
/// not say where), `invalid_config` (it is on another host and its port is 0; the user's folder or
/// the notice in it cannot be used; the folder is shared with another machine or network namespace,
/// and one lives there).
[[nodiscard]] result<found_supervisor> find_supervisor(const begun_terms& terms);
[[nodiscard]] result<found_supervisor> find_supervisor(const config::deployment& of);

/// Same as `find_supervisor`, but begins a supervisor if none lives; of several concurrent callers,
/// only one does. Errors as above, and `not_found` (there is no `troupe` command to begin it with),
/// `invalid_config` (its log is no plain file), `peer_unreachable` (it ended before it listened),
/// `deadline` (it has not listened within `patience`), each with the end of its log; `aborted`
/// (`given_up` was requested). A supervisor that was begun has `begin_patience` to come to listen,
/// whatever `patience` is: it goes on starting, and the next look of this process goes on waiting
/// for it. After `aborted` that holds only if it goes on by itself within a moment.
[[nodiscard]] result<found_supervisor> find_or_begin_supervisor(
    const begun_terms& terms, std::chrono::milliseconds patience = begin_patience,
    const std::stop_token& given_up = {});
[[nodiscard]] result<found_supervisor> find_or_begin_supervisor(
    const config::deployment& of, std::chrono::milliseconds patience = begin_patience,
    const std::stop_token& given_up = {});

/// The deployment with the present address of its supervisor; unchanged without `supervisor.begin`.
[[nodiscard]] result<config::deployment> with_supervisor(const config::deployment& of,
                                                         missing_supervisor missing);

/// Asks where the supervisor is now, for at most `patience`. Thread-safe.
using supervisor_look = std::function<result<found_supervisor>(std::chrono::milliseconds patience)>;
/// Empty without `supervisor.begin`: the supervisor is where the deployment says. Reads the
/// environment now, not when the result is called. `given_up` ends a look in flight (`aborted`).
[[nodiscard]] supervisor_look look_for_supervisor(const config::deployment& of,
                                                  missing_supervisor missing,
                                                  const std::stop_token& given_up = {});

}  // namespace troupe::actors
