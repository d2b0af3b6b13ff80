// The module pdserve._native. Each file that exports functions has one binding function, called
// here.

#include <nanobind/nanobind.h>

#include "attention/launch.h"
#include "attention/row_codes.h"
#include "bind.h"
#include "decoder/bind.h"
#include "drafts/bind.h"
#include "json_shape.h"
#include "linear/launch.h"
#include "places/bind.h"
#include "ranks/bind.h"
#include "recurrent/bind.h"
#include "routing/bind.h"
#include "rows/launch.h"
#include "sampling/launch.h"
#include "shared_memory.h"
#include "streams/bind.h"
#include "transfer/block_read.h"
#include "transfer/checksum.h"
#include "transfer/generations.h"
#include "transfer/planes.h"
#include "transfer/transfer.h"
#include "vocabulary.h"

NB_MODULE(_native, m) {
    nanobind::set_leak_warnings(false);  // tables of a tokenizer may live as long as the process
    m.doc() = "Native kernels of pdserve.";
    pdserve::bind_cpu(m);
    pdserve::bind_threads(m);
    pdserve::bind_core_share(m);
    pdserve::bind_watchdog(m);
    pdserve::bind_attention(m);
    pdserve::bind_row_codes(m);
    pdserve::bind_linear(m);
    pdserve::bind_rows(m);
    pdserve::bind_places(m);
    pdserve::bind_ranks(m);
    pdserve::bind_routing(m);
    pdserve::bind_recurrent(m);
    pdserve::bind_decoder(m);
    pdserve::bind_sampling(m);
    pdserve::bind_drafts(m);
    pdserve::bind_generations(m);
    pdserve::bind_block_read(m);
    pdserve::bind_checksum(m);
    pdserve::bind_shared_memory(m);
    pdserve::bind_transfer(m);
    pdserve::bind_planes(m);
    pdserve::bind_json_shape(m);
    pdserve::bind_vocabulary(m);
    pdserve::bind_streams(m);
}
