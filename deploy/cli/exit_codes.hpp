#pragma once

namespace troupe::deploy::cli {

/// Exit codes of the `troupe` command. Scripts rely on the numbers.
enum class exit_code : int {
  ok = 0,
  failed = 1,         ///< the operation was tried and failed; standard error says why
  usage = 2,          ///< wrong arguments, or a deployment file that is not valid
  incomplete = 3,     ///< `status`: the supervisor answered, but not every node is up; `drain`: the
                      ///< node has left, but not with everything that it had ended
  replaced = 4,       ///< `node`: another process has its name now; a restart would not help
  interrupted = 130,  ///< Ctrl-C or SIGTERM before a `demo`, `ask` or `bench` had finished
};

[[nodiscard]] constexpr int to_int(exit_code code) noexcept {
  return static_cast<int>(code);
}

inline constexpr const char* exit_codes_text =
    "Exit codes: 0 done; 1 it failed, standard error says why; 2 wrong arguments or an invalid\n"
    "deployment file; 3 status: not every node is up, drain: the node left with work\n"
    "unfinished; 4 node: another process took its place; 130 demo, ask, bench: interrupted.";

}  // namespace troupe::deploy::cli
