// Tiles come by TMA, completing on an mbarrier; each block sums its tile over rows, and writes the
// tile, doubled and transposed, back by TMA.
#include <cuda.h>
#include <cstdint>

constexpr int TILE = 32;

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}

extern "C" __global__ void __launch_bounds__(128)
transpose(const __grid_constant__ CUtensorMap source, const __grid_constant__ CUtensorMap target,
          float* sums) {
    __shared__ alignas(128) float tile[2][TILE][TILE];
    __shared__ alignas(128) float turned[TILE][TILE];
    __shared__ uint64_t barrier[2];
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier[i])));
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int tiles = 4;
    auto fetch = [&](int step) {
        int slot = step % 2;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::
                     "r"(shared_address(&barrier[slot])), "r"(TILE * TILE * 4) : "memory");
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3}], [%4];" ::
            "r"(shared_address(tile[slot])), "l"(&source), "r"(step * TILE), "r"(int(blockIdx.x) * TILE),
            "r"(shared_address(&barrier[slot])) : "memory");
    };
    if (threadIdx.x == 0) { fetch(0); fetch(1); }
    float sum = 0;
    for (int step = 0; step < tiles; ++step) {
        wait(&barrier[step % 2], step / 2 % 2);
        for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x)
            turned[i % TILE][i / TILE] = 2 * tile[step % 2][i / TILE][i % TILE];
        if (threadIdx.x < TILE)
            for (int i = 0; i < TILE; ++i) sum += tile[step % 2][threadIdx.x][i];
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
        if (threadIdx.x == 0) {
            asm volatile(
                "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::
                "l"(&target), "r"(int(blockIdx.x) * TILE), "r"(step * TILE),
                "r"(shared_address(turned)) : "memory");
            asm volatile("cp.async.bulk.commit_group;");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            if (step + 2 < tiles) fetch(step + 2);
        }
        __syncthreads();
    }
    if (threadIdx.x < TILE) sums[blockIdx.x * TILE + threadIdx.x] = sum;
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
