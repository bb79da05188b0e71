#pragma once

/// Owning types for OpenSSL's objects. Only for source files: no public header includes OpenSSL.

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

/// The message of the last failed call, "" if none; clears OpenSSL's error queue.
[[nodiscard]] std::string last_error();
/// The certificates of a PEM text, in order; empty if one of them is malformed.
[[nodiscard]] std::vector<certificate> certificates_of(std::string_view pem);
/// Null if malformed or locked with a password (it never prompts for one).
[[nodiscard]] private_key key_of(std::string_view pem);
[[nodiscard]] std::chrono::system_clock::time_point time_of(const ASN1_TIME* time);
/// The URIs among the names that the certificate is for.
[[nodiscard]] std::vector<std::string> uris_of(const X509* of);

/// Whether one of the certificate's URIs is `uri`. False for null.
[[nodiscard]] bool is_for(const X509* it, const std::string& uri);

/// The prefix of the URI by which a certificate names its cluster.
inline constexpr std::string_view cluster_prefix = "troupe:";

}  // namespace troupe::actors::openssl
