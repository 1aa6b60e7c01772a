// Communicator: what the ranks of a run say to one another. A rank is one engine; all ranks run the same programs.
//
// Guarantees that every communicator gives: all ranks call the same functions with the same sizes in the same order;
// sums are taken in the order of the ranks, so results are the same bits on every rank and in every run; a rank that
// fails calls `abort`, and every call that then waits or begins on another rank throws RankStopped.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace surogate {

// Another rank has failed; the message names it and its cause.
class RankStopped : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

class Communicator {
   public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int ranks() const = 0;

    // All in place, on dense tensors; `stream` is the backend's own handle. Part r of a tensor is its r-th n-th in
    // elements, so the number of elements must be a multiple of the number of ranks where parts are spoken of.
    // The sum over all ranks; f32 or f64.
    virtual void all_reduce(const Tensor& tensor, void* stream) = 0;
    // The sum of this rank's part; what the other parts hold afterwards is not defined. f32 or f64.
    virtual void reduce_scatter(const Tensor& tensor, void* stream) = 0;
    // Part r of rank r becomes part r of every rank. Any dtype.
    virtual void all_gather(const Tensor& tensor, void* stream) = 0;
    // The root's tensor becomes every rank's. Any dtype.
    virtual void broadcast(const Tensor& tensor, int root, void* stream) = 0;

    // Until all ranks are here.
    virtual void barrier() = 0;
    // This rank has failed: all others stop. The first reason counts. From any thread; never throws.
    virtual void abort(const std::string& reason) noexcept = 0;
};

// The ranks of a group that lives in this process, one a thread.
std::vector<std::shared_ptr<Communicator>> make_thread_group(int ranks);

}  // namespace surogate
