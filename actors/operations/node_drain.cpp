#include "troupe/actors/operations/node_drain.hpp"

namespace troupe::actors {

bool node_drain::ordered(const drain_order& order, std::uint64_t incarnation) {
  if (order.incarnation != incarnation) return false;
  reminded_ = true;
  judges_itself_ = false;
  if (order.step == drain_step::resume) {
    auto expected = drain_standing::draining;
    return standing_.compare_exchange_strong(expected, drain_standing::serving);
  }
  const auto wanted =
      order.step == drain_step::finish ? drain_standing::draining : drain_standing::drained;
  if (wanted <= standing_.load()) return false;
  standing_.store(wanted);
  return true;
}

bool node_drain::registered() {
  if (standing_.load() == drain_standing::serving || reminded_) return false;
  judges_itself_ = true;
  quiet_beats_ = 0;
  return true;
}

bool node_drain::beats(const load_report& load) {
  if (!judges_itself_ || standing_.load() != drain_standing::draining) return false;
  const bool quiet = load.queue_length == 0 && load.active_transfers == 0;
  quiet_beats_ = quiet ? quiet_beats_ + 1 : 0;
  if (quiet_beats_ < 2) return false;
  standing_.store(drain_standing::drained);
  return true;
}

}  // namespace troupe::actors
