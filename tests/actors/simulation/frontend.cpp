#include "frontend.hpp"

#include <utility>

#include "supervisor_life.hpp"

namespace troupe::actors::cluster_simulation {

namespace {

constexpr std::uint32_t retry_budget = 2;  // of `limits.retry_budget`

}  // namespace

frontend::frontend(world& in) : world_{in}, requests_(in.given.requests) {}

void frontend::begin() {
  const auto mean = microseconds{static_cast<std::int64_t>(1e6 / world_.given.requests_per_second)};
  // Give the nodes some time to come up.
  microseconds when = milliseconds{1500};
  for (std::uint32_t i = 0; i < requests_.size(); ++i) {
    when += world_.between(microseconds{0}, 2 * mean);
    if (world_.given.unasked_requests.contains(i)) {
      ++ended_;
      continue;
    }
    world_.time.after(when, [this, i] { place(i); });
  }
}

bool frontend::all_have_ended() const noexcept {
  return ended_ == requests_.size();
}

// -- placing

void frontend::place(std::uint32_t number) {
  auto& r = requests_[number];
  if (r.outcomes > 0) return;
  const auto asked = ++r.asked;
  placement_request wish;
  // The same id marks a repeated placement of one request; a new id carries no history.
  if (r.lost.empty()) r.as = "r" + std::to_string(number) + "-" + std::to_string(asked);
  wish.request = r.as;
  wish.failed = r.lost;
  wish.timeout_ms = 2000;
  const auto whom = world_.supervisor;
  world_.time.after(world_.one_way(), [this, number, asked, wish, whom] {
    world_.in(whom, [this, number, asked, wish, whom] {
      whom->place(wish, [this, number, asked, wish, whom](const placement& where) {
        world_.time.after(world_.one_way(), [this, number, asked, wish, where, whom] {
          placed(number, asked, wish.request, where, whom->number);
        });
      });
    });
  });
  // A supervisor that dies or is frozen with the request answers late or never.
  world_.time.after(milliseconds{3000}, [this, number, asked] {
    if (requests_[number].asked == asked) try_again(number);
  });
}

void frontend::placed(std::uint32_t number, std::uint64_t asked, const std::string& as,
                      const placement& where, std::uint32_t by) {
  auto& r = requests_[number];
  if (r.asked != asked || r.outcomes > 0) {
    if (where.failed == 0 && (r.as != as || r.outcomes > 0)) placed_request_ended(as);
    return;
  }
  ++r.asked;
  if (where.failed != 0) {
    ++world_.told.reasons[static_cast<errc>(where.failed)];
    r.lost.clear();
    return try_again(number);
  }
  ++world_.told.attempts;
  if (!r.lost.empty()) ++world_.told.placed_once_more;
  world_.require(where.attempt <= 1 + retry_budget,
                 "placed again more often than the budget allows");
  const auto attempt = std::make_shared<progress>(progress{
      number, as, nullptr, {where.decode.front().name, where.prefill.front().name}, false});
  attempt->what = std::make_shared<transfer>(
      world_, ++last_transfer_, where, stage_of_things{by, where.epoch},
      [this, known = std::weak_ptr{attempt}](side s, const std::optional<error>& why) {
        const auto of = known.lock();
        if (!of) return;
        // The engine's event travels to the frontend.
        world_.time.after(world_.one_way(), [this, of, s, why] { told(of, s, why); });
      });
  attempts_[last_transfer_] = attempt;
  call(attempt, prefill);
  call(attempt, decode);
}

void frontend::call(const std::shared_ptr<progress>& attempt, side s) {
  const auto at = attempt->what->at(s);
  const auto lost = [this, attempt, s] {
    told(attempt, s, error{errc::peer_lost, "its process is gone"});
  };
  if (!at->alive) {
    world_.time.after(world_.one_way() * 2, lost);
    return;
  }
  at->callers.emplace_back(lost);
  world_.time.after(world_.one_way(), [this, attempt, at, s] {
    world_.in(at, [attempt, s] {
      if (!attempt->ended) attempt->what->begin(s);
    });
  });
}

void frontend::placed_request_ended(const std::string& as) {
  const auto whom = world_.supervisor;
  world_.time.after(world_.one_way(), [this, whom, as] {
    world_.in(whom, [whom, as] { whom->placed_request_ended(as); });
  });
}

// -- outcomes

void frontend::told(const std::shared_ptr<progress>& attempt, side s,
                    const std::optional<error>& why) {
  if (attempt->ended) return;
  if (why) return attempt_failed(attempt, s, *why);
  if (s == prefill) return;  // the decode side's outcome counts
  attempt_ended(attempt);
  end(attempt->request, true);
}

void frontend::attempt_failed(const std::shared_ptr<progress>& attempt, side s, const error& why) {
  ++world_.told.reasons[why.code];
  attempt->ended = true;
  auto& lost = requests_[attempt->request].lost;
  lost.clear();
  // A side that reports a lost peer is alive itself, unless the report is about its own end.
  if (why.code == errc::peer_lost) {
    const bool itself = !attempt->what->at(s)->alive;
    lost = {attempt->nodes[itself ? s : other(s)]};
  } else if (why.code == errc::stale_incarnation) {
    lost = {attempt->nodes[s]};
  }
  if (lost.empty()) placed_request_ended(attempt->placed_as);
  for (const auto each : {decode, prefill}) {
    world_.time.after(world_.one_way(), [this, attempt, each] {
      world_.in(attempt->what->at(each), [attempt, each] { attempt->what->abort_session(each); });
    });
  }
  try_again(attempt->request);
}

void frontend::attempt_ended(const std::shared_ptr<progress>& attempt) {
  attempt->ended = true;
  placed_request_ended(attempt->placed_as);
}

void frontend::try_again(std::uint32_t number) {
  auto& r = requests_[number];
  if (r.outcomes > 0) return;
  if (++r.attempts >= most_attempts) {
    if (!r.lost.empty()) placed_request_ended(r.as);
    return end(number, false);
  }
  ++r.asked;
  world_.time.after(world_.between(milliseconds{1}, milliseconds{100}),
                    [this, number] { place(number); });
}

void frontend::end(std::uint32_t number, bool well) {
  world_.note(well ? "request done" : "request failed", number);
  world_.require(++requests_[number].outcomes == 1, "a request had two outcomes");
  ++(well ? world_.told.done : world_.told.failed);
  ++ended_;
}

void frontend::sweep() {
  std::erase_if(attempts_, [](const auto& one) {
    const auto& [number, attempt] = one;
    return attempt->ended && attempt->what->settled(decode) && attempt->what->settled(prefill);
  });
}

std::string frontend::unsettled() const {
  for (const auto& [number, attempt] : attempts_) {
    for (const auto s : {decode, prefill}) {
      if (!attempt->what->settled(s)) return attempt->what->standing();
    }
  }
  return {};
}

}  // namespace troupe::actors::cluster_simulation
