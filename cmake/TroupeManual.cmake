# The manual pages of deploy/man. troupe.yaml(5) shows the schema as the header comment of
# config/deployment.hpp has it, so that there is one text of it.

# The comment without its slashes, as literal roff text.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/config/deployment.hpp"
             "${PROJECT_SOURCE_DIR}/deploy/examples/quickstart.yaml")
file(READ "${PROJECT_SOURCE_DIR}/config/deployment.hpp" text)
string(FIND "${text}" "/// The file." from)
string(FIND "${text}" "\n\n#include" to)
math(EXPR length "${to} - ${from}")
string(SUBSTRING "${text}" ${from} ${length} text)
file(READ "${PROJECT_SOURCE_DIR}/deploy/examples/quickstart.yaml" example)
string(STRIP "${example}" example)
foreach(name text example)
  string(REPLACE "\\" "\\e" ${name} "${${name}}")
  string(REPLACE "-" "\\-" ${name} "${${name}}")
endforeach()
string(REGEX REPLACE "(^|\n)/// ?" "\\1" deployment_keys "${text}")
set(deployment_example "${example}")
foreach(page troupe.1 troupe.yaml.5)
  configure_file("${PROJECT_SOURCE_DIR}/deploy/man/${page}" "${PROJECT_BINARY_DIR}/man/${page}" @ONLY)
  cmake_path(GET page EXTENSION LAST_ONLY section)
  string(SUBSTRING "${section}" 1 1 section)
  install(FILES "${PROJECT_BINARY_DIR}/man/${page}" DESTINATION "${CMAKE_INSTALL_MANDIR}/man${section}"
          COMPONENT runtime)
endforeach()
