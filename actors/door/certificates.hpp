#pragma once

/// What mode tls needs, made without a tool: an authority of the cluster, and a certificate that says
/// "a node of cluster NAME". Keys are on the curve P-256, certificates of X.509 version 3 with the URI
/// `troupe:NAME` and no host name: one certificate serves every node of the cluster, wherever it runs.

#include <chrono>
#include <string>

#include "troupe/kvcache/result.hpp"

namespace troupe::actors {

using certificate_time = std::chrono::system_clock::time_point;

/// A certificate and its key, as texts in PEM.
struct certificate_pair {
  std::string certificate, key;
};
struct certificate_life {
  certificate_time from, until;
};

/// A new authority, which signs nodes' certificates and nothing else.
[[nodiscard]] result<certificate_pair> make_authority(const std::string& cluster,
                                                      certificate_life life);
/// A new certificate of a node, for both ends of a connection. Lasts no longer than its authority.
/// Where the authority's text holds several certificates, the one that the key belongs to signs.
[[nodiscard]] result<certificate_pair> make_node_certificate(const certificate_pair& authority,
                                                             const std::string& cluster,
                                                             certificate_life life);

/// The files of a folder, under the names that `init_certificates` gives them.
struct certificate_files {
  std::string ca, ca_key, certificate, key, secret;
};
[[nodiscard]] certificate_files certificate_files_in(const std::string& folder);

/// Makes the folder, if there is none, and files that only their owner can read: ca.crt, ca.key, node.crt, node.key and
/// cluster.secret, 256 random bits in hexadecimal. The authority lasts ten years, the certificate
/// `days` (1 to 3650). `already_exists` when one of the files is there; `invalid_config` when the
/// folder cannot be written; then nothing that this call made is left.
[[nodiscard]] result<certificate_files> init_certificates(const std::string& folder,
                                                          const std::string& cluster,
                                                          unsigned days);

/// A new node.key and node.crt of the same authority and cluster, in the place of the old ones: each is
/// written beside and renamed, the key first. Who reads between the two renames sees a key and a
/// certificate that do not belong together, and reads again. `not_found` without ca.key: a certificate
/// is renewed where the authority is kept. `invalid_config`, with nothing written, once that expired.
[[nodiscard]] result<certificate_files> renew_certificates(const std::string& folder,
                                                           unsigned days);

/// Where the next text of one of these files is written, before it takes that one's place.
[[nodiscard]] std::string file_beside(const std::string& path);

struct certificate_facts {
  std::string cluster;  ///< empty: it names none
  certificate_life life;
};
/// Of the first certificate in a text in PEM.
[[nodiscard]] result<certificate_facts> facts_of(const std::string& certificate);

}  // namespace troupe::actors
