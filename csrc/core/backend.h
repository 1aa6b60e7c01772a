// Backend: a device. It owns memory, and runs programs whose tensors are resolved.
//
// Guarantees that every backend gives: instructions of one stream run in program order; an instruction starts only
// after the events it waits for were signalled in this run; `run` returns when all streams are idle, so the host may
// read any tensor. A backend may prepare a program once (a CUDA graph) and replay it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "core/program.h"

namespace surogate {

struct ProfileEntry {
    std::string program;
    int index;
    std::string op;
    int64_t calls = 0;
    double seconds = 0.0;
};

class Backend {
   public:
    virtual ~Backend() = default;

    virtual const char* name() const = 0;
    // Zero-filled memory, aligned to 64 bytes; throws std::bad_alloc.
    virtual void* allocate(Space space, int64_t bytes) = 0;
    virtual void release(Space space, void* memory, int64_t bytes) = 0;
    // Called once after load; `program` keeps its address.
    virtual void prepare(Program& program) = 0;
    // Throws std::runtime_error that names program, instruction and op.
    virtual void run(Program& program) = 0;

    // Delay instructions on all streams but compute, pseudo-randomly, up to this many microseconds; 0: none. A missing
    // dependency then gives a wrong result in a test instead of one in a thousand runs.
    virtual void inject_delays(uint64_t seed, int max_microseconds) = 0;
    virtual void profile(bool on) = 0;
    virtual std::vector<ProfileEntry> profile_report() const = 0;
};

std::unique_ptr<Backend> make_cpu_backend(int threads);

}  // namespace surogate
