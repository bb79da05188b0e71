#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/shm/mapped_link.hpp"
#include "troupe/transport/shm/shm_listener.hpp"

namespace troupe::transport::shm {

/// A backend whose links join two processes of one host: all but how the bytes move, as
/// `mapped_link` is of its links. Keeps the listener where they meet, and tells every link of a
/// region that is deregistered.
class mapped_backend : public backend {
 public:
  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) final;
  ~mapped_backend() override { close(); }

 protected:
  explicit mapped_backend(backend_context& context) : context_{context} {}

  /// Listens, or notes why not. Called once, at the end of the leaf's constructor.
  void start();
  /// No region's end is told any more. Called first in the destructor of a leaf that is told of it.
  void close();

  [[nodiscard]] virtual std::shared_ptr<mapped_link> make(const link_options& options,
                                                          std::shared_ptr<link_sink> sink) = 0;
  /// Before its links hear of it.
  virtual void on_removed(region_id region) { static_cast<void>(region); }

  backend_context& context_;
  std::shared_ptr<shm_listener> listener_;  ///< null: `why_not_` says why
  std::string why_not_;

 private:
  void region_removed(region_id region);

  std::uint64_t removals_{0};
  std::mutex mutex_;
  using link_list = std::vector<std::weak_ptr<mapped_link>>;
  /// Replaced and never changed: whoever goes through them needs neither the lock nor memory for that.
  std::shared_ptr<const link_list> links_{std::make_shared<link_list>()};
};

}  // namespace troupe::transport::shm
