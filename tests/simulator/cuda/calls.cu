// Calls that cannot be inlined: recursive ones, of pointers, of virtual functions.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

__device__ __noinline__ int ackermann(int m, int n) {
  if (m == 0) return n + 1;
  if (n == 0) return ackermann(m - 1, 1);
  return ackermann(m - 1, ackermann(m, n - 1));
}

__device__ __noinline__ int odd(unsigned n);
__device__ __noinline__ int even(unsigned n) { return n == 0 ? 1 : odd(n - 1); }
__device__ __noinline__ int odd(unsigned n) { return n == 0 ? 0 : even(n - 1); }

struct Range {
  int low, high;
  long long weight;
};

// Each call has an array of its own, which the calls inside it see.
__device__ __noinline__ Range spread(int depth, const int *outer) {
  int own[4];
  for (int i = 0; i < 4; ++i) own[i] = outer[(i + 1) & 3] + depth * (i + 1);
  Range result = {own[depth & 3], own[(depth + 1) & 3], own[0]};
  if (depth > 0) {
    Range left = spread(depth - 1, own);
    Range right = spread(depth - 2 > 0 ? depth - 2 : 0, own);
    result.low = min(result.low, left.low + own[1]);
    result.high = max(result.high, right.high + own[2]);
    result.weight += left.weight * 3 + right.weight;
  }
  return result;
}

__device__ __noinline__ float twice(float x) { return 2 * x; }
__device__ __noinline__ float square(float x) { return x * x; }
__device__ __noinline__ float third(float x) { return x / 3; }

using Function = float (*)(float);
__device__ Function table[] = {twice, square, third};

struct Shape {
  __device__ virtual float area() const = 0;
  __device__ virtual ~Shape() {}
};
struct Square : Shape {
  float side;
  __device__ Square(float side) : side(side) {}
  __device__ float area() const override { return side * side; }
};
struct Circle : Shape {
  float radius;
  __device__ Circle(float radius) : radius(radius) {}
  __device__ float area() const override { return 3 * radius * radius; }
};

extern "C" __global__ void recursive(int *result) {
  int i = threadIdx.x;
  int start[4] = {i, 2 * i, i - 7, 5};
  Range range = spread(i % 7, start);
  result[i] = ackermann(i % 3, i % 5);
  result[i + 64] = even(i);
  result[i + 128] = range.low;
  result[i + 192] = range.high;
  result[i + 256] = (int)range.weight;
}

extern "C" __global__ void indirect(float *values, int limit) {
  int i = threadIdx.x;
  Function function = table[i % limit];
  values[i] = function(values[i]);
  Square square(values[i]);
  Circle circle(values[i]);
  const Shape *shape = i % 5 < 2 ? static_cast<const Shape *>(&square) : &circle;
  values[i + 64] = shape->area();
}

extern "C" __global__ void tiles(int *sums) {
  auto tile = cg::tiled_partition<64>(cg::this_thread_block());
  int sum = cg::reduce(tile, (int)threadIdx.x, cg::plus<int>());
  sums[threadIdx.x] = sum + 1000 * tile.shfl((int)threadIdx.x, 5);
}
