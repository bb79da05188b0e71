#include "troupe/deploy/cli/status_watch.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <iostream>
#include <memory>
#include <sstream>
#include <string_view>

#include <sys/ioctl.h>
#include <unistd.h>

#include "troupe/config/printable.hpp"
#include "troupe/config/units.hpp"
#include "troupe/deploy/cli/cluster_look.hpp"
#include "troupe/deploy/cli/stop_signals.hpp"
#include "troupe/deploy/cli/supervisor_presence.hpp"
#include "troupe/deploy/cli/text_table.hpp"

namespace troupe::deploy::cli {

namespace {

using std::chrono::milliseconds;
using clock = std::chrono::steady_clock;

/// The present size of the window behind standard output. One column is left free, because
/// terminals differ in what clearing to the end of a full row clears.
window window_now() {
  winsize size{};
  window out;
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 1)
    out = {size.ws_row, size.ws_col};
  --out.columns;
  return out;
}

/// The destination of looks and of messages between them.
class watch_view {
 public:
  virtual ~watch_view() = default;
  virtual void show(const cluster_status& status) = 0;
  virtual void away(const error& why) = 0;
  virtual void restarted(std::uint64_t incarnation) = 0;
};

/// Prints tables one after another, for a file or a pipe. Messages go to standard error.
class listed final : public watch_view {
 public:
  listed(const actors::cluster_client& cluster, watch_form form)
      : form_{form}, presence_{"status", [&cluster] { return cluster.supervisor_address(); }} {}
  void show(const cluster_status& status) override {
    presence_.here();
    const auto now = unix_ms_now();
    switch (form_) {
      case watch_form::json: std::cout << to_json_line(status, now) << std::endl; return;
      case watch_form::tables:
        std::cout << time_text(now) << "\n";
        print_tables(status, std::cout);
        std::cout << std::endl;
    }
  }
  void away(const error& why) override { presence_.away(to_string(why)); }
  void restarted(std::uint64_t incarnation) override { presence_.restarted(incarnation, ""); }

 private:
  watch_form form_;
  supervisor_presence presence_;
};

constexpr std::string_view hide_cursor = "\033[?25l";
constexpr std::string_view show_cursor = "\033[?25h";

void write_now(std::string_view text) noexcept {
  [[maybe_unused]] const auto written = ::write(STDOUT_FILENO, text.data(), text.size());
}

/// Ctrl-Z: shows the cursor for the shell and stops. Returns when the process is continued.
void stop_with_cursor(int signal) {
  const int before = errno;
  write_now(show_cursor);
  struct sigaction ours {};
  struct sigaction usual {};
  usual.sa_handler = SIG_DFL;
  ::sigaction(signal, &usual, &ours);
  sigset_t mask{};
  sigemptyset(&mask);
  sigaddset(&mask, signal);
  ::raise(signal);  // stops the process once it is unblocked
  ::pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
  ::pthread_sigmask(SIG_BLOCK, &mask, nullptr);
  ::sigaction(signal, &ours, nullptr);
  write_now(hide_cursor);
  errno = before;
}

/// Hides the terminal's cursor while it lives, except while the process is stopped.
class hidden_cursor {
 public:
  hidden_cursor() {
    write_now(hide_cursor);
    struct sigaction stops {};
    stops.sa_handler = stop_with_cursor;
    stops.sa_flags = SA_RESTART;
    ::sigaction(SIGTSTP, nullptr, &before_);
    if (before_.sa_handler == SIG_DFL) ::sigaction(SIGTSTP, &stops, nullptr);
  }
  ~hidden_cursor() {
    ::sigaction(SIGTSTP, &before_, nullptr);
    write_now(show_cursor);
  }
  hidden_cursor(const hidden_cursor&) = delete;
  hidden_cursor& operator=(const hidden_cursor&) = delete;

 private:
  struct sigaction before_ {};
};

/// Draws the newest tables in place, with the cursor, which would jump about, hidden.
class drawn final : public watch_view {
 public:
  drawn(const actors::cluster_client& cluster, milliseconds interval)
      : cluster_{cluster}, interval_{config::format_duration(interval)} {}
  ~drawn() override { std::cout << "\n" << std::flush; }
  drawn(const drawn&) = delete;
  drawn& operator=(const drawn&) = delete;

  void show(const cluster_status& status) override {
    std::ostringstream text;
    print_tables(status, text);
    tables_ = text.str();
    away_since_.clear();
    draw({});
  }
  void away(const error& why) override {
    if (away_since_.empty()) away_since_ = time_text(unix_ms_now());
    draw("the supervisor at " + cluster_.supervisor_address() + " has not answered since " +
         away_since_ + (tables_.empty() ? "" : ", what follows is older") + ": " +
         printable(to_string(why)) + "\n");
  }
  void restarted(std::uint64_t /*incarnation*/) override {
    restarted_ = "the supervisor was restarted at " + time_text(unix_ms_now()) + "\n";
  }

 private:
  void draw(const std::string& news) const {
    const auto head = time_text(unix_ms_now()) + ", every " + interval_ + "; Ctrl-C ends\n";
    std::cout << redrawn(fitted(head + restarted_ + news + "\n" + tables_, window_now()))
              << std::flush;
  }
  const actors::cluster_client& cluster_;
  std::string interval_;
  std::string tables_;
  std::string away_since_;
  std::string restarted_;
  hidden_cursor no_cursor_;
};

/// The view must not outlive the cluster.
std::unique_ptr<watch_view> view_for(const actors::cluster_client& cluster,
                                     const watch_options& how) {
  if (how.form == watch_form::tables && ::isatty(STDOUT_FILENO) != 0)
    return std::make_unique<drawn>(cluster, how.interval);
  return std::make_unique<listed>(cluster, how.form);
}

}  // namespace

exit_code watch_status(const cluster_address& at, const watch_options& how) {
  stop_signals signals;
  const auto cluster = actors::cluster_client::unconnected(at.client(how.timeout));
  auto view = view_for(*cluster, how);
  rate_meter rates;
  std::uint64_t supervisor = 0;
  for (auto next = clock::now();;) {
    next = std::max(next + how.interval, clock::now());
    std::atomic<bool> cancelled{false};
    result<cluster_status> status = fail(errc::internal, "not looked");
    const auto look = [&] { status = look_at(*cluster, at, cancelled); };
    const auto end = [&] {
      cancelled = true;
      view.reset();  // restores the terminal before the answers still due arrive
    };
    if (!run_and_listen(signals, look, end)) return exit_code::ok;
    if (status) {
      const auto now = status->members.supervisor_incarnation;
      if (supervisor != 0 && supervisor != now) view->restarted(now);
      supervisor = now;
      rates.measure(*status);
      view->show(*status);
      // The reader of a pipe went away.
      if (!std::cout) return exit_code::ok;
    } else if (is_final(status.error())) {
      view.reset();
      std::cerr << "troupe status: " << config::printable(to_string(status.error())) << "\n";
      return exit_code::failed;
    } else {
      view->away(status.error());
    }
    const auto rest = std::chrono::duration_cast<milliseconds>(next - clock::now());
    if (signals.wait(std::max(rest, milliseconds{0}))) return exit_code::ok;
  }
}

}  // namespace troupe::deploy::cli
