// Blocks that wait for one another by cooperative groups.
#include <cooperative_groups.h>

extern "C" __global__ void rotated(const int *x, int *between, int *y, int rounds) {
  auto grid = cooperative_groups::this_grid();
  unsigned count = grid.num_threads(), at = grid.thread_rank();
  int value = x[at];
  for (int i = 0; i < rounds; ++i) {
    between[at] = value;
    grid.sync();
    value = between[(at + 33) % count];
    grid.sync();
  }
  y[at] = value;
}
