#include "troupe/actors/door/door_openssl.hpp"

#include <algorithm>
#include <array>
#include <ctime>

#include <openssl/err.h>
#include <openssl/pem.h>

namespace troupe::actors::openssl {

namespace {

bio reader_of(std::string_view text) {
  return bio{::BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))};
}

int no_password(char*, int, int, void*) {
  return -1;
}

}  // namespace

std::string last_error() {
  const auto code = ::ERR_peek_last_error();
  ::ERR_clear_error();
  if (code == 0) return {};
  const char* reason = ::ERR_reason_error_string(code);
  if (reason != nullptr) return reason;
  std::array<char, 256> text{};
  ::ERR_error_string_n(code, text.data(), text.size());
  return text.data();
}

std::vector<certificate> certificates_of(std::string_view pem) {
  std::vector<certificate> all;
  const auto from = reader_of(pem);
  while (from) {
    certificate one{::PEM_read_bio_X509(from.get(), nullptr, &no_password, nullptr)};
    if (!one) break;
    all.push_back(std::move(one));
  }
  // "No start line" is the end of the text; anything else is a certificate that cannot be read.
  const auto code = ::ERR_peek_last_error();
  const bool at_end =
      ERR_GET_LIB(code) == ERR_LIB_PEM && ERR_GET_REASON(code) == PEM_R_NO_START_LINE;
  ::ERR_clear_error();
  if (!at_end) all.clear();
  return all;
}

private_key key_of(std::string_view pem) {
  const auto from = reader_of(pem);
  if (!from) return nullptr;
  private_key key{::PEM_read_bio_PrivateKey(from.get(), nullptr, &no_password, nullptr)};
  ::ERR_clear_error();
  return key;
}

std::chrono::system_clock::time_point time_of(const ASN1_TIME* time) {
  std::tm parts{};
  if (::ASN1_TIME_to_tm(time, &parts) != 1) return {};
  return std::chrono::system_clock::from_time_t(::timegm(&parts));
}

std::vector<std::string> uris_of(const X509* of) {
  std::vector<std::string> all;
  const general_names names{
      static_cast<GENERAL_NAMES*>(::X509_get_ext_d2i(of, NID_subject_alt_name, nullptr, nullptr))};
  const int count = names ? sk_GENERAL_NAME_num(names.get()) : 0;
  for (int i = 0; i < count; ++i) {
    const auto* name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const auto* text = name->d.uniformResourceIdentifier;
    all.emplace_back(reinterpret_cast<const char*>(::ASN1_STRING_get0_data(text)),
                     static_cast<std::size_t>(::ASN1_STRING_length(text)));
  }
  return all;
}

bool is_for(const X509* it, const std::string& uri) {
  if (it == nullptr) return false;
  const auto all = uris_of(it);
  return std::ranges::find(all, uri) != all.end();
}

}  // namespace troupe::actors::openssl
