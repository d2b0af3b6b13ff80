// The checked launchers of the router's arithmetic.

#include "bind.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "fleet_view.h"
#include "one_node.h"

namespace nb = nanobind;

namespace pdserve {

namespace routing {

namespace {

using Floats = Column<const double>;
using FloatsOut = Column<double>;
using Ints = Column<const int64_t>;

void check_slot(int64_t slot, int64_t num_slots) {
    if (slot >= 0 && slot < num_slots) return;
    raise_value_error("slots", "below " + std::to_string(num_slots), std::to_string(slot));
}

void check_slots(const Ints& slots, int64_t num_slots) {
    for (int64_t i = 0; i < slots.size(); ++i) check_slot(slots[i], num_slots);
}

nb::list list_of(const std::vector<int64_t>& slots) {
    nb::list list;
    for (const int64_t slot : slots) list.append(slot);
    return list;
}

// Which nodes hold how much of a prompt.
struct Hits {
    Ints slots, held, in_pool;  // [num_hits]; the last two in tokens

    // Raises ValueError: it is not of these nodes, or not of a prompt of so many tokens.
    Hits(const FleetView& view, int64_t num_tokens, nb::handle slots_array, nb::handle held_array,
        nb::handle in_pool_array)
        : slots(slots_array, "slots"), held(held_array, "held"), in_pool(in_pool_array, "in_pool") {
        held.expect_size(slots.size(), "held");
        in_pool.expect_size(slots.size(), "in_pool");
        check_slots(slots, view.num_slots());
        if (num_tokens < 0) {
            raise_value_error("num_tokens", "0 or more", std::to_string(num_tokens));
        }
        for (int64_t i = 0; i < slots.size(); ++i) {
            if (in_pool[i] >= 0 && in_pool[i] <= held[i] && held[i] < num_tokens) continue;
            raise_value_error("held", "0 <= in_pool <= held < " + std::to_string(num_tokens),
                std::to_string(in_pool[i]) + ", " + std::to_string(held[i]));
        }
    }
};

// For each node, the time until it has the prompt's KV: computed, or fetched as far as some node
// holds it.
void prompts(const FleetView& view, int64_t num_tokens, const Hits& hits, nb::handle out_array) {
    const auto& [slots, held, in_pool] = hits;
    const FloatsOut out(out_array, "out");
    out.expect_size(view.num_slots(), "out");
    int64_t most = 0;
    for (int64_t i = 0; i < slots.size(); ++i) most = std::max(most, held[i]);
    for (int64_t slot = 0; slot < view.num_slots(); ++slot) {
        const Node node = view.node(slot);
        out[slot] = node.prompt_s(num_tokens, 0);
        if (most == 0) continue;
        const double rest_s = node.prompt_s(num_tokens - most, most);
        out[slot] = std::min(out[slot], view.pull_s(slot, most) + rest_s);
    }
    for (int64_t i = 0; i < slots.size(); ++i) {
        const int64_t slot = slots[i];
        const Node node = view.node(slot);
        out[slot] = node.prompt_s(num_tokens - in_pool[i], in_pool[i]);
        double load_s = 0.0;  // what is in its tier
        if (held[i] > in_pool[i]) {
            load_s = view.tier_s(slot, held[i] - in_pool[i]);
            out[slot] = std::min(out[slot], load_s + node.prompt_s(num_tokens - held[i], held[i]));
        }
        if (held[i] == most) continue;  // nobody has more
        const double bring_s = std::min(
            load_s + view.pull_s(slot, most - held[i]), view.pull_s(slot, most - in_pool[i]));
        out[slot] = std::min(out[slot], bring_s + node.prompt_s(num_tokens - most, most));
    }
}

// Step times with the newcomer in the batches of a moment.
void paces(const FleetView& view, double in_s, double full_s, nb::handle out_array) {
    const FloatsOut out(out_array, "out");
    out.expect_size(view.num_slots(), "out");
    const int64_t ahead = view.bucket_in(in_s);
    for (int64_t slot = 0; slot < view.num_slots(); ++slot) {
        const auto [step_s, has_place] = view.joining(slot, ahead);
        out[slot] = has_place ? step_s : step_s + full_s;
    }
}

// How much of the KV transfer to each node is left when another node has prefilled the prompt. The
// prefill takes `prompt_s` of the `ttft_s` until then. Chunks are pulled while the next ones are
// computed. What a node holds already is not pulled, and is loaded from its tier meanwhile.
void handoffs(const FleetView& view, int64_t num_tokens, const Hits& hits, double prompt_s,
    double ttft_s, nb::handle out_array) {
    const FloatsOut out(out_array, "out");
    out.expect_size(view.num_slots(), "out");
    const auto pull_s = [&](int64_t slot, int64_t held) {
        const double fixed_s = view.pull_s(slot, 0);
        return fixed_s + std::max(view.pull_s(slot, num_tokens - held) - fixed_s - prompt_s, 0.0);
    };
    for (int64_t slot = 0; slot < view.num_slots(); ++slot) out[slot] = pull_s(slot, 0);
    for (int64_t i = 0; i < hits.slots.size(); ++i) {
        const int64_t slot = hits.slots[i], held = hits.held[i], in_tier = held - hits.in_pool[i];
        out[slot] = pull_s(slot, held);
        if (in_tier > 0) out[slot] += std::max(view.tier_s(slot, in_tier) - ttft_s, 0.0);
    }
}

void on_one_node_each(const FleetView& view, nb::handle slots_array, nb::handle queue_array,
    nb::handle prompt_array, nb::handle queued_array, const Promise& promise,
    nb::handle out_array) {
    const Ints slots(slots_array, "slots"), num_queued(queued_array, "num_prompts");
    const Floats queue_s(queue_array, "queue_s"), prompt_s(prompt_array, "prompt_s");
    const FloatsOut out(out_array, "out", 2);
    num_queued.expect_size(view.num_slots(), "num_prompts");
    queue_s.expect_size(view.num_slots(), "queue_s");
    prompt_s.expect_size(view.num_slots(), "prompt_s");
    out.expect_size(7, "out");
    out.expect_size(slots.size(), "out", 1);
    check_slots(slots, view.num_slots());
    for (int64_t i = 0; i < slots.size(); ++i) {
        const int64_t slot = slots[i];
        const Prompt prompt{queue_s[slot], prompt_s[slot], num_queued[slot]};
        const Outcome outcome = on_one_node(view, slot, prompt, promise);
        const double values[] = {outcome.begins_s, outcome.ttft_s, outcome.tpot_s,
            outcome.stalled_s, outcome.harm, outcome.is_full ? 1.0 : 0.0,
            outcome.crowds ? 1.0 : 0.0};
        for (int64_t row = 0; row < 7; ++row) out[row * slots.size() + i] = values[row];
    }
}

// The first free place from a moment on. Requests that are to join later were sent there earlier,
// and come before the newcomer.
nb::tuple place(const FleetView& view, int64_t slot, double ready_s) {
    check_slot(slot, view.num_slots());
    const int64_t ready = view.nearest_bucket(ready_s / view.bucket_s());
    int64_t first = view.num_buckets();
    while (first > ready && view.joining(slot, first - 1).has_place) --first;
    first = std::min(first, view.num_buckets() - 1);
    return nb::make_tuple((first - ready) * view.bucket_s(), view.joining(slot, first).step_s);
}

// The slots whose costs are about equal to the lowest, and of these the least loaded.
nb::list cheapest(
    nb::handle costs_array, nb::handle loads_array, nb::handle slots_array, double equal) {
    const Floats costs(costs_array, "costs");
    const Ints loads(loads_array, "loads"), slots(slots_array, "slots");
    check_slots(slots, std::min(costs.size(), loads.size()));
    double least_cost = std::numeric_limits<double>::infinity();
    for (int64_t i = 0; i < slots.size(); ++i) {
        least_cost = std::min(least_cost, costs[slots[i]]);
    }
    std::vector<int64_t> found;
    for (int64_t i = 0; i < slots.size(); ++i) {
        const int64_t slot = slots[i];
        if (costs[slot] > least_cost * (1 + equal)) continue;
        if (!found.empty() && loads[slot] < loads[found[0]]) found.clear();
        if (found.empty() || loads[slot] == loads[found[0]]) found.push_back(slot);
    }
    return list_of(found);
}

// The `most` slots with the lowest costs, in ascending order.
nb::list least(nb::handle costs_array, nb::handle slots_array, int64_t most) {
    const Floats costs(costs_array, "costs");
    const Ints slots(slots_array, "slots");
    check_slots(slots, costs.size());
    std::vector<int64_t> found(slots.data(), slots.data() + slots.size());
    if (most < 0) raise_value_error("most", "0 or more", std::to_string(most));
    if (most < slots.size()) {
        const auto cost = [&](int64_t slot) {  // what is no number has no order
            return std::isnan(costs[slot]) ? std::numeric_limits<double>::infinity() : costs[slot];
        };
        const auto is_less = [&](int64_t a, int64_t b) {
            return cost(a) < cost(b) || (cost(a) == cost(b) && a < b);
        };
        std::nth_element(found.begin(), found.begin() + most, found.end(), is_less);
        found.resize(most);
        std::sort(found.begin(), found.end());
    }
    return list_of(found);
}

// When one of these nodes first has a place at this pace.
nb::object within(const FleetView& view, nb::handle slots_array, double tpot_s) {
    const Ints slots(slots_array, "slots");
    check_slots(slots, view.num_slots());
    for (int64_t ahead = 0; ahead < view.num_buckets(); ahead += kStride) {
        for (int64_t i = 0; i < slots.size(); ++i) {
            const Node node = view.node(slots[i]);
            const Batch batch = view.batch(slots[i], ahead);
            const double step_s = node.with_s(batch, view.newcomer());
            if (step_s <= tpot_s && node.has_place(batch, view.newcomer(), step_s)) {
                return nb::float_(ahead * view.bucket_s());
            }
        }
    }
    return nb::none();
}

}  // namespace

}  // namespace routing

void bind_routing(nb::module_& m) {
    using namespace routing;
    using nb::arg;
    nb::class_<FleetView>(m, "FleetView")
        .def(
            "__init__",
            [](FleetView* self, nb::handle tables, nb::handle nodes, nb::handle loads,
                nb::handle calendar, double now_s, int64_t context, int64_t num_tokens,
                double limit_s, nb::handle yielding) {
                new (self) FleetView(tables, nodes, loads, calendar, now_s,
                    {context, num_tokens, limit_s}, yielding);
            },
            arg("tables"), arg("nodes"), arg("loads"), arg("calendar"), arg("now_s"),
            arg("context"), arg("num_tokens"), arg("limit_s"), arg("yielding"))
        .def(
            "prompts",
            [](const FleetView& view, int64_t num_tokens, nb::handle slots, nb::handle held,
                nb::handle in_pool, nb::handle out) {
                prompts(view, num_tokens, {view, num_tokens, slots, held, in_pool}, out);
            },
            arg("num_tokens"), arg("slots"), arg("held"), arg("in_pool"), arg("out"))
        .def(
            "has_place",
            [](const FleetView& view, int64_t slot) {
                check_slot(slot, view.num_slots());
                return view.joining(slot, 0).has_place;
            },
            arg("slot"))
        .def("paces", &paces, arg("in_s"), arg("full_s"), arg("out"))
        .def(
            "handoffs",
            [](const FleetView& view, int64_t num_tokens, nb::handle slots, nb::handle held,
                nb::handle in_pool, double prompt_s, double ttft_s, nb::handle out) {
                handoffs(view, num_tokens, {view, num_tokens, slots, held, in_pool}, prompt_s,
                    ttft_s, out);
            },
            arg("num_tokens"), arg("slots"), arg("held"), arg("in_pool"), arg("prompt_s"),
            arg("ttft_s"), arg("out"))
        .def(
            "on_one_node",
            [](const FleetView& view, nb::handle slots, nb::handle queue_s, nb::handle prompt_s,
                nb::handle num_prompts, double ttft_s, double tpot_s, int64_t output_tokens,
                nb::handle out) {
                on_one_node_each(view, slots, queue_s, prompt_s, num_prompts,
                    {ttft_s, tpot_s, output_tokens}, out);
            },
            arg("slots"), arg("queue_s"), arg("prompt_s"), arg("num_prompts"), arg("ttft_s"),
            arg("tpot_s"), arg("output_tokens"), arg("out"))
        .def("place", &place, arg("slot"), arg("ready_s"))
        .def("within", &within, arg("slots"), arg("tpot_s"));
    m.def("cheapest", &cheapest, arg("costs"), arg("loads"), arg("slots"), arg("equal"));
    m.def("least", &least, arg("costs"), arg("slots"), arg("most"));
}

}  // namespace pdserve
