# The protocol of a transfer without its actors: session messages, the two state machines, and the watch
# over a peer's life. The library `troupe::session` needs no CAF: fuzzing, sanitizers and simulations use
# it where TROUPE_BUILD_ACTORS is off. Its headers are among those of actors/; troupe::actors links it.
add_library(troupe_session STATIC messages/keep_alive.cpp link/peer_liveness.cpp transfer/receive_session.cpp transfer/send_session.cpp
                                  messages/session_messages.cpp)
add_library(troupe::session ALIAS troupe_session)
set_target_properties(troupe_session PROPERTIES EXPORT_NAME session)
set(session_root "${PROJECT_BINARY_DIR}/include/actors")
file(MAKE_DIRECTORY "${session_root}/troupe")
file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}" "${session_root}/troupe/actors" SYMBOLIC)
# From config/ the session uses the transfer modes and the door uses the rule of names. Both are only headers, which
# are available without yaml-cpp too.
set(session_config_root "${PROJECT_BINARY_DIR}/include/config")
file(MAKE_DIRECTORY "${session_config_root}/troupe")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/config" "${session_config_root}/troupe/config" SYMBOLIC)
target_include_directories(troupe_session PUBLIC "$<BUILD_INTERFACE:${session_root}>"
                           "$<BUILD_INTERFACE:${session_config_root}>" "$<INSTALL_INTERFACE:include>")
target_compile_features(troupe_session PUBLIC cxx_std_20)
target_link_libraries(troupe_session PUBLIC troupe::kvcache troupe::transport)
troupe_compile_settings(troupe_session)
