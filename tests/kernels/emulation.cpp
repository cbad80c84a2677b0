// SPDX-License-Identifier: Apache-2.0
//
// Runs a CUDA source on the CPU, thread by thread, for tests: every GPU thread is a fiber, and a seeded scheduler picks which CTAs and
// in which order their threads go on; some CTAs stand still for a while, so that others run a round ahead. __syncthreads and the warp
// intrinsics are waits; a poll gives way. Sequentially consistent.
// Shared memory is poisoned, with a guard behind it. "kernel.inc" is persistent_topk.cu with its inline PTX replaced.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

namespace {

struct Dim {
    unsigned x, y, z;
};
enum Wait { kNone, kCta, kWarp };
struct Fiber {
    jmp_buf state;
    char* stack = nullptr;
    bool started = false, done = false;
    Dim thread{}, block{};
    int cta = 0;
    Wait wait = kNone;
};
struct Cta {
    int live = 1024, arrived = 0;
    int warp_live[32], warp_arrived[32];
    unsigned exchange[1024];
    std::vector<unsigned char> shared;
};

constexpr size_t kStack = 32768;
constexpr size_t kGuard = 256;
std::vector<Fiber> fibers;
std::vector<Cta> ctas;
Fiber* current = nullptr;
Dim grid_size{};
jmp_buf scheduler;

void release_cta(int index) {
    Cta& cta = ctas[index];
    if (cta.live == 0 || cta.arrived != cta.live) return;
    cta.arrived = 0;
    for (int i = 0; i < 1024; ++i)
        if (fibers[index * 1024 + i].wait == kCta) fibers[index * 1024 + i].wait = kNone;
}

void release_warp(int index, int warp) {
    Cta& cta = ctas[index];
    if (cta.warp_live[warp] == 0 || cta.warp_arrived[warp] != cta.warp_live[warp]) return;
    cta.warp_arrived[warp] = 0;
    for (int i = 0; i < 32; ++i) {
        Fiber& fiber = fibers[index * 1024 + warp * 32 + i];
        if (fiber.wait == kWarp) fiber.wait = kNone;
    }
}

void give_way() {
    if (_setjmp(current->state) == 0) _longjmp(scheduler, 1);
}

void __syncthreads() {
    current->wait = kCta;
    ++ctas[current->cta].arrived;
    release_cta(current->cta);
    while (current->wait != kNone) give_way();
}

void __syncwarp() {
    const int warp = current->thread.x / 32;
    current->wait = kWarp;
    ++ctas[current->cta].warp_arrived[warp];
    release_warp(current->cta, warp);
    while (current->wait != kNone) give_way();
}

unsigned __shfl_down_sync(unsigned, unsigned value, unsigned distance) {
    Cta& cta = ctas[current->cta];
    const unsigned thread = current->thread.x;
    cta.exchange[thread] = value;
    __syncwarp();
    const unsigned result = thread % 32 + distance < 32 ? cta.exchange[thread + distance] : value;
    __syncwarp();
    return result;
}

void __threadfence() {}
void __nanosleep(unsigned) { give_way(); }
unsigned atomicAdd(unsigned* address, unsigned value) {
    const unsigned old = *address;
    *address += value;
    return old;
}
int atomicAdd(int* address, int value) {
    const int old = *address;
    *address += value;
    return old;
}
unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
int max(int a, int b) { return a > b ? a : b; }

}  // namespace

#define threadIdx (current->thread)
#define blockIdx (current->block)
#define gridDim grid_size
#define dynamic_shared (ctas[current->cta].shared.data())

#include "kernel.inc"

using namespace dsv4_repro::persistent;

static PersistentTopKParams parameters;
static void (*kernel)(PersistentTopKParams);

static void body() {
    kernel(parameters);
    Fiber* fiber = current;
    fiber->done = true;
    --ctas[fiber->cta].live;
    --ctas[fiber->cta].warp_live[fiber->thread.x / 32];
    release_cta(fiber->cta);
    release_warp(fiber->cta, fiber->thread.x / 32);
    _longjmp(scheduler, 1);
}

static void run(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler) != 0) return;
    if (fiber.started) _longjmp(fiber.state, 1);
    fiber.started = true;
    static ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, body, 0);
    setcontext(&context);
}

// One launch. 0: every CTA retired; 1: not after max_sweeps; 2: a CTA wrote behind its shared memory; 3: no such instance.
// `slots`: CTAs that are resident at once, started in order. `*never_started`: how many CTAs were not.
extern "C" int launch(int k, int vec, unsigned grid, unsigned shared_bytes, unsigned slots, unsigned seed,
                      const PersistentTopKParams* p, long max_sweeps, unsigned* never_started) {
    kernel = nullptr;
#define INSTANCE(K, V) \
    if (k == K && vec == V) kernel = persistent_topk_kernel<K, V>;
    INSTANCE(512, 4)
#ifdef ALL_INSTANCES
    INSTANCE(512, 2) INSTANCE(512, 1) INSTANCE(1024, 4) INSTANCE(1024, 2) INSTANCE(1024, 1) INSTANCE(2048, 4) INSTANCE(2048, 2)
    INSTANCE(2048, 1)
#endif
    if (kernel == nullptr) return 3;
    parameters = *p;
    grid_size = {grid, 1, 1};
    std::mt19937 random(seed);
    const size_t threads = static_cast<size_t>(grid) * 1024;
    char* stacks = static_cast<char*>(std::aligned_alloc(4096, threads * kStack));
    fibers.assign(threads, Fiber());
    ctas.assign(grid, Cta());
    for (unsigned c = 0; c < grid; ++c) {
        ctas[c].shared.assign(shared_bytes + kGuard, 0xab);
        for (int w = 0; w < 32; ++w) ctas[c].warp_live[w] = 32, ctas[c].warp_arrived[w] = 0;
        for (unsigned i = 0; i < 1024; ++i) {
            Fiber& fiber = fibers[c * 1024 + i];
            fiber.stack = stacks + (c * 1024ul + i) * kStack;
            fiber.thread = {i, 0, 0};
            fiber.block = {c, 0, 0};
            fiber.cta = static_cast<int>(c);
        }
    }
    std::vector<unsigned> resident;
    std::vector<bool> still(grid, false);
    unsigned next = 0;
    unsigned change = 0;
    int result = 1;
    for (long sweep = 0; sweep < max_sweeps && result == 1; ++sweep) {
        while (resident.size() < slots && next < grid) resident.push_back(next++);
        std::shuffle(resident.begin(), resident.end(), random);
        if (change-- == 0) {
            change = random() % 40;
            const unsigned of_four = random() % 4;
            for (unsigned c = 0; c < grid; ++c) still[c] = random() % 4 < of_four;
        }
        const unsigned step = 1 + 2 * (random() % 512), offset = random() % 1024;
        for (unsigned c : resident) {
            if (still[c]) continue;
            for (unsigned j = 0; j < 1024; ++j) {
                Fiber& fiber = fibers[c * 1024 + ((j * step + offset) & 1023)];
                if (!fiber.done && fiber.wait == kNone) run(fiber);
            }
            const std::vector<unsigned char>& shared = ctas[c].shared;
            if (std::any_of(shared.end() - kGuard, shared.end(), [](unsigned char byte) { return byte != 0xab; })) result = 2;
        }
        resident.erase(std::remove_if(resident.begin(), resident.end(), [](unsigned c) { return ctas[c].live == 0; }), resident.end());
        if (resident.empty() && next == grid && result == 1) result = 0;
    }
    *never_started = grid - next;
    std::free(stacks);
    return result;
}
