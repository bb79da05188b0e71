#pragma once

#include <chrono>
#include <iosfwd>
#include <string>

namespace troupe::deploy::cli {

/// How far something is: one line that is written over on a terminal, a line of its own once a
/// second elsewhere.
class progress_line {
 public:
  progress_line(std::ostream& out, bool terminal) : out_{out}, terminal_{terminal} {}
  /// Takes the line away from the terminal.
  ~progress_line();
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;

  /// `share` is 0 to 1, `text` what stands behind the bar.
  void show(double share, const std::string& text);

 private:
  std::ostream& out_;
  const bool terminal_;
  bool shown_{false};
  std::chrono::steady_clock::time_point next_{std::chrono::steady_clock::now() +
                                              std::chrono::seconds{1}};
};

/// "[#####---------------]  25%"
[[nodiscard]] std::string bar_text(double share);

}  // namespace troupe::deploy::cli
