#include <algorithm>
#include <chrono>
#include <future>
#include <iostream>
#include <memory>
#include <mutex>
#include <random>
#include <stop_token>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>

#include "troupe/actors/request_carrier.hpp"
#include "troupe/deploy/cli/cluster_address.hpp"
#include "troupe/deploy/cli/cluster_look.hpp"
#include "troupe/deploy/cli/text_table.hpp"
#include "troupe/deploy/cli/verbs.hpp"
#include "troupe/deploy/interrupt_watch.hpp"
#include "troupe/deploy/reference_engine/carried_text.hpp"
#include "troupe/deploy/reference_engine/generation.hpp"

namespace troupe::deploy::cli {

namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;

/// Interval at which a text in progress is polled.
constexpr auto text_interval = 20ms;

struct ask_arguments {
  std::string where;
  std::string prompt;
  std::string from, to;
  std::uint32_t max_tokens{48};
  std::uint64_t seed{1};
  std::uint32_t deadline_s{120};
};

void complain_of_ask(const std::string& sentence) {
  std::cerr << "troupe ask: " << printable(sentence) << "\n";
}

/// An id that no concurrent `ask` has.
std::string drawn_id() {
  std::random_device device;
  return "ask-" + std::to_string((std::uint64_t{device()} << 32) | device());
}

/// The engine that writes a request's text at present.
class writer {
 public:
  void moved_to(const actors::carried_attempt& now) {
    const std::lock_guard lock{mutex_};
    request_ = now.source;
    node_ = now.where.decode.front();
  }
  /// The text so far; empty while no engine knows the request.
  [[nodiscard]] std::vector<reference::token> text(actors::cluster_client& cluster) const {
    actors::node_info node;
    std::string request;
    {
      const std::lock_guard lock{mutex_};
      if (request_.empty()) return {};
      node = node_;
      request = request_;
    }
    const auto answer = cluster.call(node, {"text", reference::abort_to_json(request), 1000});
    if (!answer) return {};
    auto reply = reference::text_reply_from(*answer);
    return reply ? std::move(reply->tokens) : std::vector<reference::token>{};
  }

 private:
  mutable std::mutex mutex_;
  std::string request_;
  actors::node_info node_;
};

/// Prints each part of a text once, even if it arrives repeatedly.
class printed_text {
 public:
  void print(const std::vector<reference::token>& all) {
    if (all.size() <= printed_) return;
    const std::vector<reference::token> fresh{all.begin() + static_cast<std::ptrdiff_t>(printed_),
                                              all.end()};
    std::cout << printable(reference::decode_text(fresh)) << std::flush;
    printed_ = all.size();
  }

 private:
  std::size_t printed_{0};
};

exit_code answer(const ask_arguments& given, const cluster_address& at,
                 const interrupt_watch& watch, std::stop_source& stop) {
  auto connected = actors::cluster_client::connect(at.client({}));
  if (!connected) {
    complain_of_ask(to_string(at.explained(connected.error())));
    return exit_code::failed;
  }
  auto& cluster = **connected;
  if (const auto members = members_of(cluster, at); !members) {
    complain_of_ask(to_string(members.error()));
    return exit_code::failed;
  }
  reference::text_order order;
  order.request = drawn_id();
  order.prompt = reference::encode_text(given.prompt);
  order.max_tokens = given.max_tokens;
  order.how = {0.8f, given.seed, true};
  order.from = given.from;
  order.to = given.to;
  order.deadline = std::chrono::seconds{given.deadline_s};
  auto request = reference::carried_text(order);
  request.stop = stop.get_token();
  writer place;
  request.decode = [&place, calls = request.decode](const actors::carried_attempt& now,
                                                    const actors::node_info& node) {
    place.moved_to(now);
    return calls(now, node);
  };
  actors::request_carrier carrier{cluster};
  auto carried = std::async(std::launch::async, [&] { return carrier.carry(request); });
  printed_text text;
  while (carried.wait_for(text_interval) != std::future_status::ready) {
    text.print(place.text(cluster));
  }
  const auto done = carried.get();
  if (!done) {
    std::cout << std::endl;
    if (watch.interrupted()) return exit_code::interrupted;
    complain_of_ask(to_string(done.error()));
    return exit_code::failed;
  }
  const auto reply = reference::decode_reply_from(done->decode.front());
  if (!reply) {
    complain_of_ask(to_string(reply.error()));
    return exit_code::failed;
  }
  text.print(reply->text.tokens);
  std::cout << std::endl;
  return exit_code::ok;
}

exit_code run_ask(const ask_arguments& given) {
  const auto at = cluster_at("ask", given.where);
  if (!at) return exit_code::usage;
  log_errors_only("ask");
  std::stop_source stop;
  const interrupt_watch watch{[&stop] { stop.request_stop(); }};
  return answer(given, *at, watch, stop);
}

}  // namespace

void add_ask(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "ask",
      "Send a prompt to a running cluster of reference engines and print the text as it is "
      "written.\n"
      "Their weights are random, so the text is noise; what it shows is that the cluster serves.");
  const auto given = std::make_shared<ask_arguments>();
  verb->add_option("TARGET", given->where, "The deployment file, or HOST:PORT of the supervisor")
      ->required();
  verb->add_option("--prompt", given->prompt, "Text to continue")
      ->required()
      ->check([](const std::string& text) {
        return text.empty() || text.size() > reference::max_prompt_tokens
                   ? "takes 1 to " + std::to_string(reference::max_prompt_tokens) +
                         " bytes, found " + std::to_string(text.size())
                   : std::string{};
      });
  verb->add_option("--max-tokens", given->max_tokens, "Number of tokens to generate")
      ->check(CLI::Range(1U, reference::max_new_tokens))
      ->capture_default_str();
  verb->add_option("--seed", given->seed, "Seed of the draws: the same seed gives the same text")
      ->capture_default_str();
  verb->add_option("--from", given->from, "The prefill stage, where there are several edges");
  verb->add_option("--to", given->to, "The decode stage, where there are several edges");
  verb->add_option("--deadline", given->deadline_s, "Seconds after which the request is given up")
      ->check(CLI::Range(1U, 86'400U))
      ->capture_default_str();
  verb->callback([given, &code] { code = run_ask(*given); });
}

}  // namespace troupe::deploy::cli
