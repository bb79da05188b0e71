#pragma once

/// The supervisor of a deployment with `supervisor.begin`, which nobody has to start: whoever needs it
/// and finds none on the supervisor's host begins one, as a process of its own that outlives them.
/// Engines (`engine::start`, `claimed_slot::claim`) and the C library do so by themselves. A frontend in
/// C++:
///
///     cluster_client_options options;
///     options.find = look_for_supervisor(deployment, missing_supervisor::is_begun);
///     auto cluster = cluster_client::connect(options);
///
/// All of them are processes of one user, of one machine: they find each other by a file of that user's
/// (supervisor_notice.hpp). The one that begins it runs the `troupe` command, which is looked for
/// at $TROUPE_COMMAND; then it is this process's own program; then beside the library or the program
/// that this code is in, and in ../bin of it; then in $PATH.

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
  /// Of its process, and of its life; 0 where only the deployment says where it is.
  std::uint32_t pid{0};
  std::uint64_t incarnation{0};

  friend bool operator==(const found_supervisor&, const found_supervisor&) = default;
};

/// What becomes of whoever finds none.
enum class missing_supervisor : std::uint8_t { is_an_error, is_begun };

/// How long one that is begun may take until it listens.
inline constexpr std::chrono::milliseconds begin_patience{15'000};

/// What the supervisor of a deployment is found and begun with, read once: whoever looks again later, in a
/// program that may change its environment meanwhile, reads none of it again.
struct begun_terms {
  config::deployment deployment;
  bool is_here{false};                   ///< the supervisor's host is this machine
  result<std::string> folder;            ///< of what tells of it; an error: nothing says where
  std::vector<std::string> environment;  ///< of what is begun: "NAME=value" each
};
[[nodiscard]] begun_terms begun_terms_of(const config::deployment& of);

/// The one that lives now. Where the supervisor's host is not this machine: what the deployment says,
/// without asking whether it is there. Waits a moment for one that is about to say where it listens.
/// Errors: `not_found` (none lives), `deadline` (one lives and does not say where), `invalid_config` (it
/// is on another host, and its port is 0; the user's folder or the notice in it cannot be used; the folder
/// is shared with another machine or network namespace, and one lives there).
[[nodiscard]] result<found_supervisor> find_supervisor(const begun_terms& terms);
[[nodiscard]] result<found_supervisor> find_supervisor(const config::deployment& of);

/// The same, and begins one where none lives: of all that do so at once, one begins it. Errors as
/// above, and `not_found` (there is no `troupe` command to begin it with), `invalid_config` (its log is no
/// plain file), `peer_unreachable` (it ended before it listened), `deadline` (it has not listened within
/// `patience`), each with the end of its log; `aborted` (`given_up` said so). What was begun has
/// `begin_patience` to come to listen, whatever `patience` is: it goes on starting, and the next look of
/// this process goes on waiting for it. After `aborted` it does if it goes on by itself within a moment.
[[nodiscard]] result<found_supervisor> find_or_begin_supervisor(
    const begun_terms& terms, std::chrono::milliseconds patience = begin_patience,
    const std::stop_token& given_up = {});
[[nodiscard]] result<found_supervisor> find_or_begin_supervisor(
    const config::deployment& of, std::chrono::milliseconds patience = begin_patience,
    const std::stop_token& given_up = {});

/// The deployment with the address of its supervisor as it is now. Without `supervisor.begin`: as it was.
[[nodiscard]] result<config::deployment> with_supervisor(const config::deployment& of,
                                                         missing_supervisor missing);

/// Asks where the supervisor is now, and takes no longer than it is told. Thread-safe.
using supervisor_look = std::function<result<found_supervisor>(std::chrono::milliseconds patience)>;
/// Empty without `supervisor.begin`: it is where the deployment says. Reads the environment now, and not
/// when it is asked. `given_up` ends a look that is under way (`aborted`).
[[nodiscard]] supervisor_look look_for_supervisor(const config::deployment& of,
                                                  missing_supervisor missing,
                                                  const std::stop_token& given_up = {});

}  // namespace troupe::actors
