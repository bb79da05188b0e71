#include "troupe/actors/door/certificates.hpp"

#include <algorithm>
#include <initializer_list>
#include <memory>

#include <openssl/bn.h>
#include <openssl/pem.h>

#include "troupe/actors/door/door_openssl.hpp"

namespace troupe::actors {

namespace {

using openssl::certificate;
using openssl::private_key;

using extension = std::unique_ptr<X509_EXTENSION, openssl::freed_by<&::X509_EXTENSION_free>>;
using number = std::unique_ptr<BIGNUM, openssl::freed_by<&::BN_free>>;

constexpr long version_3 = 2;
constexpr int serial_bits = 127;

struct extension_text {
  int nid;
  std::string value;
};

unexpected failed(const char* what) {
  return fail(errc::internal,
              std::string{"no certificate was made: "} + what + ": " + openssl::last_error());
}

template <class Write>
std::string text_of(Write write) {
  const openssl::bio into{::BIO_new(::BIO_s_mem())};
  if (!into || write(into.get()) != 1) return {};
  char* data = nullptr;
  const auto size = BIO_get_mem_data(into.get(), &data);
  return {data, static_cast<std::size_t>(size)};
}

certificate_pair pair_of(X509* made, EVP_PKEY* key) {
  return {text_of([&](BIO* into) { return ::PEM_write_bio_X509(into, made); }),
          text_of([&](BIO* into) {
            return ::PEM_write_bio_PrivateKey(into, key, nullptr, nullptr, 0, nullptr, nullptr);
          })};
}

bool set_life(X509* made, const certificate_life& life) {
  const auto from = std::chrono::system_clock::to_time_t(life.from);
  const auto until = std::chrono::system_clock::to_time_t(life.until);
  return ::ASN1_TIME_set(::X509_getm_notBefore(made), from) != nullptr &&
         ::ASN1_TIME_set(::X509_getm_notAfter(made), until) != nullptr;
}

bool set_serial(X509* made) {
  const number serial{::BN_new()};
  return serial && ::BN_rand(serial.get(), serial_bits, BN_RAND_TOP_ANY, BN_RAND_BOTTOM_ANY) == 1 &&
         ::BN_to_ASN1_INTEGER(serial.get(), ::X509_get_serialNumber(made)) != nullptr;
}

bool set_name(X509* made, const std::string& name) {
  // A common name has 64 characters at most.
  const auto text = name.substr(0, 64);
  return ::X509_NAME_add_entry_by_txt(::X509_get_subject_name(made), "CN", MBSTRING_UTF8,
                                      reinterpret_cast<const unsigned char*>(text.data()),
                                      static_cast<int>(text.size()), -1, 0) == 1;
}

bool add_extensions(X509* made, X509* issuer, std::initializer_list<extension_text> all) {
  X509V3_CTX context{};
  X509V3_set_ctx_nodb(&context);
  ::X509V3_set_ctx(&context, issuer, made, nullptr, nullptr, 0);
  return std::ranges::all_of(all, [&](const extension_text& one) {
    const extension it{::X509V3_EXT_conf_nid(nullptr, &context, one.nid, one.value.c_str())};
    return it && ::X509_add_ext(made, it.get(), -1) == 1;
  });
}

struct request {
  std::string name;
  certificate_life life;
  std::initializer_list<extension_text> extensions;
};

/// Makes a certificate signed by `issuer`, or self-signed without one.
result<certificate_pair> make(const request& wanted, X509* issuer, EVP_PKEY* issuer_key) {
  const private_key key{EVP_EC_gen("P-256")};
  const certificate made{::X509_new()};
  if (!key || !made) return failed("no key");
  auto* signer = issuer != nullptr ? issuer : made.get();
  const bool filled = ::X509_set_version(made.get(), version_3) == 1 && set_serial(made.get()) &&
                      set_life(made.get(), wanted.life) && set_name(made.get(), wanted.name) &&
                      ::X509_set_issuer_name(made.get(), ::X509_get_subject_name(signer)) == 1 &&
                      ::X509_set_pubkey(made.get(), key.get()) == 1 &&
                      add_extensions(made.get(), signer, wanted.extensions);
  if (!filled) return failed("a field does not fit");
  if (::X509_sign(made.get(), issuer_key != nullptr ? issuer_key : key.get(), ::EVP_sha256()) == 0)
    return failed("it cannot be signed");
  return pair_of(made.get(), key.get());
}

}  // namespace

result<certificate_pair> make_authority(const std::string& cluster, certificate_life life) {
  const std::initializer_list<extension_text> extensions{
      {NID_basic_constraints, "critical,CA:TRUE,pathlen:0"},
      {NID_key_usage, "critical,keyCertSign,cRLSign"},
      {NID_subject_key_identifier, "hash"},
  };
  return make({"Troupe authority of " + cluster, life, extensions}, nullptr, nullptr);
}

result<certificate_pair> make_node_certificate(const certificate_pair& authority,
                                               const std::string& cluster, certificate_life life) {
  const auto issuers = openssl::certificates_of(authority.certificate);
  const auto key = openssl::key_of(authority.key);
  if (issuers.empty() || !key) {
    return fail(errc::invalid_config,
                "the authority's certificate or key cannot be read (PEM, without a password)");
  }
  // There may be several while one authority replaces another.
  const auto found = std::ranges::find_if(issuers, [&](const certificate& one) {
    return ::X509_check_private_key(one.get(), key.get()) == 1;
  });
  (void)openssl::last_error();
  if (found == issuers.end())
    return fail(errc::invalid_config, "the authority's key does not belong to its certificate");
  auto* issuer = found->get();
  life.until = std::min(life.until, openssl::time_of(::X509_get0_notAfter(issuer)));
  // In OpenSSL's list syntax a name ends at a comma.
  if (cluster.empty() || cluster.find_first_of(",;\n") != std::string::npos)
    return fail(errc::invalid_config, "`" + cluster + "` is not a name of a cluster");
  const std::initializer_list<extension_text> extensions{
      {NID_basic_constraints, "critical,CA:FALSE"},
      {NID_key_usage, "critical,digitalSignature"},
      {NID_ext_key_usage, "serverAuth,clientAuth"},
      {NID_subject_key_identifier, "hash"},
      {NID_authority_key_identifier, "keyid"},
      {NID_subject_alt_name, "URI:" + std::string{openssl::cluster_prefix} + cluster},
  };
  return make({"Troupe node of " + cluster, life, extensions}, issuer, key.get());
}

result<certificate_facts> facts_of(const std::string& certificate) {
  const auto all = openssl::certificates_of(certificate);
  if (all.empty())
    return fail(errc::invalid_config, "it holds no certificate that can be read (PEM)");
  certificate_facts facts;
  for (const auto& uri : openssl::uris_of(all.front().get())) {
    if (uri.starts_with(openssl::cluster_prefix)) {
      facts.cluster = uri.substr(openssl::cluster_prefix.size());
      break;
    }
  }
  facts.life = {openssl::time_of(::X509_get0_notBefore(all.front().get())),
                openssl::time_of(::X509_get0_notAfter(all.front().get()))};
  return facts;
}

}  // namespace troupe::actors
