# The authenticated door of a cluster port. A library of its own, `troupe::door`, which needs no CAF, as
# `troupe::session`: sanitizers and the fuzzer use it where TROUPE_BUILD_ACTORS is off. There it is built if
# OpenSSL is found; troupe::actors needs it.
add_library(troupe_door STATIC
  door/certificate_files.cpp
  door/certificates.cpp
  door/door.cpp
  door/door_credentials.cpp
  door/door_dial.cpp
  door/door_eviction.cpp
  secrets/door_files.cpp
  door/door_greeting.cpp
  door/door_listener.cpp
  door/door_handshake.cpp
  door/door_loop.cpp
  door/door_openssl.cpp
  door/door_pump.cpp
  door/door_resolver.cpp
  door/door_sockets.cpp
  door/door_thread.cpp
  door/door_tls.cpp
  door/door_tls_context.cpp
  secrets/door_user_secret.cpp)
add_library(troupe::door ALIAS troupe_door)
set_target_properties(troupe_door PROPERTIES EXPORT_NAME door)
target_compile_features(troupe_door PUBLIC cxx_std_20)
target_include_directories(troupe_door PUBLIC "$<BUILD_INTERFACE:${session_root}>"
                           "$<INSTALL_INTERFACE:include>" PRIVATE "${session_config_root}")
target_link_libraries(troupe_door PUBLIC troupe::kvcache troupe::transport PRIVATE OpenSSL::SSL OpenSSL::Crypto)
troupe_compile_settings(troupe_door)
