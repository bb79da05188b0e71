#include "troupe/deploy/orphan_wake.hpp"

#include <csignal>

#include <sys/prctl.h>

namespace troupe::deploy {

orphan_wake::orphan_wake() {
  int told = 0;
  ::prctl(PR_GET_PDEATHSIG, &told);
  if (told == SIGTERM) thread_ = std::jthread{[this](const std::stop_token& over) { watch(over); }};
}

void orphan_wake::watch(const std::stop_token& over) {
  // The kernel keeps this signal per thread and sends them all; the main thread's is SIGTERM.
  ::prctl(PR_SET_PDEATHSIG, SIGCONT);
  std::unique_lock lock{mutex_};
  ended_.wait(lock, over, [] { return false; });
}

}  // namespace troupe::deploy
