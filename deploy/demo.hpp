#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>

namespace troupe::deploy {

/// Bound on a prompt. A token is a byte; every token is computed twice, in the cluster and alone.
inline constexpr std::size_t max_prompt_bytes = 8192;

/// The options of `troupe demo`.
struct demo_options {
  std::string prompt;           ///< empty: the demo's own text
  std::string mode{"write"};    ///< write, read
  std::string backend{"auto"};  ///< one of `config::backend_words`
  std::uint32_t requests{1};
  std::uint32_t max_tokens{48};  ///< of each text
  std::string program;           ///< the `troupe` command to start nodes with; empty: this program
};

/// Starts a supervisor, a prefill and a decode process on this machine, sends prompts through them
/// and compares each text with what one process alone computes. Writes its progress to `out`, and
/// the cause of a failure to `complaints`. All processes that it started have ended when it
/// returns, also after SIGINT or SIGTERM. Call it before any other thread is made. The exit code: 0
/// all texts are identical, 1 they are not or something failed, 130 interrupted.
[[nodiscard]] int run_demo(const demo_options& options, std::ostream& out,
                           std::ostream& complaints);

}  // namespace troupe::deploy
