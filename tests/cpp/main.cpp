// minfer_tests [name...]: runs the named cases, or all of them; --list prints their names.
#include <cstring>

#include "testing.h"

int main(int argc, char** argv) {
  using namespace minfer::testing;
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (Case const& c : cases()) std::printf("%s\n", c.name);
    return 0;
  }
  int failed = 0, run = 0;
  for (int i = 1; i < argc; ++i) {
    bool known = false;
    for (Case const& c : cases()) known = known || std::strcmp(c.name, argv[i]) == 0;
    if (!known) {
      std::fprintf(stderr, "there is no case %s\n", argv[i]);
      return 2;
    }
  }
  for (Case const& c : cases()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(c.name, argv[i]) == 0;
    if (!wanted) continue;
    ++run;
    try {
      c.run();
      std::printf("ok      %s\n", c.name);
    } catch (std::exception const& error) {
      ++failed;
      std::printf("FAILED  %s\n%s\n", c.name, error.what());
    }
  }
  std::printf("%d of %d cases passed\n", run - failed, run);
  return failed == 0 ? 0 : 1;
}
