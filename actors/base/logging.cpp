#include "troupe/actors/logging.hpp"

#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <spdlog/common.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/dist_sink.h>
#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <unistd.h>

namespace troupe::actors {

namespace {

constexpr std::pair<std::string_view, spdlog::level::level_enum> levels[] = {
    {"trace", spdlog::level::trace}, {"debug", spdlog::level::debug}, {"info", spdlog::level::info},
    {"warn", spdlog::level::warn},   {"error", spdlog::level::err},   {"off", spdlog::level::off},
};

/// The level's name as options spell it, five wide: spdlog's own name for `warn` differs.
class level_name final : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& line, const std::tm&,
              spdlog::memory_buf_t& out) override {
    std::string name;
    for (const auto& [known, level] : levels) {
      if (level == line.level) name = known;
    }
    name.resize(5, ' ');
    out.append(name.data(), name.data() + name.size());
  }
  [[nodiscard]] std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<level_name>();
  }
};

std::unique_ptr<spdlog::formatter> form_of_lines(std::string node) {
  if (node.empty()) node = std::to_string(getpid());
  std::string escaped;
  for (char c : node) escaped += c == '%' ? std::string{"%%"} : std::string{c};
  auto form = std::make_unique<spdlog::pattern_formatter>();
  form->add_flag<level_name>('*').set_pattern("%Y-%m-%dT%H:%M:%S.%e %* " + escaped + " %n: %v");
  return form;
}

/// All loggers share one sink that forwards to the real one, so that the real one can be replaced.
struct log_state {
  std::mutex mutex;
  std::shared_ptr<spdlog::sinks::dist_sink_mt> out =
      std::make_shared<spdlog::sinks::dist_sink_mt>();
  spdlog::level::level_enum level{spdlog::level::info};
  std::map<std::string, std::shared_ptr<spdlog::logger>, std::less<>> loggers;

  log_state() {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    sink->set_formatter(form_of_lines({}));
    out->set_sinks({sink});
  }
};

log_state& state() {
  // Never destroyed: an actor may still write a line while the process ends.
  static log_state* const instance = new log_state;
  return *instance;
}

result<spdlog::level::level_enum> level_from(std::string_view text) {
  std::string names;
  for (const auto& [name, level] : levels) {
    if (name == text) return level;
    names += (names.empty() ? "" : ", ") + std::string{name};
  }
  return fail(errc::invalid_config,
              "there is no log level '" + std::string{text} + "'; use one of " + names);
}

}  // namespace

result<void> init_logging(const log_options& options) {
  const auto level = level_from(options.level);
  if (!level) return fail(level.error());
  spdlog::sink_ptr sink;
  if (options.file.empty()) {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  } else {
    try {
      sink = std::make_shared<spdlog::sinks::rotating_file_sink_mt>(
          options.file, options.file_bytes, options.files);
    } catch (const spdlog::spdlog_ex& e) {
      return fail(errc::invalid_config, "cannot write the log file '" + options.file +
                                            "': " + e.what() + "; name another one");
    }
  }
  sink->set_formatter(form_of_lines(options.node));
  log_state& s = state();
  const std::lock_guard lock{s.mutex};
  s.level = *level;
  s.out->set_sinks({sink});
  for (auto& [name, l] : s.loggers) l->set_level(*level);
  return {};
}

std::shared_ptr<spdlog::logger> logger(std::string_view component) {
  log_state& s = state();
  const std::lock_guard lock{s.mutex};
  if (const auto it = s.loggers.find(component); it != s.loggers.end()) return it->second;
  auto made = std::make_shared<spdlog::logger>(std::string{component}, s.out);
  made->set_level(s.level);
  made->flush_on(spdlog::level::info);
  s.loggers.emplace(component, made);
  return made;
}

std::optional<std::uint64_t> log_limiter::pass(std::chrono::steady_clock::time_point now) {
  const std::lock_guard lock{mutex_};
  if (last_ && now - *last_ < interval_) {
    ++held_back_;
    return std::nullopt;
  }
  last_ = now;
  return std::exchange(held_back_, 0);
}

}  // namespace troupe::actors
