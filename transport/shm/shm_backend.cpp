#include "troupe/transport/shm/shm_backend.hpp"

#include <string>
#include <utility>

#include "troupe/transport/shm/mapped_backend.hpp"
#include "troupe/transport/shm/staged_link.hpp"
#include "troupe/transport/shm/tracing.hpp"

namespace troupe::transport {

namespace {

/// What an operator should know about engine memory.
std::string about_engine_memory() {
  // With 1, the peer is named by PR_SET_PTRACER, and may.
  const auto scope = shm::ptrace_scope().value_or(0);
  if (scope < 2) return "";
  return "; memory of the engine may be out of reach (ptrace_scope is " + std::to_string(scope) +
         "): regions that the endpoint allocates are not";
}

class shm_backend final : public shm::mapped_backend {
 public:
  shm_backend(backend_context& context, std::shared_ptr<staging::staging_pool> staging)
      : mapped_backend{context}, staging_{std::move(staging)} {
    start();
  }

  [[nodiscard]] backend_kind kind() const noexcept override { return backend_kind::shm; }

  [[nodiscard]] usability probe() const override {
    if (!listener_) return {false, why_not_};
    return {true, "memfd and unix sockets work here"};
  }

  [[nodiscard]] usability reaches(const host_identity& peer) const override {
    if (auto why = why_apart(context_.identity, peer)) return {false, std::move(*why)};
    return {true, "same host, namespaces and user" + about_engine_memory()};
  }

 protected:
  [[nodiscard]] std::shared_ptr<shm::mapped_link> make(const link_options& options,
                                                       std::shared_ptr<link_sink> sink) override {
    return std::make_shared<shm::staged_link>(context_, listener_, staging_, options,
                                              std::move(sink));
  }

 private:
  const std::shared_ptr<staging::staging_pool> staging_;
};

}  // namespace

std::unique_ptr<backend> make_shm_backend(backend_context& context,
                                          std::shared_ptr<staging::staging_pool> staging) {
  return std::make_unique<shm_backend>(context, std::move(staging));
}

}  // namespace troupe::transport
