// What else CUDA C++ becomes in PTX: initial values of all kinds, virtual functions, pointers to
// functions, recursion, managed variables, inline assembly with labels, tensor cores, clusters.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include <cassert>
#include <cstdio>

namespace cg = cooperative_groups;
namespace wmma = nvcuda::wmma;

struct Pair {
    float x, y;
};
struct Large {
    double values[4];
    int number;
    char letters[7];
    float factor;
};
struct Mixed {
    int* pointer;
    char letter;
};
typedef int (*Function)(int, int);

__device__ int sum(int a, int b) { return a + b; }
__device__ int product(int a, int b) { return a * b; }

__constant__ float table[5] = {1.5f, -2.f, 3.25f, 1e-30f, 7.f};
__constant__ char text[] = "hello\n\"quoted\"";
__device__ int matrix[3][4] = {{1, 2, 3, 4}, {5, 6}, {-7}};
__device__ double pi = 3.141592653589793;
__device__ __managed__ int managed = 5;
__device__ float4 four = {1, 2, 3, 4};
__device__ Function functions[2] = {sum, product};
__device__ const int* element = &matrix[1][2];
__device__ Mixed mixed = {&matrix[2][1], 'x'};
#pragma pack(push, 1)
struct Packed {
    char letter;
    int* pointer;
};
#pragma pack(pop)
__device__ Packed packed = {'y', &matrix[0][3]};

struct Base {
    __device__ virtual int apply(int x) { return x; }
    __device__ virtual ~Base() {}
};
struct Derived : Base {
    int factor;
    __device__ int apply(int x) override { return x * factor; }
};

__noinline__ __device__ Pair by_value(Large large, Pair pair, int n) {
    return {float(large.values[n & 3]) + pair.x, large.factor * pair.y + large.letters[n % 7]};
}

__noinline__ __device__ int fibonacci(int n) {
    return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2);
}

extern "C" __global__ void language(
    const __grid_constant__ Large large, Pair pair, int* out, int n, Function* given) {
    extern __shared__ int dynamic[];
    __shared__ float fixed[2][33];
    int t = threadIdx.x + blockIdx.x * blockDim.x;
    fixed[t & 1][t % 33] = table[n % 5];
    dynamic[t] = text[n % 14];
    __syncthreads();
    Pair result = by_value(large, pair, n);
    int total = fibonacci(n);
    switch (n) {
        case 0: total += 5; break;
        case 1: total *= 7; break;
        case 2: total ^= out[1]; break;
        case 3: total -= 9; break;
        case 4: total = __popc(total); break;
        case 5: total = __clz(total); break;
        case 6: total = total / n; break;
        case 7: total = dynamic[t ^ 1];
        case 8: total = out[5]; break;
        default: total = matrix[n % 3][n % 4];
    }
    total += given[n & 1](total, n) + functions[n & 1](total, 3);
    printf("%d %f %s\n", total, result.x, "string");
    Base* base = n ? new Derived : new Base;
    total += base->apply(n);
    total += int(sin(pi * n)) + int(pow(double(result.y), 2.5)) + managed + int(four.z);
    out[t] = total + *element + *mixed.pointer + mixed.letter + *packed.pointer + packed.letter;
    asm volatile(
        "{ .reg .pred p; WAIT_%=: setp.eq.u32 p, %1, 0; @p bra DONE_%=; bra WAIT_%=;\n"
        "DONE_%=: mov.u32 %0, %clock; }"
        : "=r"(out[t + 1])
        : "r"(n));
    assert(n > 0);
}

extern "C" __global__ void __launch_bounds__(256, 2) __cluster_dims__(2, 1, 1) intrinsics(
    float* a, half* h, __nv_bfloat16* b, unsigned long long* u, double* d) {
    int t = threadIdx.x;
    float v = a[t];
    v = __shfl_xor_sync(~0u, v, 1) + __fdividef(v, 3.f) + __expf(v) + rsqrtf(v) + sinf(v) + erff(v);
    atomicAdd(a, v);
    atomicCAS(u, 1ull, 2ull);
    h[t] = __hfma(h[t], h[t + 1], __float2half(v));
    b[t] = __hadd(b[t], __float2bfloat16(v));
    unsigned votes = __ballot_sync(~0u, v > 0);
    if (__any_sync(votes, v < 1)) a[t + 1] = __popc(votes);
    __shared__ float shared[256];
    shared[t] = v;
    auto cluster = cg::this_cluster();
    cluster.sync();
    a[t] = cluster.map_shared_rank(shared, 1)[t];
    u[t] = __umul64hi(u[t], u[t + 1]) + clock64() + __byte_perm(t, 5, 0x1234) + __dp4a(t, t, t);
    __nanosleep(100);
    u[2] = (u[3] % 7) / u[1];
    d[t] = exp(d[t]) + fma(d[t], 2.0, 1.0) + sqrt(d[t + 1]) + __drcp_rn(d[2]);
}

extern "C" __global__ void tensor_cores(const half* a, const half* b, float* c) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> result;
    wmma::fill_fragment(result, 0.f);
    wmma::load_matrix_sync(left, a, 16);
    wmma::load_matrix_sync(right, b, 16);
    wmma::mma_sync(result, left, right, result);
    wmma::store_matrix_sync(c, result, 16, wmma::mem_row_major);
}

template <class T>
__global__ void elementwise(T* x, long n) {
    for (long i = threadIdx.x; i < n; i += 32) x[i] = x[i] > T(0) ? x[i] * x[i] : -x[i];
}
template __global__ void elementwise<float>(float*, long);
template __global__ void elementwise<double>(double*, long);
template __global__ void elementwise<char>(char*, long);
