#include "troupe/deploy/interrupt_watch.hpp"

#include <ctime>
#include <utility>

namespace troupe::deploy {

interrupt_watch::interrupt_watch(std::function<void()> on_interrupt)
    : on_interrupt_{std::move(on_interrupt)} {
  sigemptyset(&watched_);
  sigaddset(&watched_, SIGINT);
  sigaddset(&watched_, SIGTERM);
  ::pthread_sigmask(SIG_BLOCK, &watched_, &before_);
  thread_ = std::thread{[this] { run(); }};
}

interrupt_watch::~interrupt_watch() {
  over_ = true;
  thread_.join();
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void interrupt_watch::run() {
  const timespec pause{0, 50'000'000};
  while (!over_) {
    if (::sigtimedwait(&watched_, nullptr, &pause) < 0) continue;
    interrupted_ = true;
    on_interrupt_();
  }
}

}  // namespace troupe::deploy
