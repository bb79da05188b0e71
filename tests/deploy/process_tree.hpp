#pragma once

/// The child processes of a process.

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

#include <sys/types.h>

#include "text_of.hpp"
#include "waiting.hpp"

namespace troupe::testing {

struct process_standing {
  char state{0};  ///< as `ps` shows it; 0 if there is no such process
  pid_t parent{0};
};

inline process_standing standing_of(const std::string& number) {
  const auto stat = text_of("/proc/" + number + "/stat");
  const auto name_end = stat.rfind(')');  // the name may contain anything
  process_standing found;
  if (name_end == std::string::npos) return found;
  std::istringstream rest{stat.substr(name_end + 1)};
  rest >> found.state >> found.parent;
  return found;
}

inline std::vector<pid_t> children_of(pid_t parent) {
  std::vector<pid_t> found;
  std::error_code failed;
  for (std::filesystem::directory_iterator it{"/proc", failed}, end; !failed && it != end;
       it.increment(failed)) {
    const auto name = it->path().filename().string();
    const bool number = std::ranges::all_of(
        name, [](char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; });
    if (number && standing_of(name).parent == parent)
      found.push_back(static_cast<pid_t>(std::stol(name)));
  }
  return found;
}

/// Waits for that many children. Returns those that there are.
inline std::vector<pid_t> wait_for_children(pid_t parent, std::size_t count) {
  std::vector<pid_t> found;
  (void)comes_true([&] {
    found = children_of(parent);
    return found.size() >= count;
  });
  return found;
}

/// When this returns, all are stopped: a later signal cannot overtake the stop.
inline void freeze(const std::vector<pid_t>& all) {
  for (const auto pid : all) ::kill(pid, SIGSTOP);
  for (const auto pid : all)
    (void)comes_true([pid] { return standing_of(std::to_string(pid)).state == 'T'; });
}

}  // namespace troupe::testing
