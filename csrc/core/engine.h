// Engine: arenas, loaded programs, and the whole training step. Every arena is taken before the first step.
//
// Public functions may be called from any thread and take turns: what reads memory during a step waits for its end.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"
#include "data/feeder.h"

namespace surogate {

struct StepResult {
    double loss_sum = 0.0;  // over the targets of the global batch
    int64_t targets = 0;    // as tokens, of all ranks
    int64_t tokens = 0;     // padding not counted
    double grad_norm = 0.0;
    bool applied = false;  // false: loss or gradient norm was not finite, weights are as before
    double seconds = 0.0;
    double data_wait_seconds = 0.0;
};

class Engine {
   public:
    // "cpu" with a number of threads and a configuration that is empty, check_nan=0 or check_nan=1; or "cuda": a
    // device's ordinal, the path of the plugin library, and its configuration (see open_plugin_backend).
    Engine(const std::string& backend, int threads, int device = 0, const std::string& plugin = "",
           const std::string& config = "");
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Makes this engine one rank of a group; before programs are loaded.
    void join(std::shared_ptr<Communicator> communicator);
    // This rank has failed outside the engine: the others stop.
    void abort(const std::string& reason);

    std::vector<std::string> kernels() const { return backend_->kernels(); }

    // One arena a space, once.
    void allocate(Space space, int64_t bytes);
    int64_t allocated(Space space) const;
    // Memory that the host may use; std::invalid_argument where it may not (see write and read).
    void* memory(Space space, int64_t offset, int64_t bytes) const;
    void write(Space space, int64_t offset, const void* source, int64_t bytes);
    void read(Space space, int64_t offset, void* target, int64_t bytes);

    // Resolves every tensor against the arenas and finds every kernel; throws std::invalid_argument naming what is
    // wrong.
    void load(Program program);
    // Returns when the work is done.
    void run(std::string_view name);

    // The order of micro-batches is the ranks' together: the feeder must be of this rank, and hands out every ranks-th.
    // Programs micro_step (accumulation times; last_micro_step instead the last time, where it is loaded), norm_step
    // where one is loaded, and optimizer_step. `scalars` are written to the symbols of these names first; names that no
    // program has are skipped. optimizer_step does not run when the loss or the norm is not finite: weights and
    // gradients are then left as they are. Without norm_step the loss alone decides, and grad_norm is what
    // optimizer_step leaves (NaN if it has no such symbol).
    StepResult train_step(Feeder& feeder, int accumulation, const std::map<std::string, double>& scalars, int64_t seed,
                          int64_t step);
    // Program eval_step, `batches` times, then eval_end where it is loaded: the sum over the ranks.
    StepResult evaluate(Feeder& feeder, int batches);

    // See Backend.
    void inject_delays(uint64_t seed, int max_microseconds);
    void profile(bool on);
    std::vector<ProfileEntry> profile_report() const;

   private:
    struct Arena {
        void* base = nullptr;
        int64_t bytes = 0;
    };

    void* place(Space space, int64_t offset, int64_t bytes) const;
    Tensor resolve(const TensorRef& ref, const std::string& what) const;
    Program* find(std::string_view name);     // null: not loaded
    Program& program(std::string_view name);  // std::invalid_argument: not loaded
    void feed(Program& program, const Batch& batch);
    StepResult step(Feeder& feeder, int accumulation, const std::map<std::string, double>& scalars, int64_t seed,
                    int64_t step);
    StepResult pass(Feeder& feeder, int batches);
    // Runs; a failure stops the other ranks too.
    template <typename F>
    auto together(const F& work) -> decltype(work());
    // Where a symbol lies, null if the program has none; std::invalid_argument unless it has one element of this dtype.
    static void* scalar(const Program& program, std::string_view symbol, DType dtype);
    // Write a one-element symbol if the program has it.
    void set(Program& program, std::string_view symbol, double value);
    void set_seed(Program& program, int64_t seed);
    double get(Program& program, std::string_view symbol);

    mutable std::mutex mutex_;
    std::unique_ptr<Backend> backend_;
    Arena arenas_[kSpaces];
    std::map<std::string, std::unique_ptr<Program>, std::less<>> programs_;
};

// A positive seed for one micro-batch, from the run's seed, the step and the micro-batch's index (splitmix64).
int64_t micro_seed(int64_t seed, int64_t step, int64_t micro);

}  // namespace surogate
