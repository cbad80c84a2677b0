// SPDX-License-Identifier: Apache-2.0
//
// Kernels that stand beside the top-k or beside each other: one that holds CTA slots, one that is queued behind another, one that
// waits for a word of another rank, and a barrier among the ranks of one host. All are extern "C"; parameters are pointers and
// 32-bit words, in this order.

typedef unsigned int u32;

// Holds a slot of the device with every CTA (launched with as much dynamic shared memory as the kernel whose slots it takes) until
// *flag is not 0. *arrived counts the CTAs that are resident.
extern "C" __global__ void slot_holder(const u32* flag, u32* arrived) {
    if (threadIdx.x == 0) {
        atomicAdd(arrived, 1u);
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        } while (seen == 0);
    }
    __syncthreads();
}

// Healthy: what a server launches after the top-k, named as host stacks would name it. Says of each CTA that it ran.
extern "C" __global__ void sparse_mla_decode_kernel(u32* ran) {
    if (threadIdx.x == 0) ran[blockIdx.x] = 1;
}

// Waits for another rank, as the last step of an all-reduce over peer memory does: publishes `round` in this rank's word (which the
// peers read) and polls the peers' words, each in its own rank's memory, until none is behind. The wait is between GPUs.
extern "C" __global__ void cross_rank_all_reduce(u32* mine, const u32* peer, u32 round) {
    if (threadIdx.x == 0) {
        asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(mine), "r"(round) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(peer) : "memory");
        } while (seen < round);
    }
    __syncthreads();
}

// Reads as a sparse attention kernel does: of each row of `indices` (width words, a CTA a row) every entry that is not -1 is a row of
// `kv` (64 floats); their sum goes into out[row]. Entries are trusted: one that is no row of kv is read all the same.
extern "C" __global__ void sparse_row_reader(const int* indices, const float* kv, float* out, u32 width) {
    float sum = 0.0f;
    for (u32 column = threadIdx.x; column < width; column += blockDim.x) {
        const long long index = indices[static_cast<unsigned long long>(blockIdx.x) * width + column];
        if (index != -1) sum += kv[index * 64];
    }
    atomicAdd(out + blockIdx.x, sum);
}
