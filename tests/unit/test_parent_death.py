import asyncio
import os
import sys

CHILD = """
import os, sys, time
from pdserve.shared.process.limited_child import die_with_parent
die_with_parent(int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
time.sleep(60)
"""


async def test_a_child_dies_with_its_parent():
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, CHILD, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    parent.kill()
    # Both hold the pipe; its end means that both are gone.
    assert await asyncio.wait_for(parent.stdout.read(), 30) == b""
    await parent.wait()


async def test_a_child_whose_parent_has_died_already_ends_at_once():
    not_my_parent = str(os.getppid())
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CHILD, not_my_parent, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await child.communicate()
    assert (out, child.returncode) == (b"", 1)
