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

/// Reports when GPUs reach points in an engine's work, without a waiting thread: a stream of ours
/// waits for the engine's event, and the driver makes a callback behind it. After an error the
/// driver makes no callbacks, so a timer checks every stream that has callers waiting. Thread-safe.
class compute_watch final : public pollable, public std::enable_shared_from_this<compute_watch> {
 public:
  using news = std::function<void(std::optional<troupe::error>)>;

  compute_watch(std::shared_ptr<gpu_site> site, progress_engine& engine);
  ~compute_watch() override;

  /// Calls `then` once, on a thread of the driver or of the progress engine, or never if `close`
  /// comes first; `then` must not call the GPU. Points of one `line` are waited for in order. The
  /// caller may reuse the event when this returns; an event of another process is kept open here.
  /// `no_device`, `invalid_config` (no event, two, or an event that cannot be opened), `overloaded`
  /// (too many wait behind points that the GPU does not reach).
  [[nodiscard]] result<void> after(const compute_point& point, std::uint64_t line, news then);
  /// No callback runs after this returns.
  void close();

  bool on_ready(std::uint64_t, std::uint32_t) override { return false; }
  void on_timer(std::uint64_t key, steady_time now) override;

 private:
  /// Lines that have a stream of their own on a GPU; more lines share the streams.
  static constexpr std::uint64_t streams_per_gpu = 16;
  /// Additional streams of a GPU, which wait for points of other processes only. A worker that dies
  /// before its point is reached leaves the stream waiting for ever, and every caller behind it
  /// fails by its deadline; no point of this process is behind it. The first of these streams takes
  /// all points; once it has not moved for `patience`, new points go to the next one.
  static constexpr std::uint64_t streams_of_others = 4;
  static constexpr std::chrono::milliseconds patience{1000};
  /// The most points behind one stream. Each is three commands to the driver, which queues about a
  /// thousand per stream and blocks the caller beyond that.
  static constexpr std::size_t most_behind = 320;
  static constexpr std::chrono::milliseconds look_every{100};

  /// A caller waiting behind a point.
  class caller final : public bell {
   public:
    explicit caller(news then) : then_{std::move(then)} {}
    void ring() noexcept override { tell(std::nullopt); }
    void tell(std::optional<troupe::error> why) noexcept;
    /// Drops the callback; waits for a call in progress.
    void forget();
    [[nodiscard]] bool told();

   private:
    std::mutex mutex_;
    news then_;  ///< empty once called
  };
  struct point_behind {
    std::uint64_t line{0};
    std::shared_ptr<caller> who;
    std::shared_ptr<const opened_event> event;  ///< of another process, or null
  };
  struct waiting_stream {
    gpu_stream stream;
    gpu_event last;  ///< recorded behind all work given to the stream
    std::vector<point_behind> behind;
    steady_time moved{};  ///< when it last reached a point or had none waiting
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
