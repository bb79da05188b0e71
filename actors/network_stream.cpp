#include "troupe/actors/network_stream.hpp"

#include <utility>

#include <caf/io/basp_broker.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/network/default_multiplexer.hpp>
#include <caf/io/network/scribe_impl.hpp>
#include <caf/make_counted.hpp>
#include <sys/socket.h>

namespace troupe::actors {

/// CAF's stream, but for two mends.
///
/// CAF takes a connection that is being made for one that has been silent since the machine was
/// started, and its keep-alive cuts it with the next tick.
///
/// A stream holds itself while the loop of CAF watches its socket, and is told when the loop has
/// ceased to. What one turn of the loop notes down and takes back it is never told: it would hold
/// itself, and its socket, for ever.
class open_streams::stream final : public caf::io::network::scribe_impl {
 public:
  stream(caf::io::network::default_multiplexer& loop, door_socket socket,
         std::shared_ptr<open_streams> all)
      : scribe_impl{loop, socket}, all_{std::move(all)} {
    all_->add(socket);
  }
  ~stream() override { all_->remove(stream_.fd()); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  void configure_read(caf::io::receive_policy::config config) override {
    if (!began_) {
      began_ = true;
      auto& broker = static_cast<caf::io::basp_broker&>(*parent());
      if (const auto it = broker.ctx.find(hdl()); it != broker.ctx.end()) {
        it->second.last_seen = broker.clock().now();
      }
    }
    scribe_impl::configure_read(config);
  }

  void remove_from_loop() override {
    scribe_impl::remove_from_loop();
    stream_.backend().post([watched = last_look{this}] {});
  }

 private:
  /// Goes with its task after the turn that runs, or unrun with the loop itself.
  class last_look {
   public:
    explicit last_look(stream* looked_at) : stream_{looked_at} {}
    last_look(last_look&&) = default;
    last_look& operator=(last_look&&) = delete;
    ~last_look() {
      if (stream_ && stream_->detached()) stream_->let_go();
    }

   private:
    caf::intrusive_ptr<stream> stream_;
  };

  void let_go() {
    using caf::io::network::operation;
    const auto watched = stream_.eventbf();
    if ((watched & caf::io::network::input_mask) == 0) stream_.removed_from_loop(operation::read);
    if ((watched & caf::io::network::output_mask) == 0) stream_.removed_from_loop(operation::write);
  }

  std::shared_ptr<open_streams> all_;
  bool began_{false};
};

caf::io::scribe_ptr open_streams::open(caf::actor_system& system, door_socket socket) {
  auto& loop = static_cast<caf::io::network::default_multiplexer&>(system.middleman().backend());
  return caf::make_counted<stream>(loop, socket, shared_from_this());
}

void open_streams::cut() {
  const std::lock_guard lock{mutex_};
  cut_ = true;
  for (const auto socket : sockets_) ::shutdown(socket, SHUT_RDWR);
}

void open_streams::add(door_socket socket) {
  const std::lock_guard lock{mutex_};
  sockets_.insert(socket);
  if (cut_) ::shutdown(socket, SHUT_RDWR);
}

void open_streams::remove(door_socket socket) {
  const std::lock_guard lock{mutex_};
  sockets_.erase(socket);
}

}  // namespace troupe::actors
