// SPDX-License-Identifier: Apache-2.0
//
// Small kernels, sick and healthy, that a diagnosis has to tell apart. None of them is the top-k: what they do is in one line each,
// so that a core dump or a debugger's answer can be checked by hand. All are extern "C"; parameters are pointers and 32-bit words.

typedef unsigned int u32;
typedef unsigned long long u64;

// Healthy: works for `rounds` rounds and writes its progress, so that two looks at *progress differ. Every CTA counts its rounds.
extern "C" __global__ void healthy_worker(u32* progress, u32 rounds, u32 pause_ns) {
    u32 value = threadIdx.x + 1;
    for (u32 round = 0; round < rounds; ++round) {
#pragma unroll 1
        for (u32 i = 0; i < 256; ++i) {
            value ^= value << 13;
            value ^= value >> 17;
            value ^= value << 5;
        }
        if (pause_ns != 0) __nanosleep(pause_ns);
        if (threadIdx.x == 0) *reinterpret_cast<volatile u32*>(progress + 1 + blockIdx.x) = round + 1;
    }
    if (value == 0) progress[0] = 1;  // never, but the compiler cannot know: the work stays
}

// Healthy: CTAs of one grid pass one barrier on *arrivals (zeroed before) and end. Hangs if they are not all resident at once.
extern "C" __global__ void grid_barrier_once(u32* arrivals, u32 expected) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" : : "l"(arrivals) : "memory");
        u32 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(arrivals) : "memory");
        } while (seen < expected);
    }
    __syncthreads();
}

// Waits until *flag reaches target, by a system-scope acquire: what a kernel does that waits for another rank or the host.
extern "C" __global__ void flag_wait(const u32* flag, u32 target, u32* done) {
    if (threadIdx.x == 0) {
        u32 seen;
        do {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        } while (seen != target);
    }
    __syncthreads();
    done[blockIdx.x * blockDim.x + threadIdx.x] = target;
}

// Sick: the first half of the CTA waits at named barrier 1 for the whole CTA; the other half leaves without it.
extern "C" __global__ void named_barrier_stuck(u32* done, u32 sick) {
    const u32 half = blockDim.x / 2;
    if (threadIdx.x < half || sick == 0) asm volatile("bar.sync 1, %0;" : : "r"(blockDim.x) : "memory");
    done[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

#if __CUDA_ARCH__ >= 900
// Sick: waits for the completion of a phase of an mbarrier to which one arrival fewer comes than it was initialised with.
extern "C" __global__ void mbarrier_phase_stuck(u32* done, u32 missing) {
    __shared__ __align__(8) u64 barrier;
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(&barrier));
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(address), "r"(blockDim.x) : "memory");
    __syncthreads();
    if (threadIdx.x >= missing) asm volatile("{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [%0]; }" : : "r"(address) : "memory");
    u32 complete;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(complete)
                     : "r"(address)
                     : "memory");
    } while (complete == 0);
    done[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

// Sick: CTA 0 of a cluster of two waits at the cluster barrier for its peer, which waits for *release first.
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_peer_stuck(const u32* release, u32* done) {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (rank != 0 && threadIdx.x == 0) {
        u32 seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(release) : "memory");
        } while (seen == 0);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" : : : "memory");
    done[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
#endif

// Sick: one thread writes far outside of every allocation (an address in the upper half of the canonical range is never mapped).
extern "C" __global__ void illegal_access(u32* done) {
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x == blockDim.x - 1) {
        *reinterpret_cast<volatile u32*>(0x00007ffffffff000ull) = 1;
    }
    done[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

// Sick: one thread stores a word to an address that is not a multiple of four.
extern "C" __global__ void misaligned_access(u32* done) {
    const u64 odd = reinterpret_cast<u64>(done) + (threadIdx.x == blockDim.x - 1 ? 2 : 0);
    *reinterpret_cast<volatile u32*>(odd + 4 * static_cast<u64>(threadIdx.x)) = 1;
}
