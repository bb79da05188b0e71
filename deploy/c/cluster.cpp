#include <thread>

#include <nlohmann/json.hpp>

#include "troupe/actors/discovery/supervisor_search.hpp"
#include "troupe/actors/host_options.hpp"
#include "troupe/actors/supervisor_begin.hpp"
#include "troupe/deploy/c/cluster_handle.hpp"
#include "troupe/deploy/c/deployment_source.hpp"
#include "troupe/deploy/c/placements.hpp"
#include "troupe/deploy/report_json.hpp"

using namespace troupe;
using namespace troupe::c;

namespace {

result<actors::cluster_client_options> client_options_of(const troupe_cluster_options& given) {
  actors::cluster_client_options out;
  const auto port = port_of(given.port, "options.port");
  if (!port) return fail(port.error());
  out.port = *port;
  if (given.deployment_file || given.deployment_text) {
    const auto deployment =
        load_deployment({given.deployment_file, given.deployment_text, given.host, given.port});
    if (!deployment) return fail(deployment.error());
    out.find = actors::look_for_supervisor(*deployment, actors::missing_supervisor::is_begun);
    out.host = deployment->supervisor.host;
    out.port = deployment->supervisor.port;
    auto security = actors::door_security_of(*deployment);
    if (!security) return fail(security.error());
    out.actors.security = std::move(*security);
    if ((given.flags & TROUPE_LAZY) == 0) {
      // With more patience than a later call has.
      const auto here = actors::with_supervisor(*deployment, actors::missing_supervisor::is_begun);
      if (!here) return fail(here.error());
    }
  } else {
    auto host = optional_text(given.host, "options.host");
    if (!host) return fail(host.error());
    if (!host->empty()) out.host = std::move(*host);
  }
  if (out.port == 0 && !out.find)
    return bad_argument(
        "`options.port` is 0, and no deployment names another port; give the supervisor's");
  if (given.timeout_ms != 0) out.timeout = milliseconds(given.timeout_ms);
  return out;
}

result<std::unique_ptr<actors::cluster_client>> connect(const troupe_cluster_options& given) {
  auto options = client_options_of(given);
  if (!options) return fail(options.error());
  if ((given.flags & TROUPE_LAZY) != 0)
    return actors::cluster_client::unconnected(std::move(*options));
  auto client = actors::cluster_client::connect(*options);
  const bool is_gone = !client && (client.error().code == errc::peer_unreachable ||
                                   client.error().code == errc::peer_lost);
  if (!is_gone || !options->find) return client;
  // The supervisor that was found ended, for want of nodes, before the connection: begin the next
  // one.
  std::this_thread::sleep_for(actors::between_looks);
  if (const auto next = options->find(actors::begin_patience); !next) return fail(next.error());
  return actors::cluster_client::connect(std::move(*options));
}

template <class Document>
result<void> give(const result<Document>& document, char** json) {
  if (!document) return fail(document.error());
  *json = copy_for_c(deploy::text_of(deploy::to_json(*document), 2));
  return {};
}

result<void> drain(actors::cluster_client& client, const char* node, uint32_t deadline_ms,
                   bool cancel) {
  auto name = text(node, "node");
  if (!name) return fail(name.error());
  const auto reply =
      client.drain({std::move(*name), deadline_ms, static_cast<std::uint8_t>(cancel ? 1 : 0)});
  if (!reply) return fail(reply.error());
  return {};
}

}  // namespace

troupe_status troupe_cluster_connect(const troupe_cluster_options* options,
                                     troupe_cluster** cluster) {
  return guarded([&]() -> result<void> {
    if (auto out = present(cluster, "cluster"); !out) return out;
    const auto given = read(options, "options");
    if (!given) return fail(given.error());
    if (auto flags = known_flags(given->flags, TROUPE_LAZY, "options.flags"); !flags) return flags;
    if (auto can = process_life::can_begin("a connection to a cluster"); !can) return can;
    auto core = std::make_shared<cluster_core>();
    auto client = connect(*given);
    if (!client) return fail(client.error());
    core->client = std::move(*client);
    core->carrier = std::make_unique<actors::request_carrier>(*core->client);
    *cluster = new troupe_cluster{std::move(core)};
    return {};
  });
}

void troupe_cluster_free(troupe_cluster* cluster) {
  delete cluster;
}

troupe_status troupe_cluster_members(troupe_cluster* cluster, char** json) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(json, "json"); !out) return out;
    return give(core.client->members(), json);
  });
}

troupe_status troupe_cluster_report(troupe_cluster* cluster, const char* node, char** json) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(json, "json"); !out) return out;
    const auto name = text(node, "node");
    if (!name) return fail(name.error());
    return give(core.client->report(*name), json);
  });
}

troupe_status troupe_cluster_events(troupe_cluster* cluster, uint64_t after, uint32_t max,
                                    char** json) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(json, "json"); !out) return out;
    return give(core.client->events({after, max}), json);
  });
}

troupe_status troupe_cluster_place(troupe_cluster* cluster, const troupe_placement_request* request,
                                   troupe_placement** placement) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(placement, "placement"); !out) return out;
    const auto what = placement_request_of(request);
    if (!what) return fail(what.error());
    auto where = core.client->place(*what);
    if (!where) return fail(where.error());
    *placement = new troupe_placement{std::move(*where)};
    return {};
  });
}

troupe_status troupe_cluster_finished(troupe_cluster* cluster, const char* request) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    const auto id = text(request, "request");
    if (!id) return fail(id.error());
    return core.client->finished(*id);
  });
}

troupe_status troupe_cluster_call(troupe_cluster* cluster, const char* node, const char* method,
                                  const void* payload, size_t payload_size, uint32_t timeout_ms,
                                  void** answer, size_t* answer_size) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present({{answer, "answer"}, {answer_size, "answer_size"}}); !out) return out;
    const auto name = text(node, "node");
    if (!name) return fail(name.error());
    auto request = call_of(method, payload, payload_size);
    if (!request) return fail(request.error());
    request->timeout_ms = timeout_ms;
    const auto said = core.client->call(*name, *request);
    if (!said) return fail(said.error());
    *answer = copy_for_c(said->data(), said->size());
    *answer_size = said->size();
    return {};
  });
}

troupe_status troupe_cluster_drain(troupe_cluster* cluster, const char* node,
                                   uint32_t deadline_ms) {
  return on_cluster(
      cluster, [&](cluster_core& core) { return drain(*core.client, node, deadline_ms, false); });
}

troupe_status troupe_cluster_cancel_drain(troupe_cluster* cluster, const char* node) {
  return on_cluster(cluster,
                    [&](cluster_core& core) { return drain(*core.client, node, 0, true); });
}
