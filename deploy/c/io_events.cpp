#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>

#include <poll.h>

#include "troupe/deploy/c/io_handle.hpp"

// Notices and events of troupe/io.h.

namespace troupe::c {

namespace {

/// Owns what a notice for C points to; `troupe_io_notice::from` is the address of one. Made before
/// the notice is taken: a call that finds no memory then has not lost the notice.
struct kept_notice {
  std::array<char, 257> from{};  // the longest name of an agent, NUL-terminated
  std::vector<std::byte> bytes;
};
static_assert(std::is_standard_layout_v<kept_notice>);

troupe_io_notice notice_for_c(io::notice came, std::unique_ptr<kept_notice> keeper) noexcept {
  auto& kept = *keeper.release();
  came.from.copy(kept.from.data(), kept.from.size() - 1);
  kept.bytes = std::move(came.bytes);
  // Not NULL, even if there are none.
  const void* first = kept.bytes.empty() ? static_cast<void*>(kept.from.data()) : kept.bytes.data();
  return {came.life.value, kept.from.data(), first, kept.bytes.size()};
}

/// Without memory for the sentence the event has only its code.
char* sentence_for_c(const std::string& sentence) noexcept {
  try {
    return copy_for_c(sentence);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

troupe_io_event event_for_c(const io::event& what) noexcept {
  troupe_io_event out{};
  switch (what.what) {
    case io::event_kind::transfer_ended: out.kind = TROUPE_IO_TRANSFER_ENDED; break;
    case io::event_kind::peer_lost: out.kind = TROUPE_IO_PEER_LOST; break;
    case io::event_kind::notices_wait: out.kind = TROUPE_IO_NOTICES_WAIT; break;
    case io::event_kind::notices_lost: out.kind = TROUPE_IO_NOTICES_LOST; break;
  }
  out.transfer = what.which.value;
  out.peer = what.who.value;
  if (what.why) {
    out.code = code_of(what.why->code);
    out.reason = sentence_for_c(what.why->message);
  }
  return out;
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_status troupe_io_notify(troupe_io_agent* agent, troupe_io_peer peer, const void* given,
                               size_t byte_count) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    const auto note = bytes(given, byte_count, "bytes");
    if (!note) return fail(note.error());
    return self.notify(io::peer_id{peer}, *note);
  });
}

troupe_status troupe_io_take_notices(troupe_io_agent* agent, troupe_io_notice* notices,
                                     size_t notice_size, size_t capacity, uint64_t timeout_ms,
                                     size_t* count) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    auto to = array_of(notices, notice_size, capacity, "notice");
    if (!to) return fail(to.error());
    std::unique_ptr<kept_notice> keeper;
    const auto came = wait_in_steps(*agent, milliseconds(timeout_ms), [&](auto step) {
      static_cast<void>(self.wait_for_notices(step));
      fill(*to, [&] {
        if (!keeper) keeper = std::make_unique<kept_notice>();
        auto next = self.take_notices(1);
        if (next.empty()) return false;
        to->add(notice_for_c(std::move(next.front()), std::move(keeper)));
        return true;
      });
      return to->count() != 0;
    });
    if (!came) return fail(came.error());
    *count = to->count();
    return {};
  });
}

void troupe_io_notices_free(troupe_io_notice* notices, size_t notice_size, size_t count) {
  if (!notices || notice_size < sizeof(troupe_io_notice)) return;
  auto* at = reinterpret_cast<std::byte*>(notices);
  for (size_t i = 0; i < count; ++i, at += notice_size) {
    auto* each = reinterpret_cast<troupe_io_notice*>(at);
    delete reinterpret_cast<const kept_notice*>(each->from);
    each->bytes = nullptr;
    each->from = nullptr;
    each->byte_count = 0;
  }
}

troupe_status troupe_io_event_fd(const troupe_io_agent* agent, int* fd) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(fd, "fd"); !out) return out;
    *fd = self.event_fd();
    return {};
  });
}

troupe_status troupe_io_take(troupe_io_agent* agent, troupe_io_event* events, size_t event_size,
                             size_t capacity, uint64_t timeout_ms, size_t* count) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    auto to = array_of(events, event_size, capacity, "event");
    if (!to) return fail(to.error());
    const auto take = [&] {
      fill(*to, [&] {
        const auto next = self.take(1);
        if (next.empty()) return false;
        to->add(event_for_c(next.front()));
        return true;
      });
      return to->count() != 0;
    };
    const auto came = wait_in_steps(*agent, milliseconds(timeout_ms), [&](auto step) {
      if (take() || step.count() == 0) return to->count() != 0;
      if (agent->polling) {
        if (!self.poll()) std::this_thread::yield();
      } else {
        pollfd readable{self.event_fd(), POLLIN, 0};
        (void)::poll(&readable, 1, static_cast<int>(step.count()));
      }
      return take();
    });
    if (!came) return fail(came.error());
    *count = to->count();
    return {};
  });
}

void troupe_io_events_free(troupe_io_event* events, size_t event_size, size_t count) {
  if (!events || event_size < sizeof(troupe_io_event)) return;
  auto* at = reinterpret_cast<std::byte*>(events);
  for (size_t i = 0; i < count; ++i, at += event_size) {
    auto* each = reinterpret_cast<troupe_io_event*>(at);
    std::free(each->reason);
    each->reason = nullptr;
  }
}

troupe_status troupe_io_poll(troupe_io_agent* agent, uint32_t* worked) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    const bool done = self.poll();
    if (worked) *worked = done ? 1 : 0;
    return {};
  });
}
