#pragma once

#include <exception>

namespace troupe::deploy::cli {

/// While it lives, what ends the process behind the command's back is told in one line on standard
/// error, and the process ends with `exit_code::failed` at once: an exception out of a thread (of a
/// library, or by a defect of ours), and a library that calls `exit`. Without it the first is a signal
/// and a core, the second a silent end with any code. One at a time.
class last_words {
 public:
  last_words() noexcept;
  ~last_words();
  last_words(const last_words&) = delete;
  last_words& operator=(const last_words&) = delete;

 private:
  std::terminate_handler before_;
};

}  // namespace troupe::deploy::cli
