# Configures and builds a C project against the installation at WORK/moved, with CMake's package, which must then
# look for no other one, and with pkg-config. The project must link to the installed library, by its permanent name.
# Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")

file(REMOVE_RECURSE "${WORK}/c")
set(without)
foreach(package CAF spdlog nlohmann_json OpenSSL yaml-cpp Threads)
  list(APPEND without "-DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON")
endforeach()
must("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/c" -B "${WORK}/c" -G "${GENERATOR}" "-DPAIR=${PAIR}"
     "-DCMAKE_PREFIX_PATH=${WORK}/moved" ${without})
must("${CMAKE_COMMAND}" --build "${WORK}/c")
must(readelf -d "${WORK}/c/pair")
if(NOT said MATCHES "NEEDED[^\n]*libtroupe\\.so\\.0")
  message(FATAL_ERROR "the program does not ask for libtroupe.so.0:\n${said}")
endif()
must(readelf --dyn-syms --wide "${WORK}/c/pair")
if(NOT said MATCHES "troupe_engine_start@TROUPE_0")
  message(FATAL_ERROR "the program asks for troupe_engine_start without a version:\n${said}")
endif()

find_program(pkg_config NAMES pkg-config pkgconf)
if(NOT pkg_config)
  message(STATUS "pkg-config is not there: what troupe.pc says was not tried")
  return()
endif()
set(ENV{PKG_CONFIG_PATH} "${WORK}/moved/lib/pkgconfig")
must("${pkg_config}" --cflags --libs troupe)
string(STRIP "${said}" flags)
separate_arguments(flags UNIX_COMMAND "${flags}")
must(cc -std=c11 -Wall -Wextra -Werror -pedantic "${PAIR}" -o "${WORK}/c/by_pkg_config" ${flags})
# It runs: without arguments it prints its usage.
must_fail_saying("usage: pair FILE NAME" "${CMAKE_COMMAND}" -E env "LD_LIBRARY_PATH=${WORK}/moved/lib"
                 "${WORK}/c/by_pkg_config")
