#include "troupe/actors/runtime/network_stream.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <caf/binary_deserializer.hpp>
#include <caf/defaults.hpp>
#include <caf/io/basp_broker.hpp>
#include <caf/io/middleman.hpp>
#include <caf/io/network/default_multiplexer.hpp>
#include <caf/io/network/scribe_impl.hpp>
#include <sys/socket.h>

namespace troupe::actors {

/// CAF's stream, with three fixes.
///
/// CAF takes a new connection for one that has been silent since the machine was started, and its
/// keep-alive cuts it with the next tick.
///
/// A stream holds a reference to itself while CAF's loop watches its socket, and is told when the
/// loop has stopped. It is never told of a registration that was made and withdrawn within one turn
/// of the loop: it would keep itself, and its socket, for ever.
///
/// A process that dials a peer which has connected to it meanwhile closes the connection that it
/// dialled. If two processes dial each other at once, each may close its own, and both lose all
/// connections between them. A dialled connection is kept until the other process is known to have
/// chosen the one that it dialled itself; if neither has, both connections stay. Each side goes on
/// over the connection that it spoke over first, so its messages keep their order.
class open_streams::stream final : public caf::io::network::scribe_impl {
 public:
  stream(caf::io::network::default_multiplexer& loop, door_socket socket, side ours,
         std::shared_ptr<open_streams> all)
      : scribe_impl{loop, socket}, all_{std::move(all)}, side_{ours} {
    all_->add(socket, this);
  }
  ~stream() override { all_->remove(stream_.fd()); }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;

  void configure_read(caf::io::receive_policy::config config) override {
    if (broker_ == nullptr) {
      broker_ = static_cast<caf::io::basp_broker*>(parent());
      if (const auto it = broker_->ctx.find(hdl()); it != broker_->ctx.end()) {
        it->second.last_seen = broker_->clock().now();
      }
    }
    scribe_impl::configure_read(config);
  }

  bool consume(caf::execution_unit* unit, const void* come, std::size_t size) override {
    const auto peer = detached() ? caf::node_id{} : crossed_with(come, size);
    if (!peer) return scribe_impl::consume(unit, come, size);
    kept_ = true;
    const bool goes_on = scribe_impl::consume(unit, come, size);
    kept_ = false;
    broker_->instance.tbl().add_alternative(hdl(), peer);
    broker_->set_context(hdl());
    broker_->this_context->id = peer;
    configure_read(caf::io::receive_policy::exactly(caf::io::basp::header_size));
    return goes_on;
  }

  void graceful_shutdown() override {
    if (!kept_) scribe_impl::graceful_shutdown();
  }

  void remove_from_loop() override {
    scribe_impl::remove_from_loop();
    stream_.backend().post([watched = read_last_frames{this}] {});
  }

 protected:
  /// The connection broke. Messages in flight are lost, and no one would notice if the peer could
  /// still be reached over another connection, so all of the peer's connections are shut down.
  caf::message detach_message() override {
    auto& table = broker_->instance.tbl();
    if (const auto peer = table.lookup_direct(hdl()); peer && table.lookup_direct(peer) == hdl()) {
      const std::lock_guard lock{table.mtx_};
      for (const auto& [other, node] : table.direct_by_hdl_)
        if (node == peer) ::shutdown(socket_of(other), SHUT_RDWR);
    }
    return scribe_impl::detach_message();
  }

 private:
  /// Destroyed with its task after the present turn, or unrun with the loop itself.
  class read_last_frames {
   public:
    explicit read_last_frames(stream* looked_at) : stream_{looked_at} {}
    read_last_frames(read_last_frames&&) = default;
    read_last_frames& operator=(read_last_frames&&) = delete;
    ~read_last_frames() {
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

  static door_socket socket_of(caf::io::connection_handle connection) {
    return static_cast<door_socket>(connection.id());
  }

  /// The peer, if it greets us over a connection that we dialled while it is connected to us by one
  /// that it dialled itself and has not chosen yet. Sees all input, and records the peer's choice.
  caf::node_id crossed_with(const void* come, std::size_t size) {
    using caf::io::basp::header;
    using caf::io::basp::message_type;
    const auto it = broker_->ctx.find(hdl());
    if (it == broker_->ctx.end() || it->second.cstate != caf::io::basp::await_payload) return {};
    const auto& head = it->second.hdr;
    if (side_ == side::admitted) {
      chosen_ = chosen_ || (head.operation == message_type::client_handshake &&
                            head.has(header::select_connection_flag));
      return {};
    }
    if (head.operation != message_type::server_handshake) return {};
    caf::node_id peer;
    std::vector<std::string> applications;
    caf::actor_id actor{};
    std::set<std::string> messages;
    caf::binary_deserializer said{broker_->system(), static_cast<const char*>(come), size};
    if (said(peer, applications, actor, messages) || !one_is_ours(applications)) return {};
    const auto other = broker_->instance.tbl().lookup_direct(peer);
    const auto* crossing = other ? all_->find(socket_of(*other)) : nullptr;
    const bool may_go = crossing && crossing->side_ == side::admitted && !crossing->chosen_;
    return may_go ? peer : caf::node_id{};
  }

  /// CAF refuses a peer that has none of our applications.
  [[nodiscard]] bool one_is_ours(const std::vector<std::string>& applications) const {
    const auto ours = caf::get_or(broker_->config(), "middleman.app-identifiers",
                                  caf::defaults::middleman::app_identifiers);
    return std::ranges::find_first_of(applications, ours) != applications.end();
  }

  std::shared_ptr<open_streams> all_;
  const side side_;
  caf::io::basp_broker* broker_{nullptr};  ///< set once CAF reads from the stream
  bool chosen_{false};                     ///< chosen by the peer, which dialled it
  bool kept_{false};                       ///< ignore CAF's order to close it
};

caf::io::scribe_ptr open_streams::open(caf::actor_system& system, transport::owned_fd socket,
                                       side ours) {
  auto& loop = static_cast<caf::io::network::default_multiplexer&>(system.middleman().backend());
  // `new` allocates before the socket is released.
  return {new stream{loop, socket.release(), ours, shared_from_this()}, false};
}

void open_streams::cut() {
  const std::lock_guard lock{mutex_};
  cut_ = true;
  for (const auto& [socket, of] : streams_) ::shutdown(socket, SHUT_RDWR);
}

void open_streams::add(door_socket socket, stream* of) {
  const std::lock_guard lock{mutex_};
  streams_.insert_or_assign(socket, of);
  if (cut_) ::shutdown(socket, SHUT_RDWR);
}

void open_streams::remove(door_socket socket) {
  const std::lock_guard lock{mutex_};
  streams_.erase(socket);
}

open_streams::stream* open_streams::find(door_socket socket) {
  const std::lock_guard lock{mutex_};
  const auto it = streams_.find(socket);
  return it == streams_.end() ? nullptr : it->second;
}

}  // namespace troupe::actors
