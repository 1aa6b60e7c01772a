// The CPU backend: the compute stream runs on the calling thread, every other stream on a thread of its own.
#include "core/backend.h"

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <new>
#include <random>
#include <thread>

namespace surogate {

namespace {

// Whether a row of `n` elements has a NaN: an exponent of ones and a mantissa that is not zero.
template <typename Bits>
bool has_nan(const Bits* row, int64_t n, Bits infinity) {
    constexpr auto kMagnitude = static_cast<Bits>(~(Bits{1} << (8 * sizeof(Bits) - 1)));
    bool found = false;
    for (int64_t i = 0; i < n; ++i) found |= static_cast<Bits>(row[i] & kMagnitude) > infinity;
    return found;
}

bool has_nan(const Tensor& t) {
    const int64_t rows = t.rows(), n = t.rank == 0 ? 1 : t.dim(-1);
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = t.row_offset(r);
        bool found = false;
        if (t.dtype == DType::f32) found = has_nan<uint32_t>(t.as<uint32_t>() + at, n, 0x7F800000U);
        if (t.dtype == DType::f64) found = has_nan<uint64_t>(t.as<uint64_t>() + at, n, uint64_t{0x7FF} << 52);
        if (t.dtype == DType::bf16) found = has_nan<uint16_t>(t.as<uint16_t>() + at, n, 0x7F80U);
        if (found) return true;
    }
    return false;
}

void look_for_nan(const Instruction& instruction) {
    for (size_t o = 0; o < instruction.out.size(); ++o) {
        if (!instruction.out[o] || !has_nan(instruction.out[o])) continue;
        throw std::runtime_error("result " + std::to_string(o) + " has a NaN");
    }
}

// One run of one program: which events were signalled, and the first failure of any stream.
class RunState {
   public:
    explicit RunState(int events) : signalled_(static_cast<size_t>(events), 0) {}

    void signal(int event) {
        std::lock_guard lock(mutex_);
        signalled_[static_cast<size_t>(event)] = 1;
        changed_.notify_all();
    }
    // False when another stream failed.
    bool wait(const std::vector<int>& events) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] {
            if (failure_) return true;
            for (int event : events) {
                if (!signalled_[static_cast<size_t>(event)]) return false;
            }
            return true;
        });
        return !failure_;
    }
    void fail(std::exception_ptr failure) {
        std::lock_guard lock(mutex_);
        if (!failure_) failure_ = failure;
        changed_.notify_all();
    }
    std::exception_ptr failure() {
        std::lock_guard lock(mutex_);
        return failure_;
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<char> signalled_;
    std::exception_ptr failure_;
};

// A thread that runs the jobs it is given, one at a time.
class Worker {
   public:
    Worker() : thread_([this] { loop(); }) {}
    ~Worker() {
        {
            std::lock_guard lock(mutex_);
            stop_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }
    template <typename F>
    void start(F job) {
        std::lock_guard lock(mutex_);
        job_ = std::move(job);
        busy_ = true;
        changed_.notify_all();
    }
    void finish() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !busy_; });
    }

   private:
    void loop() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return busy_ || stop_; });
            if (stop_) return;
            lock.unlock();
            job_();
            lock.lock();
            busy_ = false;
            changed_.notify_all();
        }
    }
    std::mutex mutex_;
    std::condition_variable changed_;
    std::function<void()> job_;
    bool busy_ = false, stop_ = false;
    std::thread thread_;
};

class CpuBackend final : public Backend {
   public:
    CpuBackend(int threads, bool check_nan) : threads_(threads), check_nan_(check_nan) {}

    const char* name() const override { return "cpu"; }
    Kernel find(std::string_view op) const override { return find_kernel("cpu", op); }
    std::vector<std::string> kernels() const override { return kernel_names("cpu"); }

    void* allocate(Space, int64_t bytes) override {
        // Pages that are never touched cost nothing, and arrive as zeros.
        void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        if (bytes >= (2 << 20)) madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
        return memory;
    }
    void release(Space, void* memory, int64_t bytes) override { munmap(memory, static_cast<size_t>(bytes)); }

    bool host_visible(Space) const override { return true; }
    void write(Space, void* target, const void* source, int64_t bytes) override {
        std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    void read(Space, void* target, const void* source, int64_t bytes) override {
        std::memcpy(target, source, static_cast<size_t>(bytes));
    }
    void wait() override {}  // run waits itself

    void join(std::shared_ptr<Communicator> communicator) override { communicator_ = std::move(communicator); }
    Communicator* communicator() const override { return communicator_.get(); }

    void prepare(Program& program) override {
        auto& plan = plans_[&program];
        plan = {};
        for (int i = 0; i < static_cast<int>(program.instructions.size()); ++i) {
            const Instruction& instruction = program.instructions[static_cast<size_t>(i)];
            plan.streams[static_cast<size_t>(instruction.stream)].push_back(i);
        }
        plan.seconds.assign(program.instructions.size(), 0.0);
        plan.calls.assign(program.instructions.size(), 0);
        for (int s = 1; s < kStreams; ++s) {
            auto at = static_cast<size_t>(s);
            if (!plan.streams[at].empty() && !workers_[at]) workers_[at] = std::make_unique<Worker>();
        }
    }

    void run(Program& program) override {
        Plan& plan = plans_.at(&program);
        RunState state(program.events);
        std::vector<Worker*> started;
        for (int s = 1; s < kStreams; ++s) {
            auto at = static_cast<size_t>(s);
            if (plan.streams[at].empty()) continue;
            started.push_back(workers_[at].get());
            workers_[at]->start([this, &program, &plan, &state, s] { run_stream(program, plan, state, s); });
        }
        run_stream(program, plan, state, 0);
        for (Worker* worker : started) worker->finish();
        if (auto failure = state.failure()) std::rethrow_exception(failure);
    }

    void inject_delays(uint64_t seed, int max_microseconds) override {
        delay_seed_ = seed;
        max_delay_ = max_microseconds;
    }
    void profile(bool on) override { profiling_ = on; }

    std::vector<ProfileEntry> profile_report() const override {
        std::vector<ProfileEntry> report;
        for (const auto& [program, plan] : plans_) {
            for (size_t i = 0; i < plan.calls.size(); ++i) {
                if (plan.calls[i] == 0) continue;
                report.push_back(
                    {program->name, static_cast<int>(i), program->instructions[i].op, plan.calls[i], plan.seconds[i]});
            }
        }
        return report;
    }

   private:
    struct Plan {
        std::vector<int> streams[kStreams];
        std::vector<double> seconds;
        std::vector<int64_t> calls;
    };

    static std::exception_ptr failure_of(const Program& program, int index, const char* what) {
        return std::make_exception_ptr(std::runtime_error(program.name + ", instruction " + std::to_string(index) +
                                                          " (" + program.instructions[static_cast<size_t>(index)].op +
                                                          "): " + what));
    }

    void run_stream(Program& program, Plan& plan, RunState& state, int stream) {
        std::mt19937_64 random(delay_seed_ * kStreams + static_cast<uint64_t>(stream));
        for (int index : plan.streams[stream]) {
            const Instruction& instruction = program.instructions[static_cast<size_t>(index)];
            if (!instruction.waits.empty() && !state.wait(instruction.waits)) return;
            if (max_delay_ > 0 && stream != 0) {
                auto pause = random() % static_cast<uint64_t>(max_delay_ + 1);
                std::this_thread::sleep_for(std::chrono::microseconds(pause));
            }
            auto begin = std::chrono::steady_clock::now();
            try {
                // Kernels beside the compute stream copy memory: one thread each, so that compute keeps its cores.
                int threads = stream == 0 ? threads_ : 1;
                instruction.kernel({instruction.in, instruction.out, instruction.workspace, instruction.attrs, threads,
                                    nullptr, nullptr, communicator_.get()});
                if (check_nan_) look_for_nan(instruction);
            } catch (const RankStopped&) {
                state.fail(std::current_exception());  // says all there is to say
                return;
            } catch (const std::exception& error) {
                state.fail(failure_of(program, index, error.what()));
                return;
            } catch (...) {
                state.fail(failure_of(program, index, "unknown failure"));
                return;
            }
            if (profiling_) {
                auto at = static_cast<size_t>(index);
                plan.seconds[at] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
                plan.calls[at] += 1;
            }
            if (instruction.signal >= 0) state.signal(instruction.signal);
        }
    }

    int threads_;
    bool check_nan_;
    std::shared_ptr<Communicator> communicator_;
    uint64_t delay_seed_ = 0;
    int max_delay_ = 0;
    bool profiling_ = false;
    std::map<Program*, Plan> plans_;
    std::unique_ptr<Worker> workers_[kStreams];
};

}  // namespace

std::unique_ptr<Backend> make_cpu_backend(int threads, bool check_nan) {
    return std::make_unique<CpuBackend>(threads, check_nan);
}

}  // namespace surogate
