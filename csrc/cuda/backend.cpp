// The CUDA backend: a device arena, four streams, and programs that run as CUDA graphs.
//
// A program runs eagerly the first time (kernels choose algorithms and make plans then), is captured the second, and
// replayed ever after. Everything the host asks for is ordered by the compute stream: a run lets the other streams
// start from it and ends by joining them to it; writes and reads go through it.
#include "core/backend.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <random>
#include <stdexcept>
#include <utility>

#include "core/plugin.h"
#include "cuda/plugin.h"
#include "cuda/probes.h"

namespace surogate::cuda {

namespace {

constexpr int kComputeStream = static_cast<int>(Stream::compute);

class Event {
   public:
    explicit Event(unsigned flags = cudaEventDisableTiming) {
        check(cudaEventCreateWithFlags(&event_, flags), "making an event");
    }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&&) = delete;
    ~Event() {
        if (event_ != nullptr) cudaEventDestroy(event_);
    }
    operator cudaEvent_t() const { return event_; }  // NOLINT: stands for the handle

   private:
    cudaEvent_t event_ = nullptr;
};

// Pinned memory through which host data goes to the device, so that the host need not wait for the copy.
class Staging {
   public:
    Staging() : busy_(kSlots) {
        check(cudaHostAlloc(reinterpret_cast<void**>(&memory_), kSlots * kSlotBytes, cudaHostAllocDefault),
              "allocating staging memory");
    }
    ~Staging() { cudaFreeHost(memory_); }
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    void write(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
        auto from = static_cast<const char*>(source);
        auto to = static_cast<char*>(target);
        while (bytes > 0) {
            if (used_ == kSlotBytes) next_slot(stream);
            int64_t n = std::min(bytes, kSlotBytes - used_);
            char* place = memory_ + slot_ * kSlotBytes + used_;
            std::memcpy(place, from, static_cast<size_t>(n));
            check(cudaMemcpyAsync(to, place, static_cast<size_t>(n), cudaMemcpyHostToDevice, stream), "writing");
            used_ += n;
            from += n, to += n, bytes -= n;
        }
    }

    void read(void* target, const void* source, int64_t bytes, cudaStream_t stream) {
        auto from = static_cast<const char*>(source);
        auto to = static_cast<char*>(target);
        // Two halves of the staging memory: one is copied out while the device fills the other.
        next_slot(stream);
        check(cudaStreamSynchronize(stream), "reading");
        const int64_t half = kSlots * kSlotBytes / 2;
        int64_t pending = 0;
        for (int64_t done = 0, turn = 0; done < bytes || pending > 0; turn ^= 1) {
            int64_t n = std::min(bytes - done, half);
            if (n > 0) {
                check(cudaMemcpyAsync(memory_ + turn * half, from + done, static_cast<size_t>(n),
                                      cudaMemcpyDeviceToHost, stream),
                      "reading");
                check(cudaEventRecord(busy_[static_cast<size_t>(turn)], stream), "reading");
            }
            if (pending > 0) {
                check(cudaEventSynchronize(busy_[static_cast<size_t>(turn ^ 1)]), "reading");
                std::memcpy(to + done - pending, memory_ + (turn ^ 1) * half, static_cast<size_t>(pending));
            }
            done += n;
            pending = n;
        }
    }

   private:
    static constexpr int64_t kSlots = 4, kSlotBytes = int64_t{4} << 20;

    void next_slot(cudaStream_t stream) {
        check(cudaEventRecord(busy_[static_cast<size_t>(slot_)], stream), "writing");
        slot_ = (slot_ + 1) % kSlots;
        used_ = 0;
        check(cudaEventSynchronize(busy_[static_cast<size_t>(slot_)]), "writing");
    }

    char* memory_ = nullptr;
    std::vector<Event> busy_;  // the copies out of a slot
    int64_t slot_ = 0, used_ = 0;
};

// What the backend keeps of a program.
struct Plan {
    std::vector<std::shared_ptr<void>> states;  // of the instructions
    std::vector<Event> events;
    bool uses[kStreams] = {};
    bool warm = false;  // has run eagerly
    cudaGraphExec_t graph = nullptr;
    std::vector<Event> begins, ends;  // profiling
    std::vector<double> seconds;
    std::vector<int64_t> calls;

    void drop_graph() {
        if (graph != nullptr) cudaGraphExecDestroy(graph);
        graph = nullptr;
    }
    Plan() = default;
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;
    ~Plan() { drop_graph(); }
};

std::string place_of(const Program& program, size_t index) {
    return program.name + ", instruction " + std::to_string(index) + " (" + program.instructions[index].op + ")";
}

class CudaBackend final : public Backend {
   public:
    CudaBackend(int ordinal, Options options) : device_(ordinal, std::move(options)) {
        if (device_.sm < 80) {
            throw std::runtime_error(device_.name + " has compute capability " + std::to_string(device_.sm / 10) + "." +
                                     std::to_string(device_.sm % 10) + ", Surogate needs 8.0 or newer");
        }
        set_device(&device_);
        for (cudaStream_t& stream : streams_) {
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
        }
        for (int s = 0; s < kStreams; ++s) joins_.emplace_back();
        staging_ = std::make_unique<Staging>();
        check(cudaHostAlloc(reinterpret_cast<void**>(&nan_found_), sizeof(int), cudaHostAllocMapped),
              "allocating a flag");
        *nan_found_ = 0;
    }

    ~CudaBackend() override {
        cudaSetDevice(device_.ordinal);
        cudaDeviceSynchronize();
        plans_.clear();
        staging_.reset();
        cudaFreeHost(nan_found_);
        for (cudaStream_t stream : streams_) {
            if (stream != nullptr) cudaStreamDestroy(stream);
        }
    }

    const char* name() const override { return "cuda"; }
    Kernel find(std::string_view op) const override { return find_kernel("cuda", op); }
    std::vector<std::string> kernels() const override { return kernel_names("cuda"); }

    void* allocate(Space space, int64_t bytes) override {
        set_device(&device_);
        void* memory = nullptr;
        const auto size = static_cast<size_t>(bytes);
        switch (space) {
            case Space::device:
                if (cudaMalloc(&memory, size) != cudaSuccess) {
                    cudaGetLastError();
                    size_t free = 0, total = 0;
                    cudaMemGetInfo(&free, &total);
                    throw std::runtime_error(device_.name + " has " + std::to_string(free) + " bytes free of " +
                                             std::to_string(total) + ": " + std::to_string(bytes) +
                                             " cannot be allocated");
                }
                check(cudaMemsetAsync(memory, 0, size, compute()), "clearing device memory");
                check(cudaStreamSynchronize(compute()), "clearing device memory");
                return memory;
            case Space::pinned:
                if (cudaHostAlloc(&memory, size, cudaHostAllocDefault) != cudaSuccess) {
                    cudaGetLastError();
                    throw std::runtime_error("the system refuses " + std::to_string(bytes) +
                                             " bytes of pinned host memory");
                }
                std::memset(memory, 0, size);
                return memory;
            case Space::host:
                memory =
                    mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (memory == MAP_FAILED) throw std::bad_alloc();
                return memory;
        }
        throw std::invalid_argument("unknown space");
    }

    void release(Space space, void* memory, int64_t bytes) override {
        cudaSetDevice(device_.ordinal);
        cudaStreamSynchronize(compute());
        switch (space) {
            case Space::device:
                cudaFree(memory);
                break;
            case Space::pinned:
                cudaFreeHost(memory);
                break;
            case Space::host:
                munmap(memory, static_cast<size_t>(bytes));
                break;
        }
    }

    bool host_visible(Space space) const override { return space != Space::device; }

    void write(Space space, void* target, const void* source, int64_t bytes) override {
        set_device(&device_);
        if (space == Space::device) {
            staging_->write(target, source, bytes, compute());
        } else {
            wait();
            std::memcpy(target, source, static_cast<size_t>(bytes));
        }
    }

    void read(Space space, void* target, const void* source, int64_t bytes) override {
        set_device(&device_);
        wait();
        if (space == Space::device) {
            staging_->read(target, source, bytes, compute());
        } else {
            std::memcpy(target, source, static_cast<size_t>(bytes));
        }
    }

    void join(std::shared_ptr<Communicator>) override {
        throw std::invalid_argument("a GPU's ranks speak through NCCL: the plugin's configuration says it");
    }
    Communicator* communicator() const override { return nullptr; }

    void wait() override {
        set_device(&device_);
        cudaError_t status = cudaStreamSynchronize(compute());
        if (status == cudaSuccess) return;
        check(status, last_run_.empty()
                          ? "waiting for the device"
                          : (last_run_ + " failed on the device (the setting eager finds the instruction)").c_str());
    }

    void prepare(Program& program) override {
        set_device(&device_);
        auto plan = std::make_unique<Plan>();
        const size_t n = program.instructions.size();
        plan->states.resize(n);
        plan->seconds.assign(n, 0.0);
        plan->calls.assign(n, 0);
        for (int i = 0; i < program.events; ++i) plan->events.emplace_back();
        for (const Instruction& instruction : program.instructions) {
            plan->uses[static_cast<int>(instruction.stream)] = true;
        }
        plans_[&program] = std::move(plan);
    }

    void run(Program& program) override {
        set_device(&device_);
        Plan& plan = *plans_.at(&program);
        last_run_ = program.name;
        if (!plan.warm || eager()) {
            enqueue(program, plan);
            plan.warm = true;
        } else if (profiling_) {
            run_profiled(program, plan);
        } else {
            if (plan.graph == nullptr) capture(program, plan);
            check(cudaGraphLaunch(plan.graph, compute()), ("launching " + program.name).c_str());
        }
    }

    void inject_delays(uint64_t seed, int max_microseconds) override {
        delay_seed_ = seed;
        max_delay_ = max_microseconds;
        for (auto& [program, plan] : plans_) plan->drop_graph();
    }
    void profile(bool on) override { profiling_ = on; }

    std::vector<ProfileEntry> profile_report() const override {
        std::vector<ProfileEntry> report;
        for (const auto& [program, plan] : plans_) {
            for (size_t i = 0; i < plan->calls.size(); ++i) {
                if (plan->calls[i] == 0) continue;
                report.push_back({program->name, static_cast<int>(i), program->instructions[i].op, plan->calls[i],
                                  plan->seconds[i]});
            }
        }
        return report;
    }

   private:
    cudaStream_t compute() const { return streams_[kComputeStream]; }
    bool eager() const { return device_.options.eager || device_.options.check_nan; }

    // The other streams start after what the compute stream holds now.
    void fork(const Plan& plan) {
        check(cudaEventRecord(joins_[kComputeStream], compute()), "starting streams");
        for (int s = 0; s < kStreams; ++s) {
            if (s == kComputeStream || !plan.uses[s]) continue;
            check(cudaStreamWaitEvent(streams_[s], joins_[kComputeStream]), "starting streams");
        }
    }
    void join(const Plan& plan) {
        for (int s = 0; s < kStreams; ++s) {
            if (s == kComputeStream || !plan.uses[s]) continue;
            check(cudaEventRecord(joins_[static_cast<size_t>(s)], streams_[s]), "joining streams");
            check(cudaStreamWaitEvent(compute(), joins_[static_cast<size_t>(s)]), "joining streams");
        }
    }

    void issue(Program& program, Plan& plan, size_t index) {
        const Instruction& instruction = program.instructions[index];
        cudaStream_t stream = streams_[static_cast<int>(instruction.stream)];
        try {
            for (int event : instruction.waits) {
                check(cudaStreamWaitEvent(stream, plan.events[static_cast<size_t>(event)]), "waiting for an event");
            }
            if (max_delay_ > 0 && instruction.stream != Stream::compute) {
                // From the place in the program, so that a delay does not depend on what ran before.
                std::mt19937_64 random(delay_seed_ + index);
                launch_delay(static_cast<int64_t>(random() % static_cast<uint64_t>(max_delay_ + 1)) * 1000, stream);
            }
            instruction.kernel({instruction.in, instruction.out, instruction.workspace, instruction.attrs, 1, stream,
                                &plan.states[index]});
            check(cudaGetLastError(), "launching");
            if (instruction.signal >= 0) {
                check(cudaEventRecord(plan.events[static_cast<size_t>(instruction.signal)], stream), "signalling");
            }
            if (device_.options.check_nan) look_for_nan(instruction, stream);
        } catch (const std::exception& error) {
            throw std::runtime_error(place_of(program, index) + ": " + error.what());
        }
    }

    void look_for_nan(const Instruction& instruction, cudaStream_t stream) {
        for (size_t o = 0; o < instruction.out.size(); ++o) {
            if (!instruction.out[o]) continue;
            launch_nan_check(instruction.out[o], nan_found_, stream);
            check(cudaStreamSynchronize(stream), "running");
            if (*nan_found_ != 0) {
                *nan_found_ = 0;
                throw std::runtime_error("result " + std::to_string(o) + " has a NaN");
            }
        }
    }

    void enqueue(Program& program, Plan& plan) {
        fork(plan);
        for (size_t i = 0; i < program.instructions.size(); ++i) issue(program, plan, i);
        join(plan);
    }

    void capture(Program& program, Plan& plan) {
        cudaGraph_t graph = nullptr;
        check(cudaStreamBeginCapture(compute(), cudaStreamCaptureModeThreadLocal), "beginning a capture");
        try {
            enqueue(program, plan);
        } catch (...) {
            cudaStreamEndCapture(compute(), &graph);
            if (graph != nullptr) cudaGraphDestroy(graph);
            cudaGetLastError();
            throw;
        }
        check(cudaStreamEndCapture(compute(), &graph), ("capturing " + program.name).c_str());
        cudaError_t status = cudaGraphInstantiate(&plan.graph, graph, 0);
        cudaGraphDestroy(graph);
        check(status, ("instantiating the graph of " + program.name).c_str());
    }

    // Eager, in windows of a few instructions: the device is held up until a window is enqueued, so that events measure
    // kernels and not the host's pace.
    void run_profiled(Program& program, Plan& plan) {
        constexpr size_t kWindow = 100;
        constexpr int64_t kHold = 4'000'000;  // nanoseconds; enqueueing a window takes less
        while (plan.begins.size() < program.instructions.size()) {
            plan.begins.emplace_back(cudaEventDefault);
            plan.ends.emplace_back(cudaEventDefault);
        }
        fork(plan);
        for (size_t begin = 0; begin < program.instructions.size(); begin += kWindow) {
            const size_t end = std::min(begin + kWindow, program.instructions.size());
            launch_delay(kHold, compute());
            for (size_t i = begin; i < end; ++i) {
                cudaStream_t stream = streams_[static_cast<int>(program.instructions[i].stream)];
                check(cudaEventRecord(plan.begins[i], stream), "profiling");
                issue(program, plan, i);
                check(cudaEventRecord(plan.ends[i], stream), "profiling");
            }
            for (cudaStream_t stream : streams_) check(cudaStreamSynchronize(stream), "profiling");
            for (size_t i = begin; i < end; ++i) {
                float milliseconds = 0.0F;
                check(cudaEventElapsedTime(&milliseconds, plan.begins[i], plan.ends[i]), "profiling");
                plan.seconds[i] += milliseconds * 1e-3;
                plan.calls[i] += 1;
            }
        }
        join(plan);
    }

    Device device_;
    cudaStream_t streams_[kStreams] = {};
    std::vector<Event> joins_;
    std::unique_ptr<Staging> staging_;
    int* nan_found_ = nullptr;
    std::map<Program*, std::unique_ptr<Plan>> plans_;
    std::string last_run_;
    uint64_t delay_seed_ = 0;
    int max_delay_ = 0;
    bool profiling_ = false;
};

}  // namespace

}  // namespace surogate::cuda

#define SUROGATE_EXPORT extern "C" __attribute__((visibility("default")))

SUROGATE_EXPORT const char* surogate_plugin_build() {
    static const std::string build = surogate::plugin_build();
    return build.c_str();
}

SUROGATE_EXPORT surogate::Backend* surogate_make_cuda_backend(int device, const char* config, char* error,
                                                              size_t size) {
    using namespace surogate::cuda;
    try {
        int devices = 0;
        check(cudaGetDeviceCount(&devices), "counting GPUs");
        if (device < 0 || device >= devices) {
            throw std::runtime_error("there is no GPU " + std::to_string(device) + ": " + std::to_string(devices) +
                                     " can be seen");
        }
        return new CudaBackend(device, Options::parse(config));
    } catch (const std::exception& failure) {
        std::snprintf(error, size, "%s", failure.what());
        return nullptr;
    }
}
