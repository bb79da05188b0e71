// A node of the chaos tests in a process of its own:
//
//   cluster_node FILE NAME VIOLATIONS
//
// Exit codes: 0 on an order to end or after a drain, 1 if it could not start or crashed inside, 4
// if another process has its name.

#include <atomic>
#include <csignal>
#include <cstdio>
#include <map>
#include <mutex>

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "troupe/actors/logging.hpp"
#include "troupe/config/parse.hpp"

#include "engine_jobs.hpp"

namespace troupe::testing {
namespace {

using std::chrono::milliseconds;

std::atomic<bool> told_to_end{false};

class serving_node {
 public:
  explicit serving_node(const std::string& name, const std::string& violations)
      : violations_{violations, name} {}
  ~serving_node() { ::close(bell_); }
  serving_node(const serving_node&) = delete;
  serving_node& operator=(const serving_node&) = delete;

  int run(const config::deployment& deployment, const std::string& name) {
    engine_options options;
    options.on_call = [this](call c) { take(std::move(c)); };
    auto started = engine::start(deployment, name, std::move(options));
    if (!started) {
      std::fprintf(stderr, "%s\n", to_string(started.error()).c_str());
      return 1;
    }
    node_ = std::move(*started);
    cache_ = std::make_unique<cache_bytes>(*node_);
    around_ = std::make_unique<job_surroundings>(
        job_surroundings{*node_, *cache_, violations_, counters_,
                         [this](const job& j) { remember(j); }, stood_still_});
    const int code = serve();
    node_->stop();
    return code;
  }

 private:
  void take(call c) {
    {
      const std::lock_guard lock{mutex_};
      inbox_.push_back(std::move(c));
    }
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto rung = ::write(bell_, &one, sizeof one);
  }

  int serve() {
    auto looked = job_clock::now();
    auto before = looked;
    while (!told_to_end) {
      pollfd waits[2] = {{node_->event_fd(), POLLIN, 0}, {bell_, POLLIN, 0}};
      (void)::poll(waits, 2, jobs_.empty() ? 50 : 3);
      const auto now = job_clock::now();
      const auto gap = std::chrono::duration_cast<milliseconds>(now - before);
      if (gap > milliseconds{150}) stood_still_ += gap;
      before = now;
      answer_calls();
      for (auto& e : node_->take(1024)) {
        const auto found = jobs_.find(e.operation.value);
        if (found == jobs_.end()) {
          violations_.say("?", "an event of an operation that is over");
        } else {
          found->second->hear(e);
        }
      }
      std::erase_if(jobs_, [now](auto& entry) { return !entry.second->advance(now); });
      if (now - looked > milliseconds{50}) {
        looked = now;
        if (node_->draining() == drain_standing::drained) return 0;
        const auto standing = node_->wait_registered(milliseconds{0});
        if (!standing && standing.error().code != errc::deadline) {
          std::fprintf(stderr, "%s\n", to_string(standing.error()).c_str());
          return standing.error().code == errc::stale_incarnation ? 4 : 1;
        }
      }
    }
    return 0;
  }
  void answer_calls() {
    std::uint64_t rung = 0;
    [[maybe_unused]] const auto heard = ::read(bell_, &rung, sizeof rung);
    std::vector<call> calls;
    {
      const std::lock_guard lock{mutex_};
      calls.swap(inbox_);
    }
    for (auto& c : calls) answer(c);
  }
  void answer(call& c) {
    if (c.method == "prefill") {
      keep(begin_prefill(*around_, prefill_order_from(c.payload), std::move(c.reply)));
    } else if (c.method == "decode") {
      keep(begin_decode(*around_, decode_order_from(c.payload), std::move(c.reply)));
    } else if (c.method == "abort") {
      const std::string request{c.payload.begin(), c.payload.end()};
      for (const auto& [id, j] : jobs_) {
        if (j->request() == request) (void)node_->abort(j->id(), "the frontend gave it up");
      }
      c.reply(std::vector<std::uint8_t>{});
    } else if (c.method == "outcome") {
      const std::string request{c.payload.begin(), c.payload.end()};
      if (const auto known = outcomes_.find(request); known != outcomes_.end()) {
        c.reply(bytes_of_text(known->second));
      } else {
        asked_.emplace(request, std::move(c));
      }
    } else {
      counters_.open = jobs_.size();
      c.reply(encode(counters_));
    }
  }
  static call_bytes bytes_of_text(const std::string& text) { return {text.begin(), text.end()}; }
  void remember(const job& j) {
    if (outcomes_.size() > 10'000) outcomes_.clear();
    auto& text = outcomes_[j.request()];
    text = j.failure() ? to_string(*j.failure()) : "done";
    const auto [first, last] = asked_.equal_range(j.request());
    for (auto it = first; it != last; ++it) it->second.reply(bytes_of_text(text));
    asked_.erase(first, last);
  }
  void keep(std::unique_ptr<job> j) {
    if (!j) return;
    const auto id = j->id().value;
    jobs_[id] = std::move(j);
  }

  violation_file violations_;
  engine_counters counters_;
  milliseconds stood_still_{0};
  int bell_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
  std::mutex mutex_;
  std::vector<call> inbox_;
  std::unique_ptr<engine> node_;
  std::unique_ptr<cache_bytes> cache_;
  std::unique_ptr<job_surroundings> around_;
  std::map<std::uint64_t, std::unique_ptr<job>> jobs_;
  std::map<std::string, std::string> outcomes_;  ///< as text, by request
  std::multimap<std::string, call> asked_;       ///< calls that wait for an outcome
};

int run(const std::string& file, const std::string& name, const std::string& violations) {
  std::signal(SIGTERM, [](int) { told_to_end = true; });
  const char* level = std::getenv("TROUPE_TEST_LOG");
  (void)actors::init_logging({level != nullptr ? level : "info", name, {}, 64U << 20U, 3});
  const auto parsed = config::load(file);
  if (!parsed.value) {
    std::fprintf(stderr, "%s\n", config::to_string(parsed.issues).c_str());
    return 1;
  }
  return serving_node{name, violations}.run(*parsed.value, name);
}

}  // namespace
}  // namespace troupe::testing

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: cluster_node FILE NAME VIOLATIONS\n");
    return 64;
  }
  return troupe::testing::run(argv[1], argv[2], argv[3]);
}
