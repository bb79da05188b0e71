# Each component of the installation at WORK/moved is found if only the packages that it needs are there, and a
# component that is not available says why. Run by ctest.

cmake_minimum_required(VERSION 3.25)
include("${CMAKE_CURRENT_LIST_DIR}/must.cmake")

set(project "${CMAKE_CURRENT_LIST_DIR}/components")

# look(<folder> <missing packages> <arguments of find_package>...): puts the command that configures such a project
# into `command`.
function(look folder missing)
  file(REMOVE_RECURSE "${WORK}/${folder}")
  set(without)
  foreach(package IN LISTS missing)
    list(APPEND without "-DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON")
  endforeach()
  string(REPLACE ";" " " asked "${ARGN}")
  set(command "${CMAKE_COMMAND}" -S "${project}" -B "${WORK}/${folder}" -G "${GENERATOR}"
      "-DCMAKE_CXX_COMPILER=${COMPILER}" "-DCMAKE_PREFIX_PATH=${WORK}/moved" "-DASKED=${asked}" ${without}
      PARENT_SCOPE)
endfunction()

set(of_actors CAF spdlog nlohmann_json OpenSSL)

look(transport "${of_actors};yaml-cpp" REQUIRED COMPONENTS transport)
must(${command} -DSOURCE=transport.cpp)
must("${CMAKE_COMMAND}" --build "${WORK}/transport")
must("${WORK}/transport/uses")

look(kvcache "${of_actors};yaml-cpp;Threads" REQUIRED COMPONENTS kvcache)
must(${command})
look(config "${of_actors};Threads" REQUIRED COMPONENTS config)
must(${command})
look(all nlohmann_json REQUIRED)
must(${command} -DEXPECTED=actors)
look(optional CAF REQUIRED COMPONENTS transport OPTIONAL_COMPONENTS actors)
must(${command} -DUNEXPECTED=actors)

look(without_caf CAF REQUIRED COMPONENTS actors)
must_fail_saying("Troupe's component 'actors' needs the package CAF 0.17 COMPONENTS core io, which was not found"
                 ${command})
look(without_yaml yaml-cpp REQUIRED COMPONENTS actors)
must_fail_saying("Troupe's component 'config' needs the package yaml-cpp, which was not found" ${command})
look(unknown "" REQUIRED COMPONENTS transport python)
must_fail_saying("Troupe has no component 'python'; it has kvcache, transport, config, actors, c" ${command})
