#include "troupe/deploy/cli/app.hpp"

int main(int argc, char** argv) {
  return troupe::deploy::cli::run(argc, argv);
}
