#include "troupe/transport/shm/chunk_server.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace troupe::transport::shm {

namespace {

unexpected nonsense(const std::string& what) {
  return fail(errc::unauthorized, "the shm peer asked for " + what +
                                      ", which no Troupe does; its chunks were overwritten");
}

troupe::error revoked() {
  return {errc::grant_revoked, "the grant was revoked, or was never given on this link"};
}

/// Converts `runs` to memory of the granted region. `out_of_range`.
result<void> place(std::span<const chunk_run> runs, const given_grant& grant,
                   std::vector<staging::memory_run>& out) {
  out.clear();
  for (const auto& run : runs) {
    const extent range{run.offset, run.length, run.stride, run.count};
    if (auto ok = grant.check_place(range); !ok) return ok;
    out.push_back({grant.base + run.offset, run.length, run.stride, run.count,
                   grant.gpu.value_or(staging::memory_run::on_host)});
  }
  return {};
}

/// Checks that the runs fit into a chunk.
result<void> check_sizes(std::span<const chunk_run> runs) {
  std::uint64_t left = chunk_size;
  for (const auto& run : runs) {
    if (run.length == 0 || run.count == 0 || run.length > left / run.count) {
      return nonsense(std::to_string(run.count) + " x " + std::to_string(run.length) + " bytes");
    }
    left -= run.length * run.count;
  }
  return {};
}

}  // namespace

bool chunk_server::asked(const chunk_area& area) const noexcept {
  for (std::size_t i = 0; i < chunk_count; ++i) {
    if (area.state(i).asked.load(std::memory_order_acquire) != served_[i].number) return true;
  }
  return false;
}

result<chunk_server::news> chunk_server::serve(chunk_area& area) {
  news told;
  for (std::size_t i = 0; i < chunk_count; ++i) {
    auto& now = served_[i];
    if (now.copy) {
      if (!now.copy->ended.load(std::memory_order_acquire)) continue;
      const auto ended = std::exchange(now.copy, nullptr);
      const auto grant = std::exchange(now.grant, nullptr);
      auto failure = ended->failure;
      if (!failure && grant->guard.revoked()) failure = revoked();
      answer(area, i, failure);
      told.worked = told.answered = true;
    }
    const auto asked = area.state(i).asked.load(std::memory_order_acquire);
    if (asked == now.number) continue;
    if (asked != now.number + 1) return nonsense("request " + std::to_string(asked));
    thread_order{area.number(), static_cast<unsigned>(i)}.after_load();
    now.number = asked;
    told.worked = true;
    if (auto ok = take(area, i); !ok) return fail(std::move(ok).error());
    told.answered = told.answered || !now.copy;
  }
  return told;
}

/// An error ends the link; a request that is merely refused gets an answer.
result<void> chunk_server::take(chunk_area& area, std::size_t index) {
  auto& state = area.state(index);
  const auto what = taken_request(state);
  if (what.runs == 0 || what.runs > max_chunk_runs ||
      (what.dir != static_cast<std::uint32_t>(direction::write) &&
       what.dir != static_cast<std::uint32_t>(direction::read))) {
    return nonsense(std::to_string(what.runs) + " runs in direction " + std::to_string(what.dir));
  }
  asked_runs_ = taken_runs(state, what.runs, std::move(asked_runs_));
  if (auto ok = check_sizes(asked_runs_); !ok) return ok;
  if (auto ok = start(area, index, what); !ok) answer(area, index, ok.error());
  return {};
}

result<void> chunk_server::start(chunk_area& area, std::size_t index, const chunk_request& what) {
  const auto grant = grants_.find(what.grant);
  if (!grant || grant->guard.revoked()) return fail(revoked());
  const bool writes = what.dir == static_cast<std::uint32_t>(direction::write);
  if (auto ok = grant->check_use(writes ? access::write : access::read, transfer_id{what.transfer});
      !ok) {
    return ok;
  }
  if (auto ok = place(asked_runs_, *grant, runs_); !ok) return ok;
  if (auto ok = area.pin(copies_.pool().runtime(), grant->gpu.value_or(0)); !ok) return ok;
  const scoped_pin pin{grant->guard};
  if (!pin) return fail(revoked());
  served_[index].grant = grant;
  // The direction of `start` is relative to the chunk: `write` means into the chunk.
  served_[index].copy = copies_.start(staging::staging_chunk::somebody_elses(area.pinned(index)),
                                      {.dir = writes ? direction::read : direction::write,
                                       .runs = runs_,
                                       .from = {},
                                       .bytes = staging::bytes_of(runs_),
                                       .memory = {&grant->memory, 1},
                                       .transfer = grant->transfer,
                                       .batch = 0,
                                       .group = {}});
  return {};
}

void chunk_server::answer(chunk_area& area, std::size_t index,
                          const std::optional<troupe::error>& failure) {
  auto& state = area.state(index);
  chunk_answer said;
  if (failure) {
    said.status = static_cast<std::uint32_t>(failure->code);
    const auto length = std::min(failure->message.size(), said.sentence.size() - 1);
    std::copy_n(failure->message.begin(), length, said.sentence.begin());
  }
  state.answer = said;
  thread_order{area.number(), static_cast<unsigned>(index)}.before_store();
  state.answered.store(served_[index].number, std::memory_order_release);
}

}  // namespace troupe::transport::shm
