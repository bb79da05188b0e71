#pragma once

/// OpenSSL's objects with owners. Only for sources: no public header includes OpenSSL.

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

namespace troupe::actors::openssl {

template <auto Free>
struct freed_by {
  template <class T>
  void operator()(T* it) const noexcept {
    Free(it);
  }
};

using bio = std::unique_ptr<BIO, freed_by<&::BIO_free_all>>;
using certificate = std::unique_ptr<X509, freed_by<&::X509_free>>;
using private_key = std::unique_ptr<EVP_PKEY, freed_by<&::EVP_PKEY_free>>;
using general_names = std::unique_ptr<GENERAL_NAMES, freed_by<&::GENERAL_NAMES_free>>;

/// What the last failed call has to say, "" if nothing; forgets the rest.
[[nodiscard]] std::string last_error();
/// The certificates of a text in PEM, in order; empty when one of them is malformed.
[[nodiscard]] std::vector<certificate> certificates_of(std::string_view pem);
/// Null: malformed, or locked with a password (nobody is asked for one).
[[nodiscard]] private_key key_of(std::string_view pem);
[[nodiscard]] std::chrono::system_clock::time_point time_of(const ASN1_TIME* time);
/// The URIs among the names that the certificate is for.
[[nodiscard]] std::vector<std::string> uris_of(const X509* of);

/// Whether one of them is this one. Null is for nothing.
[[nodiscard]] bool is_for(const X509* it, const std::string& uri);

/// The URI by which a certificate names its cluster begins so.
inline constexpr std::string_view cluster_prefix = "troupe:";

}  // namespace troupe::actors::openssl
