#include "troupe/actors/door/door_tls.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>
#include <utility>

#include <openssl/err.h>

#include "troupe/actors/door/door_openssl.hpp"
#include "troupe/transport/os_error.hpp"

namespace troupe::actors {

namespace {

constexpr std::byte confirmation{1};

int int_size(std::size_t size) {
  return static_cast<int>(std::min<std::size_t>(size, std::numeric_limits<int>::max()));
}

bool about_certificates(int reason) {
  switch (reason) {
    case SSL_R_TLSV1_ALERT_UNKNOWN_CA:
    case SSL_R_SSLV3_ALERT_BAD_CERTIFICATE:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_EXPIRED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_REVOKED:
    case SSL_R_SSLV3_ALERT_CERTIFICATE_UNKNOWN:
    case SSL_R_SSLV3_ALERT_UNSUPPORTED_CERTIFICATE:
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:
    case SSL_R_SSLV3_ALERT_HANDSHAKE_FAILURE:
    case SSL_R_TLSV13_ALERT_CERTIFICATE_REQUIRED: return true;
    default: return false;
  }
}

std::string what_is_wrong(long verified, int depth) {
  switch (verified) {
    case X509_V_ERR_APPLICATION_VERIFICATION:
      return "it is for another cluster, or for none; give it a certificate of this cluster";
    case X509_V_ERR_CERT_HAS_EXPIRED:
      if (depth > 0) return std::string{"its authority has expired; "} + new_authority_advice;
      return "it has expired; `troupe certs renew DIR` makes a new one";
    case X509_V_ERR_CERT_NOT_YET_VALID: return "it is not valid yet; set the clocks of both hosts";
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
      return "another authority signed it; give every node a certificate of one authority, or both "
             "authorities in security.ca while you change from one to the other";
    default: return ::X509_verify_cert_error_string(verified);
  }
}

}  // namespace

result<std::unique_ptr<door_tls_session>> door_tls_session::create(
    std::shared_ptr<const door_tls_context> context, int fd, door_handshake::role who) {
  std::unique_ptr<SSL, openssl::freed_by<&::SSL_free>> ssl{::SSL_new(context->get())};
  if (!ssl || ::SSL_set_fd(ssl.get(), fd) != 1)
    return fail(errc::internal, "no TLS connection: " + openssl::last_error());
  if (who == door_handshake::role::client) {
    ::SSL_set_connect_state(ssl.get());
  } else {
    ::SSL_set_accept_state(ssl.get());
  }
  auto judgement = std::make_unique<door_tls_judgement>();
  judgement->uri = &context->uri();
  SSL_set_app_data(ssl.get(), judgement.get());
  return std::unique_ptr<door_tls_session>{
      new door_tls_session{std::move(context), std::move(judgement), ssl.release(), who}};
}

door_tls_session::door_tls_session(std::shared_ptr<const door_tls_context> context,
                                   std::unique_ptr<door_tls_judgement> judgement, SSL* ssl,
                                   door_handshake::role who)
    : context_{std::move(context)}, judgement_{std::move(judgement)}, ssl_{ssl}, role_{who} {}

door_tls_session::~door_tls_session() {
  ::SSL_free(ssl_);
}

door_tls_session::step door_tls_session::greet() {
  if (!secured_) {
    ::ERR_clear_error();
    const auto how = outcome(::SSL_do_handshake(ssl_));
    if (how != step::done) return how;
    secured_ = true;
    // The callback has judged the certificate. Check again: no unverified connection may exist,
    // whatever OpenSSL does.
    if (::SSL_get_verify_result(ssl_) != X509_V_OK ||
        !openssl::is_for(::SSL_get0_peer_certificate(ssl_), context_->uri())) {
      why_ = {errc::unauthorized, "the peer's certificate was not verified"};
      return step::broken;
    }
  }
  std::array<std::byte, 1> word{confirmation};
  const auto confirmed = role_ == door_handshake::role::server ? write(word) : read(word);
  if (confirmed.how == step::done && word.front() != confirmation) {
    why_ = {errc::version_mismatch,
            "the peer's confirmation is not that of this release of Troupe"};
    return step::broken;
  }
  if (confirmed.how == step::ended) {
    why_ = {errc::link_broken, "the peer hung up instead of confirming"};
    return step::broken;
  }
  return confirmed.how;
}

door_tls_session::moved door_tls_session::read(std::span<std::byte> into) {
  ::ERR_clear_error();
  const int n = ::SSL_read(ssl_, into.data(), int_size(into.size()));
  return {outcome(n), static_cast<std::size_t>(std::max(n, 0))};
}

door_tls_session::moved door_tls_session::write(std::span<const std::byte> from) {
  ::ERR_clear_error();
  const int n = ::SSL_write(ssl_, from.data(), int_size(from.size()));
  return {outcome(n), static_cast<std::size_t>(std::max(n, 0))};
}

door_tls_session::step door_tls_session::say_end() {
  ::ERR_clear_error();
  const int n = ::SSL_shutdown(ssl_);
  return n >= 0 ? step::done : outcome(n);
}

door_tls_session::step door_tls_session::outcome(int returned) {
  if (returned > 0) return step::done;
  const int number = errno;
  const int kind = ::SSL_get_error(ssl_, returned);
  switch (kind) {
    case SSL_ERROR_WANT_READ: return step::wants_read;
    case SSL_ERROR_WANT_WRITE: return step::wants_write;
    case SSL_ERROR_ZERO_RETURN: return step::ended;
    default: why_ = reason(kind == SSL_ERROR_SYSCALL ? number : 0); return step::broken;
  }
}

troupe::error door_tls_session::reason(int number) {
  const auto code = ::ERR_peek_last_error();
  const long verified = ::SSL_get_verify_result(ssl_);
  const int why = ERR_GET_LIB(code) == ERR_LIB_SSL ? ERR_GET_REASON(code) : 0;
  const auto text = openssl::last_error();
  if (why == SSL_R_CERTIFICATE_VERIFY_FAILED && verified != X509_V_OK)
    return {errc::unauthorized, "the peer's certificate is not accepted: " +
                                    what_is_wrong(verified, judgement_->depth)};
  if (why == SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE)
    return {errc::unauthorized, "the peer shows no certificate"};
  if (about_certificates(why)) {
    return {errc::unauthorized,
            "the peer does not accept our certificate (" + text +
                "); its log says why: another authority, another cluster, or expired"};
  }
  std::string sentence = "the peer hung up (";
  sentence += number != 0 ? transport::what_errno(number) : text;
  sentence += ")";
  return {errc::link_broken, std::move(sentence)};
}

}  // namespace troupe::actors
