#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "troupe/transport/backend.hpp"
#include "troupe/transport/backend_context.hpp"
#include "troupe/transport/shm/mapped_link.hpp"
#include "troupe/transport/shm/shm_listener.hpp"

namespace troupe::transport::shm {

/// Base of the backends whose links (`mapped_link`) join two processes of one host: everything
/// except how the bytes move. Owns the listener at which the processes meet, and tells every link
/// of each deregistered region.
class mapped_backend : public backend {
 public:
  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) final;
  ~mapped_backend() override { close(); }

 protected:
  explicit mapped_backend(backend_context& context) : context_{context} {}

  /// Listens, or records why it cannot. Called once, at the end of the leaf's constructor.
  void start();
  /// Stops the notifications of deregistered regions. Called first in the destructor of a leaf that
  /// overrides `on_removed`.
  void close();

  [[nodiscard]] virtual std::shared_ptr<mapped_link> make(const link_options& options,
                                                          std::shared_ptr<link_sink> sink) = 0;
  /// Called before the links are told.
  virtual void on_removed(region_id region) { static_cast<void>(region); }

  backend_context& context_;
  std::shared_ptr<shm_listener> listener_;  ///< null if it could not be started; see `why_not_`
  std::string why_not_;

 private:
  void region_removed(region_id region);

  std::uint64_t removals_{0};
  std::mutex mutex_;
  using link_list = std::vector<std::weak_ptr<mapped_link>>;
  /// Replaced, never changed: a thread can iterate over it without the lock and without a copy.
  std::shared_ptr<const link_list> links_{std::make_shared<link_list>()};
};

}  // namespace troupe::transport::shm
