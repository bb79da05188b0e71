#pragma once

#include <functional>
#include <thread>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// Starts a thread that blocks all signals, SIGPIPE included: OpenSSL writes to sockets without
/// MSG_NOSIGNAL. `name`: at most 15 characters.
[[nodiscard]] result<std::thread> start_quiet_thread(const char* name, std::function<void()> body);

}  // namespace troupe::actors
