#pragma once

#include <functional>
#include <thread>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

/// A thread that no signal of the process is handed to, SIGPIPE included: OpenSSL writes to sockets
/// without saying that it does not want one. `name`: at most 15 characters.
[[nodiscard]] result<std::thread> start_quiet_thread(const char* name, std::function<void()> body);

}  // namespace troupe::actors
