// Nodes of one host share its memory: would it decode more if its prefill nodes did, too?
#pragma once

#include <cstdint>
#include <vector>

#include "column.h"
#include "fleet_view.h"

namespace pdserve::routing {

// What is known of hosts, by slot. Ratios are of real to profiled time of decode steps; 0: unseen.
struct Hosts {
    Column<const int64_t> host;  // 0: none
    Column<const double> apart;  // while the host's other pool decodes nothing
    Column<const double> beside;  // while it does
    Column<const double> beside_step_s;  // profiled time of the steps that `beside` was seen in
};

// The prefill nodes on the hosts of `near` that should not decode: with them, their hosts would not
// have more places for the newcomer in steps of `limit_s`. All slots are checked by the caller.
std::vector<int64_t> better_not(const FleetView& view, const Hosts& hosts,
    const Column<const int64_t>& near, const Column<const int64_t>& decodes,
    const Column<const int64_t>& prefills, double limit_s);

}  // namespace pdserve::routing
