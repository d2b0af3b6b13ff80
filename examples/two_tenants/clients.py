"""Two tenants who ask at the same time, each with a key of its own.

pdserve up --key-file examples/two_tenants/keys.toml
python examples/two_tenants/clients.py [URL]
"""

import asyncio
import sys

import openai

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
KEYS = {"acme": "pds-example-acme", "nightly": "pds-example-nightly"}
REQUESTS = 8  # of each; `nightly` may send 5 a minute


async def ask_all(tenant: str) -> None:
    """Send them all at once, and tell how each ended."""
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEYS[tenant], max_retries=0)
    async with client:
        model = (await client.models.list()).data[0].id
        asked = (
            client.completions.create(model=model, prompt=f"Question {number}", max_tokens=16)
            for number in range(REQUESTS)
        )
        ends = await asyncio.gather(*asked, return_exceptions=True)
    refused = [end for end in ends if isinstance(end, openai.RateLimitError)]
    answered = [end for end in ends if not isinstance(end, BaseException)]
    print(f"{tenant}: {len(answered)} answered, {len(refused)} refused")
    if refused:
        wait_s = refused[0].response.headers["Retry-After"]
        print(f"{tenant}: {refused[0].message} (again in {wait_s} s)")


async def main() -> None:
    """Both at once; a wrong key gets nothing."""
    await asyncio.gather(*map(ask_all, KEYS))
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="pds-wrong") as stranger:
        try:
            await stranger.models.list()
        except openai.AuthenticationError as error:
            print(f"a stranger: {error.message}")


asyncio.run(main())
