#pragma once

/// The opaque type of troupe/io.h.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "troupe/deploy/c/arguments.hpp"
#include "troupe/deploy/c/process_life.hpp"
#include "troupe/deploy/c/status.hpp"
#include "troupe/io.h"
#include "troupe/io/agent.hpp"

struct troupe_io_agent {
  troupe_io_agent() = default;
  ~troupe_io_agent();
  troupe_io_agent(const troupe_io_agent&) = delete;
  troupe_io_agent& operator=(const troupe_io_agent&) = delete;

  troupe::c::process_life life;
  bool polling{false};
  std::atomic<bool> closing{false};
  mutable std::shared_mutex in_use;  ///< shared by calls, exclusive for the agent's end
  std::unique_ptr<troupe::io::agent> self;
};

namespace troupe::c {

template <>
inline constexpr std::uint32_t first_size<troupe_io_options> = offsetof(troupe_io_options,
                                                                        grant_timeout_ms);

[[nodiscard]] inline unexpected agent_was_closed() {
  return fail(errc::aborted, "the agent was closed; create another one");
}

/// Runs the body of a call on an agent that belongs to this process and is not closed.
template <class Body>
troupe_status on_agent(const troupe_io_agent* agent, Body&& body) noexcept {
  return guarded([&]() -> result<void> {
    if (auto here = present(agent, "agent"); !here) return here;
    if (auto ours = agent->life.check("the agent"); !ours) return ours;
    if (agent->closing.load())
      return agent_was_closed();  // the closing thread must not wait for further calls
    const std::shared_lock lock{agent->in_use};
    if (!agent->self) return agent_was_closed();
    return std::forward<Body>(body)(*agent->self);
  });
}

/// Stores the number of the object that a call made.
template <class Id>
[[nodiscard]] result<void> made(result<Id> id, std::uint64_t* out) {
  if (!id) return fail(std::move(id).error());
  *out = id->value;
  return {};
}

/// Calls `step` with a part of the timeout until it returns true. The steps are short so that
/// closing the agent need not wait for long. Returns whether a step returned true; `aborted` if the
/// agent is being closed.
template <class Step>
[[nodiscard]] result<bool> wait_in_steps(const troupe_io_agent& agent,
                                         std::chrono::milliseconds timeout, Step step) {
  using std::chrono::milliseconds;
  constexpr milliseconds longest{100};
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(end - std::chrono::steady_clock::now());
    if (step(std::clamp(left, milliseconds{0}, longest))) return true;
    if (left.count() <= 0) return false;
    if (agent.closing.load()) return agent_was_closed();
  }
}

/// A checked array of the caller. `name` is singular: "event".
template <class Struct>
[[nodiscard]] result<filled_array<Struct>> array_of(Struct* first, std::size_t size,
                                                    std::size_t capacity, const std::string& name) {
  if (auto here = present(first, name + "s"); !here) return fail(here.error());
  if (size < sizeof(Struct) || size > max_struct_bytes) {
    return bad_argument("`" + name + "_size` is not the size of a troupe_io_" + name +
                        "; give sizeof(troupe_io_" + name + ")");
  }
  if (capacity == 0) return bad_argument("`capacity` is 0; give room for one");
  return filled_array{first, size, capacity};
}

}  // namespace troupe::c
