#include "judge.hpp"

#include <algorithm>
#include <set>
#include <sstream>
#include <thread>

#include "orders.hpp"
#include "waiting.hpp"

namespace troupe::testing {

namespace {

using std::chrono::milliseconds;
using clock = load::clock;

constexpr auto window = std::chrono::seconds{1};
/// The number of recent calm seconds that define the usual rate.
constexpr std::size_t remembered = 40;

/// What is wrong with a node that should be at rest.
std::vector<std::string> wrong_with(const actors::node_report& report,
                                    const engine_counters& engine,
                                    const std::set<std::uint64_t>& lives) {
  std::vector<std::string> wrong;
  const auto& name = report.node.name;
  const auto& pool = report.pool;
  const auto expect_none = [&](std::uint64_t count, const char* what) {
    if (count > 0) wrong.push_back(name + " has " + std::to_string(count) + " " + what);
  };
  if (pool.blocks_total == 0 || pool.blocks_free != pool.blocks_total)
    wrong.push_back(name + " has " + std::to_string(pool.blocks_free) + " of " +
                    std::to_string(pool.blocks_total) + " blocks free");
  expect_none(pool.blocks_quarantined, "blocks in quarantine");
  expect_none(pool.waiting, "allocations in line");
  expect_none(report.transfers.size(), "transfers");
  expect_none(report.operations_open, "operations open");
  expect_none(report.waiting_for_link, "operations that wait for a link");
  expect_none(engine.open, "requests in its engine");
  if (engine.begun != engine.done + engine.failed || engine.begun != engine.unpinned)
    wrong.push_back(name + "'s engine began " + std::to_string(engine.begun) + " operations; " +
                    std::to_string(engine.done) + " were done, " + std::to_string(engine.failed) +
                    " failed, " + std::to_string(engine.unpinned) + " were unpinned");
  for (const auto& link : report.links) {
    if (!lives.contains(link.peer_incarnation))
      wrong.push_back(name + " has a link (" + link.state + ") to a former life of " + link.peer);
    expect_none(link.in_flight, "bytes in flight");
  }
  return wrong;
}

std::vector<std::string> look(cluster_processes& cluster, actors::cluster_client& client) {
  if (!cluster.are_up(client)) return {"not every node is up"};
  const auto list = client.members();
  if (!list) return {"no membership: " + to_string(list.error())};
  std::set<std::uint64_t> lives;
  for (const auto& m : list->members) lives.insert(m.node.incarnation);
  std::vector<std::string> wrong;
  for (const auto& m : list->members) {
    const auto report = client.report(m.node);
    actors::call_request ask;
    ask.method = "counters";
    const auto counters = client.call(m.node, ask);
    if (!report || !counters) {
      wrong.push_back(m.node.name +
                      " does not answer: " + to_string(report ? counters.error() : report.error()));
      continue;
    }
    std::ranges::move(wrong_with(*report, counters_from(*counters), lives),
                      std::back_inserter(wrong));
  }
  return wrong;
}

std::string row(const std::string& name, const std::string& value) {
  return "  " + name + std::string(name.size() < 28 ? 28 - name.size() : 1, ' ') + value + "\n";
}

}  // namespace

// -- recovery

void recovery_watch::look_at_calm() {
  const auto now = clock::now();
  if (now - looked_ < window) return;
  // A second that began before calm returned does not count.
  if (now - looked_ < 2 * window) {
    calm_.push_back(users_.rate(looked_, now));
    if (calm_.size() > remembered) calm_.erase(calm_.begin());
  }
  looked_ = now;
}

double recovery_watch::usual() const {
  if (calm_.empty()) return 0;
  auto sorted = calm_;
  std::ranges::sort(sorted);
  return sorted[sorted.size() / 2];
}

std::optional<milliseconds> recovery_watch::wait_for_recovery() const {
  const auto start = clock::now();
  const auto wanted = usual() / 2;
  for (auto good_since = start;; std::this_thread::sleep_for(milliseconds{50})) {
    const auto now = clock::now();
    if (users_.rate(now - window, now) < wanted) good_since = clock::now();
    const auto took = std::chrono::duration_cast<milliseconds>(good_since - start);
    if (took >= wait_limit) return std::nullopt;
    if (now - good_since >= window) return took;
  }
}

double recovery_watch::least_since(clock::time_point when) const {
  const auto now = clock::now();
  auto least = users_.rate(now - window, now);
  for (auto end = when + window; end < now; end += milliseconds{100})
    least = std::min(least, users_.rate(end - window, end));
  return least;
}

// -- rest

std::vector<std::string> what_is_not_at_rest(cluster_processes& cluster,
                                             actors::cluster_client& client) {
  std::vector<std::string> wrong;
  const auto all_is_well = [&] {
    wrong = look(cluster, client);
    return wrong.empty();
  };
  (void)comes_true(all_is_well, milliseconds{200});
  return wrong;
}

// -- the report

std::string to_string(const chaos_report& report) {
  std::ostringstream out;
  out << "faults: how many; the least served meanwhile, usually " << static_cast<int>(report.usual)
      << " requests/s; the longest until half of that was served again, until all nodes were up\n";
  for (const auto& [kind, count] : report.faults) {
    std::string value = std::to_string(count);
    if (const auto least = report.least.find(kind); least != report.least.end())
      value += ", " + std::to_string(static_cast<int>(least->second)) + " requests/s";
    if (const auto worst = report.recovery.find(kind); worst != report.recovery.end())
      value += ", " + std::to_string(worst->second.count()) + " ms";
    if (const auto worst = report.back.find(kind); worst != report.back.end())
      value += ", " + std::to_string(worst->second.count()) + " ms";
    out << row(kind, value);
  }
  const auto& r = report.requests;
  out << "requests\n"
      << row("begun", std::to_string(r.begun)) << row("done", std::to_string(r.done))
      << row("given up by their users", std::to_string(r.given_up))
      << row("placed", std::to_string(r.attempts))
      << row("longest", std::to_string(r.longest.count()) + " ms");
  for (const auto& [code, count] : r.failed) out << row("failed: " + code, std::to_string(count));
  for (const auto& [code, count] : r.retried)
    out << row("placed again after " + code, std::to_string(count));
  for (const auto& [code, sentence] : r.examples)
    out << "  e.g. " << code << ": " << sentence << "\n";
  out << "violations: " << report.violations.size() << "\n";
  for (const auto& v : report.violations) out << "  " << v << "\n";
  return out.str();
}

}  // namespace troupe::testing
