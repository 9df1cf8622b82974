// Device functions that are not inlined: structures by value, nested calls, local arrays, printf and
// assert.
#include <cassert>
#include <cstdio>

struct Table {
  int entries[6];
  float scale;
};

__device__ __noinline__ int collatz(int x, int limit) {
  int steps = 0;
  while (x != 1) {
    if (++steps == limit) return -1;
    x = x % 2 ? 3 * x + 1 : x / 2;
  }
  return steps;
}

__device__ __noinline__ float weighted(Table table, int x, int* seen) {
  float sum = 0;
  for (int i = 0; i < 6; i++) {
    int steps = collatz(x + i, 50);
    if (steps < 0) return -sum;
    seen[i] = steps;
    sum += table.scale * table.entries[steps % 6];
  }
  return sum;
}

__device__ __noinline__ Table rotated(Table table, short by, signed char add) {
  Table result = table;
  for (int i = 0; i < 6; i++) result.entries[i] = table.entries[(i + by) % 6] + add;
  result.scale *= 2;
  return result;
}

extern "C" __global__ void functions(float* out, int* seen, Table table) {
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  int mine[6] = {0, 0, 0, 0, 0, 0};
  float sum = weighted(table, thread + 1, mine);
  if (thread % 3 == 0) sum += weighted(rotated(table, thread, -2), thread + 2, mine);
  out[thread] = sum;
  for (int i = 0; i < 6; i++) seen[6 * thread + i] = mine[i];
}

extern "C" __global__ void print(const float* x, int bound) {
  int thread = threadIdx.x;
  assert(thread < bound);
  if (thread % 2) {
    int count = printf("%d: %8.3f %-6s|%5.1e|%lld %c %#x%%\n", thread, x[thread],
                       thread == 1 ? "one" : "many", x[thread] * 1e10, -(1ll << 40) - thread,
                       'a' + thread, 255u);
    if (count != 7) printf("wrong number: %d\n", count);
  } else {
    printf("nothing to say\n");
  }
}
