"""Seeded schedules of calls, open loop: arrivals do not depend on earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from zlib import crc32

from pdserve.commands.simulation.call import MOST_OUTPUT, NO_PROMISE, Call
from pdserve.protocol import Prompt, Slo

Length = Callable[[Random], int]  # draws a number of tokens


# ---- arrivals ----------------------------------------------------------------------------------


def poisson(per_s: float, until_s: float, seed: int, start_s: float = 0.0) -> list[float]:
    """Return the times of independent arrivals."""
    random, times, now_s = Random(seed), [], start_s
    while (now_s := now_s + random.expovariate(per_s)) < until_s:
        times.append(now_s)
    return times


# ---- lengths -----------------------------------------------------------------------------------


def fixed(num_tokens: int) -> Length:
    return lambda random: num_tokens


def uniform(least: int, most: int) -> Length:
    return lambda random: random.randint(least, most)


def lognormal(median: int, sigma: float, most: int) -> Length:
    """Draw many short lengths and a few very long ones, as in prompts of real services."""

    def draw(random: Random) -> int:
        return max(1, min(most, round(median * random.lognormvariate(0.0, sigma))))

    return draw


def mixed(*parts: tuple[float, Length]) -> Length:
    """Draw from each of these lengths with its share."""
    shares = [share for share, _ in parts]
    lengths = [length for _, length in parts]
    return lambda random: random.choices(lengths, shares)[0](random)


# ---- calls -------------------------------------------------------------------------------------


def calls(
    name: str,
    times: Iterable[float],
    prompt: Length,
    output: Length,
    slo: Slo = NO_PROMISE,
    prefixes: Sequence[int] = (),
    most_output: int = MOST_OUTPUT,
) -> list[Call]:
    """Make one call at each of these times, with prompts that share nothing.

    With `prefixes`, each prompt begins with one of these shared prefixes (lengths in tokens), drawn
    at random.
    """
    random = Random(crc32(name.encode()))
    made = []
    for number, at_s in enumerate(times):
        call_id = f"{name}-{number}"
        own = [crc32(call_id.encode())] * prompt(random)
        if prefixes:
            which = random.randrange(len(prefixes))
            shared = crc32(f"{name}-prefix-{which}".encode())
            own = [shared] * prefixes[which] + own
        made.append(Call(call_id, at_s, Prompt(own), output(random), slo, most_output))
    return made


def merged(*streams: Iterable[Call]) -> list[Call]:
    """Return all calls in order of arrival."""
    return sorted((call for stream in streams for call in stream), key=lambda call: call.at_s)
