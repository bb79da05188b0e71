#include "troupe/deploy/cli/stop_signals.hpp"

#include <cerrno>
#include <system_error>

#include <poll.h>
#include <sys/signalfd.h>
#include <unistd.h>

namespace troupe::deploy::cli {

stop_signals::stop_signals() {
  sigemptyset(&watched_);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&watched_, signal);
  ::pthread_sigmask(SIG_BLOCK, &watched_, &before_);
  fd_ = ::signalfd(-1, &watched_, SFD_NONBLOCK | SFD_CLOEXEC);
  if (fd_ >= 0) return;
  const int why = errno;
  restore();
  throw std::system_error{why, std::generic_category(),
                          "cannot open a descriptor for SIGTERM and Ctrl-C"};
}

stop_signals::~stop_signals() {
  // Discards signals that arrived while the owner was already ending.
  while (wait(std::chrono::milliseconds{0})) {
  }
  if (fd_ >= 0) ::close(fd_);
  restore();
}

bool stop_signals::wait(std::chrono::milliseconds timeout) noexcept {
  pollfd fd{fd_, POLLIN, 0};
  const int ready = ::poll(&fd, 1, static_cast<int>(timeout.count()));
  if (ready <= 0) return false;
  signalfd_siginfo what{};
  return ::read(fd_, &what, sizeof what) == sizeof what;
}

void stop_signals::restore() noexcept {
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

}  // namespace troupe::deploy::cli
