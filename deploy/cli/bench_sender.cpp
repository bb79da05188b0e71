#include "troupe/deploy/cli/bench_sender.hpp"

#include <chrono>
#include <cstddef>
#include <limits>
#include <unordered_map>
#include <variant>

#include "troupe/deploy/cli/bench_slots.hpp"
#include "troupe/deploy/cli/bench_source.hpp"

namespace troupe::deploy::cli {

namespace {

class sender {
 public:
  sender(engine& node, const bench_options& options, bench_slots slots)
      : node_{node},
        options_{options},
        slots_{std::move(slots)},
        layers_{static_cast<std::uint32_t>(node.layout().layers.size())},
        end_{options.requests == 0 ? std::numeric_limits<std::uint64_t>::max()
                                   : options.requests + warm_up_of(options)} {}

  result<void> run(const std::atomic<bool>& stop) {
    for (std::size_t slot = 0; slot < slots_.size(); ++slot)
      if (auto ok = begin(slot); !ok) return ok;
    while (!live_.empty() && !stop)
      for (const auto& event : node_.wait(std::chrono::milliseconds{50}, 256))
        if (auto ok = on_event(event); !ok) return ok;
    return {};
  }

 private:
  result<void> begin(std::size_t slot) {
    if (next_ == end_) return {};
    const auto index = next_++;
    if (options_.verify) fill_pattern(slots_.part(slot), index);
    send_spec spec;
    spec.request = bench_request(index);
    spec.blocks = slots_.blocks(slot);
    const auto operation = node_.send(std::move(spec));
    if (!operation) return fail(operation.error());
    live_.emplace(*operation, slot);
    // Layer by layer, like an engine that computes them.
    for (std::uint32_t layer = 0; layer < layers_; ++layer)
      if (auto ok = node_.layers_ready(*operation, layer, layer + 1, slots_.tokens()); !ok)
        return ok;
    if (auto ok = node_.seal(*operation, slots_.tokens()); !ok) return ok;
    const bool ends_round = next_ % slots_.size() == 0 || next_ == end_;
    return options_.verify && ends_round ? tell_round(index / slots_.size()) : result<void>{};
  }

  /// The decode side waits for this before it begins the round. A failure comes as an event.
  result<void> tell_round(std::uint64_t round) {
    static constexpr std::byte something{1};
    const auto put = node_.put(bench_prefill_node, bench_round(round), {&something, 1});
    return put ? result<void>{} : fail(put.error());
  }

  result<void> on_event(const event& what) {
    if (const auto* failed = std::get_if<event_failed>(&what.what)) return fail(failed->why);
    if (!std::holds_alternative<event_unpinned>(what.what)) return {};
    const auto found = live_.find(what.operation);
    if (found == live_.end()) return {};
    const auto slot = found->second;
    live_.erase(found);
    return begin(slot);
  }

  engine& node_;
  const bench_options& options_;
  bench_slots slots_;
  const std::uint32_t layers_;
  const std::uint64_t end_;
  std::uint64_t next_{0};
  std::unordered_map<operation_id, std::size_t> live_;  ///< the slot of each
};

}  // namespace

result<void> run_bench_sender(engine& node, const bench_options& options,
                              const std::atomic<bool>& stop) {
  auto slots = bench_slots::create(node, options);
  if (!slots) return fail(slots.error());
  return sender{node, options, std::move(*slots)}.run(stop);
}

}  // namespace troupe::deploy::cli
