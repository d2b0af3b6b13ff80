#include "hosts.h"

#include <algorithm>
#include <unordered_map>

namespace pdserve::routing {

namespace {

// One host, and its places for the newcomer.
struct Places {
    double sum_apart = 0.0;  // of the decode nodes whose ratio has been seen
    int64_t num_seen = 0;
    bool has_decodes = false;
    int64_t alone = 0;  // decode nodes only
    int64_t together = 0;

    double usual_apart() const { return num_seen > 0 ? sum_apart / num_seen : 1.0; }
    bool gains() const { return !has_decodes || together > alone; }
};

}  // namespace

std::vector<int64_t> better_not(const FleetView& view, const Hosts& hosts,
    const Column<const int64_t>& near, const Column<const int64_t>& decodes,
    const Column<const int64_t>& prefills, double limit_s) {
    std::unordered_map<int64_t, Places> near_hosts;
    for (int64_t i = 0; i < near.size(); ++i) {
        if (const int64_t host = hosts.host[near[i]]) near_hosts.try_emplace(host);
    }
    const auto places_at = [&](int64_t slot) {
        const auto found = near_hosts.find(hosts.host[slot]);
        return found == near_hosts.end() ? nullptr : &found->second;
    };
    for (int64_t i = 0; i < decodes.size(); ++i) {
        Places* places = places_at(decodes[i]);
        if (places == nullptr) continue;
        places->has_decodes = true;
        places->sum_apart += hosts.apart[decodes[i]];
        places->num_seen += hosts.apart[decodes[i]] > 0;
    }
    const auto add = [&](int64_t slot, bool is_decode) {
        Places* places = places_at(slot);
        if (places == nullptr) return;
        const Node node = view.node(slot);
        const double apart = hosts.apart[slot] > 0 ? hosts.apart[slot] : places->usual_apart();
        // Until it was seen: each step waits while another node reads the weights once.
        const double wait_s = hosts.beside[slot] > 0
            ? std::max(hosts.beside[slot] - apart, 0.0) * hosts.beside_step_s[slot]
            : apart * node.seconds[1];
        const int64_t context = view.newcomer().context;
        if (is_decode) places->alone += node.most_requests(context, limit_s / apart);
        places->together += node.most_requests(context, (limit_s - wait_s) / apart);
    };
    for (int64_t i = 0; i < decodes.size(); ++i) add(decodes[i], true);
    for (int64_t i = 0; i < prefills.size(); ++i) add(prefills[i], false);
    std::vector<int64_t> unfit;
    for (int64_t i = 0; i < prefills.size(); ++i) {
        const Places* places = places_at(prefills[i]);
        if (places != nullptr && !places->gains()) unfit.push_back(prefills[i]);
    }
    return unfit;
}

}  // namespace pdserve::routing
