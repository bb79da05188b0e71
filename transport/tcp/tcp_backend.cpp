#include "troupe/transport/tcp/tcp_backend.hpp"

#include <string>

#include "troupe/transport/link_check.hpp"
#include "troupe/transport/tcp/listener.hpp"
#include "troupe/transport/tcp/tcp_link.hpp"

namespace troupe::transport {

namespace {

class socket_backend final : public tcp_backend {
 public:
  socket_backend(backend_context& context, std::shared_ptr<tcp::listener> door,
                 std::shared_ptr<staging::staging_pool> staging)
      : context_{context}, door_{std::move(door)}, staging_{std::move(staging)} {}
  ~socket_backend() override { door_->stop(); }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::tcp; }
  [[nodiscard]] std::uint16_t port() const noexcept override { return door_->port(); }
  [[nodiscard]] usability probe() const override {
    return {true, "listens at " + door_->host() + ":" + std::to_string(door_->port())};
  }
  [[nodiscard]] usability reaches(const host_identity&) const override {
    return {true, "tcp reaches every peer"};
  }
  [[nodiscard]] result<std::shared_ptr<link>> open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) override;

 private:
  backend_context& context_;
  const std::shared_ptr<tcp::listener> door_;
  const std::shared_ptr<staging::staging_pool> staging_;
};

result<std::shared_ptr<link>> socket_backend::open(const link_options& options,
                                                   std::shared_ptr<link_sink> sink) {
  static_assert(max_link_lanes <= tcp::max_lanes);
  if (auto ok = check_options(options, sink.get()); !ok) return fail(std::move(ok).error());
  auto made = std::make_shared<tcp::tcp_link>(context_, door_, staging_, options, std::move(sink));
  if (options.role == link_role::acceptor) door_->expect(made->number(), made);
  return std::shared_ptr<link>{std::move(made)};
}

}  // namespace

result<std::unique_ptr<tcp_backend>> make_tcp_backend(
    backend_context& context, std::shared_ptr<staging::staging_pool> staging) {
  auto door = tcp::listener::create(context);
  if (!door) return fail(std::move(door).error());
  return std::unique_ptr<tcp_backend>{
      std::make_unique<socket_backend>(context, std::move(*door), std::move(staging))};
}

}  // namespace troupe::transport
