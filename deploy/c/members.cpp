#include <utility>
#include <vector>

#include "troupe/deploy/c/cluster_handle.hpp"
#include "troupe/deploy/c/placements.hpp"

using namespace troupe;
using namespace troupe::c;

struct troupe_members {
  explicit troupe_members(std::vector<actors::member> found) : all(std::move(found)) {
    labels.reserve(all.size());
    for (const auto& member : all) labels.push_back(labels_of(member.node));
  }
  troupe_members(const troupe_members&) = delete;
  troupe_members& operator=(const troupe_members&) = delete;

  const std::vector<actors::member> all;
  std::vector<std::vector<troupe_label>> labels;  ///< of each member; their texts belong to `all`
};

troupe_status troupe_cluster_find_label(troupe_cluster* cluster, const char* key, const char* value,
                                        troupe_members** members) {
  return on_cluster(cluster, [&](cluster_core& core) -> result<void> {
    if (auto out = present(members, "members"); !out) return out;
    const auto label_key = text(key, "key");
    if (!label_key) return fail(label_key.error());
    if (auto given = present(value, "value"); !given) return given;
    const auto label_value = optional_text(value, "value");
    if (!label_value) return fail(label_value.error());
    auto found = core.client->find_label(*label_key, *label_value);
    if (!found) return fail(found.error());
    *members = new troupe_members{std::move(*found)};
    return {};
  });
}

troupe_status troupe_members_count(const troupe_members* members, uint32_t* count) {
  return guarded([&]() -> result<void> {
    if (auto out = present({{members, "members"}, {count, "count"}}); !out) return out;
    *count = static_cast<uint32_t>(members->all.size());
    return {};
  });
}

troupe_status troupe_members_read(const troupe_members* members, uint32_t index,
                                  troupe_member_info* info) {
  return guarded([&]() -> result<void> {
    if (auto given = present(members, "members"); !given) return given;
    if (auto out = writable(info, "info"); !out) return out;
    if (auto known = check_index(index, members->all.size(), "members"); !known) return known;
    const auto& member = members->all[index];
    write({0, member.state, member.reason.c_str(), member.load.queue_length, 0}, info);
    return {};
  });
}

troupe_status troupe_members_node(const troupe_members* members, uint32_t index,
                                  troupe_node_info* node) {
  return guarded([&]() -> result<void> {
    if (auto given = present(members, "members"); !given) return given;
    if (auto out = writable(node, "node"); !out) return out;
    if (auto known = check_index(index, members->all.size(), "members"); !known) return known;
    write(node_of(members->all[index].node, members->labels[index]), node);
    return {};
  });
}

void troupe_members_free(troupe_members* members) {
  delete members;
}
