// The threads of a block as fibers: each runs until a barrier, an exchange or its end.
#include <sys/mman.h>

#include <exception>
#include <stdexcept>
#include <vector>

#include "cuda_runtime_api.h"

#ifndef __x86_64__
#error "the emulator switches fibers by x86-64 instructions"
#endif

emulate::Index threadIdx, blockIdx;
dim3 blockDim, gridDim;

// Saves what a call must preserve on this stack and goes on with another one.
extern "C" void emulate_switch(void** save, void* load);
asm(R"(
.text
.globl emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch, . - emulate_switch
)");

namespace emulate {

namespace {

enum class State : uint8_t { ready, at_block, at_warp, done };

constexpr int kWarp = 32, kMostThreads = 1024;
constexpr size_t kStack = size_t{1} << 16;

struct Fiber {
    void* stack = nullptr;
    State state = State::done;
    unsigned mask = 0;
    Index index;
    alignas(16) unsigned char slot[16];
};

struct Block {
    Fiber fibers[kMostThreads];
    char* stacks = nullptr;
    void* scheduler = nullptr;
    int threads = 0, current = -1;
    void (*body)(void*) = nullptr;
    void* context = nullptr;
    std::exception_ptr error;

    Block() {
        void* memory = mmap(nullptr, kMostThreads * kStack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        stacks = static_cast<char*>(memory);
    }
};

Block& block() {
    static Block one;
    return one;
}

void stop(State state) {
    Block& b = block();
    Fiber& self = b.fibers[b.current];
    self.state = state;
    emulate_switch(&self.stack, b.scheduler);
}

void enter() {
    Block& b = block();
    try {
        b.body(b.context);
    } catch (...) {
        b.error = std::current_exception();
    }
    stop(State::done);
}

void begin(Block& b, int i) {
    Fiber& f = b.fibers[i];
    auto top = reinterpret_cast<void**>(b.stacks + static_cast<size_t>(i + 1) * kStack);
    *--top = nullptr;                              // where enter would return to, and the alignment it expects
    *--top = reinterpret_cast<void*>(&enter);      // emulate_switch returns there
    for (int k = 0; k < 6; ++k) *--top = nullptr;  // the registers it restores
    f.stack = top;
    f.state = State::ready;
    const auto n = static_cast<unsigned>(i);
    f.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
}

// Lets waiting threads go where all that they wait for are there. A thread that has ended is not waited for by
// barriers, but a mask must not name it.
bool release(Block& b) {
    bool any = false, whole = true;
    for (int first = 0; first < b.threads; first += kWarp) {
        const int last = std::min(first + kWarp, b.threads);
        bool ready = false;
        unsigned waiting = 0, wanted = 0;
        for (int i = first; i < last; ++i) {
            const Fiber& f = b.fibers[i];
            ready = ready || f.state == State::ready;
            if (f.state == State::at_warp) waiting |= 1U << (i - first), wanted |= f.mask;
            if (f.state != State::at_block && f.state != State::done) whole = false;
        }
        if (waiting == 0 || ready) continue;
        if (last - first < kWarp) wanted &= (1U << (last - first)) - 1U;
        if (wanted != waiting) {
            throw std::logic_error("lanes of a warp wait for lanes that ended or wait at another barrier");
        }
        for (int i = first; i < last; ++i) {
            if (b.fibers[i].state == State::at_warp) b.fibers[i].state = State::ready;
        }
        any = true;
    }
    if (any || !whole) return any;
    for (int i = 0; i < b.threads; ++i) {
        if (b.fibers[i].state == State::at_block) b.fibers[i].state = State::ready, any = true;
    }
    return any;
}

void run_block(Block& b, bool backwards) {
    for (int i = 0; i < b.threads; ++i) begin(b, i);
    do {
        for (int n = 0; n < b.threads; ++n) {
            const int i = backwards ? b.threads - 1 - n : n;
            if (b.fibers[i].state != State::ready) continue;
            b.current = i;
            threadIdx = b.fibers[i].index;
            emulate_switch(&b.scheduler, b.fibers[i].stack);
            if (b.error) std::rethrow_exception(std::exchange(b.error, nullptr));
        }
    } while (release(b));
    for (int i = 0; i < b.threads; ++i) {
        if (b.fibers[i].state != State::done) throw std::logic_error("threads of a block wait at different barriers");
    }
}

}  // namespace

void wait_block() { stop(State::at_block); }
void wait_warp(unsigned mask) {
    Block& b = block();
    b.fibers[b.current].mask = mask;
    stop(State::at_warp);
}
int lane() { return block().current % kWarp; }
void* slot(int lane) {
    Block& b = block();
    return b.fibers[b.current / kWarp * kWarp + lane].slot;
}

void run(const Config& config, void (*body)(void*), void* context) {
    Block& b = block();
    gridDim = config.grid;
    blockDim = config.block;
    const uint64_t threads = uint64_t{blockDim.x} * blockDim.y * blockDim.z;
    if (threads == 0 || threads > kMostThreads) throw std::invalid_argument("a block of so many threads");
    if (gridDim.x == 0 || gridDim.y == 0 || gridDim.y > 65535 || gridDim.z == 0 || gridDim.z > 65535) {
        throw std::invalid_argument("a grid of so many blocks");
    }
    b.threads = static_cast<int>(threads);
    b.body = body;
    b.context = context;
    for (unsigned z = 0; z < gridDim.z; ++z) {
        for (unsigned y = 0; y < gridDim.y; ++y) {
            for (unsigned x = 0; x < gridDim.x; ++x) {
                blockIdx = {x, y, z};
                run_block(b, (x + y + z) % 2 == 1);
            }
        }
    }
}

}  // namespace emulate
