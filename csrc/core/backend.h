// Backend: a device. It owns memory, and runs programs whose tensors are resolved.
//
// Guarantees that every backend gives: instructions of one stream run in program order; an instruction starts only
// after the events it waits for were signalled in this run; runs, writes and reads take effect in the order of the
// calls. `run` may return before its work is done; `read` and `wait` do not. A backend may prepare a program once (a
// CUDA graph) and replay it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "core/communicator.h"
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
    virtual Kernel find(std::string_view op) const = 0;  // null: there is none
    virtual std::vector<std::string> kernels() const = 0;

    // Zero-filled memory, aligned to 64 bytes; throws std::bad_alloc, or std::runtime_error that says how much is free.
    virtual void* allocate(Space space, int64_t bytes) = 0;
    virtual void release(Space space, void* memory, int64_t bytes) = 0;
    // Whether the host may use pointers into this space itself.
    virtual bool host_visible(Space space) const = 0;
    // Between host memory and an arena. The source of `write` may change as soon as it returns.
    virtual void write(Space space, void* target, const void* source, int64_t bytes) = 0;
    virtual void read(Space space, void* target, const void* source, int64_t bytes) = 0;

    // The engine becomes a rank: collectives go through this communicator. Before the first program is loaded. A
    // backend that makes its own, as a GPU does, refuses.
    virtual void join(std::shared_ptr<Communicator> communicator) = 0;
    // Null: the engine is the only rank.
    virtual Communicator* communicator() const = 0;

    // Called once after load; `program` keeps its address.
    virtual void prepare(Program& program) = 0;
    // Throws std::runtime_error that names program, instruction and op.
    virtual void run(Program& program) = 0;
    // Until every stream is idle; throws what went wrong since the last call.
    virtual void wait() = 0;

    // Delay instructions on all streams but compute, pseudo-randomly, up to this many microseconds; 0: none. A missing
    // dependency then gives a wrong result in a test instead of one in a thousand runs.
    virtual void inject_delays(uint64_t seed, int max_microseconds) = 0;
    virtual void profile(bool on) = 0;
    virtual std::vector<ProfileEntry> profile_report() const = 0;
};

// check_nan: a run stops at the first instruction that writes a NaN.
std::unique_ptr<Backend> make_cpu_backend(int threads, bool check_nan);

// The backend in a plugin library, opened by path. `config`: lines of "key=value" that the plugin reads (see its
// header). Throws std::runtime_error that says why it cannot be had.
std::unique_ptr<Backend> open_plugin_backend(const std::string& path, int device, const std::string& config);

}  // namespace surogate
