#include "troupe/deploy/c/io_handle.hpp"

// Plans and transfers of troupe/io.h.

namespace troupe::c {

namespace {

/// A list of C structs, each converted by `turn`.
template <class Ours, class Given, class Turn>
result<std::vector<Ours>> turned(const Given* given, std::size_t count, const char* name,
                                 Turn turn) {
  const auto all = list(given, count, name);
  if (!all) return fail(all.error());
  std::vector<Ours> out;
  out.reserve(count);
  for (const auto& one : *all) {
    if (one.reserved != 0) {
      return bad_argument("`" + std::string{name} + "[" + std::to_string(out.size()) +
                          "].reserved` is not 0");
    }
    out.push_back(turn(one));
  }
  return out;
}

std::uint32_t once_at_least(std::uint32_t count) noexcept {
  return std::max(count, 1U);
}

result<std::vector<io::entry>> entries_of(const troupe_io_entry* given, std::size_t count) {
  return turned<io::entry>(given, count, "entries", [](const troupe_io_entry& one) {
    return io::entry{one.address, one.length, one.stride, once_at_least(one.count)};
  });
}

result<transport::direction> direction_of(std::uint32_t given) {
  if (auto known = in_range(given, TROUPE_IO_WRITE, TROUPE_IO_READ, "direction"); !known)
    return fail(known.error());
  return static_cast<transport::direction>(given);
}

/// Copies as much of the sentence as fits, without splitting a character.
template <std::size_t size>
void copy_sentence(const std::string& from, char (&to)[size]) noexcept {
  auto length = std::min(from.size(), size - 1);
  if (length < from.size()) {
    while (length > 0 && (static_cast<unsigned char>(from[length]) & 0xC0U) == 0x80U) --length;
  }
  std::memcpy(to, from.data(), length);
  to[length] = '\0';
}

troupe_io_status status_for_c(const io::status& now) noexcept {
  troupe_io_status out{};
  out.state = static_cast<std::uint32_t>(now.now);
  out.bytes = now.bytes;
  out.bad_count = static_cast<std::uint32_t>(now.bad_entries.size());
  if (now.why) {
    out.code = code_of(now.why->code);
    copy_sentence(now.why->message, out.reason);
  }
  return out;
}

/// Runs the body of a call that waits: TROUPE_TIMED_OUT if it returns false.
template <class Body>
troupe_status until_over(troupe_io_agent* agent, const Body& body) noexcept {
  bool is_over = true;
  const auto status = on_agent(agent, [&](io::agent& self) -> result<void> {
    const auto over = body(self);
    if (!over) return fail(over.error());
    is_over = *over;
    return {};
  });
  return is_over ? status
                 : refuse(TROUPE_TIMED_OUT, "transfers go on; the time to wait for them is over");
}

/// Waits for one transfer and reads its status.
result<bool> finish(const troupe_io_agent& agent, io::agent& self, troupe_io_transfer transfer,
                    uint64_t timeout_ms, troupe_io_status* status) {
  const io::transfer_handle one{transfer};
  const auto over = wait_in_steps(agent, milliseconds(timeout_ms), [&](auto step) {
    return self.wait({&one, 1}, io::wait_for::all, step) == 1;
  });
  if (!over) return over;
  const auto now = self.status_of(one);
  if (!now) return fail(now.error());
  write(status_for_c(*now), status);
  return over;
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

// -- plans

troupe_status troupe_io_prepare_pieces(troupe_io_agent* agent, const troupe_io_piece* pieces,
                                       size_t count, troupe_io_plan* plan) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(plan, "plan"); !out) return out;
    const auto all = turned<io::piece>(pieces, count, "pieces", [](const troupe_io_piece& one) {
      return io::piece{io::memory_id{one.memory}, one.offset, one.length, one.stride,
                       once_at_least(one.count)};
    });
    if (!all) return fail(all.error());
    return made(self.prepare(std::span<const io::piece>{*all}), plan);
  });
}

troupe_status troupe_io_prepare_local(troupe_io_agent* agent, const troupe_io_entry* entries,
                                      size_t count, troupe_io_plan* plan) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(plan, "plan"); !out) return out;
    const auto all = entries_of(entries, count);
    if (!all) return fail(all.error());
    return made(self.prepare(std::span<const io::entry>{*all}), plan);
  });
}

troupe_status troupe_io_prepare_remote(troupe_io_agent* agent, troupe_io_peer peer,
                                       const troupe_io_entry* entries, size_t count,
                                       troupe_io_plan* plan) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(plan, "plan"); !out) return out;
    const auto all = entries_of(entries, count);
    if (!all) return fail(all.error());
    return made(self.prepare(io::peer_id{peer}, *all), plan);
  });
}

troupe_status troupe_io_session(troupe_io_agent* agent, troupe_io_memory memory,
                                troupe_io_peer peer, uint64_t number, troupe_io_plan* plan) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(plan, "plan"); !out) return out;
    return made(self.session(io::memory_id{memory}, io::peer_id{peer}, number), plan);
  });
}

troupe_status troupe_io_release_plan(troupe_io_agent* agent, troupe_io_plan plan) {
  return on_agent(agent, [&](io::agent& self) { return self.release(io::plan_id{plan}); });
}

// -- transfers

troupe_status troupe_io_make(troupe_io_agent* agent, uint32_t direction, troupe_io_plan local,
                             const uint32_t* local_index, size_t local_count, troupe_io_plan remote,
                             const uint32_t* remote_index, size_t remote_count, uint32_t flags,
                             troupe_io_transfer* transfer) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(transfer, "transfer"); !out) return out;
    const auto dir = direction_of(direction);
    if (!dir) return fail(dir.error());
    const auto here = numbers(local_index, local_count, "local_index");
    if (!here) return fail(here.error());
    const auto there = numbers(remote_index, remote_count, "remote_index");
    if (!there) return fail(there.error());
    if (auto known = known_flags(flags, TROUPE_IO_MERGE, "flags"); !known) return known;
    const auto merge =
        (flags & TROUPE_IO_MERGE) != 0 ? io::merge_entries::yes : io::merge_entries::no;
    return made(self.make(*dir, io::plan_id{local}, *here, io::plan_id{remote}, *there, merge),
                transfer);
  });
}

troupe_status troupe_io_post(troupe_io_agent* agent, troupe_io_transfer transfer,
                             const void* notice, size_t notice_size, uint64_t deadline_ms) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    const auto note = bytes(notice, notice_size, "notice");
    if (!note) return fail(note.error());
    return self.post(io::transfer_handle{transfer}, *note, milliseconds(deadline_ms));
  });
}

troupe_status troupe_io_move(troupe_io_agent* agent, uint32_t direction, troupe_io_plan session,
                             const troupe_io_segment* segments, size_t count, const void* notice,
                             size_t notice_size, uint64_t deadline_ms,
                             troupe_io_transfer* transfer) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(transfer, "transfer"); !out) return out;
    const auto dir = direction_of(direction);
    if (!dir) return fail(dir.error());
    const auto all = turned<segment>(segments, count, "segments", [](const troupe_io_segment& one) {
      return segment{one.local_offset, one.remote_offset, one.length,
                     one.local_stride, one.remote_stride, once_at_least(one.count)};
    });
    if (!all) return fail(all.error());
    const auto note = bytes(notice, notice_size, "notice");
    if (!note) return fail(note.error());
    return made(self.move(*dir, io::plan_id{session}, *all, *note, milliseconds(deadline_ms)),
                transfer);
  });
}

troupe_status troupe_io_read_status(const troupe_io_agent* agent, troupe_io_transfer transfer,
                                    troupe_io_status* status, uint32_t* bad, size_t capacity) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = writable(status, "status"); !out) return out;
    if (capacity != 0)
      if (auto out = present(bad, "bad"); !out) return out;
    const auto now = self.status_of(io::transfer_handle{transfer});
    if (!now) return fail(now.error());
    std::copy_n(now->bad_entries.begin(), std::min(capacity, now->bad_entries.size()), bad);
    write(status_for_c(*now), status);
    return {};
  });
}

troupe_status troupe_io_wait(troupe_io_agent* agent, const troupe_io_transfer* transfers,
                             size_t count, uint32_t how_many, uint64_t timeout_ms, size_t* ended) {
  return until_over(agent, [&](io::agent& self) -> result<bool> {
    const auto given = list(transfers, count, "transfers");
    if (!given) return fail(given.error());
    if (auto known = in_range(how_many, TROUPE_IO_ALL, TROUPE_IO_ANY, "how_many"); !known)
      return fail(known.error());
    std::vector<io::transfer_handle> those;
    those.reserve(count);
    for (const auto one : *given) those.emplace_back(one);
    const auto rule = how_many == TROUPE_IO_ALL ? io::wait_for::all : io::wait_for::any;
    const auto wanted = how_many == TROUPE_IO_ALL ? count : std::min<size_t>(count, 1);
    size_t so_far = 0;
    const auto over = wait_in_steps(*agent, milliseconds(timeout_ms), [&](auto step) {
      so_far = self.wait(those, rule, step);
      return so_far >= wanted;
    });
    if (over && ended) *ended = so_far;
    return over;
  });
}

troupe_status troupe_io_finish(troupe_io_agent* agent, troupe_io_transfer transfer,
                               uint64_t timeout_ms, troupe_io_status* status) {
  return until_over(agent, [&](io::agent& self) -> result<bool> {
    if (auto out = writable(status, "status"); !out) return fail(out.error());
    return finish(*agent, self, transfer, timeout_ms, status);
  });
}

troupe_status troupe_io_run(troupe_io_agent* agent, troupe_io_transfer transfer, const void* notice,
                            size_t notice_size, uint64_t deadline_ms, uint64_t timeout_ms,
                            troupe_io_status* status) {
  return until_over(agent, [&](io::agent& self) -> result<bool> {
    if (auto out = writable(status, "status"); !out) return fail(out.error());
    const auto note = bytes(notice, notice_size, "notice");
    if (!note) return fail(note.error());
    const auto caller = timeout_ms != 0 ? io::then::waits : io::then::goes_on;
    const auto posted =
        self.post(io::transfer_handle{transfer}, *note, milliseconds(deadline_ms), caller);
    if (!posted) return fail(posted.error());
    return finish(*agent, self, transfer, timeout_ms, status);
  });
}

troupe_status troupe_io_cancel(troupe_io_agent* agent, troupe_io_transfer transfer) {
  return on_agent(agent,
                  [&](io::agent& self) { return self.cancel(io::transfer_handle{transfer}); });
}

troupe_status troupe_io_release_transfer(troupe_io_agent* agent, troupe_io_transfer transfer) {
  return on_agent(agent,
                  [&](io::agent& self) { return self.release(io::transfer_handle{transfer}); });
}
