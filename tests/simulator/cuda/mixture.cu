// What compilers make of ordinary code: calls, switches, structs by value, constants, local arrays,
// double precision, integer division, shuffles, votes, atomics, printing.
#include <cstdint>
#include <cstdio>

struct Coefficients {
    float scale;
    int kind;
    double shift;
    int8_t table[5];
};

__constant__ float powers[8] = {1, 2, 4, 8, 16, 32, 64, 128};
__device__ int counters[4];

__device__ __noinline__ float apply(int kind, float x) {
    switch (kind % 7) {
        case 0: return x + 1;
        case 1: return x * x;
        case 2: return sqrtf(fabsf(x));
        case 3: return x / 3;
        case 4: return fminf(x, 0.5f);
        case 5: return floorf(x);
        default: return -x;
    }
}

extern "C" __global__ void mixture(const float* x, float* y, int64_t* sums, Coefficients given, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    float value = at < count ? x[at] : 0;
    float results[7];
    for (int i = 0; i < 7; ++i) results[i] = apply(i + given.kind, value);
    float picked = results[(at / 3) % 7] * powers[at % 8];
    double precise = picked * 1.0 + given.shift / (at + 1);
    if (at < count) y[at] = given.scale * float(precise) + given.table[at % 5];
    int64_t number = int64_t(at) * at % 1013 - at / 7;
    for (int offset = 16; offset; offset /= 2) number += __shfl_xor_sync(~0u, number, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(sums), number);
    unsigned votes = __ballot_sync(~0u, value > 0);
    if (threadIdx.x % 32 == 0) atomicAdd(&counters[blockIdx.x % 4], __popc(votes));
    __syncthreads();
    if (threadIdx.x == 0) {
        sums[1 + blockIdx.x] = counters[blockIdx.x % 4];
        if (blockIdx.x == 1) printf("block %d of %d: %.3f %s\n", blockIdx.x, gridDim.x, value, "done");
    }
}
