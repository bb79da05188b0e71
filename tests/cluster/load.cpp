#include "load.hpp"

#include <algorithm>
#include <future>
#include <random>

#include "orders.hpp"
#include "waiting.hpp"

namespace troupe::testing {

namespace {

using std::chrono::milliseconds;

/// How much longer than its deadline a request may take: the last attempt, and a call to a node
/// that does not answer.
const milliseconds slack{wait_limit};

/// Whether a fault of a process or the network may be reported as this error. Any other error is a
/// defect of the product.
bool fits_a_fault(errc code) {
  switch (code) {
    case errc::pool_exhausted:
    case errc::overloaded:
    case errc::not_found:  // from a node that has not heard yet of the other nodes
    case errc::grant_revoked:
    case errc::peer_unreachable:
    case errc::peer_lost:
    case errc::link_broken:
    case errc::deadline:
    case errc::aborted:
    case errc::lease_expired:
    case errc::stale_incarnation: return true;
    default: return false;
  }
}

milliseconds since(load::clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(load::clock::now() - start);
}

}  // namespace

struct load::request {
  std::string id;
  std::uint32_t tokens{0};
  std::uint64_t seed{0};
  milliseconds per_layer{0}, use{0};
  clock::time_point start, end;
  bool given_up{false};  ///< by its user, `given_up_after` the call to the decode node
  milliseconds given_up_after{0};
  std::uint32_t attempts{0};
};

load::load(actors::cluster_client& client, load_options options)
    : client_{client}, options_{options} {
  for (std::uint32_t i = 0; i < options_.workers; ++i)
    workers_.emplace_back([this, i] { work(i); });
}

load::~load() {
  stop();
}

void load::stop() {
  over_ = true;
  for (auto& worker : workers_) {
    if (worker.joinable()) worker.join();
  }
}

void load::work(std::uint32_t worker) {
  std::mt19937_64 dice{options_.seed * 1000 + worker};
  const auto half = static_cast<std::uint64_t>(options_.pause.count() / 2);
  for (std::uint64_t n = 0; !over_; ++n) {
    std::this_thread::sleep_for(milliseconds{half + dice() % (2 * half + 1)});
    if (over_) return;
    serve("w" + std::to_string(worker) + "-" + std::to_string(n), dice());
  }
}

void load::serve(const std::string& id, std::uint64_t dice) {
  std::mt19937_64 draw{dice};
  request r;
  r.id = id;
  r.tokens = 1 + static_cast<std::uint32_t>(draw() % options_.max_tokens);
  // Half of the requests last long enough for a fault to hit them in the middle.
  r.per_layer = milliseconds{draw() % 2 == 0 ? draw() % 80 : 0};
  r.use = milliseconds{draw() % 20};
  r.given_up = draw() % 10 == 0;
  r.given_up_after = milliseconds{draw() % 120};
  r.start = clock::now();
  r.end = r.start + options_.deadline;
  {
    const std::lock_guard lock{mutex_};
    ++counts_.begun;
  }
  for (;;) {
    r.seed = draw();
    const auto outcome = place_and_attempt(r);
    if (outcome) {
      note_done(since(r.start));
      break;
    }
    look_at(r, outcome.error());
    if (r.given_up && outcome.error().code == errc::aborted) {
      const std::lock_guard lock{mutex_};
      ++counts_.given_up;
      break;
    }
    if (clock::now() + milliseconds{100} >= r.end) {
      note_failed(outcome.error(), since(r.start));
      break;
    }
    note_retry(outcome.error());
    std::this_thread::sleep_for(milliseconds{50});
  }
  (void)client_.finished(r.id);
  if (const auto took = since(r.start); took > options_.deadline + slack)
    violated("request " + r.id + " ended after " + std::to_string(took.count()) +
             " ms; its deadline was " + std::to_string(options_.deadline.count()) + " ms");
}

result<void> load::place_and_attempt(request& r) {
  actors::placement_request wanted;
  wanted.request = r.id;
  wanted.from = "prefill";
  wanted.to = "decode";
  wanted.timeout_ms = 1000;
  const auto where = client_.place(wanted);
  if (!where) return fail(where.error());
  if (where->prefill.size() != 1 || where->decode.size() != 1)
    return fail(errc::internal, "a placement without a pair of nodes");
  ++r.attempts;
  {
    const std::lock_guard lock{mutex_};
    ++counts_.attempts;
  }
  return attempt(r, *where);
}

result<void> load::attempt(const request& r, const actors::placement& where) {
  // Every attempt is a transfer of its own.
  const auto transfer = r.id + "." + std::to_string(r.attempts);
  const auto left =
      std::max(std::chrono::duration_cast<milliseconds>(r.end - clock::now()), milliseconds{200});
  const auto deadline = std::min(options_.transfer, left);
  const auto call = [&](const actors::node_info& node, const char* method, call_bytes payload,
                        milliseconds timeout) -> result<void> {
    actors::call_request order;
    order.method = method;
    order.payload = std::move(payload);
    order.timeout_ms = static_cast<std::uint32_t>(timeout.count());
    auto reply = client_.call(node, order);
    if (!reply) return fail(reply.error());
    return {};
  };
  const auto& prefill = where.prefill.front();
  const auto& decode = where.decode.front();
  if (auto offered = call(prefill, "prefill",
                          encode(prefill_order{transfer, r.tokens, r.seed, deadline, r.per_layer}),
                          milliseconds{1000});
      !offered)
    return offered;
  const call_bytes name{transfer.begin(), transfer.end()};
  std::future<void> user;
  if (r.given_up) {
    user = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(r.given_up_after);
      (void)call(decode, "abort", name, milliseconds{500});
    });
  }
  auto taken =
      call(decode, "decode",
           encode(decode_order{transfer, prefill.name, std::string{to_string(where.mode)}, r.tokens,
                               r.seed, deadline, r.use, where.supervisor_incarnation, where.epoch}),
           deadline + milliseconds{500});
  // Half of the users tell the prefill node; the others leave it to its own deadline.
  if (!taken && r.seed % 2 == 0) (void)call(prefill, "abort", name, milliseconds{200});
  if (user.valid()) user.wait();
  return taken;
}

// -- outcomes

void load::note_done(milliseconds took) {
  const std::lock_guard lock{mutex_};
  done_.push_back(clock::now());
  ++counts_.done;
  counts_.longest = std::max(counts_.longest, took);
}

void load::note_failed(const error& why, milliseconds took) {
  const std::lock_guard lock{mutex_};
  ++counts_.failed[std::string{to_string(why.code)}];
  counts_.longest = std::max(counts_.longest, took);
}

void load::note_retry(const error& why) {
  const std::lock_guard lock{mutex_};
  ++counts_.retried[std::string{to_string(why.code)}];
}

void load::look_at(const request& r, const error& why) {
  {
    const std::lock_guard lock{mutex_};
    counts_.examples.try_emplace(std::string{to_string(why.code)}, why.message);
  }
  if (why.message.empty()) violated("request " + r.id + " failed without a sentence");
  if (!fits_a_fault(why.code))
    violated("request " + r.id + " failed with what no fault brings: " + to_string(why));
}

void load::violated(const std::string& what) {
  const std::lock_guard lock{mutex_};
  violations_.push_back(what);
}

double load::rate(clock::time_point from, clock::time_point to) const {
  const std::lock_guard lock{mutex_};
  const auto begin = std::ranges::lower_bound(done_, from);
  const auto end = std::ranges::lower_bound(done_, to);
  const double seconds = std::chrono::duration<double>(to - from).count();
  return seconds > 0 ? static_cast<double>(end - begin) / seconds : 0;
}

load_counts load::counts() const {
  const std::lock_guard lock{mutex_};
  return counts_;
}

std::vector<std::string> load::violations() const {
  const std::lock_guard lock{mutex_};
  return violations_;
}

}  // namespace troupe::testing
