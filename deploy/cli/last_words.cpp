#include "troupe/deploy/cli/last_words.hpp"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <unistd.h>

#include "troupe/deploy/cli/exit_codes.hpp"

namespace troupe::deploy::cli {

namespace {

/// Whether a `last_words` lives. An `exit` handler cannot be unregistered.
std::atomic<bool> listening{false};

/// Writes the line and ends the process without destructors, since other threads still run.
/// Allocates no memory.
[[noreturn]] void end_with(const char* what, const char* why) noexcept {
  std::array<char, 512> line{};
  const int size = std::snprintf(line.data(), line.size(), "troupe: internal: %s: %s\n", what, why);
  if (size > 0) {
    [[maybe_unused]] const auto written =
        ::write(STDERR_FILENO, line.data(), std::strlen(line.data()));
  }
  ::_exit(to_int(exit_code::failed));
}

[[noreturn]] void on_terminate() noexcept {
  constexpr const char* what = "a thread ended by an exception, and this process with it";
  try {
    if (const auto thrown = std::current_exception()) std::rethrow_exception(thrown);
  } catch (const std::bad_alloc&) {
    end_with(what, "there was too little memory; give it more (ulimit -v, MemoryMax)");
  } catch (const std::exception& why) {
    end_with(what, why.what());
  } catch (...) {
    end_with(what, "the exception is of an unknown type");
  }
  end_with("std::terminate was called", "there was no exception; please report it with the log");
}

void on_exit_call(int code, void* /*unused*/) noexcept {
  if (!listening) return;
  std::array<char, 128> why{};
  // The code is usually an errno.
  (void)std::snprintf(why.data(), why.size(), "exit code %d (%s)", code,
                      code > 0 ? ::strerrordesc_np(code) : "no error");
  end_with("a library ended this process", why.data());
}

}  // namespace

last_words::last_words() noexcept : before_{std::set_terminate(on_terminate)} {
  static const int registered = ::on_exit(on_exit_call, nullptr);
  static_cast<void>(registered);
  listening = true;
}

last_words::~last_words() {
  listening = false;
  std::set_terminate(before_);
}

}  // namespace troupe::deploy::cli
