#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "troupe/transport/progress_engine.hpp"
#include "troupe/transport/xgmi/gpu_site.hpp"

namespace troupe::transport::xgmi {

/// Tells when GPUs have come to points in an engine's work, without a thread that waits: a stream of
/// ours waits for the engine's event, and the driver calls from behind it. A driver calls nobody
/// after an error, so every stream with somebody behind it is looked at now and then. Thread-safe.
class compute_watch final : public pollable, public std::enable_shared_from_this<compute_watch> {
 public:
  using news = std::function<void(std::optional<troupe::error>)>;

  compute_watch(std::shared_ptr<gpu_site> site, progress_engine& engine);
  ~compute_watch() override;

  /// `then` is called once, on a thread of the driver or of the progress engine, or never if `close`
  /// comes first; it must not call the GPU. Points of one `line` are waited for one behind the
  /// other. The event is done with when this returns, but for that one of another process stays
  /// open. `no_device`, `invalid_config` (no event, two, or one that cannot be opened), `overloaded`
  /// (too many wait behind points to which the GPU does not come).
  [[nodiscard]] result<void> after(const compute_point& point, std::uint64_t line, news then);
  /// Nobody is called any more when this returns.
  void close();

  bool on_ready(std::uint64_t, std::uint32_t) override { return false; }
  void on_timer(std::uint64_t key, steady_time now) override;

 private:
  /// So many lines of a GPU wait apart; more share.
  static constexpr std::uint64_t streams_per_gpu = 16;
  /// Behind them, the streams of a GPU on which points of other processes are waited for. A worker
  /// that dies before it has come to its point leaves its stream waiting for ever: whoever is behind
  /// it then fails by its deadline, and no point of this process is. So the first of these streams
  /// takes all, and the next one those that come once it has not moved for `patience`.
  static constexpr std::uint64_t streams_of_others = 4;
  static constexpr std::chrono::milliseconds patience{1000};
  /// Points behind one stream. Each is three commands to the driver, which keeps about a thousand of a
  /// stream and lets the caller wait for room for more.
  static constexpr std::size_t most_behind = 320;
  static constexpr std::chrono::milliseconds look_every{100};

  /// Somebody behind a point.
  class caller final : public bell {
   public:
    explicit caller(news then) : then_{std::move(then)} {}
    void ring() noexcept override { tell(std::nullopt); }
    void tell(std::optional<troupe::error> why) noexcept;
    /// Waits for a call that runs just now.
    void forget();
    [[nodiscard]] bool told();

   private:
    std::mutex mutex_;
    news then_;  ///< empty: told
  };
  struct point_behind {
    std::uint64_t line{0};
    std::shared_ptr<caller> who;
    std::shared_ptr<const opened_event> event;  ///< of another process, or none
  };
  struct waiting_stream {
    gpu_stream stream;
    gpu_event last;  ///< recorded behind everything that the stream was given
    std::vector<point_behind> behind;
    steady_time moved{};  ///< since then it has come to none of those, or had none
  };

  static void forget_the_told(waiting_stream& on, steady_time now);
  [[nodiscard]] std::uint64_t number_for_others(std::uint32_t gpu, std::uint64_t line,
                                                steady_time now);
  [[nodiscard]] result<waiting_stream*> stream_of(std::uint32_t gpu, std::uint64_t number);

  const std::shared_ptr<gpu_site> site_;
  progress_engine& engine_;
  std::mutex mutex_;
  std::map<std::pair<std::uint32_t, std::uint64_t>, waiting_stream> streams_;
  bool timed_{false};
  timer_id timer_{};
  bool closed_{false};
};

}  // namespace troupe::transport::xgmi
