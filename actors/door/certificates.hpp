#pragma once

/// Makes the files for mode tls without an external tool: the cluster's authority, and a
/// certificate for "a node of cluster NAME". Keys are on the curve P-256; certificates are X.509
/// version 3 with the URI `troupe:NAME` and no host name: one certificate serves every node of the
/// cluster, wherever it runs.

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
/// If the authority's text holds several certificates, the one that matches the key signs.
[[nodiscard]] result<certificate_pair> make_node_certificate(const certificate_pair& authority,
                                                             const std::string& cluster,
                                                             certificate_life life);

/// The files of a folder, under the names that `init_certificates` gives them.
struct certificate_files {
  std::string ca, ca_key, certificate, key, secret;
};
[[nodiscard]] certificate_files certificate_files_in(const std::string& folder);

/// Makes the folder, if there is none, and files that only their owner can read: ca.crt, ca.key,
/// node.crt, node.key and cluster.secret (256 random bits in hexadecimal). The authority lasts ten
/// years, the certificate `days` (1 to 3650). `already_exists` if one of the files exists;
/// `invalid_config` if the folder cannot be written. On failure nothing that this call made is
/// left.
[[nodiscard]] result<certificate_files> init_certificates(const std::string& folder,
                                                          const std::string& cluster,
                                                          unsigned days);

/// Replaces node.key and node.crt with new ones of the same authority and cluster: both are written
/// beside the old files, then renamed, the key first. A reader between the two renames sees a key
/// and a certificate that do not belong together, and must read again. `not_found` without ca.key:
/// certificates are renewed where the authority is kept. `invalid_config`, with nothing written,
/// once the authority has expired.
[[nodiscard]] result<certificate_files> renew_certificates(const std::string& folder,
                                                           unsigned days);

/// The temporary path that a file's new content is written to before it is renamed to `path`.
[[nodiscard]] std::string file_beside(const std::string& path);

struct certificate_facts {
  std::string cluster;  ///< empty if the certificate names none
  certificate_life life;
};
/// The facts of the first certificate in a PEM text.
[[nodiscard]] result<certificate_facts> facts_of(const std::string& certificate);

}  // namespace troupe::actors
