// Checks every build of the kernels that this CPU can run, and prints a line about each. With the
// argument "list", only prints their names.

#include "check.h"
#include "threads/thread_pool.h"

int main(int argc, char** argv) {
    const bool only_lists = argc == 2 && std::strcmp(argv[1], "list") == 0;
    pdserve::ThreadPool::instance().set_num_threads(2);
    for (pdserve::Variant variant : pdserve::kVariants) {
        if (!pdserve::can_run(variant)) continue;
        std::printf("%s:", pdserve::variant_name(variant));
        if (!only_lists) {
            const int products = check::check_products(variant);
            const int attentions = check::check_attention(variant);
            uint64_t digest = 14695981039346656037u;
            const int integers = check::check_integers(variant, digest);
            std::printf(" %d products and %d attentions are right, %d of integers have the bits %016llx",
                products, attentions, integers, static_cast<unsigned long long>(digest));
        }
        std::printf("\n");
    }
}
