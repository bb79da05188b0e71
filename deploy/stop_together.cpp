#include "troupe/deploy/stop_together.hpp"

#include <algorithm>

namespace troupe::deploy {

namespace {

using namespace std::chrono_literals;
using clock = std::chrono::steady_clock;

/// The nodes' time before their supervisor is stopped: a clean end takes about two seconds.
constexpr std::chrono::milliseconds head_start{2s};

/// The time that the whole group has left.
struct shared_patience {
  clock::duration left;
  const std::function<bool()>& hurried;
};

std::vector<child_process*> still_running(const std::vector<child_process*>& all) {
  std::vector<child_process*> found;
  for (auto* process : all)
    if (!process->ended()) found.push_back(process);
  return found;
}

/// Waits until all have ended, at most `most`. Waits in slices, since time during which the whole
/// machine was suspended does not count.
void wait_for(const std::vector<child_process*>& all, shared_patience& has, clock::duration most) {
  constexpr std::chrono::milliseconds slice{20};
  while (has.left > 0ms && most > 0ms) {
    const auto live = still_running(all);
    if (live.empty()) return;
    if (has.hurried && has.hurried()) {
      has.left = 0ms;
      return;
    }
    const auto began = clock::now();
    (void)live.front()->wait(slice);
    const auto passed = std::min<clock::duration>(clock::now() - began, slice);
    has.left -= passed;
    most -= passed;
  }
}

}  // namespace

std::vector<child_process*> stop_together(const ending_group& group) {
  shared_patience has{group.patience, group.hurried};
  auto all = group.nodes;
  for (const auto* node : group.nodes) node->terminate();
  if (group.supervisor != nullptr) {
    wait_for(group.nodes, has, head_start);
    group.supervisor->terminate();
    all.push_back(group.supervisor);
  }
  wait_for(all, has, clock::duration::max());
  auto killed = still_running(all);
  for (const auto* process : killed) process->kill();
  for (auto* process : killed)
    while (!process->wait(1s)) {
    }
  return killed;
}

}  // namespace troupe::deploy
