"""With keys in use, a cluster tells strangers nothing, and works for who has started it."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from pdserve.settings.access import AccessConfig, hash_key
from tests.cluster.fleet import Fleet, fleet_config

TOKEN = "of who scrapes, and of nobody else"


async def test_the_state_is_told_to_who_shows_a_key_or_the_token(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    keys, token = tmp_path / "keys.toml", tmp_path / "token"
    keys.write_text(f'[tenants.a]\nkeys = ["{hash_key("known")}"]\n')
    token.write_text(TOKEN)
    access = AccessConfig(key_file=str(keys), metrics_token_file=str(token), usage_db="memory")
    config = fleet_config(tiny_checkpoint, mode="colocated", access=access)
    async with Fleet(config) as fleet, aiohttp.ClientSession() as client:
        (node,) = (await fleet.metrics_addresses()).values()

        async def told(shown: str) -> dict[str, int]:
            headers = {"Authorization": f"Bearer {shown}"} if shown else {}
            answers = {}
            for url in (
                *(f"{fleet.url}/{path}" for path in ("status", "metrics", "metrics/targets")),
                *(f"http://{node}/{path}" for path in ("metrics", "samples")),
            ):
                async with client.get(url, headers=headers | {"Host": "far.example"}) as response:
                    answers[url] = response.status
            return answers

        for shown in ("", "unknown"):
            assert not {200} & set((await told(shown)).values()), shown
        for shown in ("known", TOKEN):
            assert set((await told(shown)).values()) == {200}, shown
        async with client.get(f"http://{node}/health") as response:
            assert response.status == 200
