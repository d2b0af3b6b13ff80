"""`pdserve bench adapters`: what adapters in a batch cost, and what a cold one waits."""
