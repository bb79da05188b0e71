#include "troupe/deploy/c/process_life.hpp"

#include <atomic>
#include <string>

#include <pthread.h>
#include <unistd.h>

namespace troupe::c {

namespace {

// Read in every call, which is cheaper than asking the kernel for the process id.
std::atomic<std::uint64_t> forks_so_far{
    0};                               // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<std::uint32_t> alive{0};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)
std::atomic<bool> begun_in_parent{
    false};  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

void in_child() {
  forks_so_far.fetch_add(1);
  if (alive.exchange(0) != 0) begun_in_parent.store(true);
}

void watch_forks() {
  static const int watched = ::pthread_atfork(nullptr, nullptr, in_child);
  (void)watched;
}

}  // namespace

result<void> process_life::can_begin(std::string_view what) {
  if (!begun_in_parent.load()) return {};
  std::string why{
      "this process was forked from one that had an engine or a cluster of Troupe, and "};
  why.append(what).append(
      " cannot be begun in it; start a new process (spawn, exec), or fork before the first one");
  return fail(errc::stale_incarnation, std::move(why));
}

process_life::process_life() : forks_{0}, pid_{::getpid()} {
  watch_forks();
  forks_ = forks_so_far.load();
  alive.fetch_add(1);
}

process_life::~process_life() {
  if (is_this_process()) alive.fetch_sub(1);
}

bool process_life::is_this_process() const noexcept {
  return forks_ == forks_so_far.load(std::memory_order_relaxed);
}

result<void> process_life::check(std::string_view what) const {
  if (is_this_process()) return {};
  std::string why{what};
  why.append(" was begun in process ").append(std::to_string(pid_)).append(", and this one, ");
  why.append(std::to_string(::getpid()))
      .append(", was forked from it without its threads; use it there, or spawn");
  return fail(errc::stale_incarnation, std::move(why));
}

}  // namespace troupe::c
