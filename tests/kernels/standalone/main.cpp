// Checks every build of the kernels that this CPU can run, and prints a line about each.

#include "check.h"
#include "thread_pool.h"

int main() {
    pdserve::ThreadPool::instance().set_num_threads(2);
    for (pdserve::Variant variant : pdserve::kVariants) {
        if (!pdserve::can_run(variant)) continue;
        const int products = check::check_products(variant);
        const int attentions = check::check_attention(variant);
        std::printf("%s: %d products and %d attentions are right\n",
            pdserve::variant_name(variant), products, attentions);
    }
}
