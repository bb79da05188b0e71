#pragma once

#include <exception>

namespace troupe::deploy::cli {

/// While it lives, an unexpected end of the process is reported in one line on standard error, and
/// the process exits with `exit_code::failed` at once. Such ends are an exception out of a thread
/// (of a library, or through a defect of ours) and a library that calls `exit`. Without this object
/// the first is a signal and a core dump, the second a silent end with any code. Only one may live
/// at a time.
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
