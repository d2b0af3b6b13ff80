"""All measurement; nothing that serves imports it. `pdserve bench NAME` is `run` in NAME/run.py.

For users:

    serve/        any OpenAI-compatible servers, in turns under the same load
    compare/      goodput of modes, and of other servers, on the same requests
    models/       requests to models that sleep, and a mix of many
    neighbours/   what one tenant feels of another, who attacks
    chaos/        what calls feel of nodes that are killed, frozen or cut off

Instruments for who changes a part of pdserve:

    step/         engine steps against what memory and arithmetic allow
    drafts/       tokens a second with drafts, against without
    overhead/     what a decode step costs besides the model
    transfer/     KV between two processes, against memcpy
    handoff/      from the end of prefill to the first decode step
    coordinator/  what a coordinator costs, with simulated nodes behind it
    router/       what a placement decision costs among very many nodes
    perf_model/   how accurate predicted step times are

What several share: `load/` is what clients send and see, `checkpoints/` are models to measure,
`output` prints. A folder has its settings in `config`, which every command loads, and everything
else, tables included, behind `run`. Only `step`, `drafts` and `perf_model` compute a model
themselves: the others know servers by their URLs, and need no torch.
"""
