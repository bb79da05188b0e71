# Builds and runs CONSUMER against the installation at WORK/moved. Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")

file(REMOVE_RECURSE "${WORK}/build")
must("${CMAKE_COMMAND}" -S "${CONSUMER}" -B "${WORK}/build" -G "${GENERATOR}"
     "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${WORK}/moved" "-DWANTED=${VERSION}"
     # Not a dependency of programs that link the libraries.
     -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON)
must("${CMAKE_COMMAND}" --build "${WORK}/build")
must("${WORK}/build/consumer")
if(NOT said STREQUAL "peer_lost\n")
  message(FATAL_ERROR "the consumer printed '${said}' instead of peer_lost")
endif()
