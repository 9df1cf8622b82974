// Memory that a kernel allocates: on the heap, and on the stack of each thread.
extern "C" __global__ void reversed(const int *x, int *y, int count) {
  int at = blockIdx.x * blockDim.x + threadIdx.x;
  int length = at % 5 + 1;
  int *heap = static_cast<int *>(malloc(sizeof(int) * length));
  int *stack = static_cast<int *>(__builtin_alloca(sizeof(int) * length));
  for (int i = 0; i < length; ++i) {
    heap[i] = x[(at + i) % count];
    stack[length - 1 - i] = heap[i];
  }
  int sum = 0;
  for (int i = 0; i < length; ++i) sum = sum * 10 + stack[i];
  free(heap);
  y[at] = sum;
}
