#include "troupe/actors/supervisor_begin.hpp"

#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "troupe/actors/base/phrases.hpp"
#include "troupe/actors/discovery/supervisor_notice.hpp"
#include "troupe/actors/discovery/supervisor_process.hpp"
#include "troupe/actors/secrets/door_files.hpp"
#include "troupe/actors/secrets/door_user_secret.hpp"
#include "troupe/config/print.hpp"
#include "troupe/config/resolve.hpp"
#include "troupe/kvcache/or_error.hpp"
#include "troupe/transport/os_error.hpp"
#include "troupe/transport/owned_fd.hpp"

namespace troupe::actors {

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds pause_of_looks{5};
/// A supervisor needs part of a second from locking the notice to publishing its address.
constexpr milliseconds patience_of_silence{2000};
/// A supervisor that has logged something, but not taken the notice this long after our child
/// ended, has ended, too.
constexpr milliseconds patience_without_a_child{2000};

/// The place of a supervisor on another machine: only the deployment tells.
result<found_supervisor> where_the_file_says(const config::deployment& of) {
  const auto& at = of.supervisor;
  if (at.port != 0) return found_supervisor{at.host, at.port, 0, 0};
  return fail(errc::invalid_config,
              "supervisor.port is 0, and supervisor.host, " + at.host +
                  ", is not this machine, so nobody here knows where the supervisor listens; give "
                  "it a port");
}

/// The folder of the user's cluster. Made again if it was removed meanwhile.
result<std::string> made_folder(const begun_terms& terms) {
  if (!terms.folder) return fail(terms.folder.error());
  if (auto made = make_user_folder_at(*terms.folder); !made) return fail(std::move(made).error());
  return terms.folder;
}

unexpected none_lives(const config::deployment& of) {
  return fail(errc::not_found, "no supervisor of cluster " + of.cluster +
                                   " runs on this machine; as supervisor.begin says, the first of "
                                   "this user's nodes and frontends that needs one begins it");
}

unexpected is_silent(const config::deployment& of, const std::string& folder,
                     const seen_notice& seen, milliseconds patience) {
  const auto who = seen.pid == 0 ? std::string{} : " (pid " + std::to_string(seen.pid) + ")";
  return fail(errc::deadline, "the supervisor of cluster " + of.cluster + who +
                                  " is running but has not said within " + time_text(patience) +
                                  " where it listens; see " + folder + "/supervisor.log");
}

result<found_supervisor> find_only(const begun_terms& terms) {
  const auto& of = terms.deployment;
  if (!terms.is_here) return where_the_file_says(of);
  const auto folder = made_folder(terms);
  if (!folder) return fail(folder.error());
  const auto until = steady_clock::now() + patience_of_silence;
  for (;;) {
    auto seen = look_at_notice(*folder, of);
    if (!seen) return fail(seen.error());
    if (seen->listens) return std::move(*seen->listens);
    if (!seen->held) return none_lives(of);
    if (steady_clock::now() >= until) return is_silent(of, *folder, *seen, patience_of_silence);
    std::this_thread::sleep_for(pause_of_looks);
  }
}

/// Writes the deployment for the new supervisor and returns its path. The caller holds the lock of
/// beginning.
result<std::string> write_deployment(const std::string& folder, const config::deployment& of) {
  const auto path = folder + "/supervisor.yaml";
  const auto draft = path + ".new";
  const auto refused = [&path](int number) {
    return fail(errc::invalid_config, "no supervisor can be begun: " + path +
                                          " cannot be written: " + transport::what_errno(number));
  };
  ::unlink(draft.c_str());
  const transport::owned_fd fd{
      ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600)};
  if (!fd) return refused(errno);
  if (const int why = write_private(fd.get(), config::print(of)); why != 0) return refused(why);
  if (::rename(draft.c_str(), path.c_str()) != 0) return refused(errno);
  return path;
}

/// A supervisor that this process has begun.
struct begun_life {
  begun_supervisor process;
  std::uint32_t pid_before{0};  ///< the pid in the notice at that time
  std::uint64_t log_before{0};  ///< the length of the log at that time
  steady_clock::time_point since{};
};
using begun_life_ptr = std::unique_ptr<begun_life>;

/// Supervisors that this process has begun and no longer waits for, by folder. They may still come
/// to listen.
class lives_left_alone {
 public:
  static lives_left_alone& of_this_process() {
    // Never destroyed: threads may look while the process ends.
    static auto* const all = new lives_left_alone;
    return *all;
  }
  void put(const std::string& folder, begun_life_ptr one) {
    const std::lock_guard lock{mutex_};
    all_.insert_or_assign(folder, std::move(one));
  }
  /// The caller holds the lock of beginning and has seen an unheld notice. Null if there is no
  /// supervisor left to wait for, its time is over, or it has lived and ended since.
  begun_life_ptr take(const std::string& folder, const seen_notice& seen) {
    begun_life_ptr one;
    {
      const std::lock_guard lock{mutex_};
      const auto found = all_.find(folder);
      if (found == all_.end()) return nullptr;
      one = std::move(found->second);
      all_.erase(found);
    }
    const bool has_time = steady_clock::now() - one->since < begin_patience;
    if (has_time && one->pid_before == seen.pid) return one;
    one->process.kill();
    return nullptr;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, begun_life_ptr> all_;
};

/// One look for a supervisor, which begins one if there is none.
class beginning {
 public:
  beginning(const begun_terms& terms, std::string folder, milliseconds patience,
            const std::stop_token& given_up)
      : terms_{terms},
        of_{terms.deployment},
        folder_{std::move(folder)},
        log_{folder_ + "/supervisor.log"},
        patience_{patience},
        until_{steady_clock::now() + patience},
        given_up_{given_up} {}

  result<found_supervisor> run() {
    for (;;) {
      auto seen = look();
      if (!seen) return fail(seen.error());
      if (seen->listens) return std::move(*seen->listens);
      if (auto over = is_over(*seen); !over) return fail(over.error());
      if (!seen->held) {
        const auto mine = lock_beginning(folder_);
        if (!mine) return fail(mine.error());
        // Another process may have begun one before we got the lock.
        if (*mine) seen = look();
        if (!seen) return fail(seen.error());
        if (seen->listens) return std::move(*seen->listens);
        if (*mine && !seen->held) return begin(*seen);
      }
      std::this_thread::sleep_for(pause_of_looks);
    }
  }

 private:
  /// Reads the notice. Content seen while nobody held the notice is not attributed to the next
  /// holder, which locks the notice first and writes right after.
  result<seen_notice> look() {
    auto seen = look_at_notice(folder_, of_);
    if (!seen) return seen;
    if (!seen->held) {
      gone_ = seen->incarnation;
    } else if (seen->incarnation == gone_) {
      seen->listens.reset();
    }
    return seen;
  }

  /// Returns an error if the look is over: given up, or out of patience.
  [[nodiscard]] result<void> is_over(const seen_notice& seen) const {
    if (given_up_.stop_requested()) return fail(errc::aborted, "it was given up");
    if (steady_clock::now() < until_) return {};
    if (seen.held) return is_silent(of_, folder_, seen, patience_);
    return fail(errc::deadline, "a supervisor of cluster " + of_.cluster +
                                    " was begun but did not listen within " + time_text(patience_) +
                                    shown_log(0));
  }

  /// Begins a supervisor. Called under the lock of beginning when none lives.
  result<found_supervisor> begin(const seen_notice& before) {
    until_ = steady_clock::now() + patience_;  // restart it: waiting for the lock took time
    auto one = lives_left_alone::of_this_process().take(folder_, before);
    if (!one) {
      auto started = start(before);
      if (!started) return fail(started.error());
      one = std::move(*started);
    }
    for (;;) {
      auto seen = look();
      if (seen && seen->listens) return std::move(*seen->listens);
      auto over = seen ? is_over(*seen) : result<void>{fail(seen.error())};
      if (over) over = may_come(*one, *seen);
      if (!over) {
        leave(std::move(one), over.error().code);
        return fail(over.error());
      }
      std::this_thread::sleep_for(pause_of_looks);
    }
  }

  [[nodiscard]] result<begun_life_ptr> start(const seen_notice& before) const {
    const auto command = troupe_command(terms_.environment);
    if (!command) return fail(command.error());
    const auto file = write_deployment(folder_, of_);
    if (!file) return fail(file.error());
    const auto length = length_of_log(log_);
    auto process = begun_supervisor::start(*command, terms_.environment, *file, log_);
    if (!process) return fail(process.error());
    // Counted from the beginning of the patience: a caller with all of `begin_patience` then waits
    // for as long as this supervisor has.
    return std::make_unique<begun_life>(
        begun_life{std::move(*process), before.pid, length, until_ - patience_});
  }

  /// Decides what happens to a supervisor that this look no longer waits for.
  void leave(begun_life_ptr one, errc why) const {
    const bool has_time = steady_clock::now() - one->since < begin_patience;
    if (why == errc::deadline && has_time) {
      lives_left_alone::of_this_process().put(folder_, std::move(one));
    } else if (why != errc::aborted) {
      one->process.kill();
    }
  }

  /// Returns an error if the begun supervisor can no longer come to listen. One that held the
  /// notice and holds it no more has ended: its pid is left in the notice.
  [[nodiscard]] result<void> may_come(begun_life& one, const seen_notice& seen) const {
    std::string how;
    if (const auto failed = one.process.failure()) {
      // A supervisor that another process started may have been first.
      const auto now = look_at_notice(folder_, of_);
      if (!now) return fail(now.error());
      if (now->held) return {};
      how = " (" + *failed + ")";
    } else if (seen.held || (seen.pid == one.pid_before && !ended_unseen(one))) {
      return {};
    }
    return fail(errc::peer_unreachable, "the supervisor of cluster " + of_.cluster +
                                            " was begun and ended before it listened" + how +
                                            shown_log(one.log_before));
  }

  /// Whether the supervisor has probably ended, although no exit status says so: other code, or the
  /// kernel, reaps the children of this process, or our child ended well but its supervisor did
  /// not.
  [[nodiscard]] bool ended_unseen(begun_life& one) const {
    const auto ended = one.process.ended();
    return ended && steady_clock::now() - *ended >= patience_without_a_child &&
           length_of_log(log_) > one.log_before;
  }

  [[nodiscard]] std::string shown_log(std::uint64_t from) const {
    const auto end = end_of_log(log_, from);
    return end.empty() ? "; it left nothing in " + log_ : "; the end of " + log_ + ": " + end;
  }

  const begun_terms& terms_;
  const config::deployment& of_;
  std::string folder_, log_;
  milliseconds patience_;
  steady_clock::time_point until_;
  const std::stop_token& given_up_;
  std::uint64_t gone_{0};  ///< incarnation of the supervisor that ended last; 0: none
};

result<found_supervisor> find_or_begin(const begun_terms& terms, milliseconds patience,
                                       const std::stop_token& given_up) {
  if (!terms.is_here) return where_the_file_says(terms.deployment);
  auto folder = made_folder(terms);
  if (!folder) return fail(folder.error());
  return beginning{terms, std::move(*folder), patience, given_up}.run();
}

constexpr const char* what_fails = "cannot look for the supervisor";

}  // namespace

begun_terms begun_terms_of(const config::deployment& of) {
  return {of, config::resolve(of).front().local, user_folder_path(of.cluster),
          environment_of_this_process()};
}

result<found_supervisor> find_supervisor(const begun_terms& terms) {
  return or_error(what_fails, [&] { return find_only(terms); });
}

result<found_supervisor> find_supervisor(const config::deployment& of) {
  return or_error(what_fails, [&] { return find_only(begun_terms_of(of)); });
}

result<found_supervisor> find_or_begin_supervisor(const begun_terms& terms, milliseconds patience,
                                                  const std::stop_token& given_up) {
  return or_error(what_fails, [&] { return find_or_begin(terms, patience, given_up); });
}

result<found_supervisor> find_or_begin_supervisor(const config::deployment& of,
                                                  milliseconds patience,
                                                  const std::stop_token& given_up) {
  return or_error(what_fails,
                  [&] { return find_or_begin(begun_terms_of(of), patience, given_up); });
}

result<config::deployment> with_supervisor(const config::deployment& of,
                                           missing_supervisor missing) {
  if (!of.supervisor.begin) return of;
  auto found =
      missing == missing_supervisor::is_begun ? find_or_begin_supervisor(of) : find_supervisor(of);
  if (!found) return fail(found.error());
  auto here = of;
  here.supervisor.host = std::move(found->host);
  here.supervisor.port = found->port;
  return here;
}

supervisor_look look_for_supervisor(const config::deployment& of, missing_supervisor missing,
                                    const std::stop_token& given_up) {
  if (!of.supervisor.begin) return {};
  return [terms = std::make_shared<const begun_terms>(begun_terms_of(of)), missing,
          given_up](milliseconds patience) {
    return missing == missing_supervisor::is_begun
               ? find_or_begin_supervisor(*terms, patience, given_up)
               : find_supervisor(*terms);
  };
}

}  // namespace troupe::actors
