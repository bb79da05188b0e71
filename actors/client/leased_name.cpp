#include "troupe/actors/leased_name.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include <spdlog/spdlog.h>
#include <unistd.h>

#include "troupe/actors/base/message_fields.hpp"
#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/discovery/supervisor_search.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/logging.hpp"
#include "troupe/actors/messages/messages.hpp"
#include "troupe/actors/runtime/local_address.hpp"
#include "troupe/actors/runtime/room_to_start.hpp"
#include "troupe/actors/runtime/system.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/kvcache/or_error.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds first_claim_pause{50};
constexpr milliseconds shortest_renewal{10};
constexpr milliseconds patience_of_claims{3000};
/// Releasing a name waits for the request in flight. A renewal that is read late still counts.
constexpr milliseconds patience_of_renewals{500};

/// The hosts of the stage that are this machine, each once, in the file's order.
result<std::vector<std::string>> own_hosts(const config::deployment& deployment,
                                           const config::stage_config& stage) {
  std::vector<std::string> own;
  std::string all;
  for (const auto& node : config::resolve(deployment)) {
    if (node.stage != stage.name) continue;
    if (std::ranges::find(own, node.host) != own.end()) continue;
    if (node.local) {
      own.push_back(node.host);
    } else {
      all += (all.empty() ? "" : ", ") + node.host;
    }
  }
  for (auto& host : own) {
    auto address = address_of(host, deployment.supervisor);
    if (!address) return fail(address.error());
    host = std::move(*address);
  }
  if (!own.empty()) return own;
  return fail(errc::invalid_config, "stage " + in_quotes(stage.name) + " belongs to " + all +
                                        ", which is not this machine; start it there, or add auto "
                                        "to its hosts");
}

/// Whether asking again may help. Credentials are read again with every attempt.
bool may_pass(errc code) noexcept {
  return code == errc::peer_unreachable || code == errc::peer_lost || code == errc::deadline ||
         code == errc::overloaded || code == errc::aborted || code == errc::unauthorized;
}

/// Sends claims to the supervisor. For one thread at a time.
class claimant {
 public:
  claimant(const config::deployment& of, actor_host_options host, const std::stop_token& given_up)
      : place_{{of.supervisor.host, of.supervisor.port, 0, 0},
               look_for_supervisor(of, missing_supervisor::is_begun, given_up)},
        host_{std::move(host)} {}

  /// The address of the supervisor that was asked last, for messages.
  [[nodiscard]] std::string asked() const { return place_.text(); }

  /// `look` limits the search for a supervisor, which may have to be begun; `patience` limits the
  /// wait for a connection, and again the wait for an answer.
  result<name_lease> ask_for(const name_request& claim, milliseconds look, milliseconds patience) {
    if (!supervisor_) {
      const auto at = place_.now(look);
      if (!at) return fail(at.error().code, "no supervisor: " + at.error().message);
      auto found = host_.connect<supervisor_actor>(at->host, at->port, patience);
      if (!found) return fail(found.error().code, "no supervisor: " + found.error().message);
      supervisor_ = *found;
    }
    auto granted = ask<name_lease>(host_.system(), supervisor_, "the supervisor", patience,
                                   lease_name_atom_v, claim);
    if (!granted) {
      supervisor_ = nullptr;  // another supervisor may answer next time
      return granted;
    }
    if (granted->failed == 0) return granted;
    return fail(refusal(*granted));
  }

 private:
  supervisor_place place_;
  actor_host host_;
  supervisor_actor supervisor_;
};

class name_holder final : public leased_name {
 public:
  name_holder(std::unique_ptr<claimant> cluster, name_request claim, name_lease granted)
      : cluster_{std::move(cluster)}, claim_{std::move(claim)}, granted_{std::move(granted)} {
    claim_.held = granted_.name;
    thread_ = std::thread{[this] { renew(); }};
  }
  ~name_holder() override {
    {
      const std::lock_guard lock{mutex_};
      over_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  name_holder(const name_holder&) = delete;
  name_holder& operator=(const name_holder&) = delete;

  [[nodiscard]] const std::string& name() const noexcept override { return granted_.name; }
  [[nodiscard]] std::uint64_t incarnation() const noexcept override { return claim_.incarnation; }

 private:
  void renew() {
    const auto interval = std::max(milliseconds{granted_.held_ms} / 3, shortest_renewal);
    std::unique_lock lock{mutex_};
    while (!changed_.wait_for(lock, interval, [this] { return over_; })) {
      lock.unlock();
      const auto renewed = cluster_->ask_for(claim_, patience_of_renewals, patience_of_renewals);
      lock.lock();
      const bool other = renewed && renewed->name != granted_.name;
      if (renewed ? !other : may_pass(renewed.error().code)) continue;
      // Renewing would keep the name from its present owner. The registration is refused, too.
      logger("node")->warn("{} is no longer held for this process: {}", granted_.name,
                           other
                               ? "the supervisor gives it " + in_quotes(renewed->name) + " instead"
                               : to_string(renewed.error()));
      return;
    }
  }

  std::unique_ptr<claimant> cluster_;
  name_request claim_;
  name_lease granted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_{false};
  std::thread thread_;
};

/// Returns whether the claim was given up meanwhile.
bool pause_of_claims(milliseconds time, const std::stop_token& given_up) {
  std::mutex mutex;
  std::condition_variable_any woken;
  std::unique_lock lock{mutex};
  (void)woken.wait_for(lock, given_up, time, [] { return false; });
  return given_up.stop_requested();
}

/// The time that beginning a supervisor needs, as far as the limit leaves it.
milliseconds patience_of_look(milliseconds limit, steady_clock::time_point began) {
  if (limit.count() < 0) return begin_patience;
  const auto asked = std::chrono::ceil<milliseconds>(steady_clock::now() - began);
  return std::clamp(limit - asked, patience_of_claims, begin_patience);
}

result<std::unique_ptr<leased_name>> claim_slot(const config::deployment& deployment,
                                                const std::string& stage_name,
                                                const claim_options& options) {
  const auto* stage = config::find_stage(deployment, stage_name);
  if (stage == nullptr) {
    std::string names;
    for (const auto& one : deployment.stages) names += (names.empty() ? "" : ", ") + one.name;
    return fail(errc::not_found,
                "the deployment has no stage " + in_quotes(stage_name) + "; it has " + names);
  }
  if (stage->open) {
    return fail(errc::invalid_config, "stage " + in_quotes(stage_name) +
                                          " is open and has no names to claim; a process joins it "
                                          "by its own announcement (engine_options::join)");
  }
  const auto hosts = own_hosts(deployment, *stage);
  if (!hosts) return fail(hosts.error());

  if (auto room = check_room(room_of_a_node); !room) return fail(room.error());
  auto host = host_options_of(deployment);
  if (!host) return fail(host.error());
  auto cluster = std::make_unique<claimant>(deployment, std::move(*host), options.given_up);
  name_request wanted;
  wanted.cluster = deployment.cluster;
  wanted.stage = stage_name;
  wanted.incarnation = draw_incarnation();
  wanted.pid = static_cast<std::uint32_t>(::getpid());
  const auto began = steady_clock::now();
  log_limiter reminder{std::chrono::seconds{30}};
  std::optional<errc> said;
  auto pause = first_claim_pause;
  for (std::size_t attempt = 0;; ++attempt) {
    wanted.host = (*hosts)[attempt % hosts->size()];
    auto granted =
        cluster->ask_for(wanted, patience_of_look(options.limit, began), patience_of_claims);
    if (granted) {
      return std::unique_ptr<leased_name>{std::make_unique<name_holder>(
          std::move(cluster), std::move(wanted), std::move(*granted))};
    }
    const auto& why = granted.error();
    if (options.given_up.stop_requested()) return fail(errc::aborted, "it was given up");
    if (!may_pass(why.code)) return fail(why);
    if (const bool due = reminder.pass().has_value(); due || said != why.code) {
      said = why.code;
      logger("node")->warn(
          "this process has no node of stage {} yet and keeps asking the supervisor at {}: {}",
          stage_name, cluster->asked(), to_string(why));
    }
    if (options.limit.count() >= 0 && steady_clock::now() - began + pause > options.limit) {
      return fail(errc::deadline, "the supervisor at " + cluster->asked() +
                                      " gave this process no node of stage " +
                                      in_quotes(stage_name) + " within " +
                                      time_text(options.limit) + ": " + to_string(why));
    }
    if (pause_of_claims(pause, options.given_up)) return fail(errc::aborted, "it was given up");
    pause =
        std::min(2 * pause, std::max(first_claim_pause, deployment.supervisor.heartbeat_interval));
  }
}

}  // namespace

result<std::unique_ptr<leased_name>> leased_name::claim(const config::deployment& deployment,
                                                        const std::string& stage,
                                                        const claim_options& options) {
  return or_error("this process cannot ask which node it is",
                  [&] { return claim_slot(deployment, stage, options); });
}

}  // namespace troupe::actors
