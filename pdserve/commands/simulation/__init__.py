"""A cluster on a virtual clock: real policies, router, admission and block pool; calibrated steps.

    events         the clock          machine, step_times, host   what takes how long
    call, prompts  what users send    outcome                     what they saw
    node, stride   one engine         handoff, prefix_pull        KV between two
    cluster        the path of calls  coordinator                 the front that decides

Nothing here waits, and the clock never counts the simulator's own time.
"""
