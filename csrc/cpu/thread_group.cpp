// Ranks as threads of one process: a collective is a meeting at which every rank sees the others' memory.
#include <condition_variable>
#include <cstring>
#include <mutex>

#include "core/communicator.h"

namespace surogate {
namespace {

class Meeting {
   public:
    explicit Meeting(int ranks) : places(static_cast<size_t>(ranks)), ranks_(ranks) {}

    const int& ranks() const { return ranks_; }

    void wait() {
        std::unique_lock lock(mutex_);
        if (!reason_.empty()) throw RankStopped(reason_);
        const uint64_t turn = turn_;
        if (++arrived_ == ranks_) {
            arrived_ = 0;
            ++turn_;
            changed_.notify_all();
            return;
        }
        changed_.wait(lock, [&] { return turn_ != turn || !reason_.empty(); });
        // A meeting that was whole before the failure counts.
        if (turn_ == turn) throw RankStopped(reason_);
    }

    void abort(const std::string& reason) {
        std::lock_guard lock(mutex_);
        if (reason_.empty()) reason_ = reason.empty() ? "another rank has stopped" : reason;
        changed_.notify_all();
    }

    std::vector<Tensor> places;  // what each rank brings; written by it before it waits

   private:
    const int ranks_;
    std::mutex mutex_;
    std::condition_variable changed_;
    int arrived_ = 0;
    uint64_t turn_ = 0;
    std::string reason_;
};

// Elements first..last summed over the ranks, in their order, into `to`.
template <typename T>
void sum(const std::vector<Tensor>& places, int64_t first, int64_t last, T* to) {
    constexpr int64_t kBlock = 4096;  // stays in the first cache
    T total[kBlock];
    for (int64_t begin = first; begin < last; begin += kBlock) {
        const int64_t n = std::min(kBlock, last - begin);
        std::memcpy(total, places[0].as<T>() + begin, static_cast<size_t>(n) * sizeof(T));
        for (size_t r = 1; r < places.size(); ++r) {
            const T* term = places[r].as<T>() + begin;
            for (int64_t i = 0; i < n; ++i) total[i] += term[i];
        }
        std::memcpy(to + begin, total, static_cast<size_t>(n) * sizeof(T));
    }
}

class ThreadRank final : public Communicator {
   public:
    ThreadRank(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}

    int rank() const override { return rank_; }
    int ranks() const override { return meeting_->ranks(); }

    void all_reduce(const Tensor& tensor, void*) override {
        // Every rank sums one part and hands it to all: nobody else touches that part before the second meeting.
        const int64_t n = tensor.numel(), first = n * rank_ / ranks(), last = n * (rank_ + 1) / ranks();
        meet(tensor, true);
        sum(tensor.dtype, first, last);
        const size_t size = size_of(tensor.dtype), at = static_cast<size_t>(first) * size;
        for (const Tensor& other : meeting_->places) {
            if (other.data == tensor.data) continue;
            std::memcpy(other.as<char>() + at, tensor.as<char>() + at, static_cast<size_t>(last - first) * size);
        }
        meeting_->wait();
    }

    void reduce_scatter(const Tensor& tensor, void*) override {
        const int64_t part = part_of(tensor);
        meet(tensor, true);
        sum(tensor.dtype, part * rank_, part * (rank_ + 1));
        meeting_->wait();
    }

    void all_gather(const Tensor& tensor, void*) override {
        const size_t bytes = static_cast<size_t>(part_of(tensor)) * size_of(tensor.dtype);
        meet(tensor, false);
        for (size_t r = 0; r < meeting_->places.size(); ++r) {
            if (static_cast<int>(r) == rank_) continue;
            std::memcpy(tensor.as<char>() + r * bytes, meeting_->places[r].as<char>() + r * bytes, bytes);
        }
        meeting_->wait();
    }

    void broadcast(const Tensor& tensor, int root, void*) override {
        if (root < 0 || root >= ranks()) throw std::invalid_argument("there is no rank " + std::to_string(root));
        meet(tensor, false);
        if (root != rank_) {
            const auto bytes = static_cast<size_t>(tensor.numel()) * size_of(tensor.dtype);
            std::memcpy(tensor.data, meeting_->places[static_cast<size_t>(root)].data, bytes);
        }
        meeting_->wait();
    }

    void barrier() override { meeting_->wait(); }
    void abort(const std::string& reason) noexcept override {
        try {
            meeting_->abort("rank " + std::to_string(rank_) + " has stopped: " + reason);
        } catch (...) {  // no memory for the message
        }
    }

   private:
    int64_t part_of(const Tensor& tensor) const {
        if (tensor.numel() % ranks() != 0) {
            throw std::invalid_argument(std::to_string(tensor.numel()) + " elements are not whole parts for " +
                                        std::to_string(ranks()) + " ranks");
        }
        return tensor.numel() / ranks();
    }

    // Shows this rank's tensor to the others, and theirs to it.
    void meet(const Tensor& tensor, bool sums) {
        if (!tensor.contiguous()) throw std::invalid_argument("a collective needs dense tensors");
        if (sums && tensor.dtype != DType::f32 && tensor.dtype != DType::f64) {
            throw std::invalid_argument(std::string("no sums over ranks of ") + name_of(tensor.dtype));
        }
        meeting_->places[static_cast<size_t>(rank_)] = tensor;
        meeting_->wait();
        for (const Tensor& other : meeting_->places) {
            if (other.numel() != tensor.numel() || other.dtype != tensor.dtype) {
                throw std::logic_error("ranks meet with tensors of different sizes: they run different programs");
            }
        }
    }

    // Into this rank's own tensor.
    void sum(DType dtype, int64_t first, int64_t last) {
        const Tensor& own = meeting_->places[static_cast<size_t>(rank_)];
        if (dtype == DType::f32) {
            surogate::sum<float>(meeting_->places, first, last, own.as<float>());
        } else {
            surogate::sum<double>(meeting_->places, first, last, own.as<double>());
        }
    }

    std::shared_ptr<Meeting> meeting_;
    int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_thread_group(int ranks) {
    if (ranks < 1) throw std::invalid_argument("a group has at least one rank");
    auto meeting = std::make_shared<Meeting>(ranks);
    std::vector<std::shared_ptr<Communicator>> group;
    for (int r = 0; r < ranks; ++r) group.push_back(std::make_shared<ThreadRank>(meeting, r));
    return group;
}

}  // namespace surogate
