#include <algorithm>
#include <atomic>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <utility>

#include <CLI/CLI.hpp>
#include <poll.h>
#include <unistd.h>

#include "troupe/actors/membership/event_log.hpp"
#include "troupe/config/open_name.hpp"
#include "troupe/config/printable.hpp"
#include "troupe/deploy/cli/cluster_look.hpp"
#include "troupe/deploy/cli/event_cursor.hpp"
#include "troupe/deploy/cli/event_text.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/supervisor_presence.hpp"
#include "troupe/deploy/cli/verbs.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds poll_interval{250};
constexpr milliseconds answer_within{3000};

struct events_arguments {
  std::string where;
  std::string node;
  std::uint64_t since{0};
  bool follow{false};
  bool json{false};
};

/// Reads from its last position and prints events; everything else goes to standard error.
class event_reader {
 public:
  event_reader(const events_arguments& given, const cluster_address& at)
      : given_{given},
        at_{at},
        cluster_{actors::cluster_client::unconnected(at.client(answer_within))},
        presence_{"events", [this] { return cluster_->supervisor_address(); }},
        cursor_{given.since} {}
  event_reader(const event_reader&) = delete;
  event_reader& operator=(const event_reader&) = delete;

  /// Prints all new events until `over` returns true.
  template <class Over>
  result<void> read(const Over& over) {
    if (!right_cluster_) {
      if (auto members = members_of(*cluster_, at_); !members) return fail(members.error());
      right_cluster_ = true;
    }
    for (bool more = true; more && !over();) {
      auto page = cluster_->events(cursor_.next());
      if (!page) {
        right_cluster_ = false;  // another cluster may listen there next time
        return fail(page.error());
      }
      presence_.here();
      const auto supervisor = page->supervisor_incarnation;
      const auto news = cursor_.take(std::move(*page));
      print(news, supervisor);
      more = news.more;
    }
    return {};
  }
  /// The last read ended with that error.
  void away(const error& why) { presence_.away(to_string(why)); }

 private:
  void print(const event_cursor::news& news, std::uint64_t supervisor) {
    if (news.restarted)
      presence_.restarted(supervisor, "; its events begin with sequence 1, earlier ones are gone");
    if (news.missed > 0)
      std::cerr << "troupe events: " << news.missed
                << (news.missed == 1 ? " event is" : " events are")
                << " gone: the supervisor keeps "
                << "the newest " << actors::max_events << std::endl;
    for (const auto& event : news.events) {
      if (!given_.node.empty() && event.node != given_.node) continue;
      if (given_.json) {
        std::cout << event_json(event, supervisor) << "\n";
      } else {
        if (!std::exchange(headed_, true)) std::cout << event_heading() << "\n";
        std::cout << event_row(event) << "\n";
      }
    }
    std::cout << std::flush;
  }

  const events_arguments& given_;
  const cluster_address& at_;
  std::unique_ptr<actors::cluster_client> cluster_;
  supervisor_presence presence_;
  event_cursor cursor_;
  bool right_cluster_{false};
  bool headed_{false};
};

exit_code complain(const error& why) {
  std::cerr << "troupe events: " << config::printable(to_string(why)) << "\n";
  return exit_code::failed;
}

/// Whether the node can exist: waiting for a name that is not in the file and that no node may join
/// with would be in vain.
bool has_node(const cluster_address& at, const std::string& node) {
  if (node.empty() || at.expected.empty()) return true;
  const auto place = config::open_place_of(node);
  if (place && std::ranges::find(at.open_stages, place->stage) != at.open_stages.end()) return true;
  std::string names;
  for (const auto& known : at.expected) {
    if (known.name == node) return true;
    names += (names.empty() ? "" : ", ") + known.name;
  }
  std::cerr << "troupe events: the deployment has no node " << node << "; it has " << names << "\n";
  return false;
}

/// Whether a pipe's reader (`| head`) has closed it: without events no failing write would reveal
/// this for long.
bool reader_is_gone() {
  pollfd out{STDOUT_FILENO, 0, 0};
  return !std::cout || (::poll(&out, 1, 0) > 0 && (out.revents & POLLERR) != 0);
}

exit_code follow(const events_arguments& given, const cluster_address& at) {
  stop_signals signals;
  event_reader reader{given, at};
  std::atomic<bool> stopped{false};
  result<void> read;
  const auto look = [&] { read = reader.read([&] { return stopped || !std::cout; }); };
  while (!stopped) {
    if (!run_and_listen(signals, look, [&] { stopped = true; })) return exit_code::ok;
    if (reader_is_gone()) return exit_code::ok;
    if (!read && is_final(read.error())) return complain(read.error());
    if (!read) reader.away(read.error());
    stopped = signals.wait(poll_interval);
  }
  return exit_code::ok;
}

exit_code run_events(const events_arguments& given) {
  const auto at = cluster_at("events", given.where);
  if (!at || !has_node(*at, given.node)) return exit_code::usage;
  log_errors_only("events");
  if (given.follow) return follow(given, *at);
  event_reader reader{given, *at};
  const auto read = reader.read([] { return !std::cout; });
  return read ? exit_code::ok : complain(read.error());
}

}  // namespace

void add_events(CLI::App& app, exit_code& code) {
  auto* verb = app.add_subcommand(
      "events",
      "Show what happened in a running cluster: nodes that came, were suspected, went down or\n"
      "left, with the reason; refused registrations; requests that no node could take; the start\n"
      "of the supervisor. The supervisor keeps the newest 4096 events for as long as it runs.");
  const auto given = std::make_shared<events_arguments>();
  verb->add_option("TARGET", given->where, "The deployment file, or HOST:PORT of the supervisor")
      ->required();
  verb->add_flag("--follow,-f", given->follow,
                 "Keep printing new events until Ctrl-C, across restarts of the supervisor, which\n"
                 "are reported on standard error");
  verb->add_option("--since", given->since, "Only events after the one of this sequence number");
  verb->add_option("--node", given->node, "Only events of this node (or `supervisor`)");
  verb->add_flag("--json", given->json, "One JSON object per line");
  verb->callback([given, &code] { code = run_events(*given); });
}

}  // namespace troupe::deploy::cli
