// Three prefill and three decode nodes serve requests while random nodes are killed, stopped, cut
// off, drained and started again. TROUPE_CHAOS_SECONDS sets the duration (120). TROUPE_SEED, which
// is printed, determines the faults.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "faults.hpp"
#include "judge.hpp"
#include "load.hpp"
#include "sanitized.hpp"
#include "seed.hpp"
#include "waiting.hpp"

namespace troupe::testing {
namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using clock = load::clock;

class chaos : public ::testing::Test {
 protected:
  const std::uint64_t seed{testing::seed()};
  chaos_report report;

  void run(const cluster_shape& shape, const network* net, std::chrono::seconds time) {
    std::cout << "TROUPE_SEED=" << seed << " TROUPE_CHAOS_SECONDS=" << time.count() << std::endl;
    cluster_processes cluster{shape, net};
    cluster.start_all();
    const auto client = cluster.client();
    ASSERT_TRUE(cluster.all_up(*client)) << "the cluster did not come up";
    load_options wanted;
    wanted.seed = seed;
    if (sanitized) wanted.pause *= 3;
    load users{*client, wanted};
    recovery_watch watch{users};
    calm(cluster, watch, 5s);
    fault_schedule schedule{seed, shape, net != nullptr};
    fault_hand hand{cluster, net, *client};
    for (const auto end = clock::now() + time; clock::now() < end;)
      live_through(schedule.next(), cluster, *client, hand, watch);
    users.stop();
    report.usual = watch.usual();
    report.requests = users.counts();
    keep(users.violations());
    keep(hand.violations());
    keep(what_is_not_at_rest(cluster, *client));
    keep(cluster.violations());
    std::cout << to_string(report);
    if (report.violations.empty() && report.requests.done > 0) return;
    cluster.keep_files();
    ADD_FAILURE() << report.violations.size()
                  << " promises were broken; the logs of all processes are in " << cluster.folder()
                  << "; run it again with TROUPE_SEED=" << seed;
  }

 private:
  void keep(const std::vector<std::string>& violations) {
    report.violations.insert(report.violations.end(), violations.begin(), violations.end());
  }
  void look_after(cluster_processes& cluster) {
    for (const auto& e : cluster.revive())
      report.violations.push_back(e.name + " " + e.how + "; its log ends\n" + e.log);
  }
  void calm(cluster_processes& cluster, recovery_watch& watch, milliseconds time) {
    for (const auto until = clock::now() + time; clock::now() < until;) {
      look_after(cluster);
      watch.look_at_calm();
      std::this_thread::sleep_for(20ms);
    }
  }
  void live_through(const episode& e, cluster_processes& cluster, actors::cluster_client& client,
                    fault_hand& hand, recovery_watch& watch) {
    calm(cluster, watch, e.pause);
    struct step {
      milliseconds at;
      const planned_fault* fault;
      bool begins;
    };
    std::vector<step> steps;
    std::string words;
    for (const auto& f : e.faults) {
      steps.push_back({f.after, &f, true});
      steps.push_back({f.after + f.lasts, &f, false});
      words += (words.empty() ? "" : "; ") + to_string(f);
      ++report.faults[to_string(f.kind)];
    }
    std::ranges::stable_sort(steps, {}, &step::at);
    const auto start = clock::now();
    for (const auto& s : steps) {
      while (clock::now() < start + s.at) {
        look_after(cluster);
        std::this_thread::sleep_for(5ms);
      }
      if (s.begins) {
        hand.begin(*s.fault);
      } else {
        hand.end(*s.fault);
      }
    }
    const auto over = clock::now();
    const auto took = watch.wait_for_recovery();
    const bool all_up = cluster.all_up(client);
    const auto back = std::chrono::duration_cast<milliseconds>(clock::now() - over);
    const auto least = watch.least_since(start);
    std::cout << words << ": at least " << static_cast<int>(least)
              << " requests/s; served again after " << took.value_or(wait_limit).count()
              << " ms, all up after " << back.count() << " ms" << std::endl;
    for (const auto& f : e.faults) {
      const auto found = report.least.try_emplace(to_string(f.kind), least).first;
      found->second = std::min(found->second, least);
      auto& worst = report.recovery[to_string(f.kind)];
      worst = std::max(worst, took.value_or(wait_limit));
      auto& longest = report.back[to_string(f.kind)];
      longest = std::max(longest, back);
    }
    if (!all_up) report.violations.push_back("not all nodes were up again after: " + words);
    if (!took) report.violations.push_back("not served again after: " + words);
  }
};

TEST_F(chaos, of_hosts_loses_nothing_corrupts_nothing_and_is_overcome) {
  if (const auto why = network::missing()) GTEST_SKIP() << "no partitions here: " << *why;
  cluster_shape shape;
  shape.mode = seed % 2 == 0 ? "write" : "read";
  shape.secured = true;
  const network net{node_names(shape), addresses::open};
  ASSERT_EQ(net.why(), "");
  net.slow_down(300);
  run(shape, &net,
      std::chrono::seconds{
          testing::number_from_environment("TROUPE_CHAOS_SECONDS", sanitized ? 40 : 120)});
}

TEST_F(chaos, of_processes_on_one_host_loses_nothing_corrupts_nothing_and_is_overcome) {
  cluster_shape shape;
  shape.backend = "auto";
  shape.mode = seed % 2 == 0 ? "read" : "write";
  run(shape, nullptr,
      std::chrono::seconds{
          testing::number_from_environment("TROUPE_CHAOS_SECONDS", sanitized ? 60 : 120) / 3});
}

}  // namespace
}  // namespace troupe::testing
