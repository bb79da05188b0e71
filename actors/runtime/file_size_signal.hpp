#pragma once

#include <csignal>
#include <ctime>

#include <pthread.h>

namespace troupe::actors {

/// While it lives, exceeding the process's limit on file sizes (RLIMIT_FSIZE; shared memory is a
/// file) is an error of the call and does not end the process. Applies to this thread, and for ever
/// to threads that it starts meanwhile.
class file_size_signal {
 public:
  file_size_signal() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    blocks_ = ::pthread_sigmask(SIG_BLOCK, &signal_, &before_) == 0;
  }
  file_size_signal(const file_size_signal&) = delete;
  file_size_signal& operator=(const file_size_signal&) = delete;
  ~file_size_signal() {
    if (!blocks_ || sigismember(&before_, SIGXFSZ) != 0) return;
    const std::timespec none{};
    while (::sigtimedwait(&signal_, nullptr, &none) > 0) {
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t signal_{};
  sigset_t before_{};
  bool blocks_{false};
};

}  // namespace troupe::actors
