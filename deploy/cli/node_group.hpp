#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "troupe/config/resolve.hpp"
#include "troupe/deploy/child_process.hpp"
#include "troupe/deploy/cli/announcement.hpp"
#include "troupe/deploy/cli/exit_codes.hpp"
#include "troupe/deploy/cli/restart_backoff.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"

namespace troupe::deploy::cli {

/// Writes a sentence of `troupe up` to standard error in one write, since the nodes write their log
/// lines there, too.
void complain(const std::string& sentence);

struct group_options {
  std::string file;
  std::string log_level{"info"};
  std::string log_dir;     ///< empty: the nodes log to our standard error
  std::string supervisor;  ///< the supervisor's address, if it is none of them
};

struct group_member {
  config::resolved_node node;
  config::restart_policy restart{config::restart_policy::never};
};

/// The processes that `troupe up` starts, from start to end.
///
/// The states of a member's process:
///
///     runs --ended, failed--> waits --its delay is over--> runs
///     runs --ended with 0 (it was drained, or told to stop)--> left
///     runs --ended, and its policy is `never`, or a restart would not help--> all stop
///
/// Only members with `on_failure` enter `waits`. They and drained members enter `left`.
class node_group {
 public:
  explicit node_group(group_options given) : given_{std::move(given)} {}

  /// Starts the members in their order (the supervisor, if it is one, comes first) and watches them
  /// until a signal comes, all have left, which is success, or a member ends that is not restarted.
  /// All of them have ended when it returns.
  exit_code run(const std::vector<group_member>& members);

 private:
  using clock = std::chrono::steady_clock;
  enum class phase : std::uint8_t { runs, waits, left };

  struct child {
    group_member member;
    child_process process;  ///< the latest one
    announcements heard;
    phase where{phase::runs};
    restart_backoff backoff{};
    clock::time_point start_at{};  ///< while it waits
    std::size_t restarts{0};
    bool listens{false};
    clock::time_point listens_since{};
    bool registered{false};
    bool drained{false};    ///< it leaves because an operator drained it
    bool reported{false};   ///< its end was printed already
    std::string failure{};  ///< its own account

    [[nodiscard]] bool supervises() const { return member.node.role == config::role::supervisor; }
    [[nodiscard]] std::string who() const;
  };
  struct started {
    child_process process;
    announcements heard;
  };

  bool start_all(const std::vector<group_member>& members);
  [[nodiscard]] result<started> start(const config::resolved_node& node) const;
  bool wait_for_supervisor();

  bool watch();
  bool step(std::chrono::milliseconds timeout);
  [[nodiscard]] std::chrono::milliseconds until_next_start(std::chrono::milliseconds most) const;
  bool start_those_due();
  bool hear(child& c);
  void on_listening(child& c, const announcement& what);
  void on_registered(child& c);
  void say_when_up();

  bool on_end(child& c);
  bool work_on_without(child& supervisor, const std::string& what_happened);
  static void wait_for_next_start(child& c, std::chrono::milliseconds delay);
  bool start_later(child& c, const std::string& what_happened);
  bool give_up(child& c, const std::string& what_happened);

  [[nodiscard]] bool all_listen_for(clock::duration time) const;
  [[nodiscard]] bool everyone_is_up() const;
  [[nodiscard]] bool nobody_is_left() const;
  void say_who_waits();

  bool stop_all();
  static bool ended_well(child& c);

  group_options given_;
  std::uint16_t supervisor_port_{0};  ///< of our own supervisor; 0: the deployment's
  stop_signals signals_;
  std::vector<child> children_;
  bool signalled_{false};
  clock::time_point stopping_since_;
  bool said_up_{false};
  clock::time_point remind_at_{};
  std::size_t expected_{0};  ///< children, when all are started
};

}  // namespace troupe::deploy::cli
