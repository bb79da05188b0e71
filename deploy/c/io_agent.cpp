#include <nlohmann/json.hpp>

#include "troupe/deploy/c/io_handle.hpp"
#include "troupe/deploy/report_json.hpp"

// Agents of troupe/io.h, their memory and their peers.

troupe_io_agent::~troupe_io_agent() {
  // The destructor would wait for threads that only the parent has.
  if (!life.is_this_process()) static_cast<void>(self.release());
}

namespace troupe::c {

namespace {

result<actors::door_security> door_security_of(const troupe_io_options& given) {
  using mode = actors::door_security::mode;
  if (auto known = in_range(given.security, TROUPE_IO_OPEN, TROUPE_IO_TLS, "options.security");
      !known)
    return fail(known.error());
  actors::door_security out;
  out.how = given.security == TROUPE_IO_OPEN     ? mode::open
            : given.security == TROUPE_IO_SECRET ? mode::secret
                                                 : mode::tls;
  const struct {
    const char* given;
    std::string* to;
    const char* name;
    std::uint32_t from;  // the first mode that has it
  } texts_of_modes[] = {
      {given.secret, &out.secret, "options.secret", TROUPE_IO_SECRET},
      {given.cluster, &out.cluster, "options.cluster", TROUPE_IO_TLS},
      {given.certificate, &out.certificate, "options.certificate", TROUPE_IO_TLS},
      {given.key, &out.key, "options.key", TROUPE_IO_TLS},
      {given.ca, &out.ca, "options.ca", TROUPE_IO_TLS},
  };
  for (const auto& each : texts_of_modes) {
    if (each.given && given.security < each.from) {
      return bad_argument("`" + std::string{each.name} +
                          "` is given, and `options.security` is a mode that does not use it");
    }
    auto said = optional_text(each.given, each.name);
    if (!said) return fail(said.error());
    *each.to = std::move(*said);
  }
  return out;
}

result<std::vector<transport::backend_kind>> backends_of(const troupe_io_options& given) {
  const auto listed = numbers(given.backends, given.backend_count, "options.backends");
  if (!listed) return fail(listed.error());
  std::vector<transport::backend_kind> out;
  for (std::size_t i = 0; i < listed->size(); ++i) {
    const auto name = "options.backends[" + std::to_string(i) + "]";
    if (auto known = in_range((*listed)[i], TROUPE_IO_SHM, TROUPE_IO_XGMI, name); !known)
      return fail(known.error());
    out.push_back(static_cast<transport::backend_kind>((*listed)[i]));
  }
  return out;
}

result<io::agent_options> agent_options_of(const troupe_io_options& given) {
  if (auto flags = known_flags(given.flags, TROUPE_POLLING, "options.flags"); !flags)
    return fail(flags.error());
  if (given.reserved != 0) return bad_argument("`options.reserved` is not 0");
  io::agent_options out;
  auto name = text(given.name, "options.name");
  if (!name) return fail(name.error());
  out.name = std::move(*name);
  if (given.host) {
    auto host = text(given.host, "options.host");
    if (!host) return fail(host.error());
    out.host = std::move(*host);
  }
  if (auto port = in_range(given.port, 0, 65'535, "options.port"); !port) return fail(port.error());
  out.port = static_cast<std::uint16_t>(given.port);
  auto security = door_security_of(given);
  if (!security) return fail(security.error());
  out.security = std::move(*security);
  auto backends = backends_of(given);
  if (!backends) return fail(backends.error());
  out.backends = std::move(*backends);
  const bool polling = (given.flags & TROUPE_POLLING) != 0;
  if (polling && given.threads != 0)
    return bad_argument("`options.threads` is not 0, and TROUPE_POLLING is given");
  out.threads = polling ? 0 : std::max(given.threads, 1U);
  if (given.lanes != 0) out.lanes = given.lanes;
  if (given.peer_silence_ms != 0) out.peer_silence = milliseconds(given.peer_silence_ms);
  if (given.connect_timeout_ms != 0) out.connect_timeout = milliseconds(given.connect_timeout_ms);
  if (given.grant_timeout_ms != 0) out.grant_timeout = milliseconds(given.grant_timeout_ms);
  if (given.max_peers != 0) out.max_peers = given.max_peers;
  if (given.max_transfers != 0) out.max_transfers = given.max_transfers;
  if (given.max_notices != 0) out.max_notices = given.max_notices;
  if (given.max_notice_bytes != 0) out.max_notice_bytes = given.max_notice_bytes;
  return out;
}

result<transport::access> rights_of(std::uint32_t given) {
  if (auto known =
          in_range(given, TROUPE_IO_MAY_READ, TROUPE_IO_MAY_READ | TROUPE_IO_MAY_WRITE, "rights");
      !known)
    return fail(known.error());
  return static_cast<transport::access>(given);
}

nlohmann::json to_json(const io::agent_report& report) {
  auto backends = nlohmann::json::array();
  for (const auto& one : report.backends) {
    backends.push_back(
        {{"name", to_string(one.kind)}, {"usable", one.usable}, {"reason", one.reason}});
  }
  auto peers = nlohmann::json::array();
  for (const auto& one : report.peers) {
    nlohmann::json peer{{"peer", one.who.value},
                        {"name", one.name},
                        {"incarnation", deploy::hex(one.life.value)},
                        {"backend", nullptr},
                        {"reason", one.reason},
                        {"lost", nullptr},
                        {"links", one.links},
                        {"notices_unread", one.notices_unread},
                        {"grants", one.grants}};
    if (one.backend) peer["backend"] = to_string(*one.backend);
    if (one.lost)
      peer["lost"] = {{"code", to_string(one.lost->code)}, {"reason", one.lost->message}};
    peers.push_back(std::move(peer));
  }
  return {{"name", report.name},
          {"incarnation", deploy::hex(report.life.value)},
          {"host", report.host},
          {"port", report.port},
          {"data_port", report.data_port},
          {"memories", report.memories},
          {"plans", report.plans},
          {"transfers", report.transfers},
          {"active", report.active},
          {"events", report.events},
          {"notices_dropped", report.notices_dropped},
          {"backends", std::move(backends)},
          {"peers", std::move(peers)}};
}

}  // namespace

}  // namespace troupe::c

using namespace troupe;
using namespace troupe::c;

troupe_status troupe_io_agent_create(const troupe_io_options* options, troupe_io_agent** agent) {
  return guarded([&]() -> result<void> {
    if (auto out = present(agent, "agent"); !out) return out;
    if (auto can = process_life::can_begin("an agent"); !can) return can;
    const auto given = read(options, "options");
    if (!given) return fail(given.error());
    auto with = agent_options_of(*given);
    if (!with) return fail(with.error());
    auto handle = std::make_unique<troupe_io_agent>();
    handle->polling = with->threads == 0;
    auto self = io::agent::create(std::move(*with));
    if (!self) return fail(std::move(self).error());
    handle->self = std::move(*self);
    *agent = handle.release();
    return {};
  });
}

troupe_status troupe_io_agent_close(troupe_io_agent* agent) {
  return guarded([&]() -> result<void> {
    if (auto here = present(agent, "agent"); !here) return here;
    if (auto ours = agent->life.check("the agent"); !ours) return ours;
    agent->closing.store(true);
    const std::lock_guard alone{agent->in_use};
    agent->self.reset();
    return {};
  });
}

void troupe_io_agent_free(troupe_io_agent* agent) {
  if (!agent) return;
  if (agent->life.is_this_process()) (void)troupe_io_agent_close(agent);
  delete agent;
}

troupe_status troupe_io_report(const troupe_io_agent* agent, char** json) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(json, "json"); !out) return out;
    *json = copy_for_c(deploy::text_of(c::to_json(self.report()), 2));
    return {};
  });
}

// -- memory

troupe_status troupe_io_register(troupe_io_agent* agent, void* data, size_t size, const char* name,
                                 uint32_t rights, troupe_io_memory* memory) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto given = present({{memory, "memory"}, {data, "data"}}); !given) return given;
    if (size == 0) return bad_argument("`size` is 0; there is no memory to register");
    auto called = optional_text(name, "name");
    if (!called) return fail(called.error());
    const auto may = rights_of(rights);
    if (!may) return fail(may.error());
    return made(
        self.register_memory({static_cast<std::byte*>(data), size}, std::move(*called), *may),
        memory);
  });
}

troupe_status troupe_io_allocate(troupe_io_agent* agent, uint64_t size, const char* name,
                                 uint32_t rights, troupe_io_memory* memory) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(memory, "memory"); !out) return out;
    if (size == 0) return bad_argument("`size` is 0; there is nothing to allocate");
    auto called = optional_text(name, "name");
    if (!called) return fail(called.error());
    const auto may = rights_of(rights);
    if (!may) return fail(may.error());
    return made(self.allocate(size, std::move(*called), *may), memory);
  });
}

troupe_status troupe_io_bytes(const troupe_io_agent* agent, troupe_io_memory memory,
                              troupe_memory* bytes) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(bytes, "bytes"); !out) return out;
    const auto found = self.bytes(io::memory_id{memory});
    if (!found) return fail(found.error());
    *bytes = {found->data(), found->size()};
    return {};
  });
}

troupe_status troupe_io_deregister(troupe_io_agent* agent, troupe_io_memory memory,
                                   uint64_t timeout_ms) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    result<void> gone;
    const auto over = wait_in_steps(*agent, milliseconds(timeout_ms), [&](auto step) {
      gone = self.deregister(io::memory_id{memory}, step);
      return gone || gone.error().code != errc::deadline;
    });
    if (!over) return fail(over.error());
    return gone;
  });
}

// -- peers

troupe_status troupe_io_describe(const troupe_io_agent* agent, const troupe_io_memory* only,
                                 size_t count, void** descriptor, size_t* descriptor_size) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present({{descriptor, "descriptor"}, {descriptor_size, "descriptor_size"}});
        !out)
      return out;
    const auto ids = list(only, count, "only");
    if (!ids) return fail(ids.error());
    std::vector<io::memory_id> those;
    for (const auto id : *ids) those.emplace_back(id);
    const auto described = self.describe(those);
    if (!described) return fail(described.error());
    *descriptor = copy_for_c(described->data(), described->size());
    *descriptor_size = described->size();
    return {};
  });
}

troupe_status troupe_io_add_peer(troupe_io_agent* agent, const void* descriptor,
                                 size_t descriptor_size, troupe_io_peer* peer) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(peer, "peer"); !out) return out;
    const auto given = bytes(descriptor, descriptor_size, "descriptor");
    if (!given) return fail(given.error());
    return made(self.add_peer(*given), peer);
  });
}

troupe_status troupe_io_remove_peer(troupe_io_agent* agent, troupe_io_peer peer) {
  return on_agent(agent, [&](io::agent& self) { return self.remove_peer(io::peer_id{peer}); });
}

troupe_status troupe_io_connect(troupe_io_agent* agent, troupe_io_peer peer, uint64_t timeout_ms,
                                uint32_t* backend) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    auto kind = result<transport::backend_kind>{fail(errc::deadline, "")};
    const auto over = wait_in_steps(*agent, milliseconds(timeout_ms), [&](auto step) {
      const auto until = std::chrono::steady_clock::now() + step;
      kind = self.connect(io::peer_id{peer}, step);
      // An unresponsive peer is a `deadline`, too, and no reason to go on.
      const bool waits_on =
          !kind && kind.error().code == errc::deadline && std::chrono::steady_clock::now() >= until;
      return !waits_on;
    });
    if (!over) return fail(over.error());
    if (!kind) return fail(kind.error());
    if (backend) *backend = static_cast<uint32_t>(*kind);
    return {};
  });
}

troupe_status troupe_io_remote_memories(const troupe_io_agent* agent, troupe_io_peer peer,
                                        troupe_io_remote_memory* memories, size_t capacity,
                                        size_t* count) {
  return on_agent(agent, [&](io::agent& self) -> result<void> {
    if (auto out = present(count, "count"); !out) return out;
    if (capacity != 0)
      if (auto out = present(memories, "memories"); !out) return out;
    const auto all = self.remote_memories(io::peer_id{peer});
    if (!all) return fail(all.error());
    for (size_t i = 0; i < std::min(capacity, all->size()); ++i) {
      const auto& one = (*all)[i];
      memories[i] = {one.number, one.address, one.length, static_cast<uint32_t>(one.rights), 0};
    }
    *count = all->size();
    return {};
  });
}
