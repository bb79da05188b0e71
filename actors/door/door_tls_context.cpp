#include <utility>

#include "troupe/actors/door/door_openssl.hpp"
#include "troupe/actors/door/door_tls.hpp"
#include "troupe/actors/secrets/door_files.hpp"

namespace troupe::actors {

namespace {

using openssl::certificate;

using context_ptr = std::unique_ptr<SSL_CTX, openssl::freed_by<&::SSL_CTX_free>>;
using store_context = std::unique_ptr<X509_STORE_CTX, openssl::freed_by<&::X509_STORE_CTX_free>>;

/// Called for each certificate of a peer's chain; the last one is the peer's own.
int judge_peer(int accepted, X509_STORE_CTX* chain) {
  const auto* ssl = static_cast<SSL*>(
      ::X509_STORE_CTX_get_ex_data(chain, ::SSL_get_ex_data_X509_STORE_CTX_idx()));
  auto* by = static_cast<door_tls_judgement*>(SSL_get_app_data(ssl));
  const int depth = ::X509_STORE_CTX_get_error_depth(chain);
  if (accepted != 1 && by != nullptr) by->depth = depth;
  if (accepted != 1 || depth != 0) return accepted;
  const auto* shown = ::X509_STORE_CTX_get_current_cert(chain);
  if (by != nullptr && shown != nullptr && openssl::is_for(shown, *by->uri)) return 1;
  ::X509_STORE_CTX_set_error(chain, X509_V_ERR_APPLICATION_VERIFICATION);
  return 0;
}

context_ptr fresh_context() {
  context_ptr made{::SSL_CTX_new(::TLS_method())};
  if (!made) return made;
  auto* it = made.get();
  ::SSL_CTX_set_min_proto_version(it, TLS1_3_VERSION);
  ::SSL_CTX_set_max_proto_version(it, TLS1_3_VERSION);
  ::SSL_CTX_set_options(it, SSL_OP_NO_TICKET | SSL_OP_NO_COMPRESSION);
  ::SSL_CTX_set_num_tickets(it, 0);
  ::SSL_CTX_set_session_cache_mode(it, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_mode(it, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER |
                             SSL_MODE_RELEASE_BUFFERS);
  ::SSL_CTX_set_verify(it, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, &judge_peer);
  return made;
}

result<void> take_authorities(SSL_CTX* into, const std::string& path) {
  const auto text = read_public_file("ca", path);
  if (!text) return fail(text.error());
  const auto all = openssl::certificates_of(*text);
  if (all.empty()) return bad_file("ca", path, "it holds no certificate that can be read (PEM)");
  for (const auto& one : all) {
    if (::X509_check_ca(one.get()) == 0)
      return bad_file("ca", path, "a certificate in it is not that of an authority");
    ::X509_STORE_add_cert(::SSL_CTX_get_cert_store(into), one.get());
  }
  return {};
}

/// Whether the certificate is among those in the same file as ours.
bool holds(const STACK_OF(X509) * all, const X509* one) {
  for (int i = 0; one != nullptr && i < sk_X509_num(all); ++i)
    if (::X509_cmp(sk_X509_value(all, i), one) == 0) return true;
  return false;
}

/// The error of a peer that would refuse our certificate because its chain cannot be verified.
unexpected refused_by_peers(X509_STORE_CTX* chain, const STACK_OF(X509) * between,
                            const door_security& security) {
  const int code = ::X509_STORE_CTX_get_error(chain);
  const int depth = ::X509_STORE_CTX_get_error_depth(chain);
  (void)openssl::last_error();
  if (code == X509_V_ERR_CERT_HAS_EXPIRED && depth == 0) {
    return bad_file("certificate", security.certificate,
                    "it has expired; `troupe certs renew DIR` makes a new one");
  }
  if (code == X509_V_ERR_CERT_HAS_EXPIRED &&
      holds(between, ::X509_STORE_CTX_get_current_cert(chain))) {
    return bad_file("certificate", security.certificate,
                    "an authority in it has expired; put a chain there that lasts longer");
  }
  if (code == X509_V_ERR_CERT_HAS_EXPIRED) {
    return bad_file("ca", security.ca,
                    "an authority in it has expired, which our certificate needs; " +
                        std::string{new_authority_advice});
  }
  return bad_file("certificate", security.certificate,
                  "it is not accepted by the authorities of " + security.ca + ": " +
                      ::X509_verify_cert_error_string(code) +
                      "; give the node a certificate of the cluster's authority");
}

result<void> take_own(SSL_CTX* into, const door_security& security) {
  const auto text = read_public_file("certificate", security.certificate);
  if (!text) return fail(text.error());
  const auto key_text = read_private_file("key", security.key);
  if (!key_text) return fail(key_text.error());
  const auto all = openssl::certificates_of(*text);
  if (all.empty()) {
    return bad_file("certificate", security.certificate,
                    "it holds no certificate that can be read (PEM)");
  }
  const auto key = openssl::key_of(*key_text);
  if (!key) {
    return bad_file("key", security.key,
                    "it holds no key that can be read (PEM, without a password)");
  }
  if (::X509_check_private_key(all.front().get(), key.get()) != 1) {
    (void)openssl::last_error();
    return bad_file("key", security.key,
                    "it does not belong to the certificate in " + security.certificate +
                        "; `troupe certs renew DIR` makes a new pair");
  }
  bool taken = ::SSL_CTX_use_certificate(into, all.front().get()) == 1 &&
               ::SSL_CTX_use_PrivateKey(into, key.get()) == 1;
  for (std::size_t i = 1; i < all.size(); ++i)
    taken = taken && SSL_CTX_add1_chain_cert(into, all[i].get()) == 1;
  if (taken) return {};
  return bad_file("certificate", security.certificate,
                  "OpenSSL does not take it: " + openssl::last_error());
}

}  // namespace

/// Checks that a peer would accept our own certificate. Returns the earliest expiry in the chain;
/// if several expire together, the one furthest from ours: a new certificate does not help if its
/// authority expires.
result<door_tls_context::end> door_tls_context::judge_own(SSL_CTX* with,
                                                          const door_security& security,
                                                          const std::string& uri) {
  auto* own = ::SSL_CTX_get0_certificate(with);
  STACK_OF(X509)* between = nullptr;
  ::SSL_CTX_get0_chain_certs(with, &between);
  end first{openssl::time_of(::X509_get0_notAfter(own)), part::node};
  for (const int purpose : {X509_PURPOSE_SSL_SERVER, X509_PURPOSE_SSL_CLIENT}) {
    const store_context chain{::X509_STORE_CTX_new()};
    if (!chain ||
        ::X509_STORE_CTX_init(chain.get(), ::SSL_CTX_get_cert_store(with), own, between) != 1) {
      return bad_file("certificate", security.certificate,
                      "it cannot be verified: " + openssl::last_error());
    }
    ::X509_STORE_CTX_set_purpose(chain.get(), purpose);
    if (::X509_verify_cert(chain.get()) != 1)
      return refused_by_peers(chain.get(), between, security);
    const auto* verified = ::X509_STORE_CTX_get0_chain(chain.get());
    for (int depth = 1; depth < sk_X509_num(verified); ++depth) {
      const auto* one = sk_X509_value(verified, depth);
      const auto when = openssl::time_of(::X509_get0_notAfter(one));
      if (when <= first.when)
        first = {when, holds(between, one) ? part::intermediate : part::authority};
    }
  }
  if (openssl::is_for(own, uri)) return first;
  return bad_file("certificate", security.certificate,
                  "it is not for cluster `" + security.cluster + "` (it has no URI " + uri +
                      "); `troupe certs init DIR --cluster " + security.cluster +
                      "` makes one that is");
}

result<std::shared_ptr<const door_tls_context>> door_tls_context::load(
    const door_security& security) {
  auto made = fresh_context();
  if (!made) return fail(errc::internal, "no TLS context: " + openssl::last_error());
  std::string uri{openssl::cluster_prefix};
  uri += security.cluster;
  if (auto taken = take_authorities(made.get(), security.ca); !taken) return fail(taken.error());
  if (auto taken = take_own(made.get(), security); !taken) return fail(taken.error());
  const auto first = judge_own(made.get(), security, uri);
  if (!first) return fail(first.error());
  return std::shared_ptr<const door_tls_context>{
      new door_tls_context{made.release(), std::move(uri), *first}};
}

std::chrono::seconds door_tls_context::time_left() const {
  return std::chrono::floor<std::chrono::seconds>(end_.when - std::chrono::system_clock::now());
}

door_tls_context::~door_tls_context() {
  ::SSL_CTX_free(context_);
}

}  // namespace troupe::actors
