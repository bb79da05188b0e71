#include "troupe/deploy/cli/bench_receiver.hpp"

#include <limits>
#include <unordered_map>
#include <utility>
#include <variant>

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
    for (std::size_t slot = 0; slot < slots_.size(); ++slot)
      if (auto ok = begin(slot); !ok) return fail(ok.error());
    auto next_checkpoint = clock::now();
    while (!live_.empty() && !outcome_.interrupted) {
      for (const auto& event : node_.wait(std::chrono::milliseconds{50}, 256))
        if (auto ok = on_event(event); !ok) return fail(ok.error());
      if (clock::now() < next_checkpoint) continue;
      next_checkpoint += checkpoint_interval;
      outcome_.interrupted = watch_.interrupted();
      if (auto ok = watch_.checkpoint(outcome_); !ok) return fail(ok.error());
    }
    return outcome_;
  }

 private:
  struct transfer {
    std::size_t slot{0};
    std::uint64_t index{0};
    clock::time_point begun;
  };

  result<void> begin(std::size_t slot) {
    if (next_ == end_ || over_) return {};
    transfer made{slot, next_++, clock::now()};
    receive_spec spec;
    spec.request = bench_request(made.index);
    spec.sources = {source_};
    spec.mode =
        options_.mode == "read" ? actors::transfer_mode::read : actors::transfer_mode::write;
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
    if (const auto* done = std::get_if<event_done>(&what.what))
      return on_done(found->second, done->bytes);
    if (!std::holds_alternative<event_unpinned>(what.what)) return {};
    const auto slot = found->second.slot;
    live_.erase(found);
    return begin(slot);
  }

  result<void> on_done(const transfer& ended, std::uint64_t bytes) {
    const auto now = clock::now();
    ++completed_;
    if (completed_ <= warm_up_) {
      measured_from_ = now;
    } else {
      ++outcome_.transfers;
      outcome_.bytes += bytes;
      outcome_.elapsed = now - measured_from_;
      if (ended.index >= warm_up_) outcome_.latency.add(now - ended.begun);
      over_ = options_.requests == 0 && outcome_.elapsed >= options_.duration;
    }
    if (!options_.verify) return {};
    if (auto ok = verify_pattern(slots_.part(ended.slot), ended.index); !ok) return ok;
    if (completed_ > warm_up_) ++outcome_.verified;
    return {};
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
  clock::time_point measured_from_{};
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
