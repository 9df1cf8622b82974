// Right programs whose idioms look like errors at first sight.
#include <cooperative_groups.h>
#include <cub/block/block_merge_sort.cuh>
#include <cuda/pipeline>

#pragma nv_diag_suppress 20054

extern "C" __global__ void pipelined(const float *x, float *y, int rounds) {
  constexpr int stages = 2;
  __shared__ float buffer[stages][128];
  __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, stages> state;
  auto block = cooperative_groups::this_thread_block();
  auto pipeline = cuda::make_pipeline(block, &state);
  for (int i = 0; i < rounds + 1; ++i) {
    if (i < rounds) {
      pipeline.producer_acquire();
      cuda::memcpy_async(block, buffer[i % stages], x + 128 * i, sizeof(buffer[0]), pipeline);
      pipeline.producer_commit();
    }
    if (i > 0) {
      pipeline.consumer_wait();
      y[128 * (i - 1) + threadIdx.x] = buffer[(i - 1) % stages][127 - threadIdx.x];
      pipeline.consumer_release();
    }
  }
}

extern "C" __global__ void sorted(const int *x, int *y, int count) {
  using Sort = cub::BlockMergeSort<int, 64, 3>;
  __shared__ typename Sort::TempStorage storage;
  int items[3];
  for (int i = 0; i < 3; ++i) {
    int at = threadIdx.x * 3 + i;
    if (at < count) items[i] = x[at];
  }
  Sort(storage).Sort(
      items, [](int a, int b) { return a < b; }, count, 0x7fffffff);
  for (int i = 0; i < 3; ++i) {
    int at = threadIdx.x * 3 + i;
    if (at < count) y[at] = items[i];
  }
}

extern "C" __global__ void greatest(const float *x, float *y, int count) {
  float value = 0;
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at < count) value = x[at];
  unsigned lanes = __ballot_sync(~0u, threadIdx.x % 32 < 20);
  if (threadIdx.x % 32 < 20) {
    for (int step = 16; step; step /= 2) {
      float other = __shfl_down_sync(lanes, value, step);
      if (threadIdx.x % 32 + step < 20) value = fmaxf(value, other);
    }
    if (threadIdx.x % 32 == 0) {
      int *cell = reinterpret_cast<int *>(y), old = *cell, expected;
      do {
        expected = old;
        if (__int_as_float(expected) >= value) break;
        old = atomicCAS(cell, expected, __float_as_int(value));
      } while (old != expected);
    }
  }
}
