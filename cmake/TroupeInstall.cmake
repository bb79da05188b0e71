# What `cmake --install` installs, so that another project can write
#
#   find_package(Troupe 0.1 REQUIRED COMPONENTS actors)
#   target_link_libraries(engine PRIVATE troupe::actors)
#
# Components, each with the target troupe::<component>: kvcache, transport, and config, actors and c (libtroupe.so.0,
# for pkg-config as well) if they were built. A component brings those that it links, and looks only for the packages
# that these need; without COMPONENTS, all built components are found.
#
# The parts `runtime` (the command, its manual, units and examples) and `development` can be installed separately:
# `cmake --install <build> --component runtime`.

include(CMakePackageConfigHelpers)

set(package_folder "${CMAKE_INSTALL_LIBDIR}/cmake/Troupe")
set(TROUPE_COMPONENTS)
set(TROUPE_PUBLIC_HEADERS)
foreach(component kvcache transport config actors)
  if(NOT TARGET troupe_${component})
    continue()
  endif()
  list(APPEND TROUPE_COMPONENTS ${component})
  set(targets troupe_${component})
  if(component STREQUAL "actors")
    list(APPEND targets troupe_session troupe_door troupe_io)
  endif()
  install(TARGETS ${targets} EXPORT troupe_${component}
          ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT development)
  install(EXPORT troupe_${component} FILE TroupeTargets-${component}.cmake NAMESPACE troupe::
          DESTINATION "${package_folder}" COMPONENT development)
  get_target_property(headers troupe_${component} TROUPE_PUBLIC_HEADERS)
  foreach(header IN LISTS headers)
    cmake_path(GET header PARENT_PATH folder)
    install(FILES "${PROJECT_SOURCE_DIR}/${component}/${header}" COMPONENT development
            DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe/${component}/${folder}")
    list(APPEND TROUPE_PUBLIC_HEADERS "${component}/${header}")
  endforeach()
endforeach()
# One-sided agents are part of the component `actors`, as troupe::io, since their door is there; they need no CAF.
if(TARGET troupe_actors)
  get_target_property(headers troupe_io TROUPE_PUBLIC_HEADERS)
  foreach(header IN LISTS headers)
    install(FILES "${PROJECT_SOURCE_DIR}/actors/io/${header}" COMPONENT development
            DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe/io")
    list(APPEND TROUPE_PUBLIC_HEADERS "io/${header}")
  endforeach()
endif()

if(TARGET troupe_c)
  list(APPEND TROUPE_COMPONENTS c)
  install(TARGETS troupe_c EXPORT troupe_c
          LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT runtime NAMELINK_COMPONENT development)
  install(EXPORT troupe_c FILE TroupeTargets-c.cmake NAMESPACE troupe:: DESTINATION "${package_folder}" COMPONENT development)
  install(FILES "${PROJECT_SOURCE_DIR}/deploy/c/include/troupe/io.h"
                "${PROJECT_SOURCE_DIR}/deploy/c/include/troupe/troupe.h"
          DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/troupe" COMPONENT development)
  # The prefix is derived from the location of the file, so that an installation can be moved.
  file(RELATIVE_PATH TROUPE_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" TROUPE_PC_PREFIX "${TROUPE_PC_PREFIX}")
  configure_file("${PROJECT_SOURCE_DIR}/deploy/c/troupe.pc.in" "${PROJECT_BINARY_DIR}/troupe.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/troupe.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT development)
endif()

# The project that links a static library must link its dependencies, too.
set(TROUPE_PACKAGES_kvcache)
set(TROUPE_PACKAGES_transport Threads)
if(TROUPE_GPU_KIND STREQUAL "cuda")
  list(APPEND TROUPE_PACKAGES_transport CUDAToolkit)
endif()
set(TROUPE_PACKAGES_config yaml-cpp)
set(TROUPE_PACKAGES_actors spdlog "OpenSSL 3.0" "CAF 0.17 COMPONENTS core io")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/TroupeConfig.cmake.in"
                              "${PROJECT_BINARY_DIR}/TroupeConfig.cmake"
                              INSTALL_DESTINATION "${package_folder}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TroupeConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/TroupeConfig.cmake"
              "${PROJECT_BINARY_DIR}/TroupeConfigVersion.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/FindCAF.cmake"
        DESTINATION "${package_folder}" COMPONENT development)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT development)

if(TARGET troupe)
  install(TARGETS troupe RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}" COMPONENT runtime)
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/README.md"
          DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT runtime)
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs" DESTINATION "${CMAKE_INSTALL_DOCDIR}" COMPONENT runtime)
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/deploy/examples/"
          DESTINATION "${CMAKE_INSTALL_DOCDIR}/examples" COMPONENT runtime)
  include(TroupeManual)
  # Units contain the path of the command, which is known only at installation.
  configure_file("${PROJECT_SOURCE_DIR}/cmake/InstallUnits.cmake.in" "${PROJECT_BINARY_DIR}/InstallUnits.cmake" @ONLY)
  install(SCRIPT "${PROJECT_BINARY_DIR}/InstallUnits.cmake" COMPONENT runtime)
endif()
