# What `cmake --install` puts where, so that another project can say
#
#   find_package(Troupe 0.1 REQUIRED)
#   target_link_libraries(engine PRIVATE troupe::actors)
#
# Targets: troupe::kvcache, troupe::transport, and troupe::config and troupe::actors where they were built.

include(CMakePackageConfigHelpers)

set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/Troupe")
set(headers config kvcache transport)
set(targets troupe_config troupe_kvcache troupe_transport)
if(TROUPE_BUILD_ACTORS)
  list(APPEND headers actors)
  list(APPEND targets troupe_session troupe_door troupe_actors)
endif()
foreach(target IN LISTS targets)
  if(TARGET ${target})
    install(TARGETS ${target} EXPORT TroupeTargets ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endforeach()
foreach(folder IN LISTS headers)
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/${folder}/"
          DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe/${folder}" FILES_MATCHING PATTERN "*.hpp")
endforeach()
if(TARGET troupe)
  install(TARGETS troupe RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()

# Static libraries leave their own dependencies to whoever links them.
set(TROUPE_DEPENDENCIES "find_dependency(Threads)\n")
if(TROUPE_GPU_KIND STREQUAL "cuda")
  string(APPEND TROUPE_DEPENDENCIES "find_dependency(CUDAToolkit)\n")
endif()
if(TROUPE_BUILD_CONFIG)
  string(APPEND TROUPE_DEPENDENCIES "find_dependency(yaml-cpp)\n")
endif()
if(TROUPE_BUILD_ACTORS)
  string(APPEND TROUPE_DEPENDENCIES "find_dependency(spdlog)\nfind_dependency(nlohmann_json)\n"
                                    "find_dependency(OpenSSL 3.0)\n"
                                    "find_dependency(CAF 0.17 COMPONENTS core io)\n")
endif()
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/TroupeConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/TroupeConfig.cmake"
                              INSTALL_DESTINATION "${package_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TroupeConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(EXPORT TroupeTargets NAMESPACE troupe:: DESTINATION "${package_folder}")
install(FILES "${PROJECT_BINARY_DIR}/TroupeConfig.cmake"
              "${PROJECT_BINARY_DIR}/TroupeConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FindCAF.cmake"
        DESTINATION "${package_folder}")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")
