# Finds the C++ Actor Framework if its package has no CMake configuration (CAF 0.17 of Debian 12).
#
#   find_package(CAF 0.17 REQUIRED COMPONENTS core io openssl)
#
# defines CAF_FOUND, CAF_VERSION and one imported target per component: CAF::core, CAF::io, CAF::openssl,
# the names that later releases of CAF export.

find_path(CAF_INCLUDE_DIR caf/config.hpp)
mark_as_advanced(CAF_INCLUDE_DIR)

if(CAF_INCLUDE_DIR)
  file(STRINGS "${CAF_INCLUDE_DIR}/caf/config.hpp" caf_version_line
       REGEX "^#[ \t]*define[ \t]+CAF_VERSION[ \t]+[0-9]+")
  if(caf_version_line MATCHES "([0-9]+)$")
    set(number "${CMAKE_MATCH_1}")
    math(EXPR major "${number} / 10000")
    math(EXPR minor "(${number} / 100) % 100")
    math(EXPR patch "${number} % 100")
    set(CAF_VERSION "${major}.${minor}.${patch}")
  endif()
endif()

foreach(component IN LISTS CAF_FIND_COMPONENTS)
  find_library(CAF_${component}_LIBRARY caf_${component})
  mark_as_advanced(CAF_${component}_LIBRARY)
  if(CAF_${component}_LIBRARY AND CAF_INCLUDE_DIR)
    set(CAF_${component}_FOUND TRUE)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(CAF REQUIRED_VARS CAF_INCLUDE_DIR VERSION_VAR CAF_VERSION
                                  HANDLE_COMPONENTS)

if(CAF_FOUND)
  find_package(Threads REQUIRED)
  foreach(component IN LISTS CAF_FIND_COMPONENTS)
    if(CAF_${component}_FOUND AND NOT TARGET CAF::${component})
      add_library(CAF::${component} UNKNOWN IMPORTED)
      set_target_properties(CAF::${component} PROPERTIES
        IMPORTED_LOCATION "${CAF_${component}_LIBRARY}"
        INTERFACE_INCLUDE_DIRECTORIES "${CAF_INCLUDE_DIR}")
      if(component STREQUAL "core")
        set_property(TARGET CAF::core APPEND PROPERTY INTERFACE_LINK_LIBRARIES Threads::Threads)
      else()
        set_property(TARGET CAF::${component} APPEND PROPERTY INTERFACE_LINK_LIBRARIES CAF::core)
      endif()
    endif()
  endforeach()
endif()
