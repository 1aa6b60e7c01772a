// The kernels of collectives: the same on every backend, since the backend's communicator does the work. One rank, or
// none to speak to: nothing is to be done.
#pragma once

#include "core/communicator.h"
#include "core/kernel.h"

namespace surogate::collectives {

inline Communicator* others(const Call& call) {
    Communicator* communicator = call.communicator;
    return communicator != nullptr && communicator->ranks() > 1 ? communicator : nullptr;
}

inline void all_reduce(const Call& call) {
    if (Communicator* c = others(call)) c->all_reduce(call.out[0], call.stream);
}
inline void reduce_scatter(const Call& call) {
    if (Communicator* c = others(call)) c->reduce_scatter(call.out[0], call.stream);
}
inline void all_gather(const Call& call) {
    if (Communicator* c = others(call)) c->all_gather(call.out[0], call.stream);
}
inline void broadcast(const Call& call) {
    if (Communicator* c = others(call)) {
        c->broadcast(call.out[0], static_cast<int>(call.attrs.integer("root")), call.stream);
    }
}

}  // namespace surogate::collectives
