"""python -m tests.lives: lives many lives, and shows those that went wrong."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from contextlib import nullcontext

from tests.lives.life import ALL_MODES, Life, live
from tests.lives.planted import BUGS, planted


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lives", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many lives")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--mode", choices=ALL_MODES, help="of all clusters; default: any")
    parser.add_argument("--faults", type=int, help="in each life; default: 0 to 5")
    parser.add_argument("--events", type=int, default=80, help="of a trace that are shown")
    parser.add_argument("--stop-after", type=int, default=5, help="lives that went wrong")
    parser.add_argument("--planted", choices=BUGS, help="a bug that all of them have")
    parser.add_argument("--show", action="store_true", help="the trace, whatever happens")
    args = parser.parse_args()
    began_s, total, failed = time.monotonic(), Counter[str](), 0
    num_lives = 0
    for seed in range(args.seed, args.seed + args.seeds):
        modes = (args.mode,) if args.mode else ALL_MODES
        with planted(BUGS[args.planted]) if args.planted else nullcontext():
            life = live(seed, modes=modes, num_faults=args.faults)
        num_lives += 1
        total.update(life.counts)
        if life.wrong or args.show:
            sys.stdout.write(told(life, args.events, _options(args)) + "\n")
        failed += bool(life.wrong)
        if failed >= args.stop_after:
            break
    seconds = time.monotonic() - began_s
    counts = ", ".join(f"{name} {count}" for name, count in total.items())
    rate = f"{num_lives} lives, {failed} went wrong; {num_lives / seconds:.1f} lives/s"
    sys.stdout.write(f"{counts}\n{rate}\n")
    return 1 if failed else 0


def _options(args: argparse.Namespace) -> str:
    mode = f" --mode {args.mode}" if args.mode else ""
    mode += f' --planted "{args.planted}"' if args.planted else ""
    return mode + (f" --faults {args.faults}" if args.faults is not None else "")


def told(life: Life, num_events: int, options: str = "") -> str:
    """A life for people to read."""
    plan = life.plan
    lines = [
        f"--- seed {life.seed}: {plan.mode}, {len(plan.nodes)} nodes, digest {life.digest}",
        *life.trace.lines(num_events),
        *(f"WRONG: {what}" for what in life.wrong),
        f"again: python -m tests.lives --seeds 1 --seed {life.seed}{options} --show",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
