#include "troupe/actors/door/door_thread.hpp"

#include <csignal>
#include <system_error>
#include <utility>

#include <pthread.h>

namespace troupe::actors {

result<std::thread> start_quiet_thread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread made;
  try {
    made = std::thread{std::move(body)};  // inherits the mask
  } catch (const std::system_error& problem) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return fail(errc::overloaded, "no thread for the cluster port: " + problem.code().message() +
                                      "; allow the process more of them (ulimit -u)");
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  ::pthread_setname_np(made.native_handle(), name);
  return made;
}

}  // namespace troupe::actors
