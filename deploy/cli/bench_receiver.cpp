#include "troupe/deploy/cli/bench_receiver.hpp"

#include <limits>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "troupe/deploy/cli/bench_slots.hpp"

namespace troupe::deploy::cli {

namespace {

using clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds checkpoint_interval{100};

class receiver {
 public:
  receiver(engine& node, std::string source, const bench_options& options, bench_slots slots,
           const bench_watch& watch)
      : node_{node},
        source_{std::move(source)},
        options_{options},
        slots_{std::move(slots)},
        watch_{watch},
        warm_up_{warm_up_of(options)},
        end_{options.requests == 0 ? std::numeric_limits<std::uint64_t>::max()
                                   : options.requests + warm_up_} {}

  result<bench_outcome> run() {
    auto ran = options_.verify ? run_rounds() : run_through();
    if (!ran) return fail(ran.error());
    return outcome_;
  }

 private:
  struct transfer {
    std::size_t slot{0};
    std::uint64_t index{0};
    clock::time_point begun;
  };

  // -- sequence

  result<void> run_through() {
    for (std::size_t slot = 0; slot < slots_.size(); ++slot)
      if (auto ok = begin(slot); !ok) return fail(ok.error());
    return finish_live();
  }

  /// Per round: all slots move at once, then all arrived bytes are compared.
  result<void> run_rounds() {
    for (std::uint64_t round = 0; next_ != end_ && !over_; ++round) {
      if (auto ok = wait_for_pattern(round); !ok) return ok;
      if (outcome_.interrupted) break;
      moved_before_ = outcome_.elapsed;
      measured_from_ = clock::now();
      if (completed_ == warm_up_) counted_from_ = measured_from_;
      for (std::size_t slot = 0; slot < slots_.size(); ++slot)
        if (auto ok = begin(slot); !ok) return ok;
      if (auto ok = finish_live(); !ok) return ok;
      if (auto ok = compare_round(); !ok) return ok;
    }
    return {};
  }

  /// Runs until no transfer is live. Outside of rounds, each transfer that ends is followed by the
  /// next.
  result<void> finish_live() {
    while (!live_.empty() && !outcome_.interrupted) {
      for (const auto& event : node_.wait(std::chrono::milliseconds{50}, 256))
        if (auto ok = on_event(event); !ok) return ok;
      if (auto ok = look_up(); !ok) return ok;
    }
    return {};
  }

  /// Waits until the prefill side has announced that the pattern of this round is written.
  result<void> wait_for_pattern(std::uint64_t round) {
    while (!outcome_.interrupted) {
      const auto asked = node_.remove(source_, bench_round(round));
      if (!asked) return fail(asked.error());
      const auto answer = outcome_of(*asked);
      if (answer || answer.error().code != errc::not_found) return answer;
      std::this_thread::sleep_for(std::chrono::milliseconds{1});
      if (auto ok = look_up(); !ok) return ok;
    }
    return {};
  }

  /// The outcome of an operation while no other is live.
  result<void> outcome_of(operation_id operation) {
    for (;;)
      for (const auto& event : node_.wait(std::chrono::milliseconds{50}, 256)) {
        if (event.operation != operation) continue;
        if (const auto* failed = std::get_if<event_failed>(&event.what)) return fail(failed->why);
        return {};
      }
  }

  result<void> compare_round() {
    for (const auto& arrived : std::exchange(arrived_, {})) {
      if (auto ok = verify_pattern(slots_.part(arrived.slot), arrived.index); !ok) return ok;
      if (arrived.index >= warm_up_) ++outcome_.verified;
      if (auto ok = look_up(); !ok) return ok;
    }
    outcome_.lasted = completed_ > warm_up_ ? clock::now() - counted_from_ : outcome_.lasted;
    over_ = options_.requests == 0 && outcome_.lasted >= options_.duration;
    return {};
  }

  /// Reports the progress to the watch when it is time.
  result<void> look_up() {
    if (clock::now() < next_checkpoint_) return {};
    next_checkpoint_ += checkpoint_interval;
    outcome_.interrupted = watch_.interrupted();
    return watch_.checkpoint(outcome_);
  }

  // -- one transfer

  result<void> begin(std::size_t slot) {
    if (next_ == end_ || over_) return {};
    transfer made{slot, next_++, clock::now()};
    receive_spec spec;
    spec.request = bench_request(made.index);
    spec.sources = {source_};
    spec.mode = transfer_mode_of(options_.mode).value_or(transfer_mode::write);
    spec.tokens = slots_.tokens();
    spec.blocks = slots_.blocks(slot);
    const auto operation = node_.receive(std::move(spec));
    if (!operation) return fail(operation.error());
    live_.emplace(*operation, made);
    return {};
  }

  result<void> on_event(const event& what) {
    if (const auto* failed = std::get_if<event_failed>(&what.what)) return fail(failed->why);
    const auto found = live_.find(what.operation);
    if (found == live_.end()) return {};
    if (const auto* done = std::get_if<event_done>(&what.what)) on_done(found->second, done->bytes);
    if (!std::holds_alternative<event_unpinned>(what.what)) return {};
    const auto slot = found->second.slot;
    live_.erase(found);
    return options_.verify ? result<void>{} : begin(slot);
  }

  void on_done(const transfer& ended, std::uint64_t bytes) {
    const auto now = clock::now();
    ++completed_;
    if (options_.verify) arrived_.push_back(ended);
    if (completed_ <= warm_up_) {
      measured_from_ = counted_from_ = now;
      return;
    }
    ++outcome_.transfers;
    outcome_.bytes += bytes;
    outcome_.elapsed = moved_before_ + (now - measured_from_);
    outcome_.lasted = now - counted_from_;
    if (ended.index >= warm_up_) outcome_.latency.add(now - ended.begun);
    over_ = options_.requests == 0 && outcome_.lasted >= options_.duration;
  }

  engine& node_;
  const std::string source_;
  const bench_options& options_;
  bench_slots slots_;
  const bench_watch& watch_;
  const std::uint64_t warm_up_;
  const std::uint64_t end_;
  std::uint64_t next_{0};
  std::uint64_t completed_{0};
  bool over_{false};
  clock::time_point next_checkpoint_{clock::now()};
  clock::time_point counted_from_{};         ///< the end of the warm-up
  clock::time_point measured_from_{};        ///< that, or the start of the round
  std::chrono::nanoseconds moved_before_{};  ///< in the rounds before this one
  std::vector<transfer> arrived_;            ///< in this round, to be compared
  bench_outcome outcome_;
  std::unordered_map<operation_id, transfer> live_;
};

}  // namespace

result<bench_outcome> run_bench_receiver(engine& node, const std::string& source,
                                         const bench_options& options, const bench_watch& watch) {
  auto slots = bench_slots::create(node, options);
  if (!slots) return fail(slots.error());
  return receiver{node, source, options, std::move(*slots), watch}.run();
}

}  // namespace troupe::deploy::cli
