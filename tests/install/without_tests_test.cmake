# Configures the project at ROOT for installation without the packages of the tests, and `transport` alone also
# without CAF. Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")

# configure(<folder> <missing packages> <arguments>...)
function(configure folder missing)
  file(REMOVE_RECURSE "${WORK}/${folder}")
  set(without)
  foreach(package IN LISTS missing)
    list(APPEND without "-DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON")
  endforeach()
  must("${CMAKE_COMMAND}" -S "${ROOT}" -B "${WORK}/${folder}" -G "${GENERATOR}"
       "-DCMAKE_CXX_COMPILER=${COMPILER}" ${without} ${ARGN})
endfunction()

configure(by_our_options "GTest;benchmark" -DTROUPE_BUILD_TESTS=OFF -DTROUPE_BUILD_BENCH=OFF)
configure(by_the_usual_option "GTest;benchmark" -DBUILD_TESTING=OFF)
configure(bare "GTest;benchmark;CAF;spdlog;nlohmann_json;CLI11;yaml-cpp;OpenSSL" -DBUILD_TESTING=OFF
          -DTROUPE_BUILD_CONFIG=OFF)

# A component that was not built is not found, and the reason is given.
must_fail_saying(
  "Troupe's component 'config' is not in this installation, which was built with kvcache, transport only"
  "${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/components" -B "${WORK}/not_built" -G "${GENERATOR}"
  "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DTroupe_DIR=${WORK}/bare" "-DASKED=REQUIRED COMPONENTS config")
