#include "troupe/actors/context/node_place.hpp"

namespace troupe::actors {

node_info placed_at(node_info node, const transport::host_identity& place) {
  node.boot_id = place.boot_id;
  node.network_namespace = place.network_namespace;
  node.pid_namespace = place.pid_namespace;
  node.user_namespace = place.user_namespace;
  node.uid = place.uid;
  return node;
}

transport::host_identity place_of(const node_info& node) {
  transport::host_identity place;
  place.boot_id = node.boot_id;
  place.network_namespace = node.network_namespace;
  place.pid_namespace = node.pid_namespace;
  place.user_namespace = node.user_namespace;
  place.pid = node.pid;
  place.uid = node.uid;
  return place;
}

}  // namespace troupe::actors
