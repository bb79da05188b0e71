#pragma once

#include <chrono>
#include <iosfwd>
#include <string>

namespace troupe::deploy::cli {

/// A progress display: one line that is overwritten on a terminal, else a new line once a second.
class progress_line {
 public:
  progress_line(std::ostream& out, bool terminal) : out_{out}, terminal_{terminal} {}
  /// Clears the line from the terminal.
  ~progress_line();
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;

  /// `share` is 0 to 1; `text` follows the bar.
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
